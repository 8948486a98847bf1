"""relpos in transformers' attention interface: `attn_implementation="relpos"`, and the name that `relpos.use` gives."""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel

from relpos.models.attention_interface import EARLIER, relpos_attention
from relpos.models.key_mask import described_mask, interval_mask

BY_NAME = "relpos"  # asked for by the user: attn_implementation="relpos"
NAME = "relpos.use"  # given by `relpos.use` to a model that it has checked
REPLACED = "relpos_replaced"  # the same, for families outside the interface whose attention it replaced


def register() -> None:
    """Put our functions into transformers' interfaces. Doing it again changes nothing.

    transformers accepts a registered name for any model when it is built, also for one whose layers do not call the
    interface. Such a model asks for a mask, if for anything, and is refused there (`named_mask`).
    """
    AttentionInterface.register(BY_NAME, relpos_attention)
    AttentionMaskInterface.register(BY_NAME, named_mask)
    AttentionInterface.register(NAME, checked_attention)
    AttentionMaskInterface.register(NAME, interval_mask)
    AttentionMaskInterface.register(REPLACED, described_mask)


def checked_attention(module: nn.Module, *arguments: Any, **keywords: Any) -> tuple[Tensor, None]:
    """The same as `relpos_attention`, for layers that `relpos.use` has checked."""
    if getattr(module, EARLIER, None) is None:
        raise ValueError(
            f"{type(module).__name__} runs on relpos by the name in its configuration, and relpos has not checked its "
            "model: call relpos.use(model)."
        )
    return relpos_attention(module, *arguments, **keywords)


def named_mask(config: Any = None, **arguments: Any) -> Any:
    """The mask of a model with `attn_implementation="relpos"`.

    Raises:
        ValueError: The layers of this model do not call the interface, and would misread our mask.
    """
    if not calls_interface(config):
        kind = getattr(config, "model_type", type(config).__name__)
        raise ValueError(
            f'attn_implementation="relpos" cannot run the model type {kind!r}: its attention does not call '
            "transformers' attention interface. Build it without the name, then call relpos.use(model), which replaces "
            "the attention of some families, or says why it cannot."
        )
    return interval_mask(config, **arguments)


def calls_interface(config: Any) -> bool:
    """Whether the code of the model class that transformers has for a configuration calls the attention interface."""
    try:
        model = AutoModel._model_mapping[type(config)]
    except KeyError:  # code from elsewhere, which only `relpos.use` can check
        return False
    return bool(model._can_set_attn_implementation())
