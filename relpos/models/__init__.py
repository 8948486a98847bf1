"""Models with any encoding, as transformers models: one file per family, behind the interface in `family`.

from relpos.models import RelposLlamaConfig, RelposLlamaForCausalLM

model = RelposLlamaForCausalLM(RelposLlamaConfig.preset("nano", position="cable", vocab_size=4096))
"""

import importlib
from typing import Any

from relpos.models.presets import PRESETS
from relpos.models.registry import FAMILIES

_CLASSES = {cls: family for family, entry in FAMILIES.items() for cls in entry.classes.values()}  # class: its file

__all__ = ["FAMILIES", "PRESETS"]
__all__ += list(_CLASSES)


def __getattr__(name: str) -> Any:
    # transformers takes seconds to import, and `import relpos` passes through here.
    if name in _CLASSES:
        return getattr(importlib.import_module(f"relpos.models.{_CLASSES[name]}"), name)
    raise AttributeError(f"module 'relpos.models' has no attribute {name!r}")
