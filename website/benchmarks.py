"""All tables of benchmarks/results as one page of the site."""

import re

from website.repository import ROOT

PAGE = "benchmarks.md"
RESULT = re.compile(r"\[([^\]]+)\]\(\.\./benchmarks/results/([\w-]+)\.md\)")  # a link to a result file


def tables() -> str:
    """The result files in the order in which the page's own table links to them, each below its title."""
    written = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    return "\n\n".join(section(title, stem) for title, stem in RESULT.findall(written))


def section(title: str, stem: str) -> str:
    """A result file as a section; its headings are one level lower."""
    text = (ROOT / "benchmarks" / "results" / f"{stem}.md").read_text(encoding="utf-8")
    text = re.sub(r"^# .*\n", "", text)
    text = re.sub(r"^(#+ .*)$", r"#\1", text, flags=re.MULTILINE)
    return f"## {title} {{#{stem}}}\n\n{text.strip()}"
