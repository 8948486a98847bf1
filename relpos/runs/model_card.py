"""The model card (README.md) of a run's folder, in the format of the Hugging Face hub."""

import json
from pathlib import Path
from typing import Any, cast

import yaml

from relpos.encodings.registry import card as encoding_card
from relpos.model_catalogue import entry
from relpos.runs.results import RunResult, TaskResult, TextResult, read_evaluations
from relpos.runs.run import ABOUT, EVALUATION, Run
from relpos.system.files import write_text

FILE = "README.md"
# A card without this line belongs to the user and is never overwritten.
MARK = "<!-- Written by relpos, and again at the next evaluation. Remove this line to keep your own text. -->"
OPENING = """```python
import relpos.models  # transformers then knows this model
from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
```"""


def write_card(folder: Path, result: RunResult) -> Path | None:
    """Write README.md into the folder of a run, unless the user has edited it.

    Args:
        folder: The folder of a run, with run.yaml; its evaluations are included.
        result: How the run ended, as in result.json.

    Returns:
        The file; None if the folder has a card without the line that says it was written by relpos.
    """
    file = folder / FILE
    if file.exists() and MARK not in file.read_text(encoding="utf-8"):
        return None
    run = yaml.safe_load((folder / ABOUT).read_text(encoding="utf-8"))
    blocks = [_front_matter(run), MARK, *_about(folder, run, result), *_results(folder, result), *_origin(run)]
    write_text(file, "\n\n".join(blocks) + "\n")
    return file


def refresh_card(run: Run, evaluations: Path) -> None:
    """Write the card of a run again after an evaluation.

    Args:
        run: The run.
        evaluations: The folder that the evaluation was written into; nothing is done if it is not the run's own.
    """
    if evaluations == run.folder / EVALUATION and (run.folder / ABOUT).exists() and run.result:
        write_card(run.folder, run.result)


def _front_matter(run: dict[str, Any]) -> str:
    """The metadata of the hub. The licence and the language are left out, because they are not known."""
    entries = {
        "library_name": "relpos",
        "pipeline_tag": "text-generation" if entry(run["model"]["family"]).causal else "fill-mask",
        "tags": ["relpos", run["model"]["family"], "positional-encoding", str(run["model"]["encoding"])],
    }
    return f"---\n{yaml.safe_dump(entries, sort_keys=False)}---"


def _about(folder: Path, run: dict[str, Any], result: RunResult) -> list[str]:
    model, data, about = run["model"], run["data"], run["about"]
    name = str(model["encoding"])
    options = "".join(f", {key}={value}" for key, value in (model["options"] or {}).items())
    plan = f" and the layer plan `{json.dumps(model['plan'])}`" if model["plan"] else ""
    source = f"the task `{data['task']}`" if data["task"] else f"`{_public_name(str(data['source']))}`"
    start = model.get("start")
    size = f" {model['preset']}" if start is None else ""
    origin = "trained" if start is None else f"started from the weights of `{_public_name(start)}` and trained"
    return [
        f"# {folder.resolve().name}: {entry(model['family']).title}{size} with {name}",
        f"A language model with the positional encoding `{name}{options}` ({encoding_card(name).paper}){plan}, "
        f"{origin} by relpos on {source}: {result['step']:,} steps, {result['tokens']:,} tokens in windows of "
        f"{data['length']:,}, seed {run['run']['seed']}; {about['parameters']:,} parameters. It is a model for "
        "experiments with positional encodings and not meant for other use.",
        "## How to open it",
        "`pip install relpos`, then",
        OPENING.format(folder=folder.resolve().name, auto_class=entry(model["family"]).auto_class),
        "Without relpos, transformers cannot open it. `relpos draw FOLDER` shows its attention heads, `relpos evaluate "
        f"FOLDER` measures its {entry(model['family']).metric}.",
    ]


def _public_name(name: str) -> str:
    """The name of a corpus or model; of a path only the last component, because the rest is private to a machine."""
    return Path(name).name if Path(name).is_absolute() or Path(name).exists() else name


def _results(folder: Path, result: RunResult) -> list[str]:
    before, after = result["heldout_at_start"], result["heldout"]
    lines = []
    if before is not None and after is not None:
        lines.append(f"Held-out loss during training: {before:.4f} at the start, {after:.4f} at the end.")
    for evaluation in read_evaluations(folder / EVALUATION):
        # If the run was trained further, earlier evaluations are not of this model.
        if evaluation.get("step") == result["step"] and any(row["error"] is None for row in evaluation["rows"]):
            if "task" in evaluation:
                lines += _task_lines(cast(TaskResult, evaluation))
            else:
                lines += _text_lines(evaluation)
    return ["## Results", *lines]


def _text_lines(evaluation: TextResult) -> list[str]:
    """What was measured on a text, and its table."""
    details = [f"`{evaluation['protocol']}`"]
    if evaluation["rope_scaling"]:
        details.append(f"rope scaled by {evaluation['rope_scaling']}")
    split = "all" if evaluation["split"] == "all" else "held-out part"
    details.append(f"{split} of `{_public_name(evaluation['corpus']['name'])}`")
    details += [f"{key.replace('_', ' ')} {value:,}" for key, value in evaluation["options"].items() if value]
    title = " ".join([f"Measured by `relpos evaluate` ({', '.join(details)}).", *evaluation["warnings"]])
    lines = [f"| length | {evaluation['metric']} | 95 % | bits per byte | tokens |", "|---:|---:|---:|---:|---:|"]
    for row in evaluation["rows"]:
        if row["error"] is None:
            length = _length(row["length"], evaluation["trained_length"])
            bounds = "–" if row["low"] is None else f"{row['low']:.2f} – {row['high']:.2f}"
            bits = "–" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}"
            lines.append(f"| {length} | {row['perplexity']:.2f} | {bounds} | {bits} | {row['tokens']:,} |")
    return [title, "\n".join(lines)]


def _task_lines(evaluation: TaskResult) -> list[str]:
    """How a task was scored, and its table."""
    title = (
        f"Answers to `{evaluation['task']}`, {evaluation['samples']} sequences per length (seed {evaluation['seed']}); "
        f"guessing gets {evaluation['chance']:.1%} right."
    )
    lines = ["| length | answers right | 95 % | all right |", "|---:|---:|---:|---:|"]
    for row in evaluation["rows"]:
        if row["error"] is None:
            length = _length(row["length"], evaluation["trained_length"])
            bounds = f"{row['low']:.1%} – {row['high']:.1%}"
            lines.append(f"| {length} | {row['accuracy']:.1%} | {bounds} | {row['exact']:.1%} |")
    return [title, "\n".join(lines)]


def _length(length: int, trained: int | None) -> str:
    return f"{length} (trained)" if length == trained else str(length)


def _origin(run: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in run["about"]["versions"].items())
    return ["## How it was made", f"All settings are in `run.yaml`. Versions: {versions}."]
