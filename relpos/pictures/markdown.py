"""Pages: written in Markdown, and made into one self-contained HTML file by markdown-it."""

import base64
import html
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 1100px; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; display: block;
  overflow-x: auto; }
th, td { padding: .25em .6em; border-bottom: 1px solid #eee; }
th { border-bottom: 2px solid #888; vertical-align: bottom; } td { white-space: nowrap; }
.wrapped { font-size: .9em; white-space: normal; } .marked { background: #f3f1e7; }
img { max-width: 100%; height: auto; } p:has(img) + p { color: #555; font-size: .9em; }
pre { background: #f6f6f6; padding: .8em; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85em; }
code { font-size: .92em; }
"""
TRAINED = "(trained)"  # in the head of a column, which is then highlighted
ANCHOR = re.compile(r" \{#([\w-]+)\}$")  # at the end of a heading: what a link of the page points to


def escaped(text: str) -> str:
    """Text that contains no Markdown."""
    return re.sub(r"([\\`*_\[\]<>&|])", r"\\\1", text)


def without_tags(text: str) -> str:
    """Markdown in which < begins no HTML tag, except between backticks, where it is shown as it is."""
    return "`".join(words if code % 2 else words.replace("<", "&lt;") for code, words in enumerate(text.split("`")))


def items(sentences: Sequence[str]) -> str:
    """A list."""
    return "\n".join(f"- {without_tags(sentence)}" for sentence in sentences)


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], bold: Collection[tuple[int, int]] = (), text: bool = False
) -> str:
    """A table, with some cells (row, column) bold. A cell with no-break spaces may be broken at its other spaces.

    Columns after the first are numbers, aligned at the right, unless the table is of `text`.
    """
    marked = [[f"**{cell}**" if (r, c) in bold else cell for c, cell in enumerate(row)] for r, row in enumerate(rows)]
    lines = [head, ["---", *["---" if text else "---:"] * (len(head) - 1)], *marked]
    return "\n".join(
        "| " + " | ".join(without_tags(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def image(file: str, caption: str, alt: str = "") -> str:
    """A picture by its path from the page's folder, with a text for those who cannot see it, and one below it."""
    return f"![{escaped(alt or caption)}]({file})" + (f"\n\n{caption}" if caption else "")


def to_html(markdown: str, folder: Path, style: str = "") -> str:
    """A page as one HTML file, with the pictures of its folder embedded; the first heading is the window's title.

    `style` is added to the style of the page.

    Example:
        >>> "<h1>Results</h1>" in to_html("# Results", Path())
        True
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown)
    title = next(tokens[place + 1].content for place, token in enumerate(tokens) if token.type == "heading_open")
    column, marked = 0, None
    for token, content in zip(tokens, [*tokens[1:], Token("", "", 0)], strict=True):
        if token.type == "table_open":
            marked = None
        elif token.type == "tr_open":
            column = 0
        elif token.type in ("th_open", "td_open"):
            marked = column if token.type == "th_open" and TRAINED in content.content else marked
            classes = {"marked": column == marked, "wrapped": "\N{NO-BREAK SPACE}" in content.content}
            for name in (name for name, applies in classes.items() if applies):
                token.attrJoin("class", name)
            column += 1
        elif token.type == "heading_open" and (anchor := ANCHOR.search(content.content)):
            token.attrSet("id", anchor[1])
            assert content.children
            content.children[-1].content = ANCHOR.sub("", content.children[-1].content)
        for child in token.children or ():
            if child.type == "image":
                data = base64.b64encode((folder / str(child.attrs["src"])).read_bytes()).decode()
                child.attrSet("src", f"data:image/png;base64,{data}")
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{view}<title>{html.escape(title)}</title><style>{STYLE}{style}</style>'
    body = parser.renderer.render(tokens, parser.options, {})
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}</body></html>\n'
