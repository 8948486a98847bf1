"""Pictures of where attention goes by distance (--show mass) and of its positional part (--show position)."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from relpos.maps.bins import bin_means, distance_edges
from relpos.maps.heads.head_classes import KINDS, HeadClass, class_heads
from relpos.maps.heads.mass_profiles import MassProfile, layer_mass, mean_profile
from relpos.maps.heads.positional_part import layer_scores, mean_scores, rotation_kernel, token_means
from relpos.maps.map import Map, map_of_layer
from relpos.pictures.contact_sheet import draw_sheet
from relpos.pictures.heatmaps import draw_heads
from relpos.pictures.mass_figures import draw_mass, draw_mass_sheet
from relpos.pictures.picture_arrays import Arrays, map_arrays, mass_arrays, position_arrays
from relpos.pictures.picture_json import PACKAGES, picture_numbers
from relpos.pictures.position_figures import draw_position
from relpos.pictures.subjects import Subject
from relpos.system.versions import versions

WINDOWS = 4  # of held-out text, over which means are taken


@dataclass(frozen=True)
class Request:
    """How a picture is to look, and who is told of the progress."""

    heads: Sequence[int]  # to draw; 0 is the first
    width: float
    log: bool
    banner: str
    title: str
    seed: int
    progress: Callable[[float], None]
    shared: bool = False  # whether all panels share one colour scale


@dataclass(frozen=True)
class Drawn:
    """A drawn figure with its caption and numbers."""

    figure: Figure
    caption: str
    numbers: dict[str, Any]
    arrays: Arrays
    maps: Sequence[Map] = ()
    profiles: Sequence[MassProfile] = ()
    classes: Sequence[Sequence[HeadClass]] = ()


def mass_picture(subject: Subject, request: Request) -> Drawn:
    """Draw the attention mass by distance: panels of one layer, or a contact sheet of several."""
    collected: list[list[MassProfile]] = [[] for _ in subject.layers]
    count = 1 + len(subject.more)
    for window, layers in enumerate(subject.windows()):
        for place, layer in enumerate(layers):
            collected[place].append(layer_mass(layer))
        request.progress((window + 1) / (count + 1))
    profiles = [mean_profile(windows) for windows in collected]
    classes = class_heads(profiles)
    request.progress(1.0)
    counts = {kind: sum(head.kind == kind for heads in classes for head in heads) for kind in KINDS}
    of = "of equal tokens " if _equal(subject) else ""
    caption = (
        f"{request.title}{subject.heading}: attention mass by distance {of}{_ending(subject)} The sink is the "
        f"share of the first token{' and of learned sinks' if profiles[0].learned_sinks else ''}, which the profiles "
        "leave out. "
    )
    if len(profiles) > 1:
        caption += f"Classes of heads: {', '.join(f'{n} {kind}' for kind, n in counts.items() if n)}."
        figure = draw_mass_sheet(profiles, classes, request.heads, caption, request.width, request.banner)
    else:
        caption += "Dashed: the best of four curves."
        figure = draw_mass(profiles[0], classes[0], request.heads, caption, request.width, request.log, request.banner)
    edges = distance_edges(profiles[0].length, True, profiles[0].causal)
    numbers = {
        **_about(subject, "mass", request.seed, len(collected[0])),
        "classes": {kind: n for kind, n in counts.items() if n},
        "distances": [[int(first), int(end) - 1] for first, end in itertools.pairwise(edges)],
        "layers": [
            {
                "layer": profile.layer,
                "heads": [
                    head.as_json() | {"mass_per_distance": _means(profile, head.head - 1, edges)} for head in heads
                ],
            }
            for profile, heads in zip(profiles, classes, strict=True)
        ],
    }
    return Drawn(figure, caption, numbers, mass_arrays(profiles, classes), profiles=profiles, classes=classes)


def _means(profile: MassProfile, head: int, edges: "np.typing.NDArray[np.int64]") -> list[float]:
    return [float(x) for x in bin_means(profile.by_distance[head].numpy(), edges, int(profile.distances[0]))]


def position_picture(subject: Subject, request: Request) -> Drawn:
    """Draw the positional part of a model without an additive bias."""
    return _term_picture(subject, request) if "embedding" in subject.place else _score_picture(subject, request)


def _term_picture(subject: Subject, request: Request) -> Drawn:
    """The position–position term of learned or sinusoidal positions, as heat maps."""
    assert subject.equal is not None
    layers = subject.equal()
    maps = []
    for place, layer in enumerate(layers):
        maps.append(map_of_layer(layer, "scores"))
        request.progress((place + 1) / len(layers))
    caption = (
        f"{request.title}{subject.heading}: the position–position term δq·δk of the scores, for tokens that are all "
        f"the mean of the input and differ in their positions only; {layers[0].length:,} positions."
    )
    draw = draw_sheet if len(maps) > 1 else draw_heads
    figure = draw(
        maps if len(maps) > 1 else maps[0],  # type: ignore[arg-type]
        request.heads,
        caption,
        width=request.width,
        banner=request.banner,
    )
    numbers = picture_numbers(subject, maps, figure, request.heads, request.seed)
    return Drawn(figure, caption, numbers | {"shows": "position"}, map_arrays(maps), maps=maps)


def _score_picture(subject: Subject, request: Request) -> Drawn:
    """Mean scores by distance, and the rotation's kernel where there is one, of one layer."""
    if len(subject.layers) > 1:
        raise ValueError("the scores and the rotation of one layer fill a page: give one layer, not all.")
    profiles, means, count = [], [], 1 + len(subject.more)
    for window, (layer,) in enumerate(subject.windows()):
        profiles.append(layer_scores(layer))
        if layer.turned is not None:
            means.append(token_means(layer))
        request.progress((window + 1) / count)
    scores, kernel = mean_scores(profiles), rotation_kernel(means) if means else None
    caption = (
        f"{request.title}{subject.heading}: the positional part of the scores {_ending(subject)} Line: mean "
        "score at each distance before the softmax, without the first key; band: its standard deviation."
    )
    if kernel is not None:
        caption += (
            " Dashed: the expected score of an independent query and key, which is what the rotation does to their "
            "means; below, how far each of its terms is from its value at distance 0, by wavelength (tokens per turn)."
        )
    figure = draw_position(scores, kernel, request.heads, caption, request.width, request.log, request.banner)
    length, causal = subject.layers[0].length, subject.layers[0].causal
    edges = distance_edges(length, True, causal)
    lowest = int(scores.distances[0])
    heads = []
    for head in range(len(scores.mean)):
        entry: dict[str, Any] = {"head": head + 1}
        for name, values in (("mean_score", scores.mean), ("standard_deviation", scores.deviation)):
            entry[name] = [_number(x) for x in bin_means(values[head].numpy(), edges, lowest)]
        if kernel is not None:
            entry["kernel"] = [float(x) for x in bin_means(kernel.total(scores.distances)[head].numpy(), edges, lowest)]
            entry["amplitude"], entry["phase"] = kernel.amplitude[head].tolist(), kernel.phase[head].tolist()
            entry["constant"] = float(kernel.constant[head])
        heads.append(entry)
    numbers = {
        **_about(subject, "position", request.seed, len(profiles)),
        "distances": [[int(first), int(end) - 1] for first, end in itertools.pairwise(edges)],
        "frequencies": None if kernel is None else kernel.frequencies.tolist(),
        "layers": [{"layer": scores.layer, "heads": heads}],
    }
    return Drawn(figure, caption, numbers, position_arrays(scores, kernel))


def _number(x: float) -> float | None:
    return float(x) if np.isfinite(x) else None


def _ending(subject: Subject) -> str:
    """The end of the first sentence of a caption."""
    ending = subject.mean_ending or subject.ending
    return ending if ending.endswith(".") else f"{ending}."


def _equal(subject: Subject) -> bool:
    """Whether the tokens of an encoding without a model are equal."""
    return subject.tokens is None and not subject.layers[0].reads_scores


def _about(subject: Subject, shows: str, seed: int, windows: int) -> dict[str, Any]:
    layer = subject.layers[0]
    return {
        "encoding": subject.encoding,
        "shows": shows,
        "causal": layer.causal,
        "length": layer.length,
        "windows": windows,
        **subject.about,
        "seed": seed,
        "versions": versions(PACKAGES),
    }
