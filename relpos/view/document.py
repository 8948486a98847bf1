"""A page made of blocks: as Markdown with its pictures beside it, or as one HTML file that needs nothing else."""

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 1100px; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
th, td { padding: .25em .6em; text-align: right; border-bottom: 1px solid #eee; }
th { border-bottom: 2px solid #888; vertical-align: bottom; } td { white-space: nowrap; }
.wrapped { font-size: .9em; } .wrapped td { white-space: normal; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
.marked { background: #f3f1e7; }
figure { margin: 1em 0; } img { max-width: 100%; height: auto; } figcaption { color: #555; font-size: .9em; }
pre { background: #f6f6f6; padding: .8em; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85em; }
code { font-size: .92em; }
"""


@dataclass
class Heading:
    """A title: level 1 is the page's."""

    text: str
    level: int = 2


@dataclass
class Text:
    """A paragraph. `code` between backticks, here and in lists and tables."""

    text: str


@dataclass
class Items:
    """A list."""

    items: Sequence[str]


@dataclass
class Table:
    """Rows of text; some cells bold, one column marked."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    bold: set[tuple[int, int]] = field(default_factory=set)  # row, column
    marked: int | None = None
    wrapped: bool = False  # whether cells may have several lines


@dataclass
class Image:
    """A picture that lies in the page's folder."""

    file: Path
    caption: str


@dataclass
class Code:
    """Lines to copy."""

    text: str


Block = Heading | Text | Items | Table | Image | Code


def to_markdown(blocks: Sequence[Block], folder: Path) -> str:
    """The page as Markdown; pictures by their path from `folder`."""
    return "\n\n".join(_markdown(block, folder) for block in blocks) + "\n"


def to_html(blocks: Sequence[Block]) -> str:
    """The page as one HTML file, its pictures inside."""
    title = next(block.text for block in blocks if isinstance(block, Heading))
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    body = "\n".join(_html(block) for block in blocks)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _markdown(block: Block, folder: Path) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {block.text}"
        case Text():
            return _plain(block.text)
        case Items():
            return "\n".join(f"- {_plain(item)}" for item in block.items)
        case Table():
            rows = [
                [f"**{cell}**" if (r, c) in block.bold else cell for c, cell in enumerate(row)]
                for r, row in enumerate(block.rows)
            ]
            lines = [block.head, ["---", *["---:"] * (len(block.head) - 1)], *rows]
            return "\n".join(
                "| " + " | ".join(_plain(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
            )
        case Image():
            return f"![{block.caption}]({block.file.relative_to(folder).as_posix()})"
        case Code():
            return f"```sh\n{block.text}\n```"


def _plain(text: str) -> str:
    """Text in which Markdown finds no tags; what is between backticks it leaves alone anyway."""
    return "`".join(words if code % 2 else words.replace("<", "&lt;") for code, words in enumerate(text.split("`")))


def _html(block: Block) -> str:
    match block:
        case Heading():
            return f"<h{block.level}>{_inline(block.text)}</h{block.level}>"
        case Text():
            return f"<p>{_inline(block.text)}</p>"
        case Items():
            return "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in block.items) + "</ul>"
        case Table():
            return _html_table(block)
        case Image():
            data = base64.b64encode(block.file.read_bytes()).decode()
            caption = html.escape(block.caption)
            image = f'<img src="data:image/png;base64,{data}" alt="{caption}">'
            return f"<figure>{image}<figcaption>{_inline(block.caption)}</figcaption></figure>"
        case Code():
            return f"<pre>{html.escape(block.text)}</pre>"


def _html_table(table: Table) -> str:
    def line(tag: str, row: int, cells: Sequence[str]) -> str:
        found = []
        for column, cell in enumerate(cells):
            text = f"<strong>{_inline(cell)}</strong>" if (row, column) in table.bold else _inline(cell)
            kind = ' class="marked"' if column == table.marked else ""
            found.append(f"<{tag}{kind}>{text}</{tag}>")
        return f"<tr>{''.join(found)}</tr>"

    body = "\n".join(line("td", row, cells) for row, cells in enumerate(table.rows))
    kind = ' class="wrapped"' if table.wrapped else ""
    return f'<div class="wide"><table{kind}>\n{line("th", -1, table.head)}\n{body}\n</table></div>'


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
