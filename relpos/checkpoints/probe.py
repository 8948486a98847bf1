"""One small forward of a model, to see which of its attention layers call us."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from relpos.checkpoints.interface import LISTENERS

TOKENS = 4


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The innermost modules whose class is called attention, by name."""
    named = {name: module for name, module in model.named_modules() if "Attention" in type(module).__name__}
    return {
        name: module
        for name, module in named.items()
        if not any("Attention" in type(inner).__name__ for inner in module.modules() if inner is not module)
    }


def example(model: Any) -> dict[str, Tensor]:
    """Inputs for one small forward.

    Raises:
        ValueError: The model's main input is of a kind that we cannot make.
    """
    device = next(model.parameters()).device
    ids = torch.arange(1, 1 + TOKENS, device=device)[None]
    config = model.config
    main = model.main_input_name
    if main == "input_ids":
        inputs = {"input_ids": ids}
    elif main == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        size, channels = config.image_size, getattr(config, "num_channels", 3)
        inputs = {"pixel_values": torch.zeros(1, channels, size, size, device=device, dtype=model.dtype)}
    elif main == "input_values":
        inputs = {"input_values": torch.zeros(1, 4000, device=device, dtype=model.dtype)}
    elif main == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        frames = 2 * config.max_source_positions
        inputs = {"input_features": torch.zeros(1, config.num_mel_bins, frames, device=device, dtype=model.dtype)}
    else:
        raise ValueError(
            f"relpos cannot make an input for {type(model).__name__}, whose main input is {main}: give one, as "
            "relpos.use(model, example={…})."
        )
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids[:, :2]
    return inputs


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, without gradients; each module's mode and the random state are restored."""
    modes = {module: module.training for module in model.modules()}
    state = torch.get_rng_state()
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        torch.set_rng_state(state)


def silent_layers(model: nn.Module, inputs: Mapping[str, Any] | None) -> tuple[int, list[str]]:
    """Run one small forward.

    Args:
        model: The model.
        inputs: Its inputs; if None, they are made here.

    Returns:
        How many layers called us, and the names of attention layers that ran without doing so. A layer that did not
        run (a vision tower, given text) counts as calling us if its code asks for transformers' interface.
    """
    layers = attention_layers(model)
    ran: set[nn.Module] = set()
    heard: set[nn.Module] = set()
    hooks = [layer.register_forward_pre_hook(lambda layer, _: ran.add(layer)) for layer in layers.values()]
    LISTENERS.append(heard)
    try:
        with evaluating(model):
            model(**(example(model) if inputs is None else inputs))
    finally:
        LISTENERS.remove(heard)
        for hook in hooks:
            hook.remove()
    silent = []
    for name, layer in layers.items():
        if layer not in heard and (layer in ran or not asks_for_interface(layer)):
            silent.append(name)
    return len(heard), silent


def asks_for_interface(layer: nn.Module) -> bool:
    """Whether the code of a layer asks for transformers' attention interface."""
    forward = inspect.unwrap(type(layer).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and "get_interface" in code.co_names
