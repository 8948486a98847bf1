"""`relpos.transplant`: a trained model with other positions."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from relpos.forms.encoding import Encoding
from relpos.models.family import Family, get_family
from relpos.models.plan import Position, PositionEntry, read_position, start_again
from relpos.models.saved import listed

ORIGINALS: dict[str, type[PreTrainedModel]] = {"gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM}  # by family
OF_THE_CLASS = ("model_type", "architectures", "transformers_version", "quantization_config")  # not of the weights


def transplant(
    model: Any,
    position: str | Mapping[str, Any] | None,
    /,
    *,
    share_position: bool | None = None,
    seed: int = 0,
    **options: Any,
) -> PreTrainedModel:
    """Copy a trained model, with its positional encoding replaced.

    All weights but those of positions are copied: embeddings (tied or not), biases, norms. So are the special tokens,
    the generation config and the dtype. GPT-2's table of positions (`wpe`) is dropped, unless the new encoding is
    `learned`. An encoding that a layer had before, with the same options, keeps its parameters; every other one starts
    with its start values. The model then has to be fine-tuned: `relpos train --from` does both.

    `relpos.transplant(model, "nope")` is the first step of DroPE (arXiv 2512.12167): drop rope after pretraining, then
    train briefly at the trained length, which makes the model usable at longer ones.

    Args:
        model: A `GPT2LMHeadModel` or `LlamaForCausalLM` of transformers, a relpos model of the family gpt2 or llama, or
            a run (`relpos.open`) with one of these. It is not changed.
        position: Name of an encoding (`relpos.names()`), or a dictionary with a name, options and a plan by layer, as
            in {"name": "rope", "plan": [{"every": 4, "name": "nope"}]}; None for the model's own.
        share_position: Whether all layers share one encoding. Default: as in the model.
        seed: Seed of the start values of the new encodings.
        options: Options of the encoding. If the model has this encoding already, those that are not given are its own:
            "rope" for a Llama keeps its theta and its scaling, and changes nothing.

    Returns:
        A `RelposGPT2ForCausalLM` or `RelposLlamaForCausalLM` with weights of its own.

    Raises:
        TypeError: It is not a model of transformers.
        ValueError: The model is of another family or has something that ours cannot express; or there is no such
            encoding or option.

    Example:
        >>> model = relpos.transplant(AutoModelForCausalLM.from_pretrained("gpt2"), "kerple_log")
        >>> model.save_pretrained("gpt2-kerple")  # AutoModelForCausalLM opens it after `import relpos.models`
    """
    source = model if isinstance(model, nn.Module) else getattr(model, "model", model)
    family = _family(source)
    before = _config(source, family)
    new = merge_position(before.position, {**read_position(position, before.position), **options})
    share = before.share_position if share_position is None else share_position
    after = family.config_class(**_entries(before), position=new, share_position=share)
    old = _skeleton(source, family, before)
    result = _start_encodings(family, after, seed)
    _fill(result, old, source)
    result.generation_config = copy.deepcopy(source.generation_config)
    return result.train(source.training)


def merge_position(own: Position, new: Position) -> PositionEntry:
    """The position of a transplanted model; of the same encoding, with the model's own options where none are given."""
    if new["name"] != own["name"]:
        return dict(new)
    requested = new.keys() - {"name", "plan", "window"}
    if requested and "rope_parameters" in own.keys() - requested:
        raise ValueError(
            f"the model has {own['name']} with rope_parameters={own['rope_parameters']}, which override "
            f"{', '.join(sorted(requested))}: give complete rope_parameters instead."
        )
    if own["name"] == "learned" and new.get("length", own.get("length")) != own.get("length"):
        raise ValueError(
            f"the model has learned {own['length']} positions, and a table of {new['length']} would have to start "
            "anew: leave out length, or choose an encoding without a limit."
        )
    return {**own, **new}


