"""The options of `relpos.compare`, and their defaults. Imports nothing heavy: `relpos compare --help` prints them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.encodings.registry import names
from relpos.evaluation.evaluate_options import LAST, QUICK_MULTIPLES
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
# What part of the tokens each protocol scores, 1 / n: `last` reads a whole window for each 256 of them, and the control
# of `positions` reads each of them four times.
SHARES = {"windows": 1, "last": 24, "positions": 4}
SEEDS = 3
EVAL_TOKENS = 2**17  # scored at each length, at most; after a short training fewer, as with `relpos evaluate`
# With the same amount of data, small models learn more from many small steps than with the defaults of `relpos train`:
# rope, which has to learn to attend to near tokens, reaches alibi, which does so from the start.
LENGTH = 256
BATCH = 2
STEPS = 1200  # of each training, if neither steps nor tokens nor minutes are chosen

# `quick`
QUICK_ENCODINGS = ("alibi", "rope", "cable")
QUICK_SEEDS, QUICK_STEPS = 2, 150

# The search: factors of the learning rate, factors of it for the encoding's own parameters, share of the training.
LR_FACTORS = (0.5, 1.0, 2.0)
POSITION_FACTORS = (1.0, 10.0)
SEARCH_SHARE = 3

MODEL = "Encodings and model"  # groups in the help
of_model, of_evaluation, of_run = (partial(option, panel=panel) for panel in (MODEL, "Evaluation", "Run"))
model_setting, training_setting = (partial(setting, panel=panel) for panel in (MODEL, "Training"))


@dataclass(eq=False, repr=False)
class CompareOptions:
    """The options of `relpos.compare` and `relpos compare`. Those of None keep the value stored in the folder."""

    encodings: Sequence[str] | None = of_model(
        None,
        "Encodings (`relpos ls`); options follow after colons, and settings of the optimizer for one encoding: alibi, "
        "rope:base=500000, fire:optimizer.lr=0.01. Sums are rope+ssmax, and other layers rope:window=64:every4=nope.",
        shown=", ".join(ENCODINGS),
        metavar="NAME,NAME,...",
        complete=names,
    )
    _: KW_ONLY
    family: str | None = model_setting("model.family")
    preset: str | None = model_setting("model.preset")
    seeds: int | None = of_model(None, "Trials per encoding, with seeds 0, 1, …", shown=f"{SEEDS}", range=COUNT)
    data: str | Path | None = training_setting("data.source")
    length: int | None = training_setting("data.length", meaning="Tokens per training window.", shown=f"{LENGTH}")
    steps: int | None = training_setting(
        "run.steps", meaning="Train each for this many steps: equal data.", shown=f"{STEPS}"
    )
    tokens: float | None = training_setting("run.tokens", meaning="Train each on this many tokens: equal data.")
    minutes: float | None = training_setting(
        "run.minutes", meaning="Train each for this many minutes: equal time. Faster encodings then see more data."
    )
    batch_size: int | None = training_setting("run.batch_size", shown=f"{BATCH}")
    lr: float | None = training_setting("optimizer.lr", shown="that of the preset and family")
    search: bool = option(
        False,
        "First give every encoding the same search: learning rates × learning rates of its own parameters, "
        f"{len(LR_FACTORS) * len(POSITION_FACTORS)} settings, one seed, a third of the training each. The setting with "
        "the lowest loss at the trained length on the validation split is then trained with all seeds, and scored on "
        "the test split.",
        panel="Training",
    )
    lengths: Sequence[int] | None = of_evaluation(
        None,
        "Lengths to evaluate, in tokens.",
        shown=f"{', '.join(map(str, MULTIPLES))} × the trained length",
        metavar="N,N,...",
        range=TOKENS,
    )
    positions: int | None = of_evaluation(
        None,
        "Length at which loss by position is measured.",
        shown=f"{LONG} × the trained length, or the longest length if that is shorter",
        range=TOKENS,
    )
    eval_tokens: int | None = of_evaluation(
        None,
        "Score at most this many tokens at each length.",
        shown=f"an eighth of the tokens of the training, at most {EVAL_TOKENS}",
        range=COUNT,
    )
    last: bool = of_evaluation(
        False,
        f"Also score the last {LAST} tokens of windows inside one document (the protocol last), on 1/{SHARES['last']} "
        "of the tokens: every token then has all of the length before it.",
    )
    quick: bool = of_run(
        False,
        f"A first look, in two or three minutes on 2 cores with --workers 2: {', '.join(QUICK_ENCODINGS)}, "
        f"{QUICK_SEEDS} seeds, {QUICK_STEPS} steps, {', '.join(map(str, QUICK_MULTIPLES))} × the trained length. "
        "Options that are given as well win. The report says what so small a comparison can show.",
    )
    out: str | Path = of_run("runs/comparison", "The comparison's folder.", metavar="FOLDER")
    report_only: bool = of_run(False, "Write the report again from the finished trials, and run nothing.")
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
