"""Our own models: the encoding of each layer, as the configuration says."""

import torch
from torch import nn

from relpos.encodings.alibi import Alibi
from relpos.encodings.rope import Rope
from relpos.encodings.window import Window
from relpos.forms.encoding import Encoding
from relpos.model_catalogue import FAMILIES, PREFIX
from relpos.models.plan import layer_encodings
from relpos.pretrained.layer_position import Adapter, LayerPosition, ModelLayer, Rotary


def describe(layer: ModelLayer) -> LayerPosition:
    """The encoding of a layer, by name."""
    config = layer.config
    row = layer_encodings(config.position, config.num_hidden_layers)[layer.index]
    options = ", ".join(f"{key}={value}" for key, value in row.items() if key != "name")
    shared = "; one for all layers" if config.share_position else ""
    words = f"relpos {row['name']}" + (f" ({options})" if options else "") + shared
    with torch.device("meta"):  # no values are needed
        acting = [part for part in parts(config.make_position(layer.index + 1)) if part.places]
    acting = [part for part in acting if not isinstance(part, Window)]
    ropes = [part for part in acting if isinstance(part, Rope) and part.axes == 1]
    if len(ropes) == 1:
        return LayerPosition(layer.name, "rotary", words, rotary=rotary_of(ropes[0], layer.length))
    if all(isinstance(part, Alibi) for part in acting):
        return LayerPosition(layer.name, "alibi" if acting else "none", words)
    if all(part.places == ("embedding",) for part in acting):
        learned = any(list(part.parameters()) for part in acting)
        return LayerPosition(layer.name, "learned" if learned else "sinusoidal", words)
    return LayerPosition(layer.name, "relpos", words)


def parts(model: nn.Module) -> list[Encoding]:
    """The encodings of a model, or of a sum of encodings, that are not sums themselves."""
    encodings = [module for module in model.modules() if isinstance(module, Encoding)]
    return [module for module in encodings if not hasattr(module, "parts")]


def rotary_of(rope: Rope, length: int | None) -> Rotary:
    """The rotation of our encoding, in the vocabulary of transformers; for inputs of a length if it depends on it."""
    numbers = rope.rope
    scaling = {
        "rope_theta": numbers.base,
        "rope_type": numbers.scaling,
        "factor": numbers.factor,
        "partial_rotary_factor": numbers.fraction,
    }
    frequencies = numbers.frequencies(torch.full((1, 1), length or numbers.length), torch.float64).reshape(-1)
    return Rotary(frequencies, rope.layout, rope.head_dim, numbers.amplitude, scaling)


ADAPTER = Adapter({f"{PREFIX}{name}" for name in FAMILIES}, describe)
