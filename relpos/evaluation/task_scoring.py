"""The share of a task's answers that a trained model gets right, by length and depth."""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from relpos.evaluation.options import LONGEST_TASK, MULTIPLES, SAMPLES
from relpos.evaluation.parts import FOLDER
from relpos.evaluation.scoring import HIDDEN
from relpos.models.family import family_of
from relpos.runs.results import DepthRow, Score, TaskResult, TaskRow, refresh_card, refused_task_row
from relpos.runs.run import Run
from relpos.system.files import write_text
from relpos.system.memory import check_memory
from relpos.system.progress import Countdown
from relpos.system.seal import signed, undamaged
from relpos.tasks import task as task_of
from relpos.tasks.task import Example, Task

TOKENS = 2**14  # read at a time
DEPTHS = 11  # 0, 0.1, … 1
KEY = ("weights", "position", "digest", "seed", "samples")  # what a result depends on


def score_task(
    run: Run,
    task: str,
    lengths: Sequence[int],
    samples: int = SAMPLES,
    seed: int = 0,
    out: Path | None = None,
    say: Callable[[str], object] = print,
) -> TaskResult:
    """Score one run on held-out sequences of a task.

    The model reads each sequence once. An answer is right if it is the most likely token after the true tokens before
    it. `relpos.evaluate` does the same for several runs, chooses the lengths, and draws the pictures.

    Args:
        run: A run that was trained on the task, from `relpos.open`.
        task: The name of the task.
        lengths: In tokens.
        samples: Number of sequences at each length.
        seed: Seed of the sequences.
        out: Folder to write to. Default: RUN/evaluation. Finished lengths are kept there and not computed again.
        say: Called with a line about the progress every few seconds.

    Returns:
        "rows", one per length: "accuracy" is the share of answers that are right, "low" and "high" its bounds with 95 %
        confidence, "exact" the share of sequences with all answers right; "error" is the reason if the encoding refuses
        the length. "depths", for a task with a depth: the same by length and depth.

    Raises:
        ValueError: There is no such task, the run was not trained on it, or a length or `samples` is too small.

    Example:
        >>> result = score_task(relpos.open("runs/recall-rope"), "recall", [64, 256], samples=200)
        >>> [row["accuracy"] for row in result["rows"]]
    """
    asked = task_of(task)
    _check(run, asked, lengths, samples)
    folder = run.evaluation if out is None else Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"task-{task}.json"
    result = _empty(run, asked, samples, seed)
    kept = _stored(file)
    same = [entry for entry in kept if all(entry.get(name) == result.get(name) for name in KEY)]
    others = [entry for entry in kept if entry not in same]
    result = same[0] if same else result
    for length in sorted(set(lengths)):
        if not any(row["length"] == length for row in result["rows"]):
            row, depths = _part(folder, result, length) or _score_length(run, asked, length, samples, seed, say)
            result["rows"] = sorted([*result["rows"], row], key=lambda row: int(row["length"]))
            result["depths"] = sorted([*result["depths"], *depths], key=lambda row: (row["length"], row["depth"]))
            write_text(file, json.dumps({"results": [signed(entry) for entry in (*others, result)]}, indent=1))
        row = next(row for row in result["rows"] if row["length"] == length)
        say(f"{task}, {length} tokens: {row['error'] or '{:.1%} right'.format(row['accuracy'])}")
    refresh_card(run, folder)
    rows = [row for row in result["rows"] if row["length"] in lengths]
    return {**result, "rows": rows, "depths": [row for row in result["depths"] if row["length"] in lengths]}


def score_part(run: Run, task: str, length: int, samples: int, seed: int, out: Path) -> None:
    """Score one length only, and keep it in a file of its own, in which `score_task` finds it.

    Args:
        run: A run that was trained on the task.
        task: The name of the task.
        length: In tokens.
        samples: Number of sequences.
        seed: Seed of the sequences.
        out: The folder of the evaluation.

    Raises:
        ValueError: There is no such task, the run was not trained on it, or the length or `samples` is too small.
    """
    asked = task_of(task)
    _check(run, asked, [length], samples)
    result = _empty(run, asked, samples, seed)
    if _part(out, result, length) is None:
        row, depths = _score_length(run, asked, length, samples, seed, print)
        file = _part_file(out, result, length)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(signed({"row": row, "depths": depths})))


def _empty(run: Run, task: Task, samples: int, seed: int) -> TaskResult:
    """A result without rows."""
    return {
        "task": task.name,
        "encoding": run.encoding,
        "trained_length": run.trained_length,
        "chance": task.chance,
        "rows": [],
        "depths": [],
        "step": run.result.get("step"),
        "position": run.family.position_entry(run.model),
        "weights": run.checksum,
        "digest": task.digest,
        "seed": seed,
        "samples": samples,
    }


def _part_file(folder: Path, result: Mapping[str, Any], length: int) -> Path:
    """The file of one length; its name is a hash of everything that the scores depend on."""
    about = [result["task"], length, *(result[name] for name in KEY)]
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    return folder / FOLDER / f"task-{key}.json"


