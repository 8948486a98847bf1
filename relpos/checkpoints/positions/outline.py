"""A model without weights, from its configuration: what can be known before anything is loaded."""

from typing import Any

import torch
import transformers
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

LAYERS = 10_000  # more than any model has


def outline(config: PreTrainedConfig) -> PreTrainedModel:
    """The modules of a model on the "meta" device, which holds shapes and no values.

    Args:
        config: Of a model of transformers, or of ours.

    Returns:
        The model without a head, or the class that the configuration names where there is no other.

    Raises:
        ValueError: No model can be built from it; the message has the reason.
    """
    depth = max((getattr(each, "num_hidden_layers", None) or 0 for each in parts(config)), default=0)
    if not isinstance(depth, int) or depth > LAYERS:
        raise ValueError(f"the configuration has {depth!r} layers; up to {LAYERS:,} are read.")
    try:
        with torch.device("meta"), no_init_weights():
            if type(config) in AutoModel._model_mapping:
                model: PreTrainedModel = AutoModel.from_config(config)
                return model
            return named_class(config)(config)
    except Exception as error:  # a model's own code may raise anything for entries that contradict each other
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"no model can be built from this {type(config).__name__} ({reason}).") from error


def parts(config: Any) -> list[Any]:
    """A configuration and those inside it."""
    inside = [getattr(config, name, None) for name in config.sub_configs]
    return [config, *(each for part in inside if isinstance(part, PreTrainedConfig) for each in parts(part))]


def named_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that a configuration names.

    Raises:
        ValueError: It names none.
    """
    for name in config.architectures or []:
        if isinstance(getattr(transformers, name, None), type):
            return getattr(transformers, name)
    raise ValueError(f"transformers has no model of type {config.model_type!r}")
