"""relpos in transformers' attention interface: `attn_implementation="relpos"`, and the name that `relpos.use` gives."""

import inspect
import re
import sys
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, PreTrainedModel

from relpos.models.attention_interface import EARLIER, relpos_attention
from relpos.models.key_mask import described_mask, interval_mask

BY_NAME = "relpos"  # asked for by the user: attn_implementation="relpos"
NAME = "relpos.use"  # given by `relpos.use` to a model that it has checked
REPLACED = "relpos_replaced"  # the same, for families outside the interface whose attention it replaced
ATTENTION_CLASS = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)
CLASS_BY_NAME = re.compile(r"_CLASSES\[(self\.)?config\._attn_implementation\]")  # Falcon, GPT-J, GPT-Neo, GIT


@cache  # once per process
def register() -> None:
    """Put our functions into transformers' interfaces. Doing it again changes nothing.

    transformers accepts a registered name for any model, also for one whose layers do not call the interface. Two
    checks refuse such a model: one while it is built, by the code of its class (`refuse_own_attention`, called by
    PyTorch when a module gets a submodule), and, where that code cannot be read, one when it asks for its mask
    (`named_mask`).
    """
    AttentionInterface.register(BY_NAME, relpos_attention)
    AttentionMaskInterface.register(BY_NAME, named_mask)
    AttentionInterface.register(NAME, checked_attention)
    AttentionMaskInterface.register(NAME, interval_mask)
    AttentionMaskInterface.register(REPLACED, described_mask)
    register_module_module_registration_hook(refuse_own_attention)


def checked_attention(module: nn.Module, *arguments: Any, **keywords: Any) -> tuple[Tensor, None]:
    """The same as `relpos_attention`, for layers that `relpos.use` has checked."""
    if getattr(module, EARLIER, None) is None:
        raise ValueError(
            f"{type(module).__name__} runs on relpos by the name in its configuration, and relpos has not checked its "
            "model: call relpos.use(model)."
        )
    return relpos_attention(module, *arguments, **keywords)


def refuse_own_attention(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Refuse a model with `attn_implementation="relpos"` when it gets its first submodule.

    Raises:
        ValueError: The layers of this model do not call the interface, so it would run without relpos.
    """
    named = isinstance(module, PreTrainedModel) and module.config._attn_implementation == BY_NAME
    if named and has_own_attention(type(module).__module__):
        raise outside_interface(module.config)


def named_mask(config: Any = None, **arguments: Any) -> Any:
    """The mask of a model with `attn_implementation="relpos"`.

    Raises:
        ValueError: The layers of this model do not call the interface, and would misread our mask.
    """
    if not calls_interface(config):
        raise outside_interface(config)
    return interval_mask(config, **arguments)


def outside_interface(config: Any) -> ValueError:
    """The error for a model whose layers do not call the interface."""
    kind = getattr(config, "model_type", type(config).__name__)
    return ValueError(
        f'attn_implementation="relpos" cannot run the model type {kind!r}: its attention does not call '
        "transformers' attention interface. Build it without the name, then call relpos.use(model), which replaces "
        "the attention of some families, or says why it cannot."
    )


def calls_interface(config: Any) -> bool:
    """Whether the code of the model class that transformers has for a configuration calls the attention interface."""
    try:
        model = AutoModel._model_mapping[type(config)]
    except KeyError:  # code from elsewhere, which only `relpos.use` can check
        return False
    return bool(model._can_set_attn_implementation())


@cache
def has_own_attention(module: str) -> bool:
    """Whether the attention classes of a Python module do not call the interface; False if its code cannot be read.

    A module without attention classes (Mamba, or a model that only joins others) has nothing to refuse.
    """
    if module.partition(".")[0] == "relpos":
        return False
    try:
        code = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return False
    without_interface = ATTENTION_CLASS.search(code) and "ALL_ATTENTION_FUNCTIONS.get_interface(" not in code
    return bool(without_interface or CLASS_BY_NAME.search(code))
