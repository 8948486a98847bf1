"""Evaluate one or several runs: `relpos.evaluate`, which is also what the command `relpos evaluate` calls.

python -m relpos.evaluation.evaluate RUN OUT DATA THREADS QUESTION

answers a piece of a question (a length) on this machine or on a cluster, and keeps what it computes in OUT/parts; the
evaluation that follows finds it there, and computes everything else as it does without parts. QUESTION is JSON.
"""

import contextlib
import functools
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from relpos.evaluation.evaluate_options import (
    MULTIPLES,
    PROTOCOLS,
    QUICK_MULTIPLES,
    EvaluateOptions,
    ProtocolName,
)
from relpos.evaluation.evaluation import Question, check_scaling, default_lengths, joined
from relpos.evaluation.scoring import PARTS, Processes
from relpos.evaluation.task_scoring import TaskQuestion
from relpos.runs.results import EVALUATION, TaskResult, TextResult
from relpos.runs.run import Run, open_run
from relpos.system.executors import Executor, LocalExecutor, Part, Parts, end_with_parent
from relpos.system.options import takes
from relpos.system.progress import LiveLine, clock_time
from relpos.tasks import task as task_of

Result = TextResult | TaskResult  # what is in a JSON file: docs/evaluation.md
OF_TEXT = ("data", "split", "stride", "last", "eval_tokens", "rope_scaling")  # options that a task does not have
OF_A_PART = ("protocol", "split", "stride", "last", "eval_tokens", "quick", "seed", "bos", "task", "samples")
SHOWN = 5  # sentences about parts that failed


@dataclass(frozen=True)
class Evaluation:
    """What was measured, and the files it was written to.

    Attributes:
        results: One result per label. A label is the name of a run, with the scaling of RoPE if there is one: "rope",
            "rope, yarn:4". Each result has "rows", one per length.
        files: The JSON files, one per result.
        pictures: The pictures: one curve of all runs, or for a task one or two pictures per run.
    """

    results: Mapping[str, Result]
    files: list[Path]
    pictures: list[Path]


@takes(EvaluateOptions)
def evaluate(options: EvaluateOptions) -> Evaluation:
    """Evaluate trained models at lengths that they were not trained on, and write the results and their curve.

    Measures perplexity (of a model that predicts masked tokens, pseudo-perplexity) and bits per byte with 95 %
    intervals; with `task`, the share of right answers. If interrupted, call it again to resume.

    Returns:
        The results by label, and the paths of the JSON files and pictures.

    Raises:
        ValueError: An option does not fit the protocol, a run or the data; no length could be measured; or a part
            failed.
        OSError: There is no such run or data.

    Example:
        >>> evaluation = relpos.evaluate(["runs/cable", "runs/rope"], lengths=[512, 1024], rope_scaling="yarn")
        >>> evaluation.results["cable"]["rows"][1]["perplexity"]
    """
    _check(options)
    processes, line = Processes(options.context_parallel), LiveLine(sys.stderr)
    say: Callable[[str], object] = (options.say or line) if processes.writes else lambda text: None
    scaling = options.rope_scaling
    scalings = dict.fromkeys([None, *([scaling] if isinstance(scaling, str) else scaling or ())])
    runs = [options.runs] if isinstance(options.runs, str | Path | Run) else options.runs
    opened = [run if isinstance(run, Run) else open_run(run) for run in runs]
    named = dict(zip(run_names([run.folder for run in opened]), opened, strict=True))
    if options.task is None:
        for run, name in itertools.product(opened, list(scalings)[1:]):  # before anything is computed
            check_scaling(run, str(name))
        if options.lengths is None:
            data = None if options.data is None else str(options.data)
            with processes.in_turn():  # the text is tokenized
                multiples = QUICK_MULTIPLES if options.quick else MULTIPLES
                lengths = default_lengths(opened[0], data, options.split, options.protocol, multiples)
                options = replace(options, lengths=lengths)
    questions: dict[str, Question | TaskQuestion] = {}
    for (name, run), applied in itertools.product(named.items(), scalings):
        label = name if applied is None else f"{name}, {applied}"
        folder = None if options.out is None else Path(options.out, name)
        say_of = functools.partial(_say, say, label)
        questions[label] = _question(run, options, applied, folder, say_of, processes)
    executor = options.executor or (None if options.workers is None else LocalExecutor(options.workers))
    if executor is not None:
        _answer_in_parts(executor, questions, options.say or functools.partial(print, file=sys.stderr, flush=True))
    elif options.task is None:
        _announce(cast(Mapping[str, Question], questions), options.say or functools.partial(print, file=sys.stderr))
    results: dict[str, Result] = {label: question.answer() for label, question in questions.items()}
    line.end()
    files = [question.file for question in questions.values()]
    if options.task is not None:
        pictures = [
            _draw_task(label, cast(TaskQuestion, questions[label]), cast(TaskResult, results[label]))
            for label in results
        ]
        return Evaluation(results, files, [file for of_run in pictures for file in of_run])
    _check_measured(results)
    words = [files[0].stem, *(name for name in scalings if name), *(named if len(named) > 1 else ())]
    alone = opened[0].evaluation if len(opened) == 1 else Path(EVALUATION)
    picture = Path(options.out or alone, f"{joined(words)}.png")
    if processes.writes:
        _draw(cast(Mapping[str, TextResult], results), options.protocol, picture)
    return Evaluation(results, files, [picture])


