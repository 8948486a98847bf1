"""The tables and figures of the CABLE paper as data: rows, recipes, printed numbers with their source, deviations.

cable.json has what the recipes paper-*.yaml of `relpos train --config` do not. A printed number that we have no source
for is missing there, never guessed. Imports nothing heavy: `relpos paper` prints the list at once.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from relpos.runs.settings import RECIPES, flatten
from relpos.system.errors import unknown
from relpos.system.files import read_yaml

FILE = Path(__file__).with_name("cable.json")
Kind = Literal["perplexity", "retrieval", "speed", "maps"]
# A GPU hour is one of an H100 at 40 % of its 989 TFLOPS in bfloat16, and a token costs 6 FLOP per parameter.
FLOPS_PER_HOUR = 0.4 * 989e12 * 3600
# What shrinks a recipe to minutes of a laptop: all of its options stay, but for sizes, steps and the text.
SHRUNK_STEPS, SHRUNK_LENGTH, SHRUNK_BATCH = 3, 64, 4
SHRUNK_HELDOUT = 4000  # tokens
SHRUNK_LENGTHS = (64, 128)


@dataclass(frozen=True)
class Deviation:
    """Something that the printed text, the authors' code and relpos do differently, and the options that decide it."""

    name: str
    keys: list[str]  # settings
    printed: str
    code: str
    relpos: str  # by default
    recipe: str  # what the recipes have
    only: dict[str, str] = field(default_factory=dict)  # the cells that it is about, by item, data, size or row

    def concerns(self, cell: "Cell", key: str) -> bool:
        """Whether it explains that a setting of a cell differs."""
        return key in self.keys and all(getattr(cell, name) == value for name, value in self.only.items())


@dataclass(frozen=True, eq=False)
class Cell:
    """One model of a table: a row, a size and a text, with the numbers that are printed for it."""

    item: str
    row: str
    title: str
    size: str
    data: str
    lengths: list[int]  # of the evaluation
    windows: int  # evaluated at each length, at most
    settings: dict[str, Any] = field(repr=False)  # of the training, by dotted key
    printed: dict[int, float | None]  # by length; None where the paper has a dash
    source: str | None  # of the printed numbers

    @property
    def name(self) -> str:
        return f"{self.item}-{self.row}-{self.size}-{self.data}"

    @property
    def gpu_hours(self) -> float:
        """Hours of an H100 for its training, by FLOPS_PER_HOUR."""
        tokens = self.settings["run.steps"] * self.settings["run.batch_size"] * self.settings["data.length"]
        return float(6 * book()["sizes"][self.size]["parameters"] * tokens / FLOPS_PER_HOUR)

    def shrunk(self) -> "Cell":
        """The same recipe for a nano model, a few steps and the default corpus."""
        settings = {
            **self.settings,
            "model.preset": "nano",
            "model.vocab_size": None,
            "data.source": "sotu",
            "data.subset": None,
            "data.length": SHRUNK_LENGTH,
            "run.steps": SHRUNK_STEPS,
            "run.batch_size": SHRUNK_BATCH,
            "run.micro_batch_size": SHRUNK_BATCH // 2,
            "run.precision": None,
            "run.eval_windows": 2,
            "run.eval_every": 10**6,
            "run.save_every": 10**6,
            "optimizer.warmup_steps": 1,
        }
        if self.settings.get("data.heldout_source") is not None:
            settings["data.heldout_source"] = "sotu"
        else:
            settings["data.heldout"] = SHRUNK_HELDOUT
        fields = {**vars(self), "lengths": list(SHRUNK_LENGTHS), "windows": 4, "settings": settings}
        return Cell(**fields)


