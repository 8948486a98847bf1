"""`relpos paper`: train and evaluate a cell of a table of the CABLE paper, and compare a run with what is printed."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

from relpos.paper.catalogue import Cell, Item, deviations, item, items
from relpos.paper.paper_options import TOLERANCE, PaperOptions
from relpos.runs.results import ABOUT, read_about
from relpos.runs.settings import FREE, Settings, flatten, load_settings, parse_overrides
from relpos.system.files import read_json, write_text

RESULT = "paper.json"  # in the folder of a run: its cell and what was measured
# Settings that do not change what is computed, but for rounding and reports.
ROUNDING = {"run.micro_batch_size", "run.precision", "run.fsdp", "run.context_parallel", "model.gradient_checkpointing"}


class Measured(TypedDict):
    """What paper.json holds."""

    item: str
    row: str
    size: str
    data: str
    shrunk: bool
    step: int
    perplexity: dict[str, float | None]  # by length; None where the encoding cannot be evaluated


@dataclass(frozen=True)
class Difference:
    """A setting of a run that differs from the recipe, and the deviation that is known for it."""

    key: str
    recipe: Any
    run: Any
    deviation: str | None
    rounding: bool  # whether it changes nothing but rounding

    def __str__(self) -> str:
        known = f"  ({self.deviation})" if self.deviation else ""
        return f"{self.key}: the recipe has {_word(self.recipe)}, the run {_word(self.run)}{known}"


@dataclass(frozen=True)
class Comparison:
    """A measured number beside the printed one."""

    length: int
    printed: float | None
    measured: float | None

    @property
    def relative(self) -> float | None:
        """The relative difference; None if a number is missing."""
        if self.printed is None or self.measured is None:
            return None
        return self.measured / self.printed - 1


@dataclass(frozen=True)
class Verdict:
    """What `relpos paper verify` found."""

    run: str
    cell: str
    source: str | None
    numbers: list[Comparison]
    differences: list[Difference]

    @property
    def compared(self) -> list[float]:
        return [abs(number.relative) for number in self.numbers if number.relative is not None]

    @property
    def reproduced(self) -> bool:
        """Whether every printed number was measured to TOLERANCE, under the settings of the recipe."""
        printed = [number for number in self.numbers if number.printed is not None]
        exact = all(difference.rounding for difference in self.differences)
        return bool(printed) and exact and len(self.compared) == len(printed) and max(self.compared) <= TOLERANCE

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        changed = [difference for difference in self.differences if not difference.rounding]
        settings = (
            f"{len(changed)} setting{'s' * (len(changed) != 1)} differ{'s' * (len(changed) == 1)} from the recipe"
        )
        if not self.compared:
            reason = "was not measured" if self.source else "is not known to us"
            return (
                f"the printed number {reason}; "
                + (settings if changed else "the settings are those of the recipe")
                + "."
            )
        worst = max(self.compared)
        if self.reproduced:
            return f"reproduced within {100 * TOLERANCE:g} %: the largest difference is {100 * worst:.2f} %."
        if worst <= TOLERANCE and not changed:
            return f"reproduced within {100 * TOLERANCE:g} % where it was measured ({len(self.compared)} lengths)."
        if worst <= TOLERANCE:
            return f"within {100 * TOLERANCE:g} % of the printed numbers, but {settings}."
        return f"not reproduced: off by up to {100 * worst:.1f} %, and {settings if changed else 'no setting differs'}."

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "reproduced": self.reproduced, "sentence": self.sentence}


def cell_of(options: PaperOptions, name: str) -> tuple[Item, Cell]:
    """The cell that the options name."""
    whole = item(name)
    if not whole.cells:
        raise ValueError(f"{name} is a picture of heads: {whole.figure} draws it.")
    cell = whole.cell(options.row, options.size, options.on)
    return whole, cell.shrunk() if options.shrink else cell


def run_cell(options: PaperOptions, name: str, overrides: Sequence[str] = ()) -> Path:
    """Train and evaluate a cell of a table, or measure the speed of a row of Figure 3. Rerun it to resume.

    Returns:
        The folder of the run.

    Raises:
        ValueError: The cell does not exist, or a setting is not allowed.
    """
    whole, cell = cell_of(options, name)
    if whole.kind == "speed":
        raise ValueError(f"{name} is measured for all rows at once: relpos paper run {name} without --row.")
    out = Path(options.runs) / f"paper-{cell.name}{'-shrunk' * options.shrink}"
    values = {**cell.settings, "run.out": str(out), **parse_overrides(list(overrides))}
    settings = load_settings(None, values)
    out = Path(str(settings.run.out))
    for sentence in whole.missing:
        options.say(f"note: {sentence}")
    if not options.shrink:
        options.say(
            f"{cell.item}, {cell.title}, {cell.size} on {cell.data}: about {cell.gpu_hours:,.1f} hours of an H100. "
            "Rerun the command to resume."
        )
    from relpos.training.training import train

    result = train(settings, options.say)
    from accelerate import PartialState

    if PartialState().is_main_process:
        lengths = list(options.lengths or cell.lengths)
        measured = _evaluate(cell, out, lengths, options)
        facts = {"item": cell.item, "row": cell.row, "size": cell.size, "data": cell.data, "shrunk": options.shrink}
        perplexity = {str(length): value for length, value in measured.items()}
        write_text(
            out / RESULT, json.dumps({**facts, "step": result["step"], "perplexity": perplexity}, indent=1) + "\n"
        )
        options.say(verify(out).sentence)
    return out


def distinct_recipes() -> Iterator[tuple[Cell, list[str]]]:
    """Every recipe that differs when it is shrunk, and the names of the cells that it stands for."""
    cells = [cell for shown in items().values() if shown.kind != "speed" for cell in shown.cells]
    names: dict[str, list[str]] = {}
    first: dict[str, Cell] = {}
    for cell in cells:
        key = json.dumps(cell.shrunk().settings, sort_keys=True)
        first.setdefault(key, cell)
        names.setdefault(key, []).append(cell.name)
    return ((first[key], names[key]) for key in first)


def _evaluate(cell: Cell, folder: Path, lengths: Iterable[int], options: PaperOptions) -> dict[int, float | None]:
    """Perplexity by length: each length is cut from the start of the held-out text on its own, up to `windows`."""
    from relpos.evaluation.evaluation import evaluate
    from relpos.runs.run import TrainedRun, open_run

    run = open_run(folder)
    assert isinstance(run, TrainedRun)
    held = run.settings.data.heldout
    measured: dict[int, float | None] = {}
    for length in lengths:
        if held is not None and held >= 1:  # the same store: its first tokens
            run.settings.data.heldout = min(held, cell.windows * length + 1)
        out = run.evaluation / f"paper-{length}"
        row = evaluate(run, [length], eval_tokens=cell.windows * length, out=out, say=options.say)["rows"][0]
        measured[length] = None if row["error"] else row["perplexity"]
    return measured


def verify(folder: str | Path, cell: Cell | None = None) -> Verdict:
    """Compare a run with a printed cell: the numbers, and setting by setting the recipe.

    Args:
        folder: The folder of the run.
        cell: The cell. By default the one that `relpos paper run` wrote into the folder.

    Returns:
        The verdict.

    Raises:
        FileNotFoundError: The run does not exist.
        ValueError: The folder does not say which cell it is.
    """
    folder = Path(folder)
    if not (folder / ABOUT).exists():
        raise FileNotFoundError(f"there is no run in {folder}: it has no {ABOUT}.")
    settings, _ = read_about(folder)
    perplexity: Mapping[str, float | None] = {}
    if (folder / RESULT).exists():
        measured = cast(Measured, read_json(folder / RESULT))
        perplexity = measured["perplexity"]
        cell = cell or item(measured["item"]).cell(measured["row"], measured["size"], measured["data"])
    if cell is None:
        raise ValueError(
            f"{folder} was not made by relpos paper run: say which cell it is, as in relpos paper verify {folder} "
            "table4 --row cable --size tiny."
        )
    printed = cell.printed if item(cell.item).kind == "perplexity" else {}
    lengths = sorted({*printed, *map(int, perplexity)})
    numbers = [Comparison(length, printed.get(length), perplexity.get(str(length))) for length in lengths]
    return Verdict(
        str(folder), _words(cell), cell.source if printed else None, numbers, list(_differences(settings, cell))
    )


def _words(cell: Cell) -> str:
    return f"{cell.item}, {cell.title}, {cell.size}, {cell.data}"


def _differences(settings: Settings, cell: Cell) -> Iterator[Difference]:
    """The settings in which a run differs from the recipe of a cell."""
    recipe = load_settings(None, {**cell.settings, "run.out": settings.run.out})
    theirs, ours = _flat(recipe), _flat(settings)
    # Options of the encodings are keys of their own, so that each is compared by itself.
    for key in sorted(theirs.keys() | ours.keys()):
        free = key in FREE - {"run.steps"}
        if free or theirs.get(key) == ours.get(key):
            continue
        known = [deviation.name for deviation in deviations() if deviation.concerns(cell, key)]
        yield Difference(key, theirs.get(key), ours.get(key), known[0] if known else None, key in ROUNDING)


def _flat(settings: Settings) -> dict[str, Any]:
    flat = flatten(asdict(settings))
    options = flat.pop("model.options")
    return flat | {f"model.options.{key}": value for key, value in options.items()}


def _word(value: Any) -> str:
    return "nothing" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
