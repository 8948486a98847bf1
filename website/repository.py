"""Documents outside of docs/ that are pages of the site, and links that lead from one page to another.

A document keeps its place in the repository, so that its links work on GitHub. On the site, docs/ is the root, and
documents from elsewhere keep their path under it.
"""

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
OUTSIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "native/README.md", "benchmarks/results/*.png")
INSTEAD = {"README.md": "docs/index.md"}  # the site has a landing page of its own
RENAMED = {"native/README.md": "native/kernel.md"}  # a README would be the first page of its section
RESULTS = re.compile(r"benchmarks/results/([\w-]+)\.md")  # all of them are sections of one page, docs/benchmarks.md
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\](?:\([^)]*\))?)*)\]\((?!https?:|mailto:)([^)\s]+)\)")
FENCE = re.compile(r"^(```.*?^```\s*?$)", flags=re.MULTILINE | re.DOTALL)


def outside() -> list[str]:
    """Paths in the repository of the files outside of docs/ that belong to the site."""
    return sorted(file.relative_to(ROOT).as_posix() for pattern in OUTSIDE for file in ROOT.glob(pattern))


def source_of(page: str) -> str:
    """Path in the repository of a page of the site."""
    source = next((old for old, new in RENAMED.items() if new == page), page)
    return source if source in outside() else f"docs/{page}"


def page_of(source: str) -> str | None:
    """Path on the site of a file of the repository; None if it is not on the site."""
    source = INSTEAD.get(source, source)
    if RESULTS.fullmatch(source):
        return "benchmarks.md"
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    if re.fullmatch(r"notebooks/[\w-]+\.ipynb", source):
        return source.removesuffix(".ipynb") + ".md"
    return RENAMED.get(source, source) if source in outside() else None


def rewrite_links(markdown: str, page: str) -> str:
    """Make the links of a document lead to pages of the site.

    Args:
        markdown: The document as it stands in the repository.
        page: Its path on the site.

    Returns:
        The same text. A link to a page of the site is relative to this page; a link to a file of the repository that
        is not on the site, such as a source file, becomes plain text.

    Raises:
        FileNotFoundError: A link leads to a file that does not exist.
    """
    source = source_of(page)

    def rewrite(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        text = LINK.sub(rewrite, text)  # a picture may stand in a link
        path, _, anchor = target.partition("#")
        if not path:
            return f"{picture}[{text}]({target})"
        there = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (ROOT / there).exists() and posixpath.dirname(there) != "docs/encodings":  # of a new one, mkdocs decides
            raise FileNotFoundError(f"{source} links to {target}, which does not exist.")
        to = page_of(there)
        if to is None:
            return text
        if result := RESULTS.fullmatch(there):
            anchor = anchor or result[1]
        relative = posixpath.relpath(to, posixpath.dirname(page) or ".")
        return f"{picture}[{text}]({relative}{'#' + anchor if anchor else ''})"

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(rewrite, part) for part in parts)
