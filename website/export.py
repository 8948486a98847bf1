"""The documentation for programs: llms.txt, and all pages as one Markdown file."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

TITLE = re.compile(r"^# (.+)$", flags=re.MULTILINE)
SUMMARY = "The positional encodings of attention, in Python: exact, fast, trainable, visible."


def write(site: Path, pages: list[tuple[str, str, str]]) -> None:
    """Write llms.txt and relpos.md.

    Args:
        site: The folder of the built site.
        pages: Section, address and Markdown of each page, in the order of the navigation.
    """
    whole = [f"# relpos\n\n{SUMMARY}\n"]
    index = [f"# relpos\n\n> {SUMMARY}\n\nAll pages as one file: [relpos.md](relpos.md)\n"]
    last = ""
    for section, address, markdown in pages:
        if section != last:
            index.append(f"\n## {section}\n")
            last = section
        title = TITLE.search(markdown)
        index.append(f"- [{title[1] if title else address}]({address}): {first_sentence(markdown)}")
        whole.append(f"<!-- page: {address} -->\n\n{expanded(markdown).strip()}\n")
    (site / "llms.txt").write_text("\n".join(index) + "\n", encoding="utf-8")
    (site / "relpos.md").write_text("\n\n".join(whole), encoding="utf-8")


def first_sentence(markdown: str) -> str:
    """The first sentence of a page, without links."""
    left_out = r"<!--.*?-->|^#[^\n]*$|^```.*?^```|^\|[^\n]*$|!\[[^\]]*\]\([^)]*\)"
    text = re.sub(left_out, "", markdown, flags=re.MULTILINE | re.DOTALL)
    paragraph = " ".join(text.strip().split("\n\n", 1)[0].split())
    paragraph = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    return re.split(r"(?<=\.)\s", paragraph, maxsplit=1)[0]


def expanded(markdown: str) -> str:
    """The page with signatures and docstrings in place of mkdocstrings' directives."""
    markdown = re.sub(r"<!-- setup\n.*?-->\n?", "", markdown, flags=re.DOTALL)
    return re.sub(r"^::: ([\w.]+)\n(?:    .*\n|\n(?=    ))*", lambda match: documented(match[1]), markdown, flags=re.M)


def documented(path: str) -> str:
    """Signature and docstring of an object by its path."""
    thing, name = resolve(path), path.rsplit(".", 1)[1]
    try:
        signature = f"{name}{inspect.signature(thing)}"
    except (TypeError, ValueError):
        signature = name
    return f"```text\n{signature}\n\n{inspect.getdoc(thing) or ''}\n```\n"


def resolve(path: str) -> Any:
    """The object at a dotted path."""
    module = path
    names: list[str] = []
    while True:
        try:
            thing: Any = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            names.insert(0, name)
    for name in names:
        thing = getattr(thing, name)
    return thing
