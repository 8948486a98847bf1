"""`relpos.use`: a transformers model on our attention."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from relpos.model_catalogue import PREFIX
from relpos.models.attention_interface import EARLIER, NO_WEIGHTS
from relpos.models.named_attention import BY_NAME, NAME, REPLACED, register
from relpos.pretrained.families import replacements
from relpos.pretrained.probe import Forward, configurations, difference, probe_inputs, run, run_own, silent_layers

BEFORE = "_relpos_before"  # attribute of a model: the implementations of its configurations before, and our hook
Model = TypeVar("Model")

ATTEMPTS = 3  # inputs on which a model's numbers may differ before it is refused
REFERENCES = {"falcon": "sdpa"}  # by model type: its "eager" adds ALiBi twice
OWN_LAYERS = {  # layers that keep their own code beside ours, by class
    "LongT5LocalAttention",  # blocks of the encoder: linear memory already
    "LongT5TransientGlobalAttention",
    "MultiheadAttention",  # PyTorch's own, in pooling heads of one query
}
REFUSED = {"xlnet": "its two streams and its segment terms have no form in relpos"}


def use(model: Model, off: bool = False, *, example: Mapping[str, Any] | None = None) -> Model:
    """Run a transformers model's attention on relpos: the same numbers, in memory linear in the length.

    Weights, configuration files and outputs stay as they are. Training, generation with any cache, padding, packed
    sequences, windows, sinks, softcaps, dropout and gradient checkpointing work as before. What is not available is
    `output_attentions`, since the weights are never materialised.

    The model is checked first: it runs a small forward by its own implementation and one on relpos, and what every
    attention layer and the model return must agree. The text of this forward has a padded row, and enough tokens to
    leave every window, chunk and top-k of the configuration, as far as a second or so of computing goes: 700 tokens for
    135 million weights, 16 for 6 billion. What a model does beyond that is not compared.

    Args:
        model: Any model of transformers whose attention calls its interface; or BLOOM, DeBERTa, Falcon, MPNet, MPT. A
            run from `relpos.open` stands for its model, and so do the wrappers PeftModel, DataParallel,
            DistributedDataParallel and SentenceTransformer.
        off: Whether to undo it: the model then runs as before.
        example: Inputs for the small forward, for models whose inputs cannot be guessed.

    Returns:
        The same model, wrapper or run.

    Raises:
        TypeError: It is not a model of transformers.
        ValueError: An attention layer of this family would not run on ours, or would give other numbers. The model is
            left as it was.

    Example:
        >>> model = relpos.use(AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M"))
        >>> model.generate(**inputs)
    """
    inner = unwrap(model)
    if inner.config.model_type.startswith(PREFIX):  # our own models run on our attention anyway
        return model
    in_use = BEFORE in vars(inner)
    if off and in_use:
        restore(inner)
    elif not off and not in_use:
        if any(config.output_attentions for config in configs(inner)):
            raise ValueError(refusal(inner, "its configuration has output_attentions=True, and " + NO_WEIGHTS))
        refused = refused_part(inner)
        if refused is not None:
            raise ValueError(refusal(*refused))
        register()
        switch(inner, example)
    return model


def unwrap(model: Any) -> PreTrainedModel:
    """The model of transformers that something is, wraps or holds."""
    if isinstance(model, PreTrainedModel):
        return model
    if callable(base := getattr(model, "get_base_model", None)):  # peft
        return unwrap(base())
    if isinstance(model, nn.Module) and isinstance(wrapped := getattr(model, "module", None), nn.Module):
        return unwrap(wrapped)  # DataParallel and DistributedDataParallel
    if isinstance(model, nn.Sequential):  # sentence-transformers: a transformer, then pooling
        for part in model:
            if isinstance(wrapped := getattr(part, "auto_model", None), nn.Module):
                return unwrap(wrapped)
    if not isinstance(model, nn.Module) and isinstance(wrapped := getattr(model, "model", None), PreTrainedModel):
        return wrapped  # a run
    parts = model.named_modules() if isinstance(model, nn.Module) else getattr(model, "__dict__", {}).items()
    hint = next((f": give its .{name}" for name, part in parts if isinstance(part, PreTrainedModel)), "")
    raise TypeError(f"relpos.use takes a model of transformers (a PreTrainedModel), not {type(model).__name__}{hint}.")


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


def submodels(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The model and the models inside it."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def configs(model: PreTrainedModel) -> list[Any]:
    """All configurations of a model and of its parts, in a fixed order, each once."""
    return list({id(config): config for part in submodels(model) for config in configurations(part.config)}.values())


def switch(model: PreTrainedModel, example: Mapping[str, Any] | None) -> None:
    """Switch a model to our attention, if a small forward gives the numbers that it gave before.

    A selection (experts, top-k) may fall differently where two scores are equal to rounding. Such a difference is gone
    with other inputs; a mistake is not.
    """
    layer, size = "", 0.0
    for seed in range(ATTEMPTS):
        with reference(model):
            before = run_own(model, probe_inputs(model, seed) if example is None else [example])
        try:
            apply(model)
            after = run_ours(model, before.inputs)
            off = difference(before, after)
        except BaseException:
            restore(model)
            raise
        if off is None:
            return
        layer, size = off
        restore(model)
    which = f"{layer} ({type(model.get_submodule(layer)).__name__})" if layer else "its output"
    raise ValueError(refusal(model, f"the numbers of {which} differ by {size:.1g} from those without relpos"))


def implementations(model: PreTrainedModel) -> list[str]:
    """The implementations of a model's configurations; transformers' default in place of ours."""
    names = [config._attn_implementation_internal for config in configs(model)]
    return [
        model.get_correct_attn_implementation(None) if name in (BY_NAME, NAME, REPLACED) else name for name in names
    ]


@contextmanager
def reference(model: PreTrainedModel) -> Iterator[None]:
    """The implementation with which a model is compared: its own, but for `REFERENCES`."""
    before = [(config, config._attn_implementation_internal) for config in configs(model)]
    for (config, _), implementation in zip(before, implementations(model), strict=True):
        config._attn_implementation_internal = REFERENCES.get(config.model_type, implementation)
    try:
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


def run_ours(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Forward:
    """Run a model on our attention, with inputs that its own implementation accepts; refused if a layer does not."""
    try:
        forward = run(model, inputs)
    except Exception as error:  # a refusal of ours, or what a model's own code does with our masks
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        raise ValueError(refusal(model, reason.rstrip("."))) from error
    if not forward.called:
        raise ValueError(refusal(model, "none of its layers called us in a forward"))
    for name in silent_layers(model, forward):
        kind = type(model.get_submodule(name)).__name__
        if kind not in OWN_LAYERS:
            raise ValueError(refusal(model, f"{name} ({kind}) did not call us in a forward"))
    return forward


def apply(model: PreTrainedModel) -> None:
    """Switch a model to our attention."""
    hook = model.register_forward_pre_hook(refuse_weights, with_kwargs=True)
    vars(model)[BEFORE] = implementations(model), hook
    replaced = [part for part in submodels(model) if has_replacement(part) and not part._can_set_attn_implementation()]
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns of parts outside the interface, which we check ourselves
    try:
        model.set_attn_implementation(NAME)
    finally:
        logging.set_verbosity(level)
    for part in replaced:
        part.config._attn_implementation_internal = REPLACED
    for module in model.modules():
        attributes = replacements(module)
        vars(module)[EARLIER] = {name: vars(module).get(name) for name in attributes}
        for name, value in attributes.items():
            vars(module)[name] = MethodType(value, module) if callable(value) else value


def refuse_weights(model: nn.Module, arguments: Any, keywords: Mapping[str, Any]) -> None:
    """Refuse `output_attentions`: some models would silently return nothing."""
    if keywords.get("output_attentions"):
        raise ValueError(f"output_attentions=True: {NO_WEIGHTS}.")


def restore(model: PreTrainedModel) -> None:
    """Undo `apply`."""
    before, hook = vars(model).pop(BEFORE)
    hook.remove()
    for config, implementation in zip(configs(model), before, strict=True):
        config._attn_implementation_internal = implementation
    for module in model.modules():
        for name, value in vars(module).pop(EARLIER, {}).items():
            if value is None:  # it is the class's
                del vars(module)[name]
            else:
                vars(module)[name] = value
