"""Our docstrings have one section Example; the reader of mkdocstrings knows Examples, and shows it as code."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section when a docstring has been read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