@dataclass(frozen=True, eq=False)
class Item:
    """A table or figure."""

    name: str
    title: str
    kind: Kind
    cells: list[Cell]
    missing: list[str]  # what the recipe lacks, in sentences
    figure: str = ""  # the command that draws it, for figures that `relpos figures` makes

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def command(self) -> str:
        if self.figure:
            return self.figure
        if not self.cells:
            return ""
        cell = self.cells[0]
        if self.kind == "speed":
            return f"relpos paper run {self.name} --size {cell.size}"
        on = f" --on {cell.data}" if len({cell.data for cell in self.cells}) > 1 else ""
        return f"relpos paper run {self.name} --row {cell.row} --size {cell.size}{on}"

    def cell(self, row: str | None, size: str | None, data: str | None) -> Cell:
        """The cell with this row, size and text; what is left out must follow from the rest.

        Raises:
            ValueError: The cell does not exist, or several match.
        """
        left = self.cells
        for word, value in (("row", row), ("size", size), ("data", data)):
            names = list(dict.fromkeys(getattr(cell, word) for cell in left))
            option = "on" if word == "data" else word
            if value is None and len(names) > 1:
                raise ValueError(f"{self.name} has several {option}s: give --{option} {'|'.join(names)}.")
            if value is not None and value not in names:
                raise unknown(option, value, names)
            left = [cell for cell in left if value in (None, getattr(cell, word))]
        return left[0]


@cache
def book() -> dict[str, Any]:
    """What cable.json holds."""
    return cast(dict[str, Any], json.loads(FILE.read_text(encoding="utf-8")))


@cache
def items() -> dict[str, Item]:
    """The tables and figures by name, in the order of the paper."""
    entries = book()["items"]
    made = {name: _item(name, entry, entries) for name, entry in entries.items()}
    drawn = {
        f"figure{number}": Item(f"figure{number}", title, "maps", [], [], f"relpos figures --figure {number}")
        for number, title in MAPS.items()
    }
    diagram = Item("figure2", "How ALiBi and CABLE compute scores: a diagram, nothing to run", "maps", [], [])
    every = {**made, "figure2": diagram, **drawn}
    return {name: every[name] for name in sorted(every, key=_place)}


def _place(name: str) -> tuple[bool, int]:
    """The tables by number, then the figures."""
    return name.startswith("figure"), int(name.removeprefix("table").removeprefix("figure"))


MAPS = {  # figures of heads, which `relpos figures` draws
    4: "Biases of three heads of CABLE beside ALiBi",
    **{8: "Biases of CABLE", 9: "Biases of DAPEv2 over CABLE", 10: "Biases of Kerple"},
    **{11: "Biases of DAPEv2 over Kerple", 12: "Biases of ALiBi", 13: "Biases of Fire"},
    **{14: "Biases of T5-bias", 15: "Attention scores of RoPE"},
}


def deviations() -> list[Deviation]:
    """Every deviation between the printed text, the authors' code and relpos."""
    return [Deviation(**entry) for entry in book()["deviations"]]


def item(name: str) -> Item:
    """A table or figure by name, as in table4.

    Raises:
        ValueError: The table or figure does not exist.
    """
    if name not in items():
        raise unknown("table or figure", name, list(items()))
    return items()[name]


def _item(name: str, entry: Mapping[str, Any], entries: Mapping[str, Any]) -> Item:
    merged = dict(entry)
    if "same_as" in entry:  # the same models, but no numbers that we know
        same = entries[entry["same_as"]]
        merged = {**same, **entry, "parts": [{**part, "printed": {}, "source": None} for part in same["parts"]]}
    return Item(name, merged["title"], merged["kind"], list(_cells(name, merged)), merged.get("missing", []))


@cache
def _recipe(name: str) -> dict[str, Any]:
    """The settings of a recipe of `relpos train --config`, by dotted key."""
    return flatten(read_yaml(RECIPES / f"{name}.yaml"))


def _cells(name: str, entry: Mapping[str, Any]) -> Iterator[Cell]:
    rules = book()
    for part in entry["parts"]:
        data, size = rules["data"][part["data"]], part["size"]
        for row in entry["rows"]:
            about = rules["rows"][row]
            options = {f"model.options.{key}": value for key, value in about.get("options", {}).items()}
            steps = {"run.steps": data["steps"][size]} if "steps" in data else {}
            settings = {
                **_recipe(rules["sizes"][size]["recipe"]),
                **data["settings"],
                **steps,
                "model.encoding": about["encoding"],
                **options,
                **part.get("settings", {}),
            }
            printed = {int(length): value for length, value in part["printed"].get(row, {}).items()}
            lengths = entry.get("lengths", rules["evaluation"]["lengths"])
            windows = rules["evaluation"]["windows"]
            source = part.get("sources", {}).get(row, part["source"]) if printed else None
            yield Cell(name, row, about["title"], size, part["data"], lengths, windows, settings, printed, source)
