"""What stands in the folder of a run beside its model: run.yaml, the results as JSON, and the model card made of them.

docs/evaluation.md explains the numbers. Imports nothing heavy.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, cast

from relpos.encodings.registry import card as encoding_card
from relpos.model_catalogue import entry
from relpos.runs.settings import Settings, flatten, load_settings
from relpos.system.files import write_text

if TYPE_CHECKING:
    from relpos.runs.run import Run

ABOUT, RESULT = "run.yaml", "result.json"  # in a run's folder: its settings with versions and data, and its result
EVALUATION = "evaluation"  # the folder in it of what was measured
CARD = "README.md"
# A card without this line belongs to the user and is never overwritten.
MARK = "<!-- Written by relpos, and again at the next evaluation. Remove this line to keep your own text. -->"
OPENING = """```python
import relpos.models  # transformers then knows this model
from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
```"""


class DataFacts(TypedDict):
    """The text or the task that a run was trained on."""

    name: str
    hash: str


class About(TypedDict, total=False):
    """What run.yaml says beside the settings."""

    versions: dict[str, str]
    corpus: DataFacts
    heldout: DataFacts
    task: DataFacts
    tokens: dict[str, int]
    start: dict[str, str]
    parameters: int
    processes: int
    threads: int


class RunResult(TypedDict, total=False):
    """How a run ended: result.json."""

    step: int
    tokens: int
    seconds: float
    loss: float | None
    heldout: float | None
    heldout_at_start: float | None
    warning: str


Bin = TypedDict(  # loss by position, and that of the control: the same tokens in windows of the trained length
    "Bin",
    {
        "from": int,
        "to": int,
        "tokens": int,
        "loss": float,
        "low": float | None,
        "high": float | None,
        "control": float,
        "difference": float,
        "difference_low": float | None,
        "difference_high": float | None,
    },
)


class UnitSums(TypedDict):
    """Loss and tokens of each document or block, for comparing models on the same text."""

    number: list[int]
    loss: list[float]  # sums
    tokens: list[int]


class Row(TypedDict):
    """One length. If it could not be measured, `error` says why, and all numbers but the length are null."""

    length: int
    loss: float
    perplexity: float
    low: float | None  # of the perplexity, 95 %; None over a single document or block
    high: float | None
    bits_per_byte: float | None  # None if the tokenizer is not byte-level
    windows: int
    documents: int
    blocks: int | None  # None if the intervals are over documents
    tokens: int
    bytes: int | None
    seconds: float
    tokens_per_second: float
    peak_memory_bytes: int
    units: UnitSums
    error: str | None
    control_loss: NotRequired[float]  # of the protocol `positions`


class CorpusFacts(DataFacts):
    """The text that was scored."""

    documents: int
    tokens: int


class TextResult(TypedDict):
    """Loss on a text by length."""

    protocol: str
    family: str
    metric: str
    encoding: str
    rope_scaling: str | None
    position: Mapping[str, Any]
    trained_length: int | None
    run: str
    step: int | None
    corpus: CorpusFacts
    split: str
    special_tokens: dict[str, list[str]]
    options: dict[str, int | None]
    intervals: dict[str, str | int | None]
    warnings: list[str]
    rows: list[Row]
    bins: NotRequired[list[Bin]]  # of the protocol `positions`
    versions: NotRequired[dict[str, str]]
    file: NotRequired[str]  # name of the JSON file


class Score(TypedDict):
    """The share of right answers over some sequences."""

    accuracy: float
    exact: float  # share of sequences with all answers right
    low: float  # of the accuracy, 95 %
    high: float
    samples: int


class TaskRow(Score):
    """The score at one length. If it could not be measured, `error` says why, and the shares are null."""

    length: int
    error: str | None


class DepthRow(Score):
    """The score at one length and depth."""

    length: int
    depth: float


class TaskResult(TypedDict):
    """Right answers to a task by length."""

    task: str
    encoding: str
    trained_length: int | None
    chance: float
    rows: list[TaskRow]
    depths: list[DepthRow]
    step: int | None
    position: Mapping[str, Any]
    weights: str
    digest: str
    seed: int
    samples: int


def refused_row(length: int, error: str | None) -> Row:
    """The row of a length without numbers."""
    return cast(Row, {**dict.fromkeys(Row.__required_keys__), "length": length, "error": error})


def refused_task_row(length: int, error: str) -> TaskRow:
    """The row of a length of a task without numbers."""
    return cast(TaskRow, {**dict.fromkeys(TaskRow.__annotations__), "length": length, "samples": 0, "error": error})


def read_evaluations(folder: Path) -> list[TextResult | TaskResult]:
    """All evaluations in a folder, those with default options first; damaged files are left out."""
    evaluations: list[Any] = []
    for file in sorted(folder.glob("*.json"), key=lambda file: file.stem) if folder.is_dir() else []:
        try:
            contents = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        entries = contents.get("results", [contents]) if isinstance(contents, dict) else []  # of a task: several
        evaluations += [entry for entry in entries if isinstance(entry, dict)]
    return evaluations


def read_about(folder: Path) -> tuple[Settings, About]:
    """Read a run's run.yaml: its settings, and versions, data and sizes."""
    from relpos.system.files import read_yaml

    file = folder / ABOUT
    tree = read_yaml(file)
    about = tree.pop("about", None)
    flat = flatten(tree)
    lacking = [] if isinstance(about, dict) and about else ["about"]
    lacking += [key for key in ("model.encoding", "data.length") if flat.get(key) is None]
    if flat.get("data.source") is None and flat.get("data.task") is None:
        lacking.append("data.source")
    if lacking:
        raise ValueError(
            f"{file} is not what relpos train wrote: it has no {' and no '.join(lacking)}. "
            "Restore the file, or train in another folder."
        )
    return load_settings(str(file), {}), cast(About, about)


