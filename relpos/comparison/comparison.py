"""A comparison: its encodings, seeds and lengths, and the settings that all its trials share.

It is stored in its folder, so that the command can be rerun to resume and other processes can join. No slow imports.
"""

import dataclasses
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from relpos.comparison.options import BATCH, ENCODINGS, EVAL_TOKENS, LENGTH, LONG, MULTIPLES, SEEDS, STEPS
from relpos.encodings.registry import card
from relpos.model_catalogue import DEFAULT, FamilyEntry, entry
from relpos.runs.resolve import check_encoding
from relpos.runs.settings import FREE, TABLES, Settings, flatten, load_settings, parse_overrides
from relpos.system.files import write_text
from relpos.system.lock import Lock
from relpos.system.mappings import read_yaml
from relpos.text.corpus import open_corpus

FILE = "comparison.yaml"
# Settings of all trials where a comparison has other defaults than `relpos train`.
SHARED = {"data.length": LENGTH, "run.batch_size": BATCH, "run.keep_checkpoints": 1, **TABLES}
ENDS = ("run.steps", "run.tokens", "run.minutes")


@dataclass(frozen=True)
class Trial:
    """One encoding with one seed, trained and evaluated in a folder of its own.

    Attributes:
        encoding: The name of an encoding, with options after colons: rope:base=500000.
        seed: The seed of the training.
    """

    encoding: str
    seed: int

    @property
    def name(self) -> str:
        """The name of the trial's folder in the comparison's folder."""
        return f"{self.encoding.replace(':', '-')}-s{self.seed}"


@dataclass
class Comparison:
    """What is compared and how; everything but the results.

    Attributes:
        encodings: Names, with options after colons.
        seeds: The number of seeds; they are 0, 1, ….
        lengths: The lengths to evaluate at, sorted; the trained length is always among them.
        positions: The length at which the loss is measured by position.
        eval_tokens: The number of tokens scored at each length.
        settings: The settings that all trials share, by dotted key.
        commands: The commands that created the comparison or added to it.
    """

    encodings: list[str]
    seeds: int
    lengths: list[int]
    positions: int
    eval_tokens: int
    settings: dict[str, Any]
    commands: list[str] = field(default_factory=list)

    @property
    def length(self) -> int:
        """The trained length."""
        return int(self.settings["data.length"])

    @property
    def family(self) -> FamilyEntry:
        """The family of the models."""
        return entry(self.settings.get("model.family", DEFAULT))

    def trials(self) -> list[Trial]:
        """All trials in the order in which they are run: the first seed of every encoding, then the second, …."""
        return [Trial(encoding, seed) for seed in range(self.seeds) for encoding in self.encodings]

    def settings_of(self, trial: Trial, out: Path) -> Settings:
        """The settings of a trial's training run; `out` is the comparison's folder."""
        return load_settings(None, {**self.settings, **own_settings(trial, out)})

    def command(self, out: Path) -> str:
        """The command that creates this comparison in the folder `out`."""
        words = ["relpos", "compare", "--encodings", ",".join(self.encodings), "--length", str(self.length)]
        words += ["--lengths", ",".join(map(str, self.lengths)), "--seeds", str(self.seeds)]
        words += ["--positions", str(self.positions), "--eval-tokens", str(self.eval_tokens), "--out", str(out)]
        return shlex.join(words + [f"{k}={v}" for k, v in self.settings.items() if k != "data.length"])

    def train_command(self, trial: Trial, out: Path) -> str:
        """The command that trains the model of one trial."""
        words = ["relpos", "train"]
        return shlex.join(words + [f"{k}={v}" for k, v in {**own_settings(trial, out), **self.settings}.items()])


def own_settings(trial: Trial, out: Path) -> dict[str, Any]:
    """The settings in which a trial differs from the others, by dotted key."""
    name, *options = trial.encoding.split(":")
    model_options = {f"model.options.{key}": value for key, value in parse_overrides(options).items()}
    return {"model.encoding": name, **model_options, "run.seed": trial.seed, "run.out": str(out / trial.name)}


def make_comparison(
    out: Path,
    encodings: Iterable[str] | None = None,
    seeds: int | None = None,
    lengths: Iterable[int] | None = None,
    positions: int | None = None,
    eval_tokens: int | None = None,
    settings: Mapping[str, Any] | None = None,
    command: str | None = None,
) -> Comparison:
    """Create a comparison in a folder, or add to the comparison that is there.

    Encodings, seeds and lengths are added to those of the folder. An argument of None keeps the folder's value; a
    new comparison then takes the default.

    Args:
        out: The comparison's folder.
        encodings: Names of encodings, with options after colons: "rope:base=500000".
        seeds: The number of seeds.
        lengths: The lengths to evaluate at; the trained length is added.
        positions: The length at which the loss is measured by position.
        eval_tokens: The number of tokens scored at each length.
        settings: Settings of every training by dotted key, as of `relpos train`.
        command: The command line, kept for the report.

    Returns:
        The comparison, which has been saved in the folder.

    Raises:
        ValueError: An argument is wrong, or differs from the folder's comparison in more than encodings, seeds and
            lengths.
        FileNotFoundError: The data does not exist.

    Example:
        >>> make_comparison(Path("runs/comparison"), ["alibi", "rope"], seeds=2, settings={"run.steps": 100})
    """
    own = dict(settings or {})
    for key in own:
        if key in ("model.encoding", "model.options", "run.seed", "run.out") or key.startswith("model.options."):
            raise ValueError(f"{key} is what a comparison varies: give --encodings, --seeds and --out instead.")
    if own.get("model.start") is not None:
        raise ValueError("a comparison trains from random weights: leave out model.start, or use relpos train --from.")
    new_encodings, new_lengths = list(encodings or ()), list(lengths or ())
    minima = {"seeds": (seeds, 1), "eval_tokens": (eval_tokens, 1), "positions": (positions, 2)}
    for name, (number, least) in {**minima, "lengths": (min(new_lengths, default=None), 2)}.items():
        if number is not None and number < least:
            raise ValueError(f"{name} must be at least {least}, not {number}.")
    new = (new_encodings, seeds, new_lengths, positions, eval_tokens, own)
    _with_new(out, *new)  # what is refused leaves nothing behind
    with Lock(out, ".comparison.lock", wait=True):
        comparison = _with_new(out, *new)  # again: only now no other process can write there
        if command is not None and command not in comparison.commands:
            comparison.commands = [*comparison.commands, command]
        write_text(out / FILE, yaml.safe_dump(dataclasses.asdict(comparison), sort_keys=False, allow_unicode=True))
    return comparison


