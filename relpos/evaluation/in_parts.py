"""Divide an evaluation into parts, and run them in processes of their own, on this machine or on a cluster."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from relpos.evaluation.file_names import joined
from relpos.evaluation.part import lengths_of, make_part
from relpos.runs.run import Run
from relpos.system.executors.interface import Executor, Part
from relpos.system.scheduler import Parts

SHOWN = 5  # sentences about parts that failed


def score_in_parts(
    executor: Executor,
    named: Mapping[str, Run],
    folders: Mapping[str, Path],
    scalings: Sequence[str | None],
    lengths: Sequence[int],
    data: str | None,
    options: Mapping[str, Any],
    say: Callable[[str], object],
) -> None:
    """Compute the losses of an evaluation in parts: one per run, scaling and length.

    Args:
        executor: Where the parts run.
        named: The runs by name.
        folders: The folder of each run's evaluation, by name.
        scalings: The scalings of RoPE; None is the model as it was trained.
        lengths: In tokens.
        data: Other data than the runs' own.
        options: Further arguments of `question.ask`.
        say: Receives a line when a part ends.

    Raises:
        ValueError: A part failed.
    """
    parts: dict[str, Part] = {}
    for name, run in named.items():
        for scaling in scalings:
            label = name if scaling is None else f"{name}, {scaling}"
            for length in lengths_of(options["protocol"], lengths):
                if isinstance(length, str) and scaling is not None:
                    continue  # the control is always the model as it was trained
                question = {**options, "lengths": list(lengths), "rope_scaling": scaling, "length": length}
                title = f"{label}, length {length}" if isinstance(length, int) else f"{label}, {length}"
                parts[title] = make_part(run, folders[name], joined([title]), executor.threads, data, question)
    _run(executor, parts, say)


def score_task_in_parts(
    executor: Executor,
    named: Mapping[str, Run],
    folders: Mapping[str, Path],
    lengths: Mapping[str, Sequence[int]],
    options: Mapping[str, Any],
    say: Callable[[str], object],
) -> None:
    """Score a task in parts: one per run and length.

    Args:
        executor: Where the parts run.
        named: The runs by name.
        folders: The folder of each run's evaluation, by name.
        lengths: In tokens, by the name of the run.
        options: The task, its seed and the number of samples.
        say: Receives a line when a part ends.

    Raises:
        ValueError: A part failed.
    """
    parts: dict[str, Part] = {}
    for name, run in named.items():
        for length in lengths[name]:
            title = f"{name}, length {length}"
            question = {**options, "length": length}
            parts[title] = make_part(run, folders[name], joined([title]), executor.threads, None, question)
    _run(executor, parts, say)


def _run(executor: Executor, parts: Mapping[str, Part], say: Callable[[str], object]) -> None:
    work = Parts(executor, parts, say)
    with contextlib.closing(work.run()) as ends:
        for name, end in ends:
            say(work.summary(name, end))
    failed = {name: end.reason(f"see {parts[name].log}.") for name, end in work.ends.items() if end.code != 0}
    for name, part in parts.items():
        if name not in failed:
            part.log.unlink(missing_ok=True)
    if failed:
        reasons = " ".join(f"{name}: {reason}" for name, reason in list(failed.items())[:SHOWN])
        raise ValueError(f"{len(failed)} of {len(parts)} parts failed. {reasons} Rerun the command to resume.")
