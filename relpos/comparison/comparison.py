"""A comparison: its encodings, seeds and lengths, the settings that all its trials share, and the trials' records.

It is stored in its folder, so that the command can be rerun to resume and other processes can join. No slow imports.
"""

import dataclasses
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

import yaml

from relpos.comparison.compare_options import (
    BATCH,
    ENCODINGS,
    EVAL_TOKENS,
    LENGTH,
    LONG,
    MULTIPLES,
    SEEDS,
    SHARES,
    STEPS,
    CompareOptions,
)
from relpos.encodings.registry import canonical, card
from relpos.evaluation.evaluate_options import default_eval_tokens
from relpos.model_catalogue import DEFAULT, FamilyEntry, entry
from relpos.runs.checkpoints import WEIGHTS
from relpos.runs.resolve import check_encoding
from relpos.runs.results import About, RunResult, TextResult
from relpos.runs.settings import FREE, TABLES, Settings, encoding_settings, flatten, load_settings
from relpos.system.files import Entries, Lock, read_json, read_yaml, write_text
from relpos.system.options import check_options
from relpos.text import SplitName
from relpos.text.corpus import open_corpus

FILE = "comparison.yaml"
RECORD = "trial.json"  # in a trial's folder
# Settings of all trials where a comparison has other defaults than `relpos train`.
SHARED = {"data.length": LENGTH, "run.batch_size": BATCH, "run.keep_checkpoints": 1, **TABLES}
ENDS = ("run.steps", "run.tokens", "run.minutes")
TableProtocol = Literal["windows", "last"]  # a table over encodings and lengths
OWN = ("model.options.", "optimizer.")  # settings that an encoding may have to itself, after colons


@dataclass(frozen=True)
class Trial:
    """One encoding with one seed, trained and evaluated in a folder of its own."""

    encoding: str  # with options and settings of its own: rope:base=500000, kerple_log:optimizer.position_lr=0.01
    seed: int

    @property
    def name(self) -> str:
        """The name of the trial's folder in the comparison's folder."""
        return f"{self.encoding.replace(':', '-')}-s{self.seed}"

    def settings(self, out: Path) -> Entries:
        """The settings in which it differs from the other trials, by dotted key; `out` is the comparison's folder."""
        return {**encoding_settings(self.encoding), "run.seed": self.seed, "run.out": str(out / self.name)}


