"""What a run and its evaluations measured, as it stands in their JSON files: types, and reading them.

docs/evaluation.md explains the numbers. Imports nothing heavy.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict, cast


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


class _Row(TypedDict):
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


class Row(_Row, total=False):
    """One length. If it could not be measured, `error` says why, and all numbers but the length are null."""

    control_loss: float  # of the protocol `positions`


class CorpusFacts(TypedDict):
    """The text that was scored."""

    name: str
    hash: str
    documents: int
    tokens: int


class _TextResult(TypedDict):
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


class TextResult(_TextResult, total=False):
    """Loss on a text by length."""

    bins: list[Bin]  # of the protocol `positions`
    versions: dict[str, str]
    file: str  # name of the JSON file


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
    return cast(Row, {**dict.fromkeys(_Row.__annotations__), "length": length, "error": error})


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
