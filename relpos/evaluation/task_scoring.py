"""The share of a task's answers that a trained model gets right, by length and depth."""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from relpos.evaluation.evaluate_options import LONGEST_TASK, MULTIPLES, QUICK_MULTIPLES, SAMPLES, EvaluateOptions
from relpos.evaluation.evaluation import question_stem
from relpos.evaluation.scoring import HIDDEN, PARTS
from relpos.models.family import family_of
from relpos.runs.results import DepthRow, Score, TaskResult, TaskRow, refresh_card, refused_task_row
from relpos.runs.run import Run
from relpos.system.files import write_text
from relpos.system.memory import check_memory
from relpos.system.progress import Countdown
from relpos.system.seal import signed, undamaged
from relpos.tasks import task as task_of
from relpos.tasks.task import Example

TOKENS = 2**14  # read at a time
DEPTHS = 11  # 0, 0.1, … 1
KEY = ("weights", "position", "digest", "seed", "samples")  # what a result depends on


class TaskQuestion:
    """What is asked of a run that was trained on a task.

    The model reads each sequence once. An answer is right if it is the most likely token after the true tokens before
    it. One file keeps all scores of a run on the task.
    """

    def __init__(
        self,
        run: Run,
        options: EvaluateOptions,
        folder: Path | None = None,
        say: Callable[[str], object] = print,
    ) -> None:
        self.run, self.options, self.say = run, options, say
        self.task = task_of(str(options.task))
        usual = default_task_lengths(run, QUICK_MULTIPLES if options.quick else MULTIPLES)
        self.lengths = usual if options.lengths is None else sorted(set(options.lengths))
        if run.tokenizer.get_vocab() != self.task.vocabulary:
            raise ValueError(
                f"the tokenizer of {run.folder} does not have the words of {self.task.name}: only a model that was "
                f"trained on a task can be scored on it (relpos train --task {self.task.name})."
            )
        if not self.lengths or options.samples < 1:
            raise ValueError(f"give at least one length and one sample, not {len(self.lengths)} and {options.samples}.")
        for length in self.lengths:
            self.task.check_length(length)
        self.folder = run.evaluation if folder is None else Path(folder)
        self.file = self.folder / f"task-{self.task.name}.json"

    @property
    def pieces(self) -> list[int]:
        return self.lengths

    @property
    def stem(self) -> str:
        return question_stem(
            f"task-{self.task.name}",
            lengths=() if self.lengths == default_task_lengths(self.run) else self.lengths,
            samples=None if self.options.samples == SAMPLES else self.options.samples,
            seed=self.options.seed or None,
        )

    def answer_piece(self, length: int) -> None:
        """Score one length, and keep it in a file of its own, in which `answer` finds it."""
        result = self._empty()
        if self._stored_piece(result, length) is None:
            row, depths = self._score(length)
            file = self._piece_file(result, length)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(signed({"row": row, "depths": depths})))

    def answer(self) -> TaskResult:
        """Score every length that is not in the file, and write it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        result = self._empty()
        stored = _undamaged(self.file, lambda tree: list(tree["results"]))
        same = [entry for entry in stored if all(entry.get(name) == result.get(name) for name in KEY)]
        others = [entry for entry in stored if entry not in same]
        result = same[0] if same else result
        for length in self.lengths:
            if not any(row["length"] == length for row in result["rows"]):
                row, depths = self._stored_piece(result, length) or self._score(length)
                result["rows"] = sorted([*result["rows"], row], key=lambda row: int(row["length"]))
                result["depths"] = sorted([*result["depths"], *depths], key=lambda row: (row["length"], row["depth"]))
                entries = [signed(entry) for entry in (*others, result)]
                write_text(self.file, json.dumps({"results": entries}, indent=1))
            row = next(row for row in result["rows"] if row["length"] == length)
            self.say(f"{self._words(length)}: {row['error'] or '{:.1%} right'.format(row['accuracy'])}")
        refresh_card(self.run, self.folder)
        rows = [row for row in result["rows"] if row["length"] in self.lengths]
        return {**result, "rows": rows, "depths": [row for row in result["depths"] if row["length"] in self.lengths]}

    def _words(self, length: int) -> str:
        return f"{self.task.name}, {length} tokens"

    def _empty(self) -> TaskResult:
        run, task = self.run, self.task
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
            "seed": self.options.seed,
            "samples": self.options.samples,
        }

    def _piece_file(self, result: TaskResult, length: int) -> Path:
        """The file of one length; its name is a hash of everything that the scores depend on."""
        about = [result["task"], length, *(result.get(name) for name in KEY)]
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
        return self.folder / PARTS / f"task-{key}.json"

    def _stored_piece(self, result: TaskResult, length: int) -> tuple[TaskRow, list[DepthRow]] | None:
        """The row and depths of a length that another process has scored."""
        entries = _undamaged(self._piece_file(result, length), lambda tree: [tree])
        return (entries[0]["row"], entries[0]["depths"]) if entries else None

    def _score(self, length: int) -> tuple[TaskRow, list[DepthRow]]:
        right: list[Tensor] = []  # for each sequence, which of its answers are right
        depths: list[float | None] = []
        size = HIDDEN * length * int(self.run.model.config.hidden_size)
        countdown = Countdown(self.options.samples, self.say)
        try:
            check_memory(f"reading {length:,} tokens", size, "give a shorter length")
            for batch in self._batches(length):
                right += answers_right(self.run.model, batch)
                depths += [example.depth for example in batch]
                countdown.step(len(batch), f"{self._words(length)}: {len(right)} of {self.options.samples}")
        except ValueError as error:  # a length that the encoding refuses
            return refused_task_row(length, str(error)), []
        by_depth = {
            depth: [answers for answers, other in zip(right, depths, strict=True) if other == depth]
            for depth in sorted({depth for depth in depths if depth is not None})
        }
        return {"length": length, **_summary(right), "error": None}, [
            {"length": length, "depth": depth, **_summary(answers)} for depth, answers in by_depth.items()
        ]

    def _batches(self, length: int) -> Iterator[list[Example]]:
        task, seed, samples = self.task, self.options.seed, self.options.samples
        size = max(1, TOKENS // length)
        for start in range(0, samples, size):
            yield [
                task.draw(length, seed, i, "heldout", i % DEPTHS / (DEPTHS - 1) if task.has_depth else None)
                for i in range(start, min(start + size, samples))
            ]


def default_task_lengths(run: Run, multiples: Sequence[int] = MULTIPLES) -> list[int]:
    """The lengths to score by default: 1, 2, 4, 8 and 16 times the trained one, up to 16,384 tokens."""
    trained = run.trained_length or LONGEST_TASK
    return [trained * times for times in multiples if times == 1 or trained * times <= LONGEST_TASK]


def wilson(share: float, count: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """The bounds of a share that was observed in `count` trials, with 95 % confidence (Wilson 1927)."""
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max((middle - spread) / scale, 0.0), min((middle + spread) / scale, 1.0)


@torch.inference_mode()
def answers_right(model: PreTrainedModel, examples: Sequence[Example]) -> list[Tensor]:
    """For each sequence, which of its answers are the model's most likely token. Only their logits are computed."""
    ids = torch.from_numpy(np.stack([example.ids for example in examples])).to(model.device)  # (batch, length)
    asked = torch.from_numpy(np.stack([example.answers for example in examples]))[:, 1:].to(model.device)
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


def _undamaged(file: Path, entries_of: Callable[[Any], list[Any]]) -> list[Any]:
    """The entries of a JSON file that are as they were written; the others are computed again."""
    if not file.exists():
        return []
    try:
        entries = entries_of(json.loads(file.read_bytes()))
    except (ValueError, KeyError, TypeError):
        entries = [None]
    intact = [entry for entry in map(undamaged, entries) if entry is not None]
    if len(intact) < len(entries):
        print(f"warning: {file} is damaged: what it held is computed again.", file=sys.stderr)
    return intact
