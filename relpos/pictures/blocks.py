"""The blocks of a page (headings, text, tables, images), written as Markdown or as one self-contained HTML file.

Text may contain `code` between backticks, **bold** words and [links](https://…) to web addresses, to #anchors of the
page and to files beside it.
"""

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


LINK = re.compile(r"\[([^\]]+)\]\((https?://[^\s)\"']+|#[\w-]+|[\w.-]+)\)")

BOLD = re.compile(r"\*\*(.+?)\*\*")


@dataclass
class Heading:
    """A heading; level 1 is the page's title."""

    text: str
    level: int = 2
    anchor: str = ""  # what a link of the page points to, as #anchor


@dataclass
class Text:
    """A paragraph."""

    text: str


@dataclass
class Items:
    """A list."""

    items: Sequence[str]


@dataclass
class Table:
    """Rows of text; some cells bold, one column highlighted."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    bold: set[tuple[int, int]] = field(default_factory=set)  # row, column
    marked: int | None = None  # the highlighted column
    wrapped: bool = False  # whether a cell may have several lines


@dataclass
class Image:
    """A PNG file in the page's folder."""

    file: Path
    caption: str = ""  # text below the image
    alt: str = ""  # text instead of the image; the caption by default


@dataclass
class Code:
    """Shell commands."""

    text: str


Block = Heading | Text | Items | Table | Image | Code


def to_markdown(blocks: Sequence[Block], folder: Path) -> str:
    """Write a page as Markdown.

    Args:
        blocks: The page.
        folder: The folder of the Markdown file: images are linked by their path from it.

    Returns:
        The contents of the file.

    Example:
        >>> to_markdown([Heading("Results", 1), Text("See `relpos ls`.")], Path("."))
        '# Results\\n\\nSee `relpos ls`.\\n'
    """
    return "\n\n".join(_markdown(block, folder) for block in blocks) + "\n"


def to_html(blocks: Sequence[Block]) -> str:
    """Write a page as one HTML file, with its images embedded.

    Args:
        blocks: The page; its first heading is also the title of the window.

    Returns:
        The contents of the file.

    Example:
        >>> "<h1>Results</h1>" in to_html([Heading("Results", 1)])
        True
    """
    title = next(block.text for block in blocks if isinstance(block, Heading))
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{view}<title>{html.escape(title)}</title><style>{STYLE}</style>'
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
            image = f"![{block.alt or block.caption}]({block.file.relative_to(folder).as_posix()})"
            return f"{image}\n\n{_plain(block.caption)}" if block.alt and block.caption else image
        case Code():
            return f"```sh\n{block.text}\n```"


def _plain(text: str) -> str:
    """Escape HTML tags, except between backticks, where Markdown shows them as they are."""
    return "`".join(words if code % 2 else words.replace("<", "&lt;") for code, words in enumerate(text.split("`")))


def _html(block: Block) -> str:
    match block:
        case Heading():
            anchor = f' id="{html.escape(block.anchor)}"' if block.anchor else ""
            return f"<h{block.level}{anchor}>{_inline(block.text)}</h{block.level}>"
        case Text():
            return f"<p>{_inline(block.text)}</p>"
        case Items():
            return "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in block.items) + "</ul>"
        case Table():
            return _html_table(block)
        case Image():
            data = base64.b64encode(block.file.read_bytes()).decode()
            image = f'<img src="data:image/png;base64,{data}" alt="{html.escape(block.alt or block.caption)}">'
            caption = f"<figcaption>{_inline(block.caption)}</figcaption>" if block.caption else ""
            return f"<figure>{image}{caption}</figure>"
        case Code():
            return f"<pre>{html.escape(block.text)}</pre>"


def _html_table(table: Table) -> str:
    def line(tag: str, row: int, cells: Sequence[str]) -> str:
        written = []
        for column, cell in enumerate(cells):
            text = f"<strong>{_inline(cell)}</strong>" if (row, column) in table.bold else _inline(cell)
            kind = ' class="marked"' if column == table.marked else ""
            written.append(f"<{tag}{kind}>{text}</{tag}>")
        return f"<tr>{''.join(written)}</tr>"

    body = "\n".join(line("td", row, cells) for row, cells in enumerate(table.rows))
    kind = ' class="wrapped"' if table.wrapped else ""
    return f'<div class="wide"><table{kind}>\n{line("th", -1, table.head)}\n{body}\n</table></div>'


def _inline(text: str) -> str:
    """Text of a block as HTML, with its code, bold words and links."""
    parts = html.escape(text, quote=False).split("`")
    if len(parts) % 2 == 0:  # the last backtick has no partner
        parts[-2:] = ["`".join(parts[-2:])]
    return "".join(f"<code>{part}</code>" if place % 2 else _marked(part) for place, part in enumerate(parts))


def _marked(text: str) -> str:
    """Text without code as HTML, with its bold words and links."""
    return BOLD.sub(r"<strong>\1</strong>", LINK.sub(r'<a href="\2">\1</a>', text))
