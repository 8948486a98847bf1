"""The search of a comparison: the same few settings for every encoding, of which each keeps the best.

A search is itself a comparison, in the folder `search` of the other: one trial per encoding and setting, a third as
long, scored on the validation split at the trained length alone. So it resumes and is shared like any comparison, and
nothing is chosen by the test split or by a longer length.
"""

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path

from relpos.comparison.compare_options import LR_FACTORS, POSITION_FACTORS, SEARCH_SHARE
from relpos.comparison.comparison import (
    ENDS,
    Comparison,
    Trial,
    TrialRecord,
    change_comparison,
    load_comparison,
    read_record,
)
from relpos.runs.resolve import build_encodings
from relpos.runs.settings import Settings
from relpos.system.files import Entries

LR, POSITION_LR, TABLE_LR = "optimizer.lr", "optimizer.position_lr", "optimizer.table_lr"


@dataclass(frozen=True)
class Try:
    """One setting that the search gives an encoding."""

    encoding: str
    settings: Entries  # by dotted key

    @property
    def trial(self) -> Trial:
        return Trial(":".join([self.encoding, *(f"{key}={value:g}" for key, value in self.settings.items())]), 0)

    def loss(self, out: Path) -> float | None:
        """Its loss per token on the validation split; None if it was not measured."""
        record: TrialRecord = read_record(search_folder(out), self.trial)
        rows = [row for row in record["windows"]["rows"] if row["error"] is None] if "windows" in record else []
        return rows[0]["loss"] if rows else None


def search_folder(out: Path) -> Path:
    """The folder of the search of a comparison."""
    return out / "search"


def tries(comparison: Comparison, encoding: str, out: Path) -> list[Try]:
    """The settings that the search gives an encoding, the same for all.

    An encoding without parameters of its own has no learning rate for them: settings that differ only there would give
    the same model twice, and are left out.
    """
    settings = dataclasses.replace(comparison, chosen={}).settings_of(Trial(encoding, 0), out)
    optimizer, (parameters, tables) = settings.optimizer, _parameters(settings)
    assert optimizer.lr is not None
    distinct: dict[tuple[tuple[str, float], ...], Try] = {}
    for factor, position_factor in itertools.product(LR_FACTORS, POSITION_FACTORS):
        rates = {LR: optimizer.lr * factor}
        if parameters:
            rates[POSITION_LR] = (optimizer.position_lr or optimizer.lr) * factor * position_factor
        if tables and optimizer.table_lr is not None:  # else tables have position_lr; the default is the larger one
            rates[TABLE_LR] = optimizer.table_lr * position_factor / max(POSITION_FACTORS)
        rates = {key: float(f"{rate:.3g}") for key, rate in rates.items()}
        distinct.setdefault(tuple(rates.items()), Try(encoding, dict(rates)))
    return list(distinct.values())


def _parameters(settings: Settings) -> tuple[bool, bool]:
    """Whether the encodings of a model have parameters at position_lr, and tables."""
    parts = [part for encoding in build_encodings(settings) for part in encoding.modules()]
    tables = {id(part.get_parameter(name)) for part in parts for name in getattr(part, "tables", ())}
    trained = {id(parameter) for part in parts for parameter in part.parameters()}
    return bool(trained - tables) or (bool(tables) and settings.optimizer.table_lr is None), bool(tables)


def make_search(out: Path) -> Comparison | None:
    """Write the search of a comparison into its folder; None if all encodings have their settings already."""
    comparison = load_comparison(out)
    missing = [encoding for encoding in comparison.encodings if not comparison.settled(encoding)]
    if not missing:
        return None
    trials = [attempt.trial.encoding for encoding in missing for attempt in tries(comparison, encoding, out)]
    shorter = {key: value / SEARCH_SHARE for key, value in comparison.settings.items() if key in ENDS and value}
    shorter |= {key: max(1, int(value)) for key, value in shorter.items() if key == "run.steps"}
    search = Comparison(
        encodings=trials,
        seeds=1,
        lengths=[comparison.length],
        positions=None,
        eval_tokens=comparison.eval_tokens,
        settings={**comparison.settings, **shorter},
        split="validation",
    )

    def with_earlier() -> Comparison:
        try:
            earlier = load_comparison(search_folder(out)).encodings
        except FileNotFoundError:
            earlier = []
        return dataclasses.replace(search, encodings=list(dict.fromkeys([*earlier, *trials])))

    return change_comparison(search_folder(out), with_earlier)


def choose_settings(out: Path) -> Comparison:
    """Store for every encoding the setting with the lowest validation loss.

    An encoding is left out while a trial of its search is missing; one whose trials all failed has no setting.
    """

    def with_chosen() -> Comparison:
        comparison = load_comparison(out)
        attempts = {encoding: best(comparison, encoding, out) for encoding in comparison.encodings}
        new = {encoding: attempt.settings for encoding, attempt in attempts.items() if attempt is not None}
        return dataclasses.replace(comparison, chosen={**new, **comparison.chosen})

    return change_comparison(out, with_chosen)


def best(comparison: Comparison, encoding: str, out: Path) -> Try | None:
    """The try with the lowest validation loss; None if none was measured, or some are not over yet."""
    losses: list[tuple[float, Try]] = []
    for attempt in tries(comparison, encoding, out):
        loss = attempt.loss(out)
        if loss is not None:
            losses.append((loss, attempt))
        elif not read_record(search_folder(out), attempt.trial).get("error"):
            return None
    return min(losses, key=lambda pair: pair[0])[1] if losses else None
