"""One small forward of a model by its own implementation and on ours: which layers call us, and whether all agree."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from relpos.models.attention_interface import captured_calls

TOKENS = 16  # of the shortest probe
WORK = 10**11  # multiplications of a longer one: about a second
RANGES = ("window", "chunk", "local_", "radius", "max_distance", "rel_extent", "compress", "block_size")  # in tokens
GROUPS = ("index_block", "compress")  # tokens that are selected together
LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_source_positions", "max_target_positions")


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The innermost modules whose class is called attention, by name; without linear attention, which has no scores."""

    def is_attention(module: nn.Module) -> bool:
        kind = type(module).__name__
        return "Attention" in kind and not any(
            f"{other}Attention" in kind for other in ("Linear", "Lightning", "Delta")
        )

    return {
        name: module
        for name, module in model.named_modules()
        if is_attention(module) and not any(is_attention(inner) for inner in module.modules() if inner is not module)
    }


def configurations(config: Any) -> list[Any]:
    """A configuration and those inside it, in a fixed order, each once."""
    waiting, known = [config], dict[int, Any]()
    while waiting:
        config = waiting.pop(0)
        if config is not None and id(config) not in known:
            known[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(known.values())


def numbers_of(model: Any, words: Iterable[str]) -> list[int]:
    """The positive integers in a model's configurations whose names contain one of these words."""
    numbers = []
    for config in configurations(model.config):
        for name, value in vars(config).items():
            values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
            if any(word in name for word in words):
                numbers += [n for n in values if isinstance(n, int) and not isinstance(n, bool) and n > 0]
    return numbers


def probe_tokens(model: Any, work: int = WORK) -> int:
    """How many tokens leave every window, chunk and top-k of a model, as far as `work` multiplications go."""
    selected = max(numbers_of(model, ("topk", "top_k")), default=0)
    ranges = [*numbers_of(model, RANGES), selected * max(numbers_of(model, GROUPS), default=1)]
    affordable = max(TOKENS, work // max(1, sum(p.numel() for p in model.parameters())))
    longest = max((n for n in ranges if n + n // 4 + TOKENS <= affordable), default=0)
    limit = min(numbers_of(model, LIMITS), default=affordable)
    return max(TOKENS, min(longest + longest // 4 + TOKENS, limit - 4))  # RoBERTa's table begins after its padding


def token_ids(model: Any, rows: int, tokens: int, seed: int) -> Tensor:
    """Different ids (rows, tokens), without those that have a meaning of their own, such as an image's."""
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None) or TOKENS
    special = {0, *numbers_of(model, ("token_id", "token_index"))}
    usual = torch.tensor([n for n in range(vocabulary) if n not in special] or range(vocabulary))
    generator = torch.Generator().manual_seed(seed)
    return usual[torch.randint(len(usual), (rows, tokens), generator=generator)]


def examples(model: Any, tokens: int = 4, padded: bool = False, seed: int = 0) -> Iterator[dict[str, Tensor]]:
    """Inputs for one small forward, the most likely first; none if the model's main input is of an unknown kind."""
    parameter = next(model.parameters())
    config, main = model.config, model.main_input_name
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(parameter.device, parameter.dtype)

    ids = token_ids(model, 1 + padded, tokens, seed).to(parameter.device)
    text = {"input_ids": ids}
    if padded:  # the second row, on the right
        text["attention_mask"] = torch.ones_like(ids)
        text["attention_mask"][1, tokens - tokens // 4 :] = 0
    image = getattr(config, "vision_config", config)
    size, channels = getattr(image, "image_size", None), getattr(image, "num_channels", 3)
    pixels = {} if not isinstance(size, int) else {"pixel_values": noise(1, channels, size, size)}
    decoder = {}
    if "decoder_input_ids" in inspect.signature(model.forward).parameters and config.is_encoder_decoder:
        decoder = {"decoder_input_ids": ids[:, : tokens // 2] if main == "input_ids" else ids[:1, : tokens // 2]}
    if main == "input_ids":
        yield {**text, **decoder}
        if pixels and not padded:
            yield {**text, **pixels}
    elif main == "pixel_values" and pixels:
        yield {**pixels, **decoder}
    elif main == "input_values":
        yield {main: noise(1, 4000), **decoder}
    elif main == "input_features":
        if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
            yield {main: noise(1, config.num_mel_bins, 2 * config.max_source_positions), **decoder}
        for name in ("feature_projection_input_dim", "num_mel_bins"):  # conformers: frames, then features
            if hasattr(config, name):
                yield {main: noise(1, 64, getattr(config, name)), **decoder}


def probe_inputs(model: Any, seed: int) -> Iterator[dict[str, Tensor]]:
    """Inputs for the probe: long and padded if the model accepts that, else shorter and simpler ones."""
    tokens = probe_tokens(model)
    yield from examples(model, tokens, padded=True, seed=seed)
    if model.main_input_name == "input_ids":
        yield from examples(model, tokens, seed=seed)
        yield from examples(model, seed=seed)


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


@dataclass(frozen=True)
class Forward:
    """One forward of a model: its inputs, and what its attention layers and the model itself returned."""

    inputs: Mapping[str, Any]
    outputs: dict[str, list[Tensor]]  # by the name of the layer, in the order of its calls; the model's own under ""
    called: set[str]  # the attention layers that ran on relpos


def run_own(model: nn.Module, candidates: Iterable[Mapping[str, Any]]) -> Forward:
    """Run a model on the first of some inputs that it accepts."""
    failure: Exception | None = None
    for inputs in candidates:
        try:
            return run(model, inputs)
        except Exception as error:  # a model's own code may raise anything for inputs that it does not expect
            failure = error
    reason = "what its input is like is not known" if failure is None else f"{type(failure).__name__}: {failure}"
    raise ValueError(
        f"relpos.use runs one small forward of a model, and that of {type(model).__name__} failed ({reason}). Give its "
        "inputs: relpos.use(model, example={…}). The model is left as it was."
    ) from failure


def run(model: nn.Module, inputs: Mapping[str, Any]) -> Forward:
    """Run one forward, and keep what the attention layers and the model return."""
    layers = attention_layers(model)
    names = {layer: name for name, layer in layers.items()}
    forward = Forward(inputs, {}, set())

    def keep(layer: nn.Module, arguments: Any, output: Any) -> None:
        forward.outputs.setdefault(names[layer], []).extend(tensors(output)[:1])

    def listen(module: nn.Module, *_: object) -> None:
        forward.called.add(names.get(module, ""))

    hooks = [layer.register_forward_hook(keep) for layer in layers.values()]
    try:
        with evaluating(model), captured_calls(model, listen):
            forward.outputs[""] = tensors(model(**inputs))
    finally:
        for hook in hooks:
            hook.remove()
    return forward


def tensors(output: Any) -> list[Tensor]:
    """The tensors of real numbers that a module returns: without those in tuples and caches inside."""
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else [output]
    return [x.detach() for x in values if isinstance(x, Tensor) and x.is_floating_point()]


def silent_layers(model: nn.Module, forward: Forward) -> list[str]:
    """The names of attention layers that did not run on ours in a forward.

    A layer that did not run at all (a vision tower, given text) counts as running on ours if its code asks for
    transformers' interface.
    """

    def asks_for_interface(layer: nn.Module) -> bool:
        code = getattr(inspect.unwrap(type(layer).forward), "__code__", None)
        return code is not None and "get_interface" in code.co_names

    return [
        name
        for name, layer in attention_layers(model).items()
        if name not in forward.called and (name in forward.outputs or not asks_for_interface(layer))
    ]


def difference(own: Forward, ours: Forward) -> tuple[str, float] | None:
    """The first attention layer, or "" for the model's output, whose numbers differ on our attention.

    With the difference relative to its output, as Euclidean norms over the tokens that are not padding. None if all
    agree to rounding: 1e-3, or 16 times the precision of a half-precision dtype.
    """
    mask = own.inputs.get("attention_mask")
    for name, outputs in [*((name, x) for name, x in own.outputs.items() if name), ("", own.outputs[""])]:
        for expected, computed in zip(outputs, ours.outputs.get(name, []), strict=True):
            values, ours_values = (real_tokens(x, mask) for x in (expected, computed))
            finite = values.isfinite()
            values, ours_values = values[finite].double(), ours_values[finite].double()
            off = float((ours_values - values).norm()) / (float(values.norm()) or 1.0)
            if not off <= max(1e-3, 16 * torch.finfo(expected.dtype).eps):
                return name, off
    return None


def real_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """The values of an output at the tokens that are not padding; all values, if its axes are not those of the mask."""
    if mask is None or mask.dim() != 2:
        return x
    if x.shape[:2] == mask.shape:
        return x[mask.bool()]
    return x[mask.flatten().bool()] if x.shape[0] == mask.numel() else x
