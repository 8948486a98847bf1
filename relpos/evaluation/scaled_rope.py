"""Scalings of RoPE on a model that was trained without them: the same weights, other angles."""

from collections.abc import Mapping
from typing import Any

from relpos.encodings.registry import card
from relpos.forms.rotation import SCALINGS
from relpos.models.family import Family
from relpos.models.plan import layer_encodings, make_encoding
from relpos.runs.run import Run, open_run
from relpos.system.errors import unknown


def scaled_run(run: Run, scaling: str, length: int) -> Run:
    """Open a run again with a scaled RoPE.

    Args:
        run: A run with RoPE.
        scaling: A name, or name:factor, as in yarn:4.
        length: Number of tokens that the model will read; the default factor depends on it.

    Returns:
        The run with the same weights and other angles.
    """
    return open_run(run.folder, _position(run, scaling, length))


def check_scaling(run: Run, scaling: str) -> None:
    """Check that a scaling can be applied to a run, before anything is computed.

    Raises:
        ValueError: The run has no RoPE, its trained length is not known, or there is no such scaling.
    """
    config = run.model.config
    ours = isinstance(run.family, Family)
    if not ("rope_parameters" in card(run.encoding).options if ours else "rotary" in run.encoding):
        raise ValueError(f"a RoPE scaling is for models with rope, and {run.folder} has {run.encoding}.")
    if run.trained_length is None:
        raise ValueError(f"{run.folder} does not say at which length it was trained, which a scaling needs.")
    if not ours:  # transformers checks what it reads
        scaled_run(run, scaling, run.trained_length)
        return
    for position in layer_encodings(_position(run, scaling, run.trained_length), config.num_hidden_layers):
        make_encoding(position, config.num_attention_heads, config.size_of_head, config.hidden_size)


def _position(run: Run, scaling: str, length: int) -> dict[str, Any]:
    """The run's encoding with a scaling, also in the layers that a plan gives a rope of their own.

    The default factor is length / trained length, and 1 up to the trained length. That of dynamic is 1, because dynamic
    reads the length itself.
    """
    name, colon, text = scaling.partition(":")
    if name not in SCALINGS:
        raise unknown("RoPE scaling", name, SCALINGS)
    trained = run.trained_length
    assert trained is not None
    try:
        factor = float(text) if colon else max(1.0, length / trained) if name != "dynamic" else 1.0
    except ValueError:
        raise ValueError(f"a scaling is a name or name:factor, as in yarn:4, not {scaling!r}.") from None
    scaled = {"rope_type": name, "factor": factor}
    scaled |= {"max_position_embeddings": trained, "original_max_position_embeddings": trained}

    def with_scaling(position: Mapping[str, Any]) -> dict[str, Any]:
        return {**position, "rope_parameters": {**(position.get("rope_parameters") or {}), **scaled}}

    if not isinstance(run.family, Family):
        return with_scaling({"name": "rope"})
    position = with_scaling(run.model.config.position)
    if position.get("plan"):
        position["plan"] = [with_scaling(rule) if _names_rope(rule) else rule for rule in position["plan"]]
    return position


def _names_rope(rule: Mapping[str, Any]) -> bool:
    """Whether a rule of a plan names an encoding of its own that can be scaled."""
    return "name" in rule and "rope_parameters" in card(rule["name"]).options
