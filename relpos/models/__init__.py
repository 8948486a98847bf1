"""Language models with any encoding, as transformers models."""

from typing import TYPE_CHECKING, Any

from relpos.models.presets import PRESETS

if TYPE_CHECKING:
    from relpos.models.gpt2 import RelposGPT2ForCausalLM as RelposGPT2ForCausalLM
    from relpos.models.gpt2 import RelposGPT2Model as RelposGPT2Model
    from relpos.models.gpt2_config import RelposGPT2Config as RelposGPT2Config

__all__ = ["PRESETS", "RelposGPT2Config", "RelposGPT2ForCausalLM", "RelposGPT2Model"]


def __getattr__(name: str) -> Any:
    # transformers takes seconds to import, and `import relpos` passes through here.
    if name == "RelposGPT2Config":
        from relpos.models.gpt2_config import RelposGPT2Config

        return RelposGPT2Config
    if name in __all__:
        from relpos.models import gpt2

        return getattr(gpt2, name)
    raise AttributeError(f"module 'relpos.models' has no attribute {name!r}")
