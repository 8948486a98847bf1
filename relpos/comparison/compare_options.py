"""The options of `relpos.compare`, and their defaults. Imports nothing heavy: `relpos compare --help` prints them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.encodings.registry import names
from relpos.runs.settings import setting
from relpos.system.options import COUNT, EXECUTOR, TOKENS, option

if TYPE_CHECKING:
    from relpos.system.executors import Executor

# Sinusoids of amplitude 1 are much larger than token embeddings, which start with a deviation of 0.02; the authors of
# CABLE use an amplitude of 0.1.
SINUSOIDAL = "sinusoidal:amplitude=0.1"
ENCODINGS = ("alibi", "kerple_log", "clipped", "fire", "rope", "cable", SINUSOIDAL, "learned", "nope")
MULTIPLES = (1, 2, 4, 8, 16, 32)  # the lengths to evaluate, as multiples of the trained length
LONG = 8  # loss by position is measured at this multiple of the trained length, or at the longest length if shorter
SEEDS = 3
EVAL_TOKENS = 2**17
# With the same amount of data, small models learn more from many small steps than with the defaults of `relpos train`:
# rope, which has to learn to attend to near tokens, reaches alibi, which does so from the start.
LENGTH = 256
BATCH = 2
STEPS = 1200  # of each training, if neither steps nor tokens nor minutes are chosen

MODEL, TRAINING, EVALUATION, RUN = "Encodings and model", "Training", "Evaluation", "Run"  # groups in the help


@dataclass(eq=False, repr=False)
class CompareOptions:
    """The options of `relpos.compare` and `relpos compare`. Those of None keep the value stored in the folder."""

    encodings: Sequence[str] | None = option(
        None,
        "Encodings (`relpos ls`); options follow after colons: alibi, rope:base=500000.",
        shown=", ".join(ENCODINGS),
        metavar="NAME,NAME,...",
        complete=names,
        panel=MODEL,
    )
    _: KW_ONLY
    family: str | None = setting("model.family", panel=MODEL)
    preset: str | None = setting("model.preset", panel=MODEL)
    seeds: int | None = option(
        None, "Trials per encoding, with seeds 0, 1, …", shown=f"{SEEDS}", range=COUNT, panel=MODEL
    )
    data: str | Path | None = setting("data.source", panel=TRAINING)
    length: int | None = setting(
        "data.length", meaning="Tokens per training window.", shown=f"{LENGTH}", panel=TRAINING
    )
    steps: int | None = setting(
        "run.steps", meaning="Train each for this many steps: equal data.", shown=f"{STEPS}", panel=TRAINING
    )
    tokens: float | None = setting("run.tokens", meaning="Train each on this many tokens: equal data.", panel=TRAINING)
    minutes: float | None = setting(
        "run.minutes",
        meaning="Train each for this many minutes: equal time. Faster encodings then see more data.",
        panel=TRAINING,
    )
    batch_size: int | None = setting("run.batch_size", shown=f"{BATCH}", panel=TRAINING)
    lr: float | None = setting("optimizer.lr", shown="that of the preset and family", panel=TRAINING)
    lengths: Sequence[int] | None = option(
        None,
        "Lengths to evaluate, in tokens.",
        shown=f"{', '.join(map(str, MULTIPLES))} × the trained length",
        metavar="N,N,...",
        range=TOKENS,
        panel=EVALUATION,
    )
    positions: int | None = option(
        None,
        "Length at which loss by position is measured.",
        shown=f"{LONG} × the trained length, or the longest length if that is shorter",
        range=TOKENS,
        panel=EVALUATION,
    )
    eval_tokens: int | None = option(
        None,
        "Score at most this many tokens at each length.",
        shown=f"{EVAL_TOKENS}",
        range=COUNT,
        panel=EVALUATION,
    )
    out: str | Path = option("runs/comparison", "The comparison's folder.", metavar="FOLDER", panel=RUN)
    report_only: bool = option(False, "Write the report again from the finished trials, and run nothing.", panel=RUN)
    workers: int = option(
        1, "Trials at a time on this machine; the cores are divided among them.", range=COUNT, command=False
    )
    executor: "Executor | None" = option(None, f"Where the trials run, {EXECUTOR}", command=False)
    overrides: Mapping[str, Any] | None = option(
        None,
        "Any other setting of every training by its dotted key, as in relpos train.",
        metavar="[KEY=VALUE]...",
        argument=True,
    )
    command: str | None = option(None, "The command line to list in the report.", command=False)
    say: Callable[[str], None] = option(print, "Called with lines about the progress.", command=False)
