"""What is known of a model from its configuration alone."""

from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel

from relpos.models.registry import PREFIX
from relpos.pretrained.positions.outline import outline
from relpos.pretrained.positions.registry import layer_positions, summary
from relpos.pretrained.transplant import THEIRS
from relpos.pretrained.use import refused_part


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
        transplant=config.model_type.removeprefix(PREFIX) in THEIRS,
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
    rows = table_rows(model) or (getattr(config, "position", None) or {}).get("length")
    entries = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len", "n_positions"))
    return rows or next((entry for entry in entries if isinstance(entry, int)), None)


def table_rows(model: PreTrainedModel) -> int | None:
    """The rows of a model's table of positions that tokens can have; None if it has no table."""
    rows = [len(position.table) for position in layer_positions(model) if position.table is not None]
    return rows[-1] if rows else None
