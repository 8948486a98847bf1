"""relpos: the positional encodings of attention, exact, in one place.

import relpos
enc = relpos.encoding("kerple_log", heads=12, head_dim=64)
out = relpos.attention(q, k, v, position=enc)
enc.map(512)
"""

from typing import TYPE_CHECKING, Any

from relpos.encodings.registry import card, encoding, names, register
from relpos.models.auto import register_when_imported

if TYPE_CHECKING:
    from relpos.attend import attention as attention
    from relpos.attend import scores as scores
    from relpos.encodings.encoding import Encoding as Encoding

__version__ = "0.1.0"
__all__ = ["Encoding", "attention", "card", "encoding", "names", "register", "scores"]


def __getattr__(name: str) -> Any:
    # What needs torch is imported on first use, so that `relpos --help` and `relpos ls` never wait for it.
    if name in ("attention", "scores"):
        from relpos import attend

        return getattr(attend, name)
    if name == "Encoding":
        from relpos.encodings.encoding import Encoding

        return Encoding
    raise AttributeError(f"module 'relpos' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


register_when_imported()  # so that AutoModelForCausalLM opens our folders; imports nothing by itself
