"""What a run starts with: a new model, or a trained one with other positions; and windows of a corpus or of a task."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from accelerate import PartialState
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast, set_seed

from relpos.forms.encoding import Encoding
from relpos.model_catalogue import preset
from relpos.models.family import Family, family_of, get_family
from relpos.pretrained.transplant import ORIGINALS, merge_position, transplant
from relpos.runs.resolve import check_window, fill_length
from relpos.runs.results import About
from relpos.runs.run import heldout_corpus, open_run, training_corpus
from relpos.runs.settings import ModelSettings, Settings
from relpos.system.memory import check_memory
from relpos.tasks import task
from relpos.tasks.windows import TaskWindows, task_tokenizer
from relpos.text.prepare import start_writer
from relpos.text.tokenizers import load_tokenizer
from relpos.text.tokens import ENDLESS, MaskedWindows, Windows, add_mask_token, open_store, tokenize


@dataclass(frozen=True)
class Data:
    """The data of a run."""

    tokenizer: PreTrainedTokenizerFast
    train: Dataset[Any]
    heldout: Windows | MaskedWindows | TaskWindows  # evaluated on during training
    order: str  # in which the training windows are read: "random", or "sequential" if they are random themselves
    about: About  # a description for run.yaml
    writer: "subprocess.Popen[bytes] | None" = None  # tokenizes a streamed text

    def close(self) -> None:
        """End the process that tokenizes; what it has written is kept."""
        if self.writer is not None:
            assert self.writer.stdin is not None
            self.writer.stdin.close()
            self.writer.wait()


def open_data(settings: Settings, tokenizer: PreTrainedTokenizerFast | None = None) -> Data:
    """Open the corpus or task that the settings name; `tokenizer` is that of the model that the run starts from."""
    if settings.data.task is not None:
        return _open_task(settings, settings.data.task)
    return _open_text(settings, tokenizer)


def _open_text(settings: Settings, tokenizer: PreTrainedTokenizerFast | None) -> Data:
    data, run = settings.data, settings.run
    corpus, heldout_text = training_corpus(data), heldout_corpus(data)
    if tokenizer is None:
        assert data.tokenizer is not None
        tokenizer = load_tokenizer(data.tokenizer, corpus)
    if data.masking is not None:
        tokenizer = add_mask_token(tokenizer)
    tokens = tokenize(corpus, tokenizer)
    if data.heldout_source is not None:
        tokens["heldout"] = tokenize(heldout_text, tokenizer)["heldout"]
    counted = [portion for portion in tokens if not (portion == "train" and corpus.streamed)]
    facts = {"name": corpus.name, "hash": corpus.hash, "documents": dict(corpus.counts)}
    about = cast(About, {"corpus": facts, "tokens": {portion: len(tokens[portion]) for portion in counted}})
    if data.heldout_source is not None:
        about["heldout"] = {"name": heldout_text.name, "hash": heldout_text.hash}
    in_order = data.order == "sequential"
    early = in_order and corpus.streamed and PartialState().is_local_main_process  # before all of it is tokenized
    writer = start_writer(open_store(corpus, tokenizer)) if early else None
    train = Windows(tokens["train"], data.length, data.separate_documents, multiple=run.batch_size, endless=in_order)
    heldout = Windows(tokens["heldout"], data.length, data.separate_documents, run.eval_windows)
    if data.masking is None:
        return Data(tokenizer, train, heldout, data.order, about, writer)
    masks = (tokenizer, run.seed, data.mask_share, data.masking == "word")
    masked = MaskedWindows(train, *masks), MaskedWindows(heldout, *masks, fixed=True)
    return Data(tokenizer, *masked, data.order, about, writer)


def _open_task(settings: Settings, name: str) -> Data:
    data, run, source = settings.data, settings.run, task(name)
    same = (run.seed, data.task_loss == "all", data.task_shortest)
    return Data(
        task_tokenizer(source),
        TaskWindows(source, "train", data.length, ENDLESS, *same),
        TaskWindows(source, "heldout", data.length, run.eval_windows, *same),
        "sequential",
        cast(About, {"task": {"name": name, "hash": source.digest, "words": len(source.vocabulary)}}),
    )


def build_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Create the model that the settings describe, with at least one row of the embedding per entry of the tokenizer.

    With the same seed, the weights that two encodings have in common start with the same values: those of a model
    without an encoding.
    """
    model_settings = settings.model
    vocab_size = model_settings.vocab_size or len(tokenizer)
    assert model_settings.family is not None
    assert model_settings.preset is not None
    family, size = get_family(model_settings.family), preset(model_settings.preset)
    if vocab_size < len(tokenizer):
        raise ValueError(f"model.vocab_size is {vocab_size}, but the tokenizer has {len(tokenizer)} entries.")
    check_memory(
        f"an embedding of model.vocab_size={vocab_size:,} rows, with its gradients and AdamW's two averages,",
        4 * 4 * vocab_size * size.width,
        "give fewer rows",
    )

    def build(position: Mapping[str, Any]) -> PreTrainedModel:
        set_seed(settings.run.seed)
        config = family.config(
            size,
            position,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            share_position=model_settings.share_position,
            dropout=model_settings.dropout or 0.0,
        )
        return family.model_class(config)

    model = build(model_settings.position())
    model.load_state_dict(build({"name": "nope"}).state_dict(), strict=False)
    return model


def open_start(settings: Settings) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, dict[str, str]]:
    """Open the model that `model.start` names, replace its positions, and fill in its family and encoding.

    Returns the model with its new positions in float32, its tokenizer, and for run.yaml where it comes from, with the
    checksum of its weights before.
    """
    model_settings = settings.model
    name = model_settings.start
    assert name is not None
    source = open_run(name)
    family = source.family
    if not isinstance(family, Family):
        raise ValueError(f"{name} is a {family.title}: training can start from {' and '.join(ORIGINALS)} only.")
    if model_settings.family not in (None, family.name):
        raise ValueError(
            f"{name} is a {family.title}, but model.family={model_settings.family} was requested: leave it out."
        )
    _fill_position(model_settings, source.model.config.position, settings.data.length)
    if model_settings.dropout is not None:
        for entry, value in family.dropout(model_settings.dropout).items():
            setattr(source.model.config, entry, value)
    share = model_settings.share_position or None
    model = transplant(source, model_settings.position(), share_position=share, seed=settings.run.seed).float()
    try:  # refuse now what would be refused when the first checkpoint is saved
        if model.generation_config is not None:
            model.generation_config.validate(strict=True)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the generation_config.json of {name} cannot be saved again: {reason} Mend it.") from None
    positions = [module for module in model.modules() if isinstance(module, Encoding)]
    check_window(settings, positions, int(model.config.hidden_size))
    model_settings.family, model_settings.share_position = family_of(model).name, model.config.share_position
    return model, source.tokenizer, {"model": str(Path(name)), "checksum": source.checksum}


def _fill_position(settings: ModelSettings, before: Mapping[str, Any], length: int) -> None:
    """Fill in the encoding of the model, or the options of a new one that depend on the trained length."""
    if settings.encoding not in (None, before["name"]):
        fill_length(settings, length)
        return
    settings.encoding = before["name"]
    position = merge_position(before, settings.position())
    settings.plan = position.pop("plan", [])
    window = position.pop("window", None)  # a setting of layers only
    if window is not None:
        settings.plan = [{"every": 1, "window": window}, *settings.plan]
    settings.options = {key: value for key, value in position.items() if key != "name"}
