"""One part of an evaluation, in a process of its own: one length of one run, or of a scaling of it.

python -m relpos.evaluation.part RUN OUT DATA THREADS QUESTION

QUESTION is a JSON object. The part keeps losses, or the scores of a task, in the folder OUT/parts. The evaluation that
follows finds them there, and computes everything else from them as it does without parts.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.system.executors.interface import Part
from relpos.system.processes import end_with_parent

if TYPE_CHECKING:
    from relpos.runs.run import Run

MODULE = "relpos.evaluation.part"
FOLDER = "parts"  # in the folder of an evaluation
CONTROL = "control"  # in place of a length: the control of the protocol positions


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
    own = run.folder
    files = tuple(sorted(file for file in own.iterdir() if file.is_file())) if own.is_dir() else (own,)
    local = data is not None and Path(data).exists()
    arguments = (own, folder, Path(data) if data and local else data or "", str(threads), json.dumps(dict(question)))
    reads = (*files, Path(data)) if data and local else files
    return Part(MODULE, arguments, folder / FOLDER, folder / FOLDER / f"{name}.log", reads)


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


if __name__ == "__main__":
    sys.exit(main())