def _part(folder: Path, result: Mapping[str, Any], length: int) -> tuple[TaskRow, list[DepthRow]] | None:
    """The row and depths of a length that a part has scored; None if none has."""
    file = _part_file(folder, result, length)
    if not file.exists():
        return None
    entries = _undamaged(file, lambda tree: [tree])
    return (entries[0]["row"], entries[0]["depths"]) if entries else None


def default_task_lengths(run: Run) -> list[int]:
    """The lengths to score by default: 1, 2, 4, 8 and 16 times the trained one, up to 16,384 tokens."""
    trained = run.trained_length or LONGEST_TASK
    return [trained * times for times in MULTIPLES if times == 1 or trained * times <= LONGEST_TASK]


def wilson(share: float, count: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """The bounds of a share that was observed in `count` trials, with 95 % confidence (Wilson 1927)."""
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max((middle - spread) / scale, 0.0), min((middle + spread) / scale, 1.0)


def _check(run: Run, task: Task, lengths: Sequence[int], samples: int) -> None:
    if run.tokenizer.get_vocab() != task.vocabulary:
        raise ValueError(
            f"the tokenizer of {run.folder} does not have the words of {task.name}: only a model that was trained on a "
            f"task can be scored on it (relpos train --task {task.name})."
        )
    if not lengths or samples < 1:
        raise ValueError(f"give at least one length and one sample, not {len(lengths)} and {samples}.")
    for length in lengths:
        task.check_length(length)


def _score_length(
    run: Run, task: Task, length: int, samples: int, seed: int, say: Callable[[str], object]
) -> tuple[TaskRow, list[DepthRow]]:
    """The row of a length, and the rows of its depths."""
    right: list[Tensor] = []  # for each sequence, which of its answers are right
    depths: list[float | None] = []
    width = int(run.model.config.hidden_size)
    try:
        check_memory(f"reading {length:,} tokens", HIDDEN * length * width, "give a shorter length")
    except ValueError as error:
        return refused_task_row(length, str(error)), []
    countdown = Countdown(samples, say)
    for batch in _batches(task, length, samples, seed):
        try:
            right += answers_right(run.model, batch)
        except ValueError as error:  # a length that the encoding refuses
            return refused_task_row(length, str(error)), []
        depths += [sample.depth for sample in batch]
        countdown.step(len(batch), f"{task.name}, {length} tokens: {len(right)} of {samples}")
    return {"length": length, **_summary(right), "error": None}, [
        {"length": length, "depth": depth, **_summary([r for r, d in zip(right, depths, strict=True) if d == depth])}
        for depth in sorted({depth for depth in depths if depth is not None})
    ]


def _batches(task: Task, length: int, samples: int, seed: int) -> Iterator[list[Example]]:
    size = max(1, TOKENS // length)
    for start in range(0, samples, size):
        yield [
            task.draw(length, seed, i, "heldout", i % DEPTHS / (DEPTHS - 1) if task.has_depth else None)
            for i in range(start, min(start + size, samples))
        ]


@torch.inference_mode()
def answers_right(model: PreTrainedModel, samples: Sequence[Example]) -> list[Tensor]:
    """For each sequence, which of its answers are the model's most likely token.

    Logits are computed for the answers only.
    """
    ids = torch.from_numpy(np.stack([sample.ids for sample in samples])).to(model.device)  # (batch, length)
    asked = torch.from_numpy(np.stack([sample.answers for sample in samples]))[:, 1:].to(model.device)
    family = family_of(model)
    output = family.output(model, family.hidden(model, ids))
    states = output.states[:, :-1][asked]  # each predicts the token after it: (answers of all sequences, width)
    answers = F.linear(states, output.weight, output.bias).argmax(dim=-1)
    right = (answers == ids[:, 1:][asked]).cpu()
    return list(torch.split(right, asked.sum(dim=1).tolist()))


def _summary(right: Sequence[Tensor]) -> Score:
    """Accuracy and its bounds.

    The bounds count sequences and not answers: the answers of one sequence are not independent of each other, so the
    number of sequences is a safe lower limit for the number of independent trials.
    """
    accuracy = float(torch.cat(list(right)).double().mean())
    low, high = wilson(accuracy, len(right))
    exact = sum(bool(answers.all()) for answers in right) / len(right)
    return {"accuracy": accuracy, "exact": exact, "low": low, "high": high, "samples": len(right)}


def _stored(file: Path) -> list[TaskResult]:
    """The results in the file; none if it does not exist."""
    return _undamaged(file, lambda tree: list(tree["results"])) if file.exists() else []


def _undamaged(file: Path, entries_of: Callable[[Any], list[Any]]) -> list[Any]:
    """The entries of a JSON file that are as they were written; the others are computed again."""
    try:
        entries = entries_of(json.loads(file.read_bytes()))
    except (ValueError, KeyError, TypeError):
        entries = [None]
    intact = [entry for entry in map(undamaged, entries) if entry is not None]
    if len(intact) < len(entries):
        print(f"warning: {file} is damaged: what it held is computed again.", file=sys.stderr)
    return intact
