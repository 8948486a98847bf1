"""`relpos.use`: a transformers model on our attention."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.utils import logging

from relpos.checkpoints import t5
from relpos.checkpoints.forwards import replacements
from relpos.checkpoints.interface import NO_WEIGHTS, relpos_attention
from relpos.checkpoints.masks import described_mask, interval_mask
from relpos.checkpoints.probe import silent_layers
from relpos.models.registry import PREFIX

NAME = "relpos"  # of our implementation, in transformers' interfaces
REPLACED = "relpos_replaced"  # the same, for families outside the interface whose attention we replaced
BEFORE = "_relpos_before"  # the implementations of a model's configurations before
HOOK = "_relpos_hook"  # the hook of a model that refuses output_attentions
Model = TypeVar("Model")

OWN_LAYERS = {  # layers that keep their own code beside ours, by class
    "LongT5LocalAttention",  # blocks of the encoder: linear memory already
    "LongT5TransientGlobalAttention",
    "MultiheadAttention",  # PyTorch's own, in pooling heads of one query
}
REFUSED = {
    "xlnet": "its two streams and its segment terms are no form of ours",
}


def use(model: Model, off: bool = False, *, example: Mapping[str, Any] | None = None) -> Model:
    """Run a transformers model's attention on relpos: the same numbers, in memory linear in the length.

    Weights, configuration files and outputs stay as they are. Training, generation with any cache, padding, packed
    sequences, windows, sinks, softcaps, dropout and gradient checkpointing work as before. What is not available is
    `output_attentions`, since the weights are never materialised.

    Args:
        model: Any model of transformers whose attention calls its interface; or BLOOM, DeBERTa, Falcon, MPNet, MPT. A
            run from `relpos.open` stands for its model.
        off: Whether to undo it: the model then runs as before.
        example: Inputs for one small forward, for models whose inputs cannot be guessed.

    Returns:
        The same model, or run.

    Raises:
        TypeError: It is no model of transformers.
        ValueError: An attention layer of this family would not run on ours. The model is left as it was.

    Example:
        >>> model = relpos.use(AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M"))
        >>> model.generate(**inputs)
    """
    if isinstance(own := getattr(model, "model", None), PreTrainedModel) and not isinstance(model, nn.Module):
        use(own, off, example=example)
        return model
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"relpos.use takes a model of transformers (a PreTrainedModel), not {type(model).__name__}.")
    if model.config.model_type.startswith(PREFIX):  # our own models run on our attention anyway
        return model
    in_use = BEFORE in vars(model)
    if off:
        if in_use:
            restore(model)
        return model
    if in_use:
        return model
    if any(config.output_attentions for config in configs(model)):
        raise ValueError(refusal(model, "its configuration has output_attentions=True, and " + NO_WEIGHTS))
    check_family(model)
    register()
    vars(model)[BEFORE] = [config._attn_implementation_internal for config in configs(model)]
    try:
        apply(model)
        calls, silent = silent_layers(model, example)
        silent = [name for name in silent if type(model.get_submodule(name)).__name__ not in OWN_LAYERS]
        if silent or not calls:
            which = f"{silent[0]} ({type(model.get_submodule(silent[0])).__name__})" if silent else "no layer"
            reason = f"{which} did not call us" if silent else "none of its layers called us"
            raise ValueError(refusal(model, f"{reason} in a forward"))
    except BaseException:
        restore(model)
        raise
    return model


def register() -> None:
    """Put our functions into transformers' interfaces. Doing it again changes nothing."""
    for name, mask in ((NAME, interval_mask), (REPLACED, described_mask)):
        AttentionInterface.register(name, relpos_attention)
        AttentionMaskInterface.register(name, mask)


def check_family(model: PreTrainedModel) -> None:
    """Refuse families that are known not to run on ours.

    Raises:
        ValueError: With the reason.
    """
    refused = refused_part(model)
    if refused is not None:
        raise ValueError(refusal(*refused))


def refused_part(model: PreTrainedModel) -> tuple[PreTrainedModel, str] | None:
    """The model, or the model inside it, that is known not to run on ours, and the reason; None if there is none."""
    for part in submodels(model):
        kind = part.config.model_type
        if kind in REFUSED:
            return part, REFUSED[kind]
        if any(getattr(module, "talking_head", False) for module in part.modules()):
            return part, "its talking heads mix the scores of different heads, which no form of ours expresses"
        if not has_replacement(part) and not part._can_set_attn_implementation():
            return part, "its attention does not call transformers' attention interface"
    return None


def has_replacement(model: PreTrainedModel) -> bool:
    """Whether we have code for the attention layers of a model."""
    return any(replacements(module) for module in model.modules())


def refusal(model: PreTrainedModel, reason: str) -> str:
    """The sentence with which a model is refused."""
    name = f"{type(model).__name__} (model type {model.config.model_type!r})"
    return f"relpos.use cannot run {name}: {reason}. The model is left as it was."


def submodels(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The model and the models inside it."""
    return (module for module in model.modules() if isinstance(module, PreTrainedModel))


def configs(model: PreTrainedModel) -> list[Any]:
    """All configurations of a model and of its parts, in a fixed order, each once."""
    waiting = [part.config for part in submodels(model)]
    found: dict[int, Any] = {}
    while waiting:
        config = waiting.pop(0)
        if config is not None and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def apply(model: PreTrainedModel) -> None:
    """Switch a model to our attention."""
    replaced = [part for part in submodels(model) if has_replacement(part) and not part._can_set_attn_implementation()]
    with quiet():
        model.set_attn_implementation(NAME)
    for part in replaced:
        part.config._attn_implementation_internal = REPLACED
    for module in model.modules():
        for method, function in replacements(module).items():
            vars(module)[method] = MethodType(function, module)
    t5.apply(model)
    vars(model)[HOOK] = model.register_forward_pre_hook(refuse_weights, with_kwargs=True)


def refuse_weights(model: nn.Module, arguments: Any, keywords: Mapping[str, Any]) -> None:
    """Refuse `output_attentions`: some models would silently return nothing.

    Raises:
        ValueError: The weights were asked for.
    """
    if keywords.get("output_attentions"):
        raise ValueError(f"output_attentions=True: {NO_WEIGHTS}.")


def restore(model: PreTrainedModel) -> None:
    """Undo `apply`."""
    for config, implementation in zip(configs(model), vars(model).pop(BEFORE), strict=True):
        config._attn_implementation_internal = implementation
    hook = vars(model).pop(HOOK, None)
    if hook is not None:
        hook.remove()
    for module in model.modules():
        for method in replacements(module):
            vars(module).pop(method, None)
    t5.undo(model)


@contextmanager
def quiet() -> Iterator[None]:
    """transformers' log at errors only: it warns of parts outside the interface, which we check ourselves."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
