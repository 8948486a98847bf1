"""Evaluate one or several runs: `relpos.evaluate`, which is also what the command `relpos evaluate` calls."""

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relpos.evaluation.evaluation import evaluate as evaluate_run
from relpos.evaluation.options import PROTOCOLS, SAMPLES, EvaluateOptions, ProtocolName
from relpos.evaluation.parts import score_in_parts, score_task_in_parts
from relpos.evaluation.processes import Processes
from relpos.evaluation.question import check_lengths, default_lengths, joined, question_stem
from relpos.evaluation.scaled_rope import check_scaling
from relpos.evaluation.task_scoring import default_task_lengths, score_task
from relpos.pictures.curves import draw_accuracy, draw_curves, draw_depths, draw_positions
from relpos.pictures.printed_page import save
from relpos.runs.results import EVALUATION, TaskResult, TextResult
from relpos.runs.run import Run, open_run
from relpos.system.executors.interface import Executor
from relpos.system.executors.local import LocalExecutor
from relpos.system.options import takes
from relpos.system.progress import LiveLine
from relpos.tasks.registry import task as task_of

Result = TextResult | TaskResult  # what is in a JSON file: docs/evaluation.md


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
    task, protocol, executor = options.task, options.protocol, options.executor
    if task is not None:
        text_options = ("data", "split", "stride", "last", "eval_tokens", "rope_scaling")
        if protocol != PROTOCOLS[0] or any(getattr(options, name) is not None for name in text_options):
            raise ValueError("a task is scored by its answers: leave out the protocol and its options.")
        task_of(task)  # an unknown name is refused before the models are opened
        if options.context_parallel:
            raise ValueError("the sequences of a task are not divided among processes: leave out --context-parallel.")
    if options.context_parallel and (options.workers is not None or executor is not None):
        raise ValueError("windows are divided among processes, or lengths among parts: leave out one of the two.")
    processes = Processes(options.context_parallel)
    scaling = options.rope_scaling
    scalings = list(dict.fromkeys([scaling] if isinstance(scaling, str) else scaling or ()))
    lengths = None if options.lengths is None else check_lengths(options.lengths)
    runs = [options.runs] if isinstance(options.runs, str | Path | Run) else options.runs
    opened = [run if isinstance(run, Run) else open_run(run) for run in runs]
    named = dict(zip(run_names([run.folder for run in opened]), opened, strict=True))
    out = options.out
    folders = {name: run.evaluation if out is None else Path(out, name) for name, run in named.items()}
    progress = Progress(options.say if processes.writes else _silent)
    if options.workers is not None and executor is None:
        executor = LocalExecutor(options.workers)
    if task is not None:
        return _evaluate_task(named, folders, task, lengths, options.samples, options.seed, executor, progress)
    source = None if options.data is None else str(options.data)
    for run, name in itertools.product(opened, scalings):  # before anything is computed
        check_scaling(run, name)
    if lengths is None:
        with processes.in_turn():  # the text is tokenized
            lengths = default_lengths(opened[0], source, options.split)
        lengths = lengths[-1:] if protocol == "positions" else lengths
    asked: dict[str, Any] = {
        name: getattr(options, name) for name in ("protocol", "split", "stride", "last", "eval_tokens", "seed", "bos")
    }
    if executor is not None:
        score_in_parts(executor, named, folders, (None, *scalings), lengths, source, asked, progress.print)
    results: dict[str, TextResult] = {}
    files = []
    for (name, run), applied in itertools.product(named.items(), (None, *scalings)):
        label = name if applied is None else f"{name}, {applied}"
        results[label] = evaluate_run(
            run,
            lengths,
            data=source,
            rope_scaling=applied,
            out=None if out is None else folders[name],
            say=progress.labelled(label),
            processes=processes,
            **asked,
        )
        files.append(folders[name] / results[label]["file"])
    progress.end()
    _check_measured(results)
    alone = opened[0].evaluation if len(opened) == 1 else Path(EVALUATION)
    words = [files[0].stem, *scalings, *(named if len(named) > 1 else ())]
    picture = Path(out or alone, f"{joined(words)}.png")
    return Evaluation(results, files, [_draw(results, protocol, picture) if processes.writes else picture])


