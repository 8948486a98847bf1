"""The encodings: one file per paper, and the registry.

Every encoding's class can be imported from here: `from relpos.encodings import Alibi, Cable`.
"""

import importlib
from typing import Any

from relpos.encodings.registry import FILES, card, names, register
from relpos.forms.cards import Card, Option

__all__ = ["Card", "Option", "card", "names", "register"]


def __getattr__(name: str) -> Any:
    # A class is imported on first use, so that importing relpos does not wait for torch.
    for file, cls in FILES.values():
        if cls == name:
            return getattr(importlib.import_module(f"relpos.encodings.{file}"), cls)
    raise AttributeError(f"module 'relpos.encodings' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(cls for _, cls in FILES.values())])
