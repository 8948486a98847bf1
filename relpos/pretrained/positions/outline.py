"""A model without weights, from its configuration: what can be known before anything is loaded."""

import re
from typing import Any

import torch
import transformers
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from relpos.system.system_memory import memory_of_machine

LAYERS = 10_000  # more than any model has; experts likewise
PER_BYTE = 8  # parameters: of one bit each, which is fewer than any quantization has
SMALL = 1_000_000  # parameters that do no harm
LARGEST = 2**63 - 1  # of any size of a tensor
REPEATED = re.compile("(layers?|experts|blocks|depth)$")  # names of entries: how often something is built


def outline(config: PreTrainedConfig) -> PreTrainedModel:
    """The modules of a model on the "meta" device, which holds shapes and no values.

    Args:
        config: Of a model of transformers, or of ours.

    Returns:
        The model without a head, or the class that the configuration names where there is no other.

    Raises:
        ValueError: No model can be built from it; the message has the reason.
    """
    for part in parts(config):
        for name, value in part.to_dict().items():
            most = LAYERS if REPEATED.search(name) else LARGEST
            if isinstance(value, int) and value > most:
                raise ValueError(f"the configuration has {name} = {value:,}; at most {most:,} is possible.")
    try:
        with torch.device("meta"), no_init_weights():
            if type(config) in AutoModel._model_mapping:
                model: PreTrainedModel = AutoModel.from_config(config)
                return model
            return named_class(config)(config)
    except Exception as error:  # a model's own code may raise anything for entries that contradict each other
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"no model can be built from this {type(config).__name__} ({reason}).") from error


def check_sizes(config: PreTrainedConfig, where: str, file_bytes: int) -> None:
    """Check the size of a model before it is built, since tensors that do not fit its files would be made first.

    Args:
        config: Of a model of transformers, or of ours.
        where: Where it comes from, for the error.
        file_bytes: The size of its files of weights.

    Raises:
        ValueError: It has more parameters than this machine has memory, or than its files can hold; or no model can be
            built from the configuration.
    """
    count = sum(parameter.numel() for parameter in outline(config).parameters())
    memory = memory_of_machine()
    size = f"the configuration of {where} describes a model of {count:,} parameters, {4 * count / 2**30:,.1f} GB"
    if 4 * count > memory:
        raise ValueError(f"{size}; this machine has {memory / 2**30:,.1f} GB. Is this its size?")
    if count > PER_BYTE * file_bytes + SMALL:
        raise ValueError(f"{size}, and its weights have {file_bytes:,} bytes. Its configuration is of another model.")


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
