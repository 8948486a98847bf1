"""Parts of a document that a program writes: what stands between two comments."""

import re

COMMENT = "<!-- {name}: written by `make pages` -->"


def block(name: str, content: str) -> str:
    """A generated part with its comments."""
    return f"{COMMENT.format(name=name)}\n\n{content.strip()}\n\n<!-- end of {name} -->"


def replaced(document: str, name: str, content: str) -> str:
    """The document with another content of one generated part.

    Raises:
        ValueError: The document does not have this part exactly once.
    """
    pattern = re.compile(f"{re.escape(COMMENT.format(name=name))}.*?<!-- end of {name} -->", flags=re.DOTALL)
    result, count = pattern.subn(lambda _: block(name, content), document)
    if count != 1:
        raise ValueError(
            f"the document must have one part between {COMMENT.format(name=name)} and its end, not {count}."
        )
    return result
