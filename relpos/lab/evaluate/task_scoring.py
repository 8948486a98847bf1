"""How often a trained model answers right, by length and depth."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from relpos.lab.runs.model_card import refresh_card
from relpos.lab.runs.run import EVALUATION, Run
from relpos.lab.tasks.registry import task as task_of
from relpos.lab.tasks.task import Example, Task
from relpos.models.family import family_of
from relpos.system.files import write_text
from relpos.system.progress import Countdown

TOKENS = 2**14  # that a model reads at a time
DEPTHS = 11  # 0, 0.1, … 1
KEY = ("weights", "position", "digest", "seed", "samples")  # what a result depends on


def score_task(
    run: Run,
    task: str,
    lengths: Sequence[int],
    samples: int = 100,
    seed: int = 0,
    out: Path | None = None,
    say: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Score a run on a task's held-out sequences: `samples` of them at each length.

    The model reads a sequence once, and each answer is what it holds most likely after the true tokens before it. Of a
    row, `accuracy` is the share of answers that are right, between `low` and `high` with 95 % confidence, and `exact`
    the share of sequences with all answers right; where the encoding refuses the length, `error` is its sentence. A
    task with a depth has `depths`: the accuracy by length and depth. Finished lengths are kept in `out`, which is
    RUN/evaluation unless given, and not computed again.
    """
    asked = task_of(task)
    _check(run, asked, lengths, samples)
    folder = run.folder / EVALUATION if out is None else Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"task-{task}.json"
    result = {
        "task": task,
        "encoding": run.encoding,
        "trained_length": run.trained_length,
        "chance": asked.chance,
        "rows": [],
        "depths": [],
        "step": run.result.get("step"),
        "position": run.model.config.position,
        "weights": run.checksum,
        "digest": asked.digest,
        "seed": seed,
        "samples": samples,
    }
    kept = _kept(file)
    same = [one for one in kept if all(one.get(name) == result[name] for name in KEY)]
    others = [one for one in kept if one not in same]
    result = same[0] if same else result
    for length in sorted(set(lengths)):
        if not any(row["length"] == length for row in result["rows"]):
            row, depths = _score_length(run, asked, length, samples, seed, say)
            result["rows"] = sorted([*result["rows"], row], key=lambda row: int(row["length"]))
            result["depths"] = sorted([*result["depths"], *depths], key=lambda row: (row["length"], row["depth"]))
            write_text(file, json.dumps({"results": [*others, result]}, indent=1))
        row = next(row for row in result["rows"] if row["length"] == length)
        say(f"{task}, {length} tokens: {row['error'] or '{:.1%} right'.format(row['accuracy'])}")
    refresh_card(run, folder)
    return {
        **result,
        **{name: [row for row in result[name] if row["length"] in lengths] for name in ("rows", "depths")},
    }


def wilson(share: float, count: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """The bounds between which a share seen in `count` trials lies, with 95 % confidence (Wilson 1927)."""
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max((middle - spread) / scale, 0.0), min((middle + spread) / scale, 1.0)


def _check(run: Run, task: Task, lengths: Sequence[int], samples: int) -> None:
    if run.tokenizer.get_vocab() != task.vocabulary:
        raise ValueError(
            f"{run.folder} has not the words of {task.name}: only a model that was trained on a task can be "
            f"tested on it (relpos train --task {task.name})."
        )
    if not lengths or samples < 1:
        raise ValueError(f"give at least one length and one sample, not {len(lengths)} and {samples}.")
    for length in lengths:
        task.check_length(length)


def _score_length(
    run: Run, task: Task, length: int, samples: int, seed: int, say: Callable[[str], object]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One row, and those of its depths."""
    row: dict[str, Any] = {"length": length, "accuracy": None, "exact": None, "low": None, "high": None}
    row |= {"samples": 0, "error": None}
    right: list[Tensor] = []  # of each sequence, which answers are right
    depths: list[float | None] = []
    countdown = Countdown(samples, say)
    for batch in _batches(task, length, samples, seed):
        try:
            right += answers_right(run.model, batch)
        except ValueError as error:  # a length that the encoding refuses
            return {**row, "error": str(error)}, []
        depths += [sample.depth for sample in batch]
        countdown.step(len(batch), f"{task.name}, {length} tokens: {len(right)} of {samples}")
    return {**row, **_summary(right)}, [
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
    """Of each sequence, which of its answers the model holds most likely.

    Logits exist for the answers alone; the rest of a sequence costs its hidden states.
    """
    ids = torch.from_numpy(np.stack([sample.ids for sample in samples])).to(model.device)  # (batch, length)
    asked = torch.from_numpy(np.stack([sample.answers for sample in samples]))[:, 1:].to(model.device)
    family = family_of(model)
    output = family.output(model, family.hidden(model, ids))
    states = output.states[:, :-1][asked]  # each predicts the token after it: (answers of all sequences, width)
    answers = F.linear(states, output.weight, output.bias).argmax(dim=-1)
    right = (answers == ids[:, 1:][asked]).cpu()
    return list(torch.split(right, asked.sum(dim=1).tolist()))


def _summary(right: Sequence[Tensor]) -> dict[str, Any]:
    """Shares over sequences.

    The bounds count sequences and not answers: the answers of one sequence stand and fall together, and as many
    independent trials as there are sequences is the least that the accuracy can rest on.
    """
    accuracy = float(torch.cat(list(right)).double().mean())
    low, high = wilson(accuracy, len(right))
    exact = sum(bool(one.all()) for one in right) / len(right)
    return {"accuracy": accuracy, "exact": exact, "low": low, "high": high, "samples": len(right)}


def _kept(file: Path) -> list[dict[str, Any]]:
    """What the file keeps; nothing if there is none, or it is damaged."""
    try:
        return list(json.loads(file.read_text(encoding="utf-8"))["results"])
    except (FileNotFoundError, ValueError, KeyError):
        return []
