"""One small forward of a model, to see which of its attention layers call us."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from relpos.checkpoints.interface import LISTENERS

TOKENS = 4


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The innermost modules whose class is called attention, by name; without linear attention, which has no scores."""

    def is_attention(module: nn.Module) -> bool:
        kind = type(module).__name__
        return "Attention" in kind and not any(other in kind for other in ("LinearAttention", "LightningAttention"))

    return {
        name: module
        for name, module in model.named_modules()
        if is_attention(module) and not any(is_attention(inner) for inner in module.modules() if inner is not module)
    }


def examples(model: Any) -> Iterator[dict[str, Tensor]]:
    """Inputs for one small forward, the most likely first; none if the model's main input is of an unknown kind."""
    parameter = next(model.parameters())
    config, main = model.config, model.main_input_name

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, device=parameter.device, dtype=parameter.dtype)

    ids = torch.arange(1, 1 + TOKENS, device=parameter.device)[None]
    image = getattr(config, "vision_config", config)
    size, channels = getattr(image, "image_size", None), getattr(image, "num_channels", 3)
    pixels = {} if not isinstance(size, int) else {"pixel_values": zeros(1, channels, size, size)}
    decoder = {"decoder_input_ids": ids[:, :2]} if getattr(config, "is_encoder_decoder", False) else {}
    if main == "input_ids":
        yield {"input_ids": ids, **decoder}
        if pixels:
            yield {"input_ids": ids, **pixels}
    elif main == "pixel_values" and pixels:
        yield {**pixels, **decoder}
    elif main == "input_values":
        yield {main: zeros(1, 4000), **decoder}
    elif main == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        yield {main: zeros(1, config.num_mel_bins, 2 * config.max_source_positions), **decoder}
    if main == "input_features":
        for name in ("feature_projection_input_dim", "num_mel_bins"):  # conformers: frames, then features
            if hasattr(config, name):
                yield {main: zeros(1, 16 * TOKENS, getattr(config, name)), **decoder}


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


def run(model: nn.Module, candidates: Iterable[Mapping[str, Any]]) -> None:
    """Run the first of some inputs that the model accepts.

    Raises:
        ValueError: It accepts none of them.
    """
    failure: Exception | None = None
    for inputs in candidates:
        try:
            model(**inputs)
        except Exception as error:  # a model's own code may raise anything for inputs that it does not expect
            failure = error
        else:
            return
    reason = "what its input is like is not known" if failure is None else f"{type(failure).__name__}: {failure}"
    raise ValueError(
        f"relpos.use runs one small forward of a model, and that of {type(model).__name__} failed ({reason}). Give its "
        "inputs: relpos.use(model, example={…}). The model is left as it was."
    ) from failure


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

    def listen(module: nn.Module, *_: object) -> None:
        heard.add(module)

    LISTENERS.append(listen)
    try:
        with evaluating(model):
            run(model, examples(model) if inputs is None else [inputs])
    finally:
        LISTENERS.remove(listen)
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
