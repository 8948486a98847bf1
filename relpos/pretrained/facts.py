"""What is known of a model from its configuration alone, before any weights are loaded."""

import re
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from relpos.model_catalogue import PREFIX
from relpos.pretrained.positions import layer_positions, summary
from relpos.pretrained.probe import configurations
from relpos.pretrained.transplant import ORIGINALS
from relpos.pretrained.use import refused_part
from relpos.system.memory import memory_of_machine

LAYERS = 10_000  # more than any model has; experts likewise
PER_BYTE = 8  # parameters: of one bit each, which is fewer than any quantization has
SMALL = 1_000_000  # parameters that do no harm
LARGEST = 2**63 - 1  # of any size of a tensor
REPEATED = re.compile("(layers?|experts|blocks|depth)$")  # names of entries: how often something is built


@dataclass(frozen=True)
class Facts:
    """A model in numbers and words; of a model with several stacks, the sizes are those of its text decoder."""

    model_type: str
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    trained_length: int | None  # None if the configuration does not limit it
    positions: list[str]  # one line per group of equal layers
    use: bool  # whether relpos.use takes it
    use_reason: str  # why not, or what remains to be checked
    transplant: bool  # whether relpos.transplant takes it


def facts(config: PreTrainedConfig) -> Facts:
    """What is known of a model from its configuration alone.

    Args:
        config: From `relpos.pretrained.source.read_config`.

    Returns:
        Its sizes, its positions in words, and what relpos can do with it.

    Raises:
        ValueError: No model can be built from the configuration.
    """
    model = outline(config)
    text = config.get_text_config(decoder=True)
    sizes = {name: getattr(text, name, None) for name in ("num_hidden_layers", "num_attention_heads", "head_dim")}
    layers, heads = (size if isinstance(size, int) else 0 for size in list(sizes.values())[:2])
    head_dim = sizes["head_dim"] or (text.hidden_size // heads if heads else 0)
    ours = config.model_type.startswith(PREFIX)
    refusal = None if ours else refused_part(model)
    return Facts(
        model_type=config.model_type,
        layers=layers,
        heads=heads,
        key_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        trained_length=longest(model),
        positions=summary(model),
        use=refusal is None,
        use_reason=refusal[1] if refusal else "runs on relpos as it is" if ours else "checked by one small forward",
        transplant=config.model_type.removeprefix(PREFIX) in ORIGINALS,
    )


def longest(model: PreTrainedModel) -> int | None:
    """The most tokens that a model was made for.

    Args:
        model: With or without weights.

    Returns:
        The rows of its table of positions that tokens can have (in RoBERTa and MPNet the first ones belong to padding),
        else the entry of its configuration; None if nothing limits it.
    """
    config = model.config.get_text_config(decoder=True)
    tables = [len(position.table) for position in layer_positions(model) if position.table is not None]
    rows = tables[-1] if tables else (getattr(config, "position", None) or {}).get("length")
    entries = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len", "n_positions"))
    return rows or next((entry for entry in entries if isinstance(entry, int)), None)


def outline(config: PreTrainedConfig) -> PreTrainedModel:
    """The modules of a model on the "meta" device, which holds shapes and no values.

    Args:
        config: Of a model of transformers, or of ours.

    Returns:
        The model without a head, or the class that the configuration names where there is no other.

    Raises:
        ValueError: No model can be built from it; the message has the reason.
    """
    for part in configurations(config):
        for name, value in part.to_dict().items():
            most = LAYERS if REPEATED.search(name) else LARGEST
            if isinstance(value, int) and value > most:
                raise ValueError(f"the configuration has {name} = {value:,}; at most {most:,} is possible.")
    try:
        with torch.device("meta"), no_init_weights():
            if type(config) in AutoModel._model_mapping:
                model: PreTrainedModel = AutoModel.from_config(config)
                return model
            return _named_class(config)(config)
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


def _named_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that a configuration names.

    Raises:
        ValueError: It names none.
    """
    for name in config.architectures or []:
        if isinstance(getattr(transformers, name, None), type):
            return getattr(transformers, name)
    raise ValueError(f"transformers has no model of type {config.model_type!r}")
