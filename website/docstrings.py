"""What mkdocstrings shows of the code, where it differs from the source."""

import inspect
import re
from typing import Any

import griffe

from website.export import resolve


class Examples(griffe.Extension):
    """Our docstrings have one section Example; the reader of mkdocstrings knows Examples, and shows it as code."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if isinstance(obj, griffe.Function) and any("takes(" in str(each.value) for each in obj.decorators):
            _show_options(obj)
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)


def _show_options(function: griffe.Function) -> None:
    """Show the arguments of a function that are made from its options (relpos/system/options.py)."""
    thing = resolve(function.path)
    function.parameters = griffe.Parameters(
        *(
            griffe.Parameter(
                each.name,
                kind=getattr(griffe.ParameterKind, each.kind.name.lower()),
                annotation=inspect.formatannotation(each.annotation).strip("'"),
                default=None if each.default is inspect.Parameter.empty else repr(each.default),
            )
            for each in inspect.signature(thing).parameters.values()
        )
    )
    if function.docstring is not None:
        function.docstring.value = inspect.getdoc(thing) or ""
