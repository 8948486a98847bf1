"""The losses of a text's tokens under a model, window by window. Finished batches are kept in a file."""

import contextlib
import hashlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist
from transformers import PreTrainedModel

from relpos.evaluation.protocols import Window
from relpos.models.context import divide_sequences
from relpos.models.loss import token_losses
from relpos.runs.run import Run
from relpos.system.files import write_bytes, writing
from relpos.system.memory import begin_peak, check_memory, peak
from relpos.system.seal import signed, undamaged
from relpos.text.tokens import IGNORED, MASKED_EVERY, masked_places

if TYPE_CHECKING:
    from relpos.evaluation.evaluation import Question

PARTS = "parts"  # the folder of these files in the folder of an evaluation
HIDDEN = 16  # bytes of memory, at least, per token and entry of a hidden state: the states, and three more like them
AT_ONCE = 4096  # tokens read at a time, or one window: memory grows with the length only


@dataclass
class Losses:
    """Sums of losses by unit (a document, or a block of a single document) and bin of positions."""

    units: NDArray[np.int64]  # (units,), the numbers of the documents or blocks that have scored tokens
    sums: NDArray[np.float64]  # (units, bins)
    counts: NDArray[np.int64]  # (units, bins)
    read: int  # tokens
    seconds: float
    peak: int  # bytes

    @property
    def mean(self) -> float:
        return float(self.sums.sum() / self.counts.sum())


class Processes:
    """The processes that share every window, a slice of its tokens each: one, or all of a launch by torchrun."""

    def __init__(self, several: bool = False) -> None:
        self.number, self.rank = 1, 0
        if not several:
            return
        from accelerate import PartialState

        self.state = PartialState(cpu=not torch.cuda.is_available())
        self.number, self.rank = self.state.num_processes, self.state.process_index
        if self.number == 1:
            raise ValueError(
                "--context-parallel divides every window among the processes of a launch, and there is 1: start "
                "several, as in torchrun --nproc-per-node 2 -m relpos.cli evaluate …"
            )

    @property
    def writes(self) -> bool:
        """Whether this process writes the files and prints."""
        return self.rank == 0

    def in_turn(self) -> contextlib.AbstractContextManager[Any]:
        """A context that the first process goes through before the others, which then use what it has cached."""
        return contextlib.nullcontext() if self.number == 1 else self.state.main_process_first()

    def divide(self, model: PreTrainedModel) -> None:
        """Let a model read slices; a ValueError if it cannot."""
        if self.number > 1:
            world = dist.group.WORLD
            assert world is not None
            divide_sequences(model, world)

    def first_says(self, value: Any) -> Any:
        """The value of the first process, for all."""
        if self.number == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def check_length(self, length: int) -> None:
        if length % self.number:
            raise ValueError(
                f"windows of {length} tokens cannot be divided among {self.number} processes evenly: give a multiple."
            )

    def slice_of(self, x: Tensor) -> Tensor:
        """This process's slice of (batch, length)."""
        return x.chunk(self.number, dim=1)[self.rank]

    def joined(self, losses: Tensor) -> NDArray[np.float32]:
        """The losses of all tokens (batch, length), from those of each slice."""
        if self.number == 1:
            return losses.cpu().numpy()
        parts = [torch.empty_like(losses) for _ in range(self.number)]
        dist.all_gather(parts, losses.contiguous())
        return torch.cat(parts, dim=1).cpu().numpy()


class Batch(TypedDict):
    """A line of the file: what was measured of a batch of windows."""

    batch: int  # its number
    seconds: float
    peak: int  # bytes
    cells: list[list[float]]  # unit, bin, number of tokens and sum of their losses


