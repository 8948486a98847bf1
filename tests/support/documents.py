"""What the documents hold: their code blocks, the commands in them, their links."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(file for folder in ("docs", "native", "benchmarks", "tests") for file in ROOT.glob(f"{folder}/**/*.md")),
    ]
)
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^>\n]+) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```"
    r"|^<!-- setup\n(?P<setup>.*?)^-->",
    flags=re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A code block, or a hidden one in an HTML comment that prepares what the others need."""

    language: str  # as written; "setup" for a hidden one, which is Python
    code: str
    reason: str | None = None  # why it is not run; None if it is run


def name(document: Path) -> str:
    return str(document.relative_to(ROOT))


def all_blocks(document: Path) -> list[Block]:
    """The code blocks of a document in order."""
    found = BLOCK.finditer(document.read_text(encoding="utf-8"))
    return [
        Block("setup", match["setup"]) if match["setup"] else Block(match["language"], match["code"], match["reason"])
        for match in found
    ]


def blocks(document: Path, language: str) -> list[str]:
    """The code blocks of a language."""
    return [block.code for block in all_blocks(document) if block.language == language]


def commands_of(code: str) -> list[list[str]]:
    """The words of every command of a shell block, continued lines joined and comments left out."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def commands(document: Path) -> list[list[str]]:
    """The words of every command in its shell blocks."""
    return [words for code in blocks(document, "sh") for words in commands_of(code)]


def inline_commands(document: Path) -> list[str]:
    """Commands of relpos in code spelling within the text; those with a word in capitals are left out."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = [" ".join(words.split()) for words in re.findall(r"`(relpos [a-z]+ [^`]*)`", text)]
    return [command for command in found if "…" not in command and not re.search(r"\b[A-Z]{2,}\b|\\|\[", command)]


def relpos_arguments(words: list[str]) -> list[str] | None:
    """What a command gives to relpos, also through torchrun or accelerate; None if it does not call it."""
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]  # variables of the environment
    if words[0] == "relpos":
        return words[1:]
    return words[words.index("relpos.cli") + 1 :] if "relpos.cli" in words else None


def anchors(document: Path) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
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
