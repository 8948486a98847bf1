"""Models of relpos: the encoding of each layer, by name."""

from relpos.models.positions import layer_positions
from relpos.models.registry import FAMILIES as OURS
from relpos.models.registry import PREFIX
from relpos.pretrained.positions.description import LayerPosition
from relpos.pretrained.positions.place import Place

FAMILIES = {f"{PREFIX}{name}" for name in OURS}


def describe(place: Place) -> LayerPosition | None:
    """The encoding of one layer."""
    config = place.config
    row = layer_positions(config.position, config.num_hidden_layers)[place.layer.layer]
    options = ", ".join(f"{key}={value}" for key, value in row.items() if key != "name")
    shared = "; one for all layers" if config.share_position else ""
    main = f"relpos {row['name']}" + (f" ({options})" if options else "") + shared
    return LayerPosition(place.name, "relpos", main)