def _with_new(
    out: Path,
    encodings: list[str],
    seeds: int | None,
    lengths: list[int],
    positions: int | None,
    eval_tokens: int | None,
    settings: Mapping[str, Any],
) -> Comparison:
    """The comparison of a folder with what is new, checked; a new one if there is none."""
    if not (out / FILE).exists():
        comparison = _new(encodings, seeds, lengths, positions, eval_tokens, settings)
        _check(comparison, out)
        return comparison
    before = load_comparison(out)
    comparison = Comparison(
        _united(before.encodings, encodings),
        max(before.seeds, seeds or 1),
        sorted({*before.lengths, *lengths}),
        positions or before.positions,
        eval_tokens or before.eval_tokens,
        _merged(before.settings, settings),
        before.commands,
    )
    _check(comparison, out)
    _check_same(before, comparison, out)
    return comparison


def load_comparison(out: Path) -> Comparison:
    """Load the comparison of a folder.

    Raises:
        FileNotFoundError: The folder holds no comparison.
        ValueError: The file is damaged.
    """
    try:
        return Comparison(**read_yaml(out / FILE))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no comparison in {out}: it has no {FILE}.") from None
    except TypeError as error:
        raise ValueError(f"{out / FILE} does not describe a comparison: {' '.join(str(error).split())}") from error


def _new(
    encodings: list[str],
    seeds: int | None,
    lengths: list[int],
    positions: int | None,
    eval_tokens: int | None,
    settings: Mapping[str, Any],
) -> Comparison:
    shared = {**SHARED, **settings}
    if not any(shared.get(key) for key in ENDS):
        shared["run.steps"] = STEPS
    trained = load_settings(None, shared).data.length
    measured = sorted({trained, *(lengths or (trained * multiple for multiple in MULTIPLES))})
    return Comparison(
        _united((), encodings or default_encodings(shared.get("model.family", DEFAULT))),
        seeds or SEEDS,
        measured,
        positions or max(length for length in measured if length <= max(LONG * trained, measured[0])),
        eval_tokens or EVAL_TOKENS,
        shared,
    )


def default_encodings(family: str) -> list[str]:
    """The encodings that are compared by default; those for causal attention only are left out where it is not causal.

    Raises:
        ValueError: There is no such family.
    """
    causal = entry(family).causal
    return [name for name in ENCODINGS if causal or card(name.split(":")[0]).directions == "both"]


def _united(old: Iterable[str], new: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*old, *(encoding.strip() for encoding in new)]))


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The old settings updated by the new; if the new ones say when training ends, the old ones on that are dropped."""
    kept = {key: value for key, value in old.items() if key not in ENDS or not any(end in new for end in ENDS)}
    return {**kept, **new}


def _check(comparison: Comparison, out: Path) -> None:
    """Check every encoding with its options, and the data, before anything is trained."""
    for encoding in comparison.encodings:
        if not re.fullmatch(r"[\w.:=+-]+", encoding):
            raise ValueError(
                f"{encoding!r} is not an encoding: give a name, or a name with options as in rope:base=500000."
            )
        settings = comparison.settings_of(Trial(encoding, 0), out)
        try:
            check_encoding(settings)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the encoding {encoding} cannot be built: {error}") from error
    data = load_settings(None, comparison.settings).data
    if data.task is not None:
        raise ValueError(
            f"a comparison measures perplexity on text, and the task {data.task} has none: train with "
            f"relpos train --task {data.task}, and score with relpos evaluate RUN --task {data.task}."
        )
    assert data.source is not None
    open_corpus(data.source)  # raises an error for a file or folder that does not exist


def _check_same(before: Comparison, after: Comparison, out: Path) -> None:
    """Refuse to change anything in a comparison that the results depend on."""
    trial = before.trials()[0]
    old, new = (
        {
            **flatten(dataclasses.asdict(comparison.settings_of(trial, out))),
            "positions": comparison.positions,
            "eval_tokens": comparison.eval_tokens,
        }
        for comparison in (before, after)
    )
    free = FREE - set(ENDS)  # how often to log may change; all trials must end at the same point
    for key in sorted(new, key=lambda key: key not in ENDS):  # the end first, because the warm-up depends on it
        if key not in free and old[key] != new[key]:
            raise ValueError(
                f"{out} holds a comparison with {key}={old[key]}, but {key}={new[key]} was requested: encodings, seeds "
                "and lengths may be added to it; for anything else choose another --out."
            )
