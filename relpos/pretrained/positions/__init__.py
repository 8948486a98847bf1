"""Where position lives in other people's models: one file per kind of position."""

from relpos.pretrained.positions.description import LayerPosition, Rotary
from relpos.pretrained.positions.registry import layer_positions, summary, summary_of_config

__all__ = ["LayerPosition", "Rotary", "layer_positions", "summary", "summary_of_config"]