def write_card(folder: Path, result: RunResult) -> Path | None:
    """Write the model card of a run, in the format of the Hugging Face hub; None if the user has edited it."""
    file = folder / CARD
    if file.exists() and MARK not in file.read_text(encoding="utf-8"):
        return None
    settings, about = read_about(folder)
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    origin = ["## How it was made", f"All settings are in `run.yaml`. Versions: {versions}."]
    blocks = [_front_matter(settings), MARK, *_introduction(folder, settings, about, result)]
    write_text(file, "\n\n".join([*blocks, *_results(folder, result), *origin]) + "\n")
    return file


def refresh_card(run: "Run", evaluations: Path) -> None:
    """Write the card of a run again, if its own folder is where an evaluation was written."""
    if evaluations == run.folder / EVALUATION and (run.folder / ABOUT).exists() and run.result:
        write_card(run.folder, run.result)


def _front_matter(settings: Settings) -> str:
    """The metadata of the hub, as YAML. The licence and the language are left out, because they are not known."""
    family, encoding = str(settings.model.family), settings.model.encoding
    task = "text-generation" if entry(family).causal else "fill-mask"
    tags = "\n".join(f"- {tag}" for tag in ("relpos", family, "positional-encoding", encoding))
    return f"---\nlibrary_name: relpos\npipeline_tag: {task}\ntags:\n{tags}\n---"


def _introduction(folder: Path, settings: Settings, about: About, result: RunResult) -> list[str]:
    model, data, name, family = settings.model, settings.data, folder.resolve().name, entry(str(settings.model.family))
    options = "".join(f", {key}={value}" for key, value in model.options.items())
    plan = f" and the layer plan `{json.dumps(model.plan)}`" if model.plan else ""
    source = f"the task `{data.task}`" if data.task else f"`{_public_name(str(data.source))}`"
    size = f" {model.preset}" if model.start is None else ""
    start = "" if model.start is None else f"started from the weights of `{_public_name(model.start)}` and "
    return [
        f"# {name}: {family.title}{size} with {model.encoding}",
        f"A language model with the positional encoding `{model.encoding}{options}` "
        f"({encoding_card(str(model.encoding)).paper}){plan}, {start}trained by relpos on {source}: "
        f"{result['step']:,} steps, {result['tokens']:,} tokens in windows of {data.length:,}, seed "
        f"{settings.run.seed}; {about['parameters']:,} parameters. It is a model for experiments with positional "
        "encodings and not meant for other use.",
        "## How to open it",
        "`pip install relpos`, then",
        OPENING.format(folder=name, auto_class=family.auto_class),
        "Without relpos, transformers cannot open it. `relpos draw FOLDER` shows its attention heads, `relpos evaluate "
        f"FOLDER` measures its {family.metric}.",
    ]


def _public_name(name: str) -> str:
    """The name of a corpus or model; of a path only the last component, because the rest is private to a machine."""
    return Path(name).name if Path(name).is_absolute() or Path(name).exists() else name


def _results(folder: Path, result: RunResult) -> Iterator[str]:
    """What was measured during training, and by the evaluations of this model."""
    yield "## Results"
    before, after = result["heldout_at_start"], result["heldout"]
    if before is not None and after is not None:
        yield f"Held-out loss during training: {before:.4f} at the start, {after:.4f} at the end."
    for evaluation in read_evaluations(folder / EVALUATION):
        # If the run was trained further, earlier evaluations are not of this model.
        if evaluation.get("step") == result["step"] and any(row["error"] is None for row in evaluation["rows"]):
            if "task" in evaluation:
                yield from _task_table(cast(TaskResult, evaluation))
            else:
                yield from _text_table(evaluation)


def _text_table(evaluation: TextResult) -> Iterator[str]:
    details = [f"`{evaluation['protocol']}`"]
    if evaluation["rope_scaling"]:
        details.append(f"rope scaled by {evaluation['rope_scaling']}")
    split = "all" if evaluation["split"] == "all" else "held-out part"
    details.append(f"{split} of `{_public_name(evaluation['corpus']['name'])}`")
    details += [f"{key.replace('_', ' ')} {value:,}" for key, value in evaluation["options"].items() if value]
    yield " ".join([f"Measured by `relpos evaluate` ({', '.join(details)}).", *evaluation["warnings"]])
    lines = [f"| length | {evaluation['metric']} | 95 % | bits per byte | tokens |", "|---:|---:|---:|---:|---:|"]
    for row in evaluation["rows"]:
        if row["error"] is None:
            length = _length(row["length"], evaluation["trained_length"])
            bounds = "–" if row["low"] is None else f"{row['low']:.2f} – {row['high']:.2f}"
            bits = "–" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}"
            lines.append(f"| {length} | {row['perplexity']:.2f} | {bounds} | {bits} | {row['tokens']:,} |")
    yield "\n".join(lines)


def _task_table(evaluation: TaskResult) -> Iterator[str]:
    yield (
        f"Answers to `{evaluation['task']}`, {evaluation['samples']} sequences per length (seed {evaluation['seed']}); "
        f"guessing gets {evaluation['chance']:.1%} right."
    )
    lines = ["| length | answers right | 95 % | all right |", "|---:|---:|---:|---:|"]
    for row in evaluation["rows"]:
        if row["error"] is None:
            length = _length(row["length"], evaluation["trained_length"])
            bounds = f"{row['low']:.1%} – {row['high']:.1%}"
            lines.append(f"| {length} | {row['accuracy']:.1%} | {bounds} | {row['exact']:.1%} |")
    yield "\n".join(lines)


def _length(length: int, trained: int | None) -> str:
    return f"{length} (trained)" if length == trained else str(length)