def _announce(questions: Mapping[str, Question], say: Callable[[str], object]) -> None:
    """Say what will be measured, and about how long that takes."""
    processes = next(iter(questions.values())).processes
    if not processes.writes:
        return
    labels: dict[str, list[str]] = {}
    for label, question in questions.items():
        labels.setdefault(question.sentence(), []).append(label)
    durations = [question.seconds() for question in questions.values()] if processes.number == 1 else [None]
    known = [seconds for seconds in durations if seconds is not None]
    about = f": about {clock_time(sum(known))}" if known and len(known) == len(durations) else ""
    for number, (sentence, names) in enumerate(labels.items(), start=1):
        say(f"{', '.join(names)}: {sentence}{about if number == len(labels) else ''}")


def _check(options: EvaluateOptions) -> None:
    """Refuse options that exclude each other."""
    if options.task is not None:
        if options.protocol != PROTOCOLS[0] or any(getattr(options, name) is not None for name in OF_TEXT):
            raise ValueError("a task is scored by its answers: leave out the protocol and its options.")
        task_of(options.task)  # an unknown name is refused before the models are opened
        if options.context_parallel:
            raise ValueError("the sequences of a task are not divided among processes: leave out --context-parallel.")
    if options.context_parallel and (options.workers is not None or options.executor is not None):
        raise ValueError("windows are divided among processes, or lengths among parts: leave out one of the two.")
    if options.lengths is not None and not options.lengths:
        raise ValueError("give at least one length.")


