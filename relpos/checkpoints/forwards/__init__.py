"""The attention layers that do not call transformers' interface, one file per family: their forward, on ours.

`FORWARDS` names the functions that replace methods of a class's instances. The projections, caches and residuals are
the model's own; only what turns queries, keys, values and a bias into a result is ours.
"""

from collections.abc import Callable
from typing import Any

from relpos.checkpoints.forwards import bloom, falcon, mpnet, mpt

FORWARDS: dict[str, dict[str, Callable[..., Any]]] = {  # by the name of the class, by the name of the method
    "BloomAttention": {"forward": bloom.forward},
    "FalconAttention": {"forward": falcon.forward},
    "MPNetEncoder": {"compute_position_bias": mpnet.compute_position_bias},
    "MPNetSelfAttention": {"forward": mpnet.forward},
    "MptAttention": {"forward": mpt.forward},
}
