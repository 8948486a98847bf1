"""What a comparison is: its encodings, seeds and lengths, and the settings that all its parts share.

Kept in the comparison's folder, so that the same command goes on and other processes join in. Imports nothing heavy.
"""

import dataclasses
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from relpos.lab.compare.defaults import BATCH, ENCODINGS, EVAL_TOKENS, LENGTH, LONG, MULTIPLES, SEEDS, STEPS
from relpos.lab.data.corpus import open_corpus
from relpos.lab.runs.settings import FREE, TABLES, Settings, check_encoding, flatten, load_settings, parse_overrides
from relpos.system.files import write_text
from relpos.system.lock import Lock
from relpos.system.mappings import read_yaml

FILE = "comparison.yaml"
# Settings of all parts where a comparison has other defaults than `relpos train`.
SHARED = {"data.length": LENGTH, "run.batch_size": BATCH, "run.keep_checkpoints": 1, **TABLES}
ENDS = ("run.steps", "run.tokens", "run.minutes")


@dataclass(frozen=True)
class Trial:
    """One encoding with one seed: what is trained and evaluated by itself."""

    encoding: str  # a name, with options after colons: rope:base=500000
    seed: int

    @property
    def name(self) -> str:
        """The name of its folder in the comparison's."""
        return f"{self.encoding.replace(':', '-')}-s{self.seed}"


@dataclass
class Comparison:
    """All of a comparison but its results."""

    encodings: list[str]
    seeds: int  # 0, 1, …
    lengths: list[int]  # evaluated; the trained one is always among them
    positions: int  # the length at which loss is told by position
    eval_tokens: int  # scored at each length
    settings: dict[str, Any]  # of every part, by dotted key
    commands: list[str] = field(default_factory=list)  # that made it what it is

    @property
    def length(self) -> int:
        """The trained length."""
        return int(self.settings["data.length"])

    def parts(self) -> list[Trial]:
        """The parts in the order they are taken: every encoding once before any is taken again."""
        return [Trial(encoding, seed) for seed in range(self.seeds) for encoding in self.encodings]

    def settings_of(self, part: Trial, out: Path) -> Settings:
        """The settings of a part's training run."""
        return load_settings(None, {**self.settings, **own_settings(part, out)})

    def command(self, out: Path) -> str:
        """The one command that makes this comparison."""
        words = ["relpos", "compare", "--encodings", ",".join(self.encodings), "--length", str(self.length)]
        words += ["--lengths", ",".join(map(str, self.lengths)), "--seeds", str(self.seeds)]
        words += ["--positions", str(self.positions), "--eval-tokens", str(self.eval_tokens), "--out", str(out)]
        return shlex.join(words + [f"{k}={v}" for k, v in self.settings.items() if k != "data.length"])

    def train_command(self, part: Trial, out: Path) -> str:
        """The command that trains one part by itself."""
        words = ["relpos", "train"]
        return shlex.join(words + [f"{k}={v}" for k, v in {**own_settings(part, out), **self.settings}.items()])


def own_settings(part: Trial, out: Path) -> dict[str, Any]:
    """What a part does not share with the others."""
    name, *options = part.encoding.split(":")
    found = {f"model.options.{key}": value for key, value in parse_overrides(options).items()}
    return {"model.encoding": name, **found, "run.seed": part.seed, "run.out": str(out / part.name)}


