"""Check settings, and fill in the defaults that depend on other settings."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from relpos.encodings.registry import canonical, check_options_of, encoding_class, names
from relpos.model_catalogue import DEFAULT, entry, preset
from relpos.runs.settings import (
    CORPUS,
    ENCODING,
    LOSSES,
    MASKINGS,
    MOST_STEPS,
    PRESET,
    START_LR,
    STEPS,
    TASK_PRESET,
    TASK_STEPS,
    DataSettings,
    ModelSettings,
    Settings,
)
from relpos.system.memory import check_memory
from relpos.tasks import task
from relpos.text.corpus import bpe_entries

if TYPE_CHECKING:
    from relpos.forms.encoding import Encoding

STREAMED = ("heldout", "heldout_source", "stream", "separator_first")  # how a text is divided and read


def resolve(settings: Settings) -> Settings:
    """Refuse settings that contradict each other, and fill in, in place, the defaults that depend on others."""
    model, data, optimizer, run = settings.model, settings.data, settings.optimizer, settings.run
    if model.start is None:
        _resolve_model(settings)
    else:
        _resolve_start(settings, model.start)
    check_context(settings)
    if run.steps is not None and run.tokens is not None:
        raise ValueError("give steps or tokens, not both: one follows from the other.")
    if run.tokens is not None:
        run.steps = math.ceil(run.tokens / (run.batch_size * data.length))
        if run.steps > MOST_STEPS:
            raise ValueError(f"run.tokens={run.tokens:g} are {run.steps:,} steps; at most {MOST_STEPS:,} are possible.")
        run.tokens = None
    if run.steps is None and run.minutes is None:
        run.steps = STEPS if data.task is None else TASK_STEPS
    if optimizer.warmup_steps is None:
        optimizer.warmup_steps = min(715, (run.steps or STEPS) // 10)
    run.out = run.out or _default_folder(settings)
    if model.start is not None and Path(run.out).resolve() == Path(model.start).resolve():
        raise ValueError(f"{run.out} is the model that the run starts from: choose another --out.")
    return settings


def _resolve_model(settings: Settings) -> None:
    """Fill in the settings of a new model, its data and its learning rate."""
    model, data, optimizer = settings.model, settings.data, settings.optimizer
    model.family = model.family or DEFAULT
    model.preset = model.preset or (PRESET if data.task is None else TASK_PRESET)
    family, size = entry(model.family), preset(model.preset)
    model.encoding = canonical(model.encoding or ENCODING)
    model.dropout = model.dropout or 0.0
    check_options_of(model.encoding, model.options)
    _resolve_data(data, size.tokenizer)
    _resolve_masking(data, model.family)
    if optimizer.lr is None:
        optimizer.lr = size.lr * family.lr_scale
    fill_length(model, data.length)


def _resolve_start(settings: Settings, start: str) -> None:
    """Refuse settings that contradict the model that a run starts from; fill in its data and learning rates.

    Its family and encoding are filled in when it is opened.
    """
    model, data, optimizer = settings.model, settings.data, settings.optimizer
    contradicting = {
        "model.preset": model.preset,
        "model.vocab_size": model.vocab_size,
        "data.tokenizer": data.tokenizer,
        "data.task": data.task,
        "data.masking": data.masking,
    }
    for key, value in contradicting.items():
        if value is not None:
            raise ValueError(
                f"a run that starts from a model has its sizes, tokenizer and vocabulary: leave out {key}={value}, or "
                f"--from {start}."
            )
    if model.family is not None and not entry(model.family).causal:
        raise ValueError(f"only a GPT-2 or a Llama can be started from, not {entry(model.family).title}.")
    if model.encoding is not None:
        model.encoding = canonical(model.encoding)
        check_options_of(model.encoding, model.options)
    _resolve_data(data, None)
    if optimizer.lr is None:
        optimizer.lr = START_LR


def _default_folder(settings: Settings) -> str:
    """runs/ENCODING-PRESET, after the task, and after the family unless it is the default; or runs/MODEL-ENCODING."""
    model, task_name = settings.model, settings.data.task
    if model.start is not None:
        return f"runs/{Path(model.start).resolve().name.removesuffix('.gguf')}-{model.encoding or 'tuned'}"
    words = [task_name, model.family if model.family != DEFAULT else None, model.encoding, model.preset]
    return f"runs/{'-'.join(word for word in words if word)}"


def check_encoding(settings: Settings) -> None:
    """Build the encodings once, so that options they refuse are refused before any work. Imports torch."""
    model = settings.model
    assert model.preset is not None
    assert model.family is not None
    positions = build_encodings(settings)
    check_window(settings, positions, preset(model.preset).width)
    if entry(model.family).causal:
        return
    for position in positions:
        if not position.bidirectional:
            raise ValueError(
                f"{model.encoding} is defined for causal attention only, and {entry(model.family).title} attends in "
                f"both directions: choose another encoding. {position.advice_for_both_directions}"
            )


def build_encodings(settings: Settings) -> list["Encoding"]:
    """The encodings that a new model will have: of its embedding, of all layers, and of single ones."""
    from relpos.models.plan import make_positions

    model = settings.model
    assert model.preset is not None
    size = preset(model.preset)
    built = make_positions(model.position(), model.share_position, size.layers, size.heads, size.head_dim)
    return [position for position in (built.embedding, built.shared, *built.layers) if position is not None]


def check_window(settings: Settings, positions: Iterable["Encoding"], width: int) -> None:
    """Refuse encodings that cannot embed every position of a window."""
    import torch

    length = settings.data.length
    embedding = [position for position in positions if "embedding" in position.places]
    if not embedding or settings.data.separate_documents:  # whose positions begin again with every document
        return
    check_memory(f"embedding data.length={length:,} tokens", 4 * length * width, "make data.length smaller")
    for position in embedding:
        try:
            position.embed(torch.zeros(1, length, width))
        except ValueError as error:
            raise ValueError(
                f"data.length={length} does not fit the encoding {settings.model.encoding}: {error}"
            ) from None


def check_context(settings: Settings) -> None:
    """Refuse to divide windows among processes where that cannot be."""
    processes, length, family = settings.run.context_parallel, settings.data.length, settings.model.family
    if processes == 1:
        return
    if length % processes:
        raise ValueError(
            f"windows of {length} tokens cannot be divided among {processes} processes evenly: data.length must be a "
            f"multiple of run.context_parallel."
        )
    if family is not None and not entry(family).causal:
        raise ValueError(
            f"run.context_parallel divides windows of causal models, and {entry(family).title} attends in both "
            "directions: leave it at 1."
        )


def _resolve_data(data: DataSettings, tokenizer: str | None) -> None:
    """Fill in the data: text or a task, never both. The tokenizer is None if it is that of a model."""
    if data.task is None:
        data.source = data.source or CORPUS
        unknown_part = data.stream or (data.heldout is not None and data.heldout >= 1)
        data.tokenizer = data.tokenizer or ("gpt2" if unknown_part and tokenizer else tokenizer)
        # A wrong name is refused before the text is read.
        if data.tokenizer is not None and bpe_entries(data.tokenizer) is not None and unknown_part:
            raise ValueError(
                f"data.tokenizer={data.tokenizer} is trained on what is not held out of the text, which is not "
                "known before the text is tokenized if data.stream is on or the first tokens are held out: give gpt2."
            )
        _check_heldout(data)
        for key in ("task_loss", "task_shortest"):
            if getattr(data, key) is not None:
                raise ValueError(f"data.{key} is for a task: give one with --task, or leave it out.")
        return
    for key in ("source", "tokenizer", "subset", "separate_documents", "keep_line_ends", *STREAMED):
        if getattr(data, key):
            raise ValueError(
                f"a run is trained either on a task or on text: leave out data.{key}={getattr(data, key)}, or the task "
                f"{data.task}."
            )
    data.task_loss = data.task_loss or LOSSES[0]
    source = task(data.task)
    source.check_length(data.length)
    if data.task_shortest is None and source.draws_lengths:
        data.task_shortest = source.shortest
    shortest = data.length if data.task_shortest is None else data.task_shortest
    source.check_length(shortest)
    if shortest > data.length:
        raise ValueError(f"data.task_shortest={shortest} is over data.length={data.length}.")


def _check_heldout(data: DataSettings) -> None:
    """Refuse held-out parts and streams that cannot be."""
    if data.heldout is not None and data.heldout_source is not None:
        raise ValueError(
            f"give data.heldout={data.heldout:g} or data.heldout_source={data.heldout_source}, not both: another text "
            "that is held out leaves the data as a whole to training."
        )
    if data.heldout is not None and data.heldout >= 1 and not float(data.heldout).is_integer():
        raise ValueError(f"data.heldout={data.heldout} is neither a share below 1 nor a whole number of tokens.")
    if data.stream and data.separate_documents:
        raise ValueError(
            "data.separate_documents needs the place of every document, which is not known while data.stream reads "
            "the text: leave out one of them."
        )


def _resolve_masking(data: DataSettings, family: str) -> None:
    """Fill in how tokens are masked, for a family that predicts masked tokens; the others have no masks."""
    if entry(family).causal:
        if data.masking is not None:
            raise ValueError(
                "data.masking is for families that predict masked tokens; "
                f"{entry(family).title} predicts the next token."
            )
        return
    if data.task is not None:
        raise ValueError(
            f"tasks are for families that predict the next token, and {entry(family).title} predicts masked tokens: "
            "choose another --family."
        )
    data.masking = data.masking or MASKINGS[0]


def fill_length(model: ModelSettings, length: int) -> None:
    """Give the trained length to the encodings that have an option for it (learned, fire, scaled rope)."""
    assert model.encoding is not None
    model.options = encoding_class(model.encoding).options_for_length(model.options, length)
    model.plan = [
        encoding_class(rule["name"]).options_for_length(rule, length)
        if isinstance(rule, dict) and rule.get("name") in names()
        else rule
        for rule in model.plan
    ]
