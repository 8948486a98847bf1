"""Write the generated parts of the documents: `make pages`.

The pages of the encodings, the settings and the command line are committed, so that they can be read on GitHub; a test
says when they are older than the code.
"""

import relpos
from relpos.encodings.registry import FILES
from website import cards, command_line, settings_table
from website.blocks import replaced
from website.repository import ROOT

ENCODINGS = ROOT / "docs" / "encodings"
REFERENCE = ROOT / "docs" / "reference"
PLACES = {  # sections of the overview
    "score": "On the scores: an additive bias",
    "query and key": "On queries and keys",
    "embedding": "On the embedding",
    "nowhere": "Nowhere",
}


def generated() -> dict[str, str]:
    """Every document with generated parts, by its path in the repository, as it should be."""
    documents = {f"docs/encodings/{name}.md": encoding_page(name) for name in FILES}
    parts = {
        "docs/encodings/index.md": ("list", overview()),
        "docs/reference/settings.md": ("settings", settings_table.tables()),
        "docs/reference/commands.md": ("commands", command_line.reference()),
    }
    for path, (name, content) in parts.items():
        documents[path] = replaced((ROOT / path).read_text(encoding="utf-8"), name, content)
    return documents


def encoding_page(name: str) -> str:
    """The page of an encoding; a new one if it has none."""
    file = ENCODINGS / f"{name}.md"
    return cards.page(name, file.read_text(encoding="utf-8") if file.exists() else None)


def overview() -> str:
    """A list of all encodings by place."""
    sections = []
    for place, title in PLACES.items():
        names = [name for name in FILES if relpos.card(name).place == place]
        rows = [f"| [{name}]({name}.md) | {relpos.card(name).summary} |" for name in names]
        if rows:
            sections.append("\n".join([f"## {title}", "", "| name | what it is |", "|---|---|", *rows]))
    return "\n\n".join(sections)


def without_middle() -> list[str]:
    """Names of the encodings whose page nobody has written by hand."""
    return [name for name in FILES if cards.UNWRITTEN in encoding_page(name)]


def main() -> None:
    """Write what is not current."""
    for path, text in generated().items():
        file = ROOT / path
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
