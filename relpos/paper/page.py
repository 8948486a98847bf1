"""The page of the paper's figures: all figures of a folder with their numbers, in one HTML file."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from relpos.pictures.captions import NO_NUMBER
from relpos.pictures.markdown import escaped, image, table, to_html
from relpos.system.files import write_text

PAGE = "index.html"
TITLE = "Positional encodings: the figures"
INTRODUCTION = (
    "Figures 8, 10 and 12 to 15 of the appendix of “Context-aware Biases for Length Extrapolation” "
    "([arXiv 2503.08067](https://arxiv.org/abs/2503.08067)), drawn by relpos. Uniformity is 1 if a map is constant "
    "along every diagonal. Context dependence is 0 if a map is the same for every input, and about 1 if the maps of "
    f"two inputs have nothing in common. A head that is exactly constant has neither number ({NO_NUMBER})."
)
COLUMNS = ["head", "minimum", "maximum", "uniformity", "context dependence", "note"]


def write_page(folder: Path, stems: Iterable[str]) -> Path:
    """Write index.html with the figures that are in a folder.

    Args:
        folder: The folder of the figures: STEM.png, STEM.pdf and STEM.json of each.
        stems: File names without suffix, in the order of the page; figures that are not in the folder are left out.

    Returns:
        The path of the page.
    """
    present = [stem for stem in stems if (folder / f"{stem}.json").exists()]
    figures = {stem: json.loads((folder / f"{stem}.json").read_text(encoding="utf-8")) for stem in present}
    links = " · ".join(f"[Figure {numbers['figure']}](#{stem})" for stem, numbers in figures.items())
    paragraphs = [f"# {TITLE}", INTRODUCTION, links]
    for stem, numbers in figures.items():
        paragraphs += _figure(stem, numbers)
    write_text(folder / PAGE, to_html("\n\n".join(paragraphs), folder))
    return folder / PAGE


def _figure(stem: str, numbers: dict[str, Any]) -> list[str]:
    """One figure: the image, which contains its caption, the first words of the input, and a table of the heads."""
    layer = numbers["layers"][0]
    words = numbers["input"]["first_words"] if numbers["input"] else None
    return [
        f"## Figure {numbers['figure']}: {escaped(numbers['encoding'])} {{#{stem}}}",
        image(f"{stem}.png", f"The input begins: “{escaped(words)} …”" if words else "", alt=numbers["caption"]),
        f"Files: [PDF]({stem}.pdf), [numbers as JSON]({stem}.json).",
        table(COLUMNS, [_all_heads(layer), *(_head(head) for head in layer["heads"])]),
    ]


def _all_heads(layer: dict[str, Any]) -> list[str]:
    low, high = min(head["minimum"] for head in layer["heads"]), max(head["maximum"] for head in layer["heads"])
    return ["all", f"{low:.4g}", f"{high:.4g}", _number(layer["uniformity"]), _number(layer["context_dependence"]), ""]


def _head(head: dict[str, Any]) -> list[str]:
    measures = [_number(head[key]) for key in ("uniformity", "context_dependence")]
    return [str(head["head"]), f"{head['minimum']:.4g}", f"{head['maximum']:.4g}", *measures, head.get("note") or ""]


def _number(value: float | None) -> str:
    return NO_NUMBER if value is None else f"{value:.6g}"
