"""What the documents hold: their code blocks, the commands in them, their links."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(file for folder in ("docs", "native", "benchmarks", "tests") for file in ROOT.glob(f"{folder}/**/*.md")),
    ]
)


def name(document: Path) -> str:
    return str(document.relative_to(ROOT))


def blocks(document: Path, language: str) -> list[str]:
    """The code blocks of a language."""
    text = document.read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [block for said, block in found if said == language]


def commands(document: Path) -> list[list[str]]:
    """The words of every command in its shell blocks, continued lines joined and comments left out."""
    lines = "\n".join(blocks(document, "sh")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def relpos_arguments(words: list[str]) -> list[str] | None:
    """What a command gives to relpos, also through torchrun or accelerate; None if it does not call it."""
    if words[0] == "relpos":
        return words[1:]
    return words[words.index("relpos.cli") + 1 :] if "relpos.cli" in words else None


def anchors(document: Path) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(document: Path) -> list[tuple[str, str]]:
    """Links and pictures that lead to a file: path (empty: this document) and anchor (empty: none)."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\((?!https?:)([^)\s]+)\)", text)
    return [(path, anchor) for path, _, anchor in (target.partition("#") for target in targets)]


def files_named(document: Path) -> set[str]:
    """Files of this repository that its text names by their path, in code spelling."""
    text = document.read_text(encoding="utf-8")
    return set(re.findall(r"`(?:python )?((?:relpos|tests|benchmarks|docs|native)/[\w./-]+\.\w+)", text))
