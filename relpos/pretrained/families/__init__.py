"""What relpos knows of particular model types: one file per family that needs code, and tables for the others.

A file's `ADAPTER` says where position lives in the layers of its model types, and which methods of a class are replaced
when `relpos.use` runs it: those whose own code would materialise queries × keys values. Projections, caches and
residuals stay the model's own; only what turns queries, keys, values and a bias into a result is ours. To add a family:
write its file, add it to `ADAPTERS`.
"""

from torch import nn

from relpos.model_catalogue import FAMILIES, PREFIX
from relpos.models.plan import layer_encodings
from relpos.pretrained.families import (
    absolute,
    bloom,
    conformer,
    deberta,
    falcon,
    mpnet,
    mpt,
    rotary,
    swin,
    t5_models,
)
from relpos.pretrained.layer_position import Adapter, LayerPosition, Methods, ModelLayer


def describe_ours(layer: ModelLayer) -> LayerPosition:
    """The encoding of a layer of a relpos model, by name."""
    config = layer.config
    row = layer_encodings(config.position, config.num_hidden_layers)[layer.module.layer]
    options = ", ".join(f"{key}={value}" for key, value in row.items() if key != "name")
    shared = "; one for all layers" if config.share_position else ""
    return LayerPosition(layer.name, "relpos", f"relpos {row['name']}" + (f" ({options})" if options else "") + shared)


OURS = Adapter({f"{PREFIX}{name}" for name in FAMILIES}, describe_ours)
ADAPTERS: list[Adapter] = [  # the first that describes a layer counts: esm is rotary, or else has learned positions
    OURS,
    *(module.ADAPTER for module in (bloom, conformer, deberta, falcon, mpnet, mpt, swin, t5_models)),
    *(module.ADAPTER for module in (rotary, absolute)),
]
METHODS: dict[str, Methods] = {name: methods for adapter in ADAPTERS for name, methods in adapter.methods.items()}


def replacements(module: nn.Module) -> Methods:
    """Our functions for methods of a module; empty for one that keeps its code."""
    kind = type(module)
    return METHODS.get(f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}", {})
