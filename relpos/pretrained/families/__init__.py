"""What relpos knows of particular model types: one file per family that needs code, and tables for the others.

An `Adapter` says where position lives in the layers of its model types, and which attributes of a class are replaced
when `relpos.use` runs it: methods whose own code would materialise queries × keys values. Projections, caches and
residuals stay the model's own; only what turns queries, keys, values and a bias into a result is ours. To add a family:
write its file, add its adapter to `ADAPTERS`.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from relpos.pretrained.families import (
    alibi_models,
    bucket_models,
    conformer,
    deberta,
    position_tables,
    relpos_models,
    rotary,
)
from relpos.pretrained.layer_position import Adapter

ADAPTERS: list[Adapter] = [  # the first that describes a layer counts: esm is rotary, or else has learned positions
    *(module.ADAPTER for module in (relpos_models, alibi_models, bucket_models, conformer, deberta, rotary)),
    *(position_tables.OFFSETS, position_tables.ROWS),
]
ATTRIBUTES = {name: attributes for adapter in ADAPTERS for name, attributes in adapter.attributes.items()}


def replacements(module: nn.Module) -> Mapping[str, Any]:
    """The attributes that a module has on ours, by name, functions as methods; empty for one that keeps its code."""
    kind = type(module)
    return ATTRIBUTES.get(f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}", {})