def make_plan(
    out: Path,
    encodings: Iterable[str] | None = None,
    seeds: int | None = None,
    lengths: Iterable[int] | None = None,
    positions: int | None = None,
    eval_tokens: int | None = None,
    settings: Mapping[str, Any] | None = None,
    command: str | None = None,
) -> Comparison:
    """The plan of a folder, made or added to, and saved there.

    What is not given is as it was, or has its default. Encodings, seeds and lengths are added to those that are there;
    anything else that differs is refused.
    """
    given = dict(settings or {})
    for key in given:
        if key in ("model.encoding", "model.options", "run.seed", "run.out") or key.startswith("model.options."):
            raise ValueError(f"{key} is what a comparison varies: give --encodings, --seeds and --out instead.")
    asked, tried = list(encodings or ()), list(lengths or ())
    smallest = {"seeds": (seeds, 1), "eval_tokens": (eval_tokens, 1), "positions": (positions, 2)}
    for name, (number, least) in {**smallest, "lengths": (min(tried, default=None), 2)}.items():
        if number is not None and number < least:
            raise ValueError(f"{name} must be at least {least}, not {number}.")
    with Lock(out, ".plan.lock", wait=True):
        before = load_plan(out) if (out / FILE).exists() else None
        if before is None:
            plan = _new(asked, seeds, tried, positions, eval_tokens, given)
            _check(plan, out)
        else:
            plan = Comparison(
                _united(before.encodings, asked),
                max(before.seeds, seeds or 1),
                sorted({*before.lengths, *tried}),
                positions or before.positions,
                eval_tokens or before.eval_tokens,
                _merged(before.settings, given),
                before.commands,
            )
            _check(plan, out)
            _check_same(before, plan, out)
        if command is not None and command not in plan.commands:
            plan.commands = [*plan.commands, command]
        write_text(out / FILE, yaml.safe_dump(dataclasses.asdict(plan), sort_keys=False, allow_unicode=True))
    return plan


def load_plan(out: Path) -> Comparison:
    """The plan of a comparison's folder."""
    try:
        return Comparison(**read_yaml(out / FILE))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no comparison in {out}: it has no {FILE}.") from None
    except TypeError as error:
        raise ValueError(f"{out / FILE} is no plan of a comparison: {' '.join(str(error).split())}") from error


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
    length = load_settings(None, shared).data.length
    wanted = sorted({length, *(lengths or (length * multiple for multiple in MULTIPLES))})
    long = max(found for found in wanted if found <= max(LONG * length, wanted[0]))
    return Comparison(
        _united((), encodings or ENCODINGS),
        seeds or SEEDS,
        wanted,
        positions or long,
        eval_tokens or EVAL_TOKENS,
        shared,
    )


def _united(old: Iterable[str], new: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*old, *(encoding.strip() for encoding in new)]))


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """One end replaces another: of steps, tokens and minutes only those given count."""
    kept = {key: value for key, value in old.items() if key not in ENDS or not any(end in new for end in ENDS)}
    return {**kept, **new}


def _check(plan: Comparison, out: Path) -> None:
    """Check every encoding with its options, and the data, before anything is trained."""
    for encoding in plan.encodings:
        if not re.fullmatch(r"[\w.:=+-]+", encoding):
            raise ValueError(
                f"{encoding!r} is no encoding: give a name, or a name with options as in rope:base=500000."
            )
        settings = plan.settings_of(Trial(encoding, 0), out)
        try:
            check_encoding(settings.model)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the encoding {encoding} cannot be made: {error}") from error
    data = load_settings(None, plan.settings).data
    if data.task is not None:
        raise ValueError(
            f"a comparison measures perplexity on text, and the task {data.task} has none: train with "
            f"relpos train --task {data.task}, and score with relpos evaluate RUN --task {data.task}."
        )
    assert data.source is not None
    open_corpus(data.source)  # a file or folder that does not exist is refused here


def _check_same(before: Comparison, plan: Comparison, out: Path) -> None:
    old, new = (
        {**flatten(dataclasses.asdict(one.settings_of(before.parts()[0], out))), **_measured(one)}
        for one in (before, plan)
    )
    told = FREE - set(ENDS)  # how often to log may change; when to stop is what a comparison holds equal
    for key in sorted(new, key=lambda key: key not in ENDS):  # the end first: the warm-up follows from it
        if key not in told and old[key] != new[key]:
            raise ValueError(
                f"{out} holds a comparison with {key}={old[key]}, and is now asked for {key}={new[key]}: encodings, "
                "seeds and lengths may be added to it; for anything else choose another --out."
            )


def _measured(plan: Comparison) -> dict[str, int]:
    return {"positions": plan.positions, "eval_tokens": plan.eval_tokens}
