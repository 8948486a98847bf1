"""Divide an evaluation into parts, one length of one run each, that run on this machine or on a cluster.

python -m relpos.evaluation.parts RUN OUT DATA THREADS QUESTION

answers one of them; QUESTION is a JSON object. The part keeps losses, or the scores of a task, in the folder OUT/parts.
The evaluation that follows finds them there, and computes everything else from them as it does without parts.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.system.executors.interface import Executor, Part
from relpos.system.processes import end_with_parent
from relpos.system.scheduler import Parts

if TYPE_CHECKING:
    from relpos.runs.run import Run

MODULE = "relpos.evaluation.parts"
FOLDER = "parts"  # in the folder of an evaluation
CONTROL = "control"  # in place of a length: the control of the protocol positions
SHOWN = 5  # sentences about parts that failed


def make_part(run: "Run", folder: Path, name: str, threads: int, data: str | None, question: Mapping[str, Any]) -> Part:
    """One part of an evaluation.

    Args:
        run: The run.
        folder: The folder of its evaluation.
        name: The name of the part, for its log.
        threads: The number of threads.
        data: Other data than the run's own.
        question: What is asked: options of the evaluation, and the length of this part.
    """
    from relpos.evaluation.question import joined

    own = run.folder
    files = tuple(sorted(file for file in own.iterdir() if file.is_file())) if own.is_dir() else (own,)
    local = data is not None and Path(data).exists()
    arguments = (own, folder, Path(data) if data and local else data or "", str(threads), json.dumps(dict(question)))
    reads = (*files, Path(data)) if data and local else files
    return Part(MODULE, arguments, folder / FOLDER, folder / FOLDER / f"{joined([name])}.log", reads)


def answer(run: "Run", out: Path, data: str | None, question: dict[str, Any]) -> None:
    """Score one length, and keep the losses or the scores.

    Raises:
        ValueError: The encoding or the text does not allow this length.
    """
    length: int | str = question.pop("length")
    if "task" in question:
        from relpos.evaluation.task_scoring import score_part

        assert isinstance(length, int)
        score_part(run, length=length, out=out, **question)
        return
    from relpos.evaluation.question import ask

    asked = ask(run, data=data, out=out, **question)
    if length == CONTROL:
        asked.control(asked.lengths[0])
    elif length in asked.plan.windows:
        assert isinstance(length, int)
        asked.losses(length, asked.scorer(length))


def lengths_of(protocol: str, lengths: Sequence[int]) -> list[int | str]:
    """Into what a question is divided: its lengths, and the control of the protocol positions."""
    return [*lengths, CONTROL] if protocol == "positions" else list(lengths)


def main() -> int:
    """Answer the question of the command line."""
    folder, out, data, threads, question = sys.argv[1:]
    end_with_parent()
    import torch

    from relpos.runs.run import open_run

    torch.set_num_threads(int(threads))
    try:
        answer(open_run(folder), Path(out), data or None, json.loads(question))
    except ValueError as error:  # such a length is a row without numbers; the evaluation computes the same sentence
        print(error)
    return 0


def score_in_parts(
    executor: Executor,
    named: "Mapping[str, Run]",
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
                parts[title] = make_part(run, folders[name], title, executor.threads, data, question)
    _run(executor, parts, say)


def score_task_in_parts(
    executor: Executor,
    named: "Mapping[str, Run]",
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
            parts[title] = make_part(run, folders[name], title, executor.threads, None, question)
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


if __name__ == "__main__":
    sys.exit(main())
