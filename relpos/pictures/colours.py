"""Colour maps, norms and ticks for matplotlib: one colour map per page; ranges per head, or shared by all panels."""

import itertools
from collections.abc import Sequence
from functools import cache

import matplotlib as mpl
from matplotlib.colors import Colormap, LinearSegmentedColormap, LogNorm, Normalize, to_hex
from matplotlib.ticker import MaxNLocator

from relpos.maps.map import ColourMap, ColourScale, Map, both_signs

MOST_PLACES = 6  # decimals of a tick label
# In both colour maps lightness increases with the value, so that they can be read in grey and by the colour-blind. The
# second is grey at 0, blue below and yellow above.
ONE_SIGN = "viridis"
BOTH_SIGNS = LinearSegmentedColormap.from_list(
    "blue-grey-yellow", ["#081d58", "#2c5fb4", "#8d8f94", "#eda93b", "#fff09a"], N=512
)


def head_scales(maps: Sequence[Map], heads: Sequence[int], shared: bool) -> list[list[ColourScale]]:
    """The colour scale of each head of each map, or the one that all share; one colour map for the whole page."""
    return page_scales(maps, [heads] * len(maps), shared)


def page_scales(maps: Sequence[Map], heads: Sequence[Sequence[int]], shared: bool) -> list[list[ColourScale]]:
    """The same for maps of which different heads are drawn."""
    places = [(layer_map, head) for layer_map, chosen in zip(maps, heads, strict=True) for head in chosen]
    ranges = [(layer_map.range(head), layer_map.typical_range(head)) for layer_map, head in places]
    if shared:
        ranges = [(_union([full for full, _ in ranges]), _union([typical for _, typical in ranges]))] * len(ranges)
    signed = both_signs([typical for _, typical in ranges])
    scales = iter(
        ColourScale.of_weights(*full, layer_map.length)
        if layer_map.show == "weights"
        else ColourScale.of(*full, signed, typical)
        for (layer_map, _), (full, typical) in zip(places, ranges, strict=True)
    )
    return [list(itertools.islice(scales, len(chosen))) for chosen in heads]


def _union(ranges: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def colour_map(scale: ColourScale) -> str | Colormap:
    """The colour map of a scale."""
    return BOTH_SIGNS if scale.signed else ONE_SIGN


def norm(scale: ColourScale) -> Normalize:
    """The norm of a scale."""
    return LogNorm(*scale.ends, clip=True) if scale.log else Normalize(*scale.ends)


@cache
def hex_colours() -> dict[ColourMap, list[str]]:
    """The colour maps as 256 colours each."""
    one, both = (
        [to_hex(colours(place / 255)) for place in range(256)] for colours in (mpl.colormaps[ONE_SIGN], BOTH_SIGNS)
    )
    return {"sequential": one, "diverging": both, "weights": one}


def linear_ticks(low: float, high: float, most: int = 9) -> list[float]:
    """The ticks of a colour bar from `low` to `high`: a single tick if short labels could not be told apart."""
    if high - low <= 1e-4 * max(abs(low), abs(high)):
        return [high + 0.0]
    margin = 1e-6 * (high - low)
    ticks = MaxNLocator(nbins=most, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    return [float(tick) + 0.0 for tick in ticks if low - margin <= tick <= high + margin]


def tick_words(ticks: Sequence[float]) -> list[str]:
    """The labels of ticks: absolute numbers, with as many decimals as they need."""
    if len(ticks) == 1:
        return [f"{ticks[0]:.4g}".replace("-", "−")]
    close = 1e-3 * min(after - before for before, after in itertools.pairwise(ticks))
    places = next((n for n in range(MOST_PLACES) if all(abs(round(t, n) - t) < close for t in ticks)), None)
    texts = [f"{tick:.5g}" if places is None else f"{tick:.{places}f}" for tick in ticks]
    return [text.replace("-", "−") for text in texts]