def run_names(folders: Sequence[Path]) -> list[str]:
    """Name runs by their folders: the last part of the path, or all of it if two runs have the same last part.

    Raises:
        ValueError: There are no folders, or one of them is repeated.
    """
    last = [folder.resolve().name for folder in folders]
    full = [str(folder).strip("/").replace("/", "-") for folder in folders]
    names = [short if last.count(short) == 1 else long for short, long in zip(last, full, strict=True)]
    if not names:
        raise ValueError("there is no run to evaluate: give at least one folder.")
    repeated = next((folder for folder, name in zip(folders, names, strict=True) if names.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(f"the run {repeated} is given twice: give each run once.")
    return names


def _silent(text: str) -> None:
    """Print nothing: the `say` of all processes but the first."""


class Progress:
    """Passes lines about the progress on, with the label of the run before them."""

    def __init__(self, say: Callable[[str], object] | None) -> None:
        self.line = LiveLine(sys.stderr)
        self.say = self.line if say is None else say

    def labelled(self, label: str) -> Callable[[str], object]:
        """The function to call with a line about one run."""
        return lambda text: self.say(f"{label}: {text}")

    def print(self, text: str) -> None:
        """Print a line that stays."""
        self.line.clear()
        if self.say is self.line:
            print(text, file=sys.stderr, flush=True)
        else:
            self.say(text)

    def end(self) -> None:
        """Finish the line in a terminal."""
        self.line.end()


def _evaluate_task(
    named: dict[str, Run],
    folders: dict[str, Path],
    task: str,
    lengths: Sequence[int] | None,
    samples: int,
    seed: int,
    executor: Executor | None,
    progress: Progress,
) -> Evaluation:
    """Score every run on a task. One JSON file keeps all scores of a run on it; pictures are named by the question."""
    results: dict[str, TaskResult] = {}
    files, pictures = [], []
    if executor is not None:
        wanted_of = {name: default_task_lengths(run) if lengths is None else lengths for name, run in named.items()}
        options = {"task": task, "samples": samples, "seed": seed}
        score_task_in_parts(executor, named, folders, wanted_of, options, progress.print)
    for name, run in named.items():
        usual = default_task_lengths(run)
        wanted = usual if lengths is None else lengths
        folder = folders[name]
        result = score_task(run, task, wanted, samples, seed, folder, progress.labelled(name))
        progress.end()
        _check_measured({name: result})
        stem = question_stem(
            f"task-{task}",
            lengths=() if wanted == usual else wanted,
            samples=None if samples == SAMPLES else samples,
            seed=seed or None,
        )
        results[name] = result
        files.append(folder / f"task-{task}.json")
        pictures.append(save(draw_accuracy([result]), folder / f"{stem}.png"))
        if result["depths"]:
            pictures.append(save(draw_depths(result), folder / f"{stem}-depths.png"))
    return Evaluation(results, files, pictures)


def _check_measured(results: Mapping[str, Result]) -> None:
    """Refuse results without a single number: each run says why its shortest length could not be measured."""
    if any(row["error"] is None for result in results.values() for row in result["rows"]):
        return
    reasons = [
        f"{label}, length {result['rows'][0]['length']}: {result['rows'][0]['error']}"
        for label, result in results.items()
    ]
    raise ValueError(f"nothing could be measured. {' '.join(reasons)}")


def _draw(results: Mapping[str, TextResult], protocol: ProtocolName, file: Path) -> Path:
    trained = {result["trained_length"] for result in results.values()}
    mark = trained.pop() if len(trained) == 1 else None  # runs of several trained lengths have no common mark
    if protocol == "positions":
        return save(draw_positions({label: result["bins"] for label, result in results.items()}, mark), file)
    metric = " or ".join(dict.fromkeys(result["metric"] for result in results.values()))
    return save(draw_curves({label: result["rows"] for label, result in results.items()}, mark, metric), file)
