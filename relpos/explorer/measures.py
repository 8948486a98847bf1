"""What is measured on a head: its range and colours, its profile by distance, its attention mass and class."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from relpos.explorer.model_scenes import ModelScene
from relpos.explorer.scenes import Scene
from relpos.explorer.tensor_subjects import TensorScene
from relpos.maps.diagonals import spread
from relpos.maps.entries import Entries
from relpos.maps.head_values import flat_values
from relpos.maps.heads.head_classes import LEAST_LENGTH, HeadClass, class_heads
from relpos.maps.heads.mass_profiles import MassProfile, layer_mass
from relpos.maps.layer import Layer
from relpos.maps.tensors import mean_entropy, tensor_mass
from relpos.maps.toeplitz import FlatContent
from relpos.maps.values import HeadValues
from relpos.pictures.colours import LEAST_WEIGHT, both_signs

WEIGHTS = ("weights", "flat")  # kinds of values with a logarithmic colour scale
CLASS_LENGTH = 8192  # tokens up to which heads are classed: the fits take longer than linear time
MASS_LENGTH = 4096  # tokens up to which the mass of content that is not a function of the distance is computed


def colours(show: str, low: float, high: float) -> dict[str, Any]:
    """The range of the colours of a map, the name of the colour map, and whether it is logarithmic."""
    if show in WEIGHTS:
        low, high = max(low, LEAST_WEIGHT), max(high, 2 * LEAST_WEIGHT)
        return {"low": low, "high": high, "colour_map": "weights", "log": True}
    name = "diverging" if both_signs(low, high) else "sequential"
    return {"low": low + 0.0, "high": high + 0.0, "colour_map": name, "log": False}


@dataclass(frozen=True)
class LayerMass:
    """The attention mass of a layer, and the classes of its heads."""

    profile: MassProfile
    classes: list[HeadClass]


def attention_layer(scene: Scene, show: str, number: int) -> Layer | None:
    """The layer whose attention is measured: on the input, or of equal content; None if that would take too long."""
    if isinstance(scene, ModelScene) and scene.reads_input and show != "flat":
        return scene.layer("weights", number)
    layer = scene.layer(show, number)
    return layer if "weights" in scene.shows and show != "flat" else layer.without_content() if layer.form else layer


def mass_of_layer(scene: Scene, show: str, number: int) -> LayerMass | None:
    """The mass and the classes of a layer; None if it is too long, or too short to be classed."""
    kind = "flat" if show == "flat" else "content"
    return scene.measured(("mass", kind, number), lambda: _mass_of_layer(scene, show, number))


def _mass_of_layer(scene: Scene, show: str, number: int) -> LayerMass | None:
    if isinstance(scene, TensorScene):
        if show != "weights" or not LEAST_LENGTH <= scene.length <= MASS_LENGTH:
            return None
        profile = tensor_mass(scene.tensor.layers[number - 1], number)
        return LayerMass(profile, class_heads([profile])[0])
    layer = attention_layer(scene, show, number)
    if layer is None or not LEAST_LENGTH <= layer.length <= CLASS_LENGTH:
        return None
    content = bool(layer.q.any()) if layer.q.shape[-1] > 1 else False
    if not content and layer.even_by_distance and layer.causal:
        profile = _flat_profile(layer)
    elif layer.length <= MASS_LENGTH:
        profile = layer_mass(_contiguous(layer))
    else:
        return None
    return LayerMass(profile, class_heads([profile])[0])


def _contiguous(layer: Layer) -> Layer:
    """The layer with q and k in memory of their own: the kernel reads no expanded tensors."""
    return replace(layer, q=layer.q.contiguous(), k=layer.k.contiguous())


def _flat_profile(layer: Layer) -> MassProfile:
    """The mass of equal content under a bias by distance: mass(d) = e^b(d) · Σ_{i ≥ d} 1 / Z_i / length."""
    values = layer.values_by_distance("bias")  # (heads, length)
    lse = torch.where(values.isfinite(), values, -torch.inf).logcumsumexp(dim=1)  # log Z_i
    after = (-lse).flip(1).logcumsumexp(dim=1).flip(1)  # log Σ_{i ≥ d} 1 / Z_i
    whole = torch.where(values.isfinite(), values + after, -torch.inf).exp() / layer.length
    first = torch.where(values.isfinite(), values - lse, -torch.inf).exp()  # of key 0: at distance i of query i
    by_distance = (whole - first / layer.length).clamp(min=0)
    seen = layer.length if bool(values.isfinite().all()) else int(values.isfinite().any(dim=0).nonzero().max()) + 1
    window = None if seen >= layer.length else (seen - 1, 0)
    return MassProfile(
        layer.number,
        layer.length,
        True,
        window,
        1,
        torch.arange(layer.length),
        by_distance,
        first.sum(dim=1) / layer.length,
    )


def entropy(scene: Scene, show: str, number: int, head: int) -> float | None:
    """The mean entropy of a head's attention in nats, over the queries; None if that would take too long."""
    if isinstance(scene, TensorScene):
        return mean_entropy(scene.values(show, number, head + 1)) if show == "weights" else None
    layer = attention_layer(scene, show, number)
    if layer is None:
        return None
    source = flat_values(layer, head) if layer.q.shape[-1] == 1 and layer.form is not None else None
    if isinstance(source, FlatContent):
        return source.mean_entropy
    if layer.length > MASS_LENGTH or layer.reads_rows:
        return None
    return float(Entries(layer, head, "weights").entropy.mean())


def profile(values: HeadValues, points: int = 512) -> dict[str, Any]:
    """Value against distance: mean, minimum and maximum of some diagonals, exact."""
    distances = torch.tensor(spread(0 if values.causal else 1 - values.length, values.length - 1, points))
    low, mean, high = values.profile(distances).float()
    return {"distance": distances, "mean": mean, "low": low, "high": high}