def run_names(folders: Sequence[Path]) -> list[str]:
    """Name runs by their folders: the last part of the path, or all of it if two runs have the same last part."""
    last = [folder.resolve().name for folder in folders]
    full = [str(folder).strip("/").replace("/", "-") for folder in folders]
    names = [short if last.count(short) == 1 else long for short, long in zip(last, full, strict=True)]
    if not names:
        raise ValueError("there is no run to evaluate: give at least one folder.")
    repeated = next((folder for folder, name in zip(folders, names, strict=True) if names.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(f"the run {repeated} is given twice: give each run once.")
    return names


def _question(
    run: Run,
    options: EvaluateOptions,
    scaling: str | None,
    folder: Path | None,
    say: Callable[[str], object] = print,
    processes: Processes | None = None,
) -> Question | TaskQuestion:
    if options.task is not None:
        return TaskQuestion(run, options, folder, say)
    return Question(run, options, scaling, folder, say, processes)


def _say(say: Callable[[str], object], label: str, text: str) -> None:
    say(f"{label}: {text}")


def _check_measured(results: Mapping[str, Result]) -> None:
    """Refuse results without a single number: each run says why its shortest length could not be measured."""
    if any(row["error"] is None for result in results.values() for row in result["rows"]):
        return
    first = {label: result["rows"][0] for label, result in results.items()}
    reasons = [f"{label}, length {row['length']}: {row['error']}" for label, row in first.items()]
    raise ValueError(f"nothing could be measured. {' '.join(reasons)}")


def _draw(results: Mapping[str, TextResult], protocol: ProtocolName, file: Path) -> None:
    from relpos.pictures.curves import draw_curves, draw_positions  # matplotlib, which a part does not need
    from relpos.pictures.printed_page import save

    trained = {result["trained_length"] for result in results.values()}
    mark = trained.pop() if len(trained) == 1 else None  # runs of several trained lengths have no common mark
    if protocol == "positions":
        save(draw_positions({label: result["bins"] for label, result in results.items()}, mark), file)
    else:
        metric = " or ".join(dict.fromkeys(result["metric"] for result in results.values()))
        save(draw_curves({label: result["rows"] for label, result in results.items()}, mark, metric), file)


def _draw_task(label: str, question: TaskQuestion, result: TaskResult) -> list[Path]:
    from relpos.pictures.curves import draw_accuracy, draw_depths
    from relpos.pictures.printed_page import save

    _check_measured({label: result})
    pictures = [save(draw_accuracy([result]), question.folder / f"{question.stem}.png")]
    if result["depths"]:
        pictures.append(save(draw_depths(result), question.folder / f"{question.stem}-depths.png"))
    return pictures


# -- Parts: one piece of one question each


def _answer_in_parts(
    executor: Executor, questions: Mapping[str, Question | TaskQuestion], say: Callable[[str], object]
) -> None:
    """Let other processes answer the pieces of all questions; a ValueError names those that failed."""
    parts: dict[str, Part] = {}
    for label, question in questions.items():
        for piece in question.pieces:
            title = f"{label}, length {piece}" if isinstance(piece, int) else f"{label}, {piece}"
            parts[title] = _part(question, piece, title, executor.threads)
    work = Parts(executor, parts, say)
    with contextlib.closing(work.run()) as ends:
        for name, end in ends:
            result = f"{'done in' if end.code == 0 else 'failed after'} {clock_time(end.seconds)}"
            say(f"{name}: {result}   ({len(work.ends)} of {len(parts)} parts)")
    failed = {name: end.reason(f"see {parts[name].log}.") for name, end in work.ends.items() if end.code != 0}
    for name, part in parts.items():
        if name not in failed:
            part.log.unlink(missing_ok=True)
    if failed:
        reasons = " ".join(f"{name}: {reason}" for name, reason in list(failed.items())[:SHOWN])
        raise ValueError(f"{len(failed)} of {len(parts)} parts failed. {reasons} Rerun the command to resume.")


def _part(question: Question | TaskQuestion, piece: int | str, title: str, threads: int) -> Part:
    options, source = question.options, question.run.folder
    data = "" if options.data is None else str(options.data)
    local = Path(data) if data and Path(data).exists() else None
    asked = {name: getattr(options, name) for name in OF_A_PART} | {"lengths": list(question.lengths)}
    scaling = question.scaling if isinstance(question, Question) else None
    arguments = (source, question.folder, local or data, str(threads), json.dumps([asked, scaling, piece]))
    files = sorted(file for file in source.iterdir() if file.is_file()) if source.is_dir() else [source]
    folder = question.folder / PARTS
    reads = (*files, *([local] if local else []))
    return Part("relpos.evaluation.evaluate", arguments, folder, folder / f"{joined([title])}.log", reads)


def main() -> int:
    """Answer the piece of the command line."""
    folder, out, data, threads, question = sys.argv[1:]
    end_with_parent()
    import torch

    torch.set_num_threads(int(threads))
    asked, scaling, piece = json.loads(question)
    try:
        _question(
            open_run(folder), EvaluateOptions(folder, data=data or None, **asked), scaling, Path(out)
        ).answer_piece(piece)
    except ValueError as error:  # such a length is a row without numbers; the evaluation computes the same sentence
        print(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