def _family(source: Any) -> Family:
    """The family that a model can be expressed in."""
    if not isinstance(source, PreTrainedModel):
        raise TypeError(
            f"relpos.transplant takes a model of transformers or a run, not {type(source).__name__}: open a folder "
            "with relpos.open."
        )
    for name, original in ORIGINALS.items():
        family = get_family(name)
        if type(source) in (original, family.model_class):
            return family
    known = [cls.__name__ for name, cls in ORIGINALS.items() for cls in (cls, get_family(name).model_class)]
    way_on = "relpos.use(model) runs it with its own positions; relpos train --encoding NAME trains one from the start"
    raise ValueError(_refusal(source, f"it is not one of {', '.join(known)}. {way_on}"))


def _config(source: PreTrainedModel, family: Family) -> Any:
    """Our configuration of a model as it is, with its own positions."""
    own = {key: getattr(source.config, key) for key in ("position", "share_position") if hasattr(source.config, key)}
    try:
        return family.config_class(**_entries(source.config), **own)
    except (StrictDataclassError, ValueError) as error:
        raise ValueError(_refusal(source, " ".join(str(error).split()).rstrip("."))) from None


def _entries(config: PreTrainedConfig) -> Mapping[str, Any]:
    """What a configuration says, but for positions and its class."""
    left_out = (*OF_THE_CLASS, "position", "share_position")
    return {key: value for key, value in config.to_dict().items() if key not in left_out}


def _skeleton(source: PreTrainedModel, family: Family, config: PreTrainedConfig) -> PreTrainedModel:
    """Our model of the same architecture, without values; refused if it does not have exactly the model's weights."""
    try:
        with torch.device("meta"):
            skeleton = family.model_class(config)
    except ValueError as error:
        raise ValueError(_refusal(source, str(error).rstrip("."))) from None
    shapes, own = ({name: tuple(p.shape) for name, p in each.named_parameters()} for each in (source, skeleton))
    problems = [
        *listed("lacks", sorted(own.keys() - shapes.keys())),
        *listed("has unknown", sorted(shapes.keys() - own.keys())),
        *listed("has other shapes of", sorted(name for name in own if own[name] != shapes.get(name, own[name]))),
    ]
    if problems:
        raise ValueError(_refusal(source, f"it is not the {family.title} that relpos has: it {'; it '.join(problems)}"))
    if any(parameter.is_meta for parameter in source.parameters()):
        raise ValueError(_refusal(source, "weights are on the device meta or offloaded: load it without device_map"))
    quantized = [f"{name} ({p.dtype})" for name, p in source.named_parameters() if not p.is_floating_point()]
    if quantized:
        raise ValueError(_refusal(source, f"weights are quantized, as {quantized[0]}: load it without quantization"))
    return skeleton


def _start_encodings(family: Family, config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A model without values, but for those of its encodings, which have their start values."""
    with torch.device("meta"):
        model = family.model_class(config)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        for path, encoding in _encodings(model).items():
            fresh = start_again(encoding)
            assert fresh is not None
            model.set_submodule(path, fresh)
    return model


def _encodings(model: nn.Module) -> dict[str, Encoding]:
    """The encodings of a model by path, without the parts of an encoding."""
    modules = model.named_modules()
    return {path: module for path, module in modules if isinstance(module, Encoding) and hasattr(module, "origin")}


@torch.no_grad()
def _fill(model: PreTrainedModel, old: PreTrainedModel, source: PreTrainedModel) -> None:
    """Copy the weights of a model, and the parameters of the encodings that stay; move the new ones to its dtype."""
    weights, dtype, device = dict(source.named_parameters()), source.dtype, source.device
    before, after = _encodings(old), _encodings(model)
    stay = [path for path in after if path in before and after[path].origin == before[path].origin]
    copies: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        path = next((path for path in after if name.startswith(f"{path}.")), None)
        if path is None or path in stay:
            copies[name] = weights[name].detach().clone()
        else:
            copies[name] = parameter.to(device, dtype)
    model.load_state_dict(copies, strict=False, assign=True)
    model.tie_weights()
    model.to(device)  # the buffers of encodings; fails if a weight has no values


def _refusal(model: PreTrainedModel, reason: str) -> str:
    name = f"{type(model).__name__} (model type {model.config.model_type!r})"
    return f"relpos.transplant cannot take {name}: {reason}."
