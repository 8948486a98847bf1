"""Formulas as MathML, which browsers show by themselves: no scripts and no fonts are loaded.

The documents have TeX between dollar signs, as GitHub reads it. pymdownx.arithmatex marks it in the HTML.
"""

import html
import re

from latex2mathml.converter import convert

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', flags=re.DOTALL)
DISPLAY = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', flags=re.DOTALL)


def with_mathml(page: str) -> str:
    """The HTML of a page with its formulas as MathML.

    Raises:
        ValueError: A formula has a command that the converter does not know; it would be shown as it is written.
    """
    page = INLINE.sub(lambda match: mathml(html.unescape(match[1]), "inline"), page)
    page = DISPLAY.sub(lambda match: f'<div class="formula">{displayed(html.unescape(match[1]))}</div>', page)
    if "arithmatex" in page:
        raise ValueError(f"a formula was left over: {page[page.index('arithmatex') :][:80]}")
    return page


def displayed(tex: str) -> str:
    """A formula on lines of its own. Its parts, which wide spaces separate, wrap on a narrow screen."""
    return "".join(mathml(part, "block") for part in tex.split(r"\qquad"))


def mathml(tex: str, display: str) -> str:
    """One formula: "inline" or "block"."""
    result: str = convert(" ".join(tex.split()), display=display)
    unknown = re.search(r"<m\w+>(\\[a-zA-Z]+)</m\w+>", result)
    if unknown:
        raise ValueError(f"unknown command {unknown[1]} in the formula {tex!r}.")
    return result