class Scorer:
    """Scores the windows of a question with one model, and keeps the losses of each batch in a file.

    The name of the file is a hash of everything that the losses depend on. If it is killed, the next call resumes with
    the first batch that is not in the file, and ends with the same numbers.
    """

    def __init__(self, run: Run, question: "Question") -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model, self.family, self.framing = run.model.to(self.device), run.family, run.framing
        self.text, self.units, self.folder = question.text, question.units, question.folder / PARTS
        self.question, self.processes = question, question.processes
        self.processes.divide(self.model)
        self.mask_token = -1 if self.family.causal else run.tokenizer.mask_token_id
        if self.mask_token is None:
            raise ValueError(f"the tokenizer in {run.folder} has no mask token, which {self.family.title} needs.")
        self.separate = run.settings is not None and run.settings.data.separate_documents  # as it was trained
        # A folder may move: its name is left out.
        config = {name: value for name, value in run.model.config.to_dict().items() if name != "_name_or_path"}
        self.identity = {**question.identity, "weights": run.checksum, "config": config, "separate": self.separate}
        if self.units.block is not None:
            self.identity["block"] = self.units.block
        if self.processes.number > 1:
            self.identity["processes"] = self.processes.number
        if not self.family.causal:
            self.identity["masked"] = MASKED_EVERY
        if len(self.framing):
            self.identity["special tokens"] = [self.framing.before, self.framing.after]

    def score(self, windows: list[Window], length: int, words: str, edges: NDArray[np.int64] | None = None) -> Losses:
        """The losses of windows, by the bins of positions between `edges` (bins + 1,); `words` for the progress."""
        self.processes.check_length(length)
        if self.device.type == "cpu":
            needed = HIDDEN * int(self.model.config.get_text_config().hidden_size) * length // self.processes.number
            check_memory(f"reading {length:,} tokens", needed, "give a shorter length")
        self.framing.room(length)  # there must be some
        size = max(1, AT_ONCE // length)
        batches = [windows[start : start + size] for start in range(0, len(windows), size)]
        file = self._file(windows, length, edges)
        known = self.processes.first_says(_read(file, mend=self.processes.writes))
        countdown = self.question.countdown  # it starts here: other runs may have been scored since this was made
        countdown.skip(sum(len(batch) * length for number, batch in enumerate(batches) if number in known))
        begin_peak(self.device)
        for number, batch in enumerate(batches):
            if number not in known:
                begun = time.perf_counter()
                cells = self._cells(batch, length, edges)
                seconds = time.perf_counter() - begun
                known[number] = {"batch": number, "seconds": seconds, "peak": peak(self.device), "cells": cells}
                if self.processes.writes:
                    _append(file, known[number])
                countdown.step(len(batch) * length, f"{words}: window {number * size + len(batch)}/{len(windows)}")
        bins = 1 if edges is None else len(edges) - 1
        return _collect([known[number] for number in range(len(batches))], bins, len(windows) * length)

    def _file(self, windows: list[Window], length: int, edges: NDArray[np.int64] | None) -> Path:
        """The file of the losses of windows; its name is a hash of everything that they depend on."""
        size = max(1, AT_ONCE // length)
        about = [self.identity, length, size, windows, None if edges is None else edges.tolist()]
        return self.folder / f"{hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]}.jsonl"

    def left(self, windows: list[Window], length: int, edges: NDArray[np.int64] | None = None) -> int:
        """How many tokens of windows are not read yet."""
        size, known = max(1, AT_ONCE // length), _read(self._file(windows, length, edges), mend=False)
        return length * sum(len(windows[i : i + size]) for i in range(0, len(windows), size) if i // size not in known)

    def probe(self, length: int, count: int) -> None:
        """Read `count` windows of a length, to measure how long that takes."""
        places = np.arange(length + 1)[None].repeat(count, 0)
        self._losses(places, np.ones((count, length), dtype=np.bool_), np.zeros_like(places))

    def bytes_of(self, windows: list[Window], length: int, sizes: NDArray[np.int64]) -> int:
        """Bytes of the tokens that windows score; `sizes` of the entries of the tokenizer, (entries,)."""
        total = 0
        for window in windows:
            places = window.start + np.arange(1, length + 1)
            total += int(sizes[self.text.ids[places]][self._scored(places, window.first)].sum())
        return total

    def _scored(self, places: NDArray[np.int64], first: NDArray[np.int64] | int) -> NDArray[np.bool_]:
        """Which tokens of windows are scored.

        A causal model predicts all of them, except the first token of each document if documents are separated; a
        masked model predicts those that are masked. Tokens that gave way to special tokens are not predicted: BOS
        takes the place of a window's first token, which no causal model predicts anyway.
        `places` are those in the text of the tokens after the first of each window, (…, length).
        """
        length, framing = places.shape[-1], self.framing
        scored: NDArray[np.bool_] = places >= first
        if self.family.causal:
            scored &= np.arange(length) >= len(framing.before) - 1
            return scored & ~np.isin(places, self.text.starts) if self.separate else scored
        within = np.arange(length)
        scored &= (within >= len(framing.before)) & (within < length - len(framing.after))
        return scored & masked_places(places)

    def _cells(self, batch: list[Window], length: int, edges: NDArray[np.int64] | None) -> list[list[float]]:
        """One entry per unit and bin with scored tokens: unit, bin, number of tokens and sum of their losses."""
        places = np.array([window.start for window in batch])[:, None] + np.arange(length + 1)  # (batch, length + 1)
        first, origin = np.array([window.first for window in batch]), np.array([window.origin for window in batch])
        documents = np.searchsorted(self.text.starts, places, side="right") - 1
        scored = self._scored(places[:, 1:], first[:, None])  # (batch, length)
        losses = self._losses(places, scored, documents).astype(np.float64)
        bins = np.zeros_like(documents[:, 1:])
        if edges is not None:
            bins = np.searchsorted(edges, places[:, 1:] - origin[:, None] - 1, side="right") - 1
        units = self.units.of(places[:, 1:])
        cells, which = np.unique(np.stack([units[scored], bins[scored]]), axis=1, return_inverse=True)
        counts, sums = np.bincount(which.reshape(-1)), np.bincount(which.reshape(-1), weights=losses[scored])
        return [[*map(int, cell), int(n), float(s)] for cell, n, s in zip(cells.T, counts, sums, strict=True)]

    @torch.inference_mode()
    def _losses(
        self, places: NDArray[np.int64], scored: NDArray[np.bool_], documents: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """The loss of every token that is scored: (batch, length)."""
        ids = self._tensor(self.text.ids[places].astype(np.int64))  # (batch, length + 1)
        counts = self._tensor(scored)
        targets = ids[:, 1:].masked_fill(~counts, IGNORED)  # (batch, length)
        if self.family.causal:
            read, documents = ids[:, :-1], documents[:, :-1]  # each token is predicted from those before it
        else:
            masked = self._tensor(masked_places(places[:, 1:]))
            read, documents = ids[:, 1:].masked_fill(masked, self.mask_token), documents[:, 1:]
        read = self.framing.over(read)
        mine = self.processes.slice_of
        hidden = self.family.hidden(self.model, mine(read), mine(self._tensor(documents)) if self.separate else None)
        output = self.family.output(self.model, hidden)
        losses = token_losses(output.states, output.weight, mine(targets), output.bias, softcap=output.softcap)
        return self.processes.joined(losses.float())

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def _collect(batches: list[Batch], bins: int, read: int) -> Losses:
    cells = np.array([cell for batch in batches for cell in batch["cells"]], dtype=np.float64)  # (cells, 4)
    units, which = np.unique(cells[:, 0].astype(np.int64), return_inverse=True)
    place = (which.reshape(-1), cells[:, 1].astype(int))
    sums, counts = np.zeros((len(units), bins)), np.zeros((len(units), bins), dtype=np.int64)
    np.add.at(sums, place, cells[:, 3])
    np.add.at(counts, place, cells[:, 2].astype(np.int64))
    seconds = sum(batch["seconds"] for batch in batches)
    return Losses(units, sums, counts, read, seconds, max(batch["peak"] for batch in batches))


def _read(file: Path, mend: bool) -> dict[int, Batch]:
    """The finished batches by number. Damaged lines are skipped, so that their batches are scored again.

    `mend`: name the damaged lines and remove them from the file. An incomplete last line is left by a kill.
    """
    batches: dict[int, Batch] = {}
    *lines, rest = file.read_bytes().split(b"\n") if file.exists() else [b""]
    intact, damaged = [], []
    for number, line in enumerate(lines, start=1):
        entry = undamaged(line)
        if entry is None:
            damaged.append(str(number))
        else:
            intact.append(line + b"\n")
            batches.setdefault(entry["batch"], cast(Batch, entry))
    if mend and (damaged or rest):
        if damaged:
            words = f"line {damaged[0]} is" if len(damaged) == 1 else f"lines {', '.join(damaged)} are"
            print(f"warning: {words} damaged in {file}: what they held is computed again.", file=sys.stderr)
        write_bytes(file, b"".join(intact))
    return batches


def _append(file: Path, entry: Batch) -> None:
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as handle:
            handle.write((json.dumps(signed(entry)) + "\n").encode())
