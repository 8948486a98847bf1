"""All figures of a folder on one page that needs nothing but the folder."""

import html
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from relpos.system.files import write_text
from relpos.view.captions import NO_NUMBER, notes_sentence

INDEX = "index.html"
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Positional encodings: the figures</title>
<style>
body {{ font: 16px/1.5 Georgia, serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
h1, h2 {{ font-weight: normal }}
nav a {{ margin-right: 1rem }}
figure {{ margin: 3rem 0 }}
img {{ width: 100%; height: auto }}
table {{ border-collapse: collapse; font: 13px/1.4 sans-serif; margin: 1rem 0 }}
th, td {{ padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #ddd }}
.first {{ text-align: left }}
figcaption {{ color: #555 }}
</style>
<h1>Positional encodings: the figures</h1>
<p>Figures 8, 10 and 12 to 15 of the appendix of “Context-aware Biases for Length Extrapolation”
(<a href="https://arxiv.org/abs/2503.08067">arXiv 2503.08067</a>), drawn anew by relpos.
Uniformity: 1 if a map is the same along every diagonal. Context dependence: 0 if it is the same for every input, about
1 if the maps of two inputs have nothing in common. A head that is exactly constant has neither number (–).</p>
<nav>{links}</nav>
{figures}
</html>
"""
FIGURE = """<figure id="{stem}">
<h2>Figure {number}: {encoding}</h2>
<a href="{stem}.pdf"><img src="{stem}.png" alt="{caption}"></a>
{said}<details open><summary>Numbers (<a href="{stem}.json">JSON</a>, <a href="{stem}.pdf">PDF</a>)</summary>
<table>
<tr><th class="first">head</th><th>minimum</th><th>maximum</th><th>uniformity</th><th>context dependence</th>\
<th class="first"></th></tr>
{rows}
</table></details>
</figure>
"""
ROW = '<tr><td class="first">{}</td><td>{:.4g}</td><td>{:.4g}</td><td>{}</td><td>{}</td><td class="first">{}</td></tr>'


def write_index(folder: Path, stems: Iterable[str]) -> Path:
    """Write the page of those figures of these names that are in the folder."""
    there = [stem for stem in stems if (folder / f"{stem}.json").exists()]
    told = {stem: json.loads((folder / f"{stem}.json").read_text(encoding="utf-8")) for stem in there}
    links = "".join(f'<a href="#{stem}">Figure {one["figure"]}</a>' for stem, one in told.items())
    figures = "\n".join(_figure(stem, one) for stem, one in told.items())
    write_text(folder / INDEX, PAGE.format(links=links, figures=figures))
    return folder / INDEX


def _figure(stem: str, told: dict[str, Any]) -> str:
    layer = told["layers"][0]
    said = notes_sentence([head.get("note") for head in layer["heads"]])
    rows = [("all", *_extent(layer["heads"]), layer["uniformity"], layer["context_dependence"], "")]
    rows += [
        (*(head[key] for key in ("head", "minimum", "maximum", "uniformity", "context_dependence")), head.get("note"))
        for head in layer["heads"]
    ]
    words = told["input"]["first_words"] if told["input"] else None
    said += f" The input begins: “{html.escape(words)} …”" if words else ""
    return FIGURE.format(
        stem=stem,
        number=told["figure"],
        encoding=html.escape(told["encoding"]),
        caption=html.escape(told["caption"]),
        said=f"<figcaption>{said.strip()}</figcaption>\n" if said else "",
        rows="\n".join(ROW.format(*row[:3], *map(_number, row[3:5]), row[5] or "") for row in rows),
    )


def _extent(heads: list[dict[str, Any]]) -> tuple[float, float]:
    return min(head["minimum"] for head in heads), max(head["maximum"] for head in heads)


def _number(value: float | None) -> str:
    return NO_NUMBER if value is None else f"{value:.6g}"