@dataclass
class Comparison:
    """What is compared and how; everything but the results."""

    encodings: list[str]  # names, with options after colons
    seeds: int  # how many; they are 0, 1, …
    lengths: list[int]  # to evaluate at, sorted; the trained length is always among them
    positions: int | None  # length at which the loss is measured by position; None for a search, which does not
    eval_tokens: int  # scored at each length
    settings: Entries  # that all trials share, by dotted key
    commands: list[str] = field(default_factory=list)  # that created the comparison or added to it
    split: SplitName = "heldout"  # the text that is scored
    last: bool = False  # whether the protocol `last` is measured too
    search: bool = False  # whether each encoding has settings of its own, from an equal search (search.py)
    chosen: dict[str, Entries] = field(default_factory=dict)  # these settings by encoding, as far as they are known

    @property
    def length(self) -> int:
        """The trained length."""
        return int(self.settings["data.length"])

    @property
    def protocols(self) -> list[TableProtocol]:
        """What is measured at all lengths, with all seeds."""
        return ["windows", "last"] if self.last else ["windows"]

    def scored(self, protocol: "TableProtocol | Literal['positions']") -> int:
        """The tokens that a protocol scores at each length."""
        return max(1, self.eval_tokens // SHARES[protocol])

    @property
    def family(self) -> FamilyEntry:
        return entry(self.settings.get("model.family", DEFAULT))

    def trials(self) -> list[Trial]:
        """All trials in the order in which they are run: the first seed of every encoding, then the second, …."""
        return [Trial(encoding, seed) for seed in range(self.seeds) for encoding in self.encodings]

    def trials_of(self, encoding: str) -> list[Trial]:
        return [Trial(encoding, seed) for seed in range(self.seeds)]

    def settings_of(self, trial: Trial, out: Path) -> Settings:
        """The settings of a trial's training run; `out` is the comparison's folder."""
        return load_settings(None, {**self.settings, **self.chosen.get(trial.encoding, {}), **trial.settings(out)})

    def settled(self, encoding: str) -> bool:
        """Whether the settings of an encoding's trials are known: with a search, only when that has ended."""
        return not self.search or encoding in self.chosen

    def command(self, out: Path) -> str:
        """The command that creates this comparison in the folder `out`."""
        words = ["relpos", "compare", "--encodings", ",".join(self.encodings), "--length", str(self.length)]
        words += ["--lengths", ",".join(map(str, self.lengths)), "--seeds", str(self.seeds)]
        words += [] if self.positions is None else ["--positions", str(self.positions)]
        words += ["--eval-tokens", str(self.eval_tokens)]
        words += [f"--{name}" for name in ("last", "search") if getattr(self, name)] + ["--out", str(out)]
        return shlex.join(words + [f"{k}={v}" for k, v in self.settings.items() if k != "data.length"])

    def train_command(self, trial: Trial, out: Path) -> str:
        own = {**self.chosen.get(trial.encoding, {}), **trial.settings(out)}  # listed first, and wins
        settings = {**own, **self.settings, **own}
        return shlex.join(["relpos", "train", *(f"{key}={value}" for key, value in settings.items())])


# -- The comparison of a folder


def load_comparison(out: Path) -> Comparison:
    """Load the comparison of a folder."""
    try:
        return Comparison(**read_yaml(out / FILE))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no comparison in {out}: it has no {FILE}.") from None
    except TypeError as error:
        raise ValueError(f"{out / FILE} does not describe a comparison: {' '.join(str(error).split())}") from error


def make_comparison(
    out: Path,
    encodings: Iterable[str] | None = None,
    seeds: int | None = None,
    lengths: Iterable[int] | None = None,
    positions: int | None = None,
    eval_tokens: int | None = None,
    settings: Mapping[str, Any] | None = None,
    command: str | None = None,
    search: bool = False,
    last: bool = False,
) -> Comparison:
    """Create a comparison in a folder, or add encodings, seeds and lengths to the one that is there.

    What is None keeps the folder's value; a new comparison then takes the default. `settings` are those of every
    training, by dotted key. With `search`, every encoding gets settings of its own, and the text is the test split. A
    ValueError if anything is wrong, or anything else differs from the folder's comparison.
    """
    new_encodings, new_lengths, new_settings = list(encodings or ()), list(lengths or ()), dict(settings or {})
    numbers = {"seeds": seeds, "lengths": new_lengths, "positions": positions, "eval_tokens": eval_tokens}
    check_options(CompareOptions(new_encodings, **numbers))  # type: ignore[arg-type]
    for key in new_settings:
        if key in ("model.encoding", "model.options", "run.seed", "run.out") or key.startswith("model.options."):
            raise ValueError(f"{key} is what a comparison varies: give --encodings, --seeds and --out instead.")
    if new_settings.get("model.start") is not None:
        raise ValueError("a comparison trains from random weights: leave out model.start, or use relpos train --from.")

    def combined() -> Comparison:
        """The comparison of the folder, or one of defaults, with what is new; checked."""
        exists = (out / FILE).exists()
        before = load_comparison(out) if exists else _default(new_encodings, new_lengths, new_settings)
        if exists and search and not before.search:
            raise ValueError(f"{out} holds a comparison without a search: choose another --out.")
        if search:
            before = dataclasses.replace(before, search=True, split="test")
        comparison = dataclasses.replace(
            before,
            encodings=list(dict.fromkeys([*before.encodings, *map(canonical_entry, new_encodings)])),
            seeds=max(before.seeds, seeds or 1) if exists else seeds or SEEDS,
            lengths=sorted({*before.lengths, *new_lengths}),
            positions=positions or before.positions,
            eval_tokens=eval_tokens or before.eval_tokens,
            last=last or before.last,
            settings=_merged(before.settings, new_settings),
        )
        _check(comparison, out)
        if exists:
            _check_same(before, comparison, out)
        if command is not None and command not in comparison.commands:
            comparison.commands = [*comparison.commands, command]
        return comparison

    combined()  # what is refused leaves nothing behind
    return change_comparison(out, combined)


def change_comparison(out: Path, change: Callable[[], Comparison]) -> Comparison:
    """Store what `change` returns as the comparison of a folder; no other process writes there in the meantime."""
    with Lock(out, ".comparison.lock", wait=True):
        comparison = change()
        write_text(out / FILE, yaml.safe_dump(dataclasses.asdict(comparison), sort_keys=False, allow_unicode=True))
    return comparison


def canonical_entry(encoding: str) -> str:
    """An encoding with its options, or a sum of several, by their names in the registry."""
    name, *options = encoding.strip().split(":")
    return ":".join(["+".join(map(canonical, name.split("+"))), *options])


def _default(encodings: list[str], lengths: list[int], settings: Mapping[str, Any]) -> Comparison:
    """A new comparison, with defaults for what is not given."""
    shared = {**SHARED, **settings}
    if not any(shared.get(key) for key in ENDS):
        shared["run.steps"] = STEPS
    resolved = load_settings(None, shared)
    trained, run = resolved.data.length, resolved.run
    read = None if run.steps is None else run.steps * run.batch_size * trained
    eval_tokens = min(EVAL_TOKENS, default_eval_tokens("windows", read))
    measured = sorted({trained, *(lengths or (trained * multiple for multiple in MULTIPLES))})
    positions = max(length for length in measured if length <= max(LONG * trained, measured[0]))
    causal = entry(shared.get("model.family", DEFAULT)).causal  # else encodings for causal attention are left out
    usual = [name for name in ENCODINGS if causal or card(name.split(":")[0]).directions == "both"]
    return Comparison([] if encodings else usual, SEEDS, measured, positions, eval_tokens, shared)


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> Entries:
    """The old settings updated by the new; if the new ones say when training ends, the old ones on that are dropped."""
    unchanged = {key: value for key, value in old.items() if key not in ENDS or not any(end in new for end in ENDS)}
    return {**unchanged, **new}


def _check(comparison: Comparison, out: Path) -> None:
    """Check every encoding with its options, and the data, before anything is trained."""
    for encoding in comparison.encodings:
        if not re.fullmatch(r"[\w.:=+-]+", encoding):
            raise ValueError(
                f"{encoding!r} is not an encoding: give a name, or a name with options as in rope:base=500000."
            )
        for key in Trial(encoding, 0).settings(out).keys() - {"model.encoding", "model.plan", "run.seed", "run.out"}:
            if not key.startswith(OWN):
                raise ValueError(
                    f"{encoding} gives {key} to one encoding: data, model and length must be the same for all. After "
                    "colons stand options of the encoding, and settings of the optimizer for its trainings."
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

    def entries(comparison: Comparison) -> Entries:
        settings = flatten(dataclasses.asdict(comparison.settings_of(before.trials()[0], out)))
        return {**settings, "positions": comparison.positions}

    if after.eval_tokens < before.eval_tokens:
        raise ValueError(
            f"{out} holds a comparison with --eval-tokens {before.eval_tokens}, and {after.eval_tokens} are fewer: "
            "leave it out, or choose another --out. More tokens have every trial scored again."
        )
    old, new = entries(before), entries(after)
    free = FREE - set(ENDS)  # how often to log may change; all trials must end at the same point
    for key in sorted(new, key=lambda key: key not in ENDS):  # the end first, because the warm-up depends on it
        if key not in free and old[key] != new[key]:
            raise ValueError(
                f"{out} holds a comparison with {key}={old[key]}, but {key}={new[key]} was requested: encodings, "
                "seeds, lengths and tokens to score may be added to it; for anything else choose another --out."
            )


# -- The records of trials


class Machine(TypedDict):
    """Where a trial ran."""

    cpu: str
    cores: int | None
    threads: int
    memory_bytes: int
    system: str


class TrialTraining(RunResult):
    """How the training of a trial ended, with its speed and memory."""

    tokens_per_second: float
    peak_memory_bytes: int


class TrialRecord(TypedDict, total=False):
    """How often a trial was tried, its error, and what was measured so far."""

    encoding: str
    seed: int
    error: str | None
    attempts: int
    seconds: float
    machine: Machine
    training: TrialTraining
    about: About  # as in run.yaml
    windows: TextResult
    last: TextResult
    positions: TextResult


def read_record(out: Path, trial: Trial) -> TrialRecord:
    """Read the record of a trial; empty if the trial has not been tried."""
    try:
        return cast(TrialRecord, read_json(out / trial.name / RECORD))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{error} Remove the file: the trained model is kept and will be evaluated.") from error


def write_record(out: Path, trial: Trial, record: TrialRecord) -> None:
    """Write the record of a trial, which `read_record` reads."""
    write_text(out / trial.name / RECORD, json.dumps(record, indent=1))


def finished(record: TrialRecord, comparison: Comparison, trial: Trial) -> bool:
    """Whether nothing is left to do for a trial. One to which lengths or tokens were added is evaluated again."""
    if record.get("error") is not None:
        return False
    by_position = trial.seed == 0 and comparison.positions is not None
    return all(complete(record, comparison, name) for name in comparison.protocols) and (
        not by_position or _tokens(record, "positions") == comparison.scored("positions")
    )


def trained(record: TrialRecord, out: Path, trial: Trial) -> bool:
    """Whether a trial has its model. A record that was copied without it is measured only after training again."""
    return "training" in record and (out / trial.name / WEIGHTS).exists()


def complete(record: TrialRecord, comparison: Comparison, protocol: TableProtocol) -> bool:
    """Whether a trial was scored, or refused, at all lengths, on as many tokens as the comparison wants."""
    lengths = {row["length"] for row in record[protocol]["rows"]} if protocol in record else set()
    return lengths >= set(comparison.lengths) and _tokens(record, protocol) == comparison.scored(protocol)


def _tokens(record: TrialRecord, protocol: Literal["windows", "last", "positions"]) -> int | None:
    """The tokens that a protocol was asked to score at each length; None if it was not measured."""
    return record[protocol]["options"]["eval_tokens"] if protocol in record else None
