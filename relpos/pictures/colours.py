"""Colour maps, their ranges and their ticks: per head, or shared by all panels of a page."""

import itertools
from collections.abc import Sequence

from matplotlib.colors import Colormap, LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.ticker import MaxNLocator

from relpos.maps.map import Map
from relpos.pictures.head_notes import FLAT_RANGE

LEAST_WEIGHT = 1e-4  # all weights below it have the same colour
MOST_PLACES = 6  # decimals of a tick label
# In both colour maps lightness increases with the value, so that they can be read in grey and by the colour-blind. The
# second is grey at 0, blue below and yellow above.
ONE_SIGN = "viridis"
BOTH_SIGNS = LinearSegmentedColormap.from_list(
    "blue-grey-yellow", ["#081d58", "#2c5fb4", "#8d8f94", "#eda93b", "#fff09a"], N=512
)


class Colours:
    """The colours of every panel of a page."""

    def __init__(self, maps: Sequence[Map], heads: Sequence[int], shared: bool) -> None:
        ranges = [layer_map.range(head) for layer_map in maps for head in heads]
        self.weights = maps[0].show == "weights"
        self.shared = (min(low for low, _ in ranges), max(high for _, high in ranges)) if shared else None

    def range(self, layer_map: Map, head: int) -> tuple[float, float]:
        """The smallest and largest value of a head, or of the page if the scale is shared."""
        low, high = self.shared or layer_map.range(head)
        return (max(low, LEAST_WEIGHT), max(high, 2 * LEAST_WEIGHT)) if self.weights else (low, high)

    def colours(self, layer_map: Map, head: int) -> str | Colormap:
        """The colour map of a head."""
        return BOTH_SIGNS if self._signed(layer_map, head) else ONE_SIGN

    def norm(self, layer_map: Map, head: int) -> Normalize:
        """The norm of a head: centred on 0 where both signs matter, logarithmic for weights.

        The colours span at least `FLAT_RANGE`, so that a head that is practically constant looks constant. Where one
        sign dominates, the largest value is the lightest.
        """
        low, high = self.range(layer_map, head)
        if self.weights:
            return LogNorm(low, high, clip=True)
        if self._signed(layer_map, head):
            most = max(-low, high, FLAT_RANGE / 2)
            return Normalize(-most, most)
        return Normalize(min(low, high - FLAT_RANGE), high)

    def _signed(self, layer_map: Map, head: int) -> bool:
        return not self.weights and both_signs(*self.range(layer_map, head))


def both_signs(low: float, high: float) -> bool:
    """Whether both signs matter: the smaller side is more than half of the larger.

    Otherwise, colours centred on 0 would leave much of the colour map unused; and 0 is not special to a softmax.
    """
    below, above = sorted((-low, high))
    return below > 0.5 * above


def linear_ticks(low: float, high: float) -> list[float]:
    """The ticks of a colour bar from `low` to `high`: a single tick if short labels could not be told apart."""
    if high - low <= 1e-4 * max(abs(low), abs(high)):
        return [high + 0.0]
    margin = 1e-6 * (high - low)
    ticks = MaxNLocator(nbins=9, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    return [float(tick) + 0.0 for tick in ticks if low - margin <= tick <= high + margin]


def tick_words(ticks: Sequence[float]) -> list[str]:
    """The labels of ticks: absolute numbers, with as many decimals as they need."""
    if len(ticks) == 1:
        return [f"{ticks[0]:.4g}".replace("-", "−")]
    close = 1e-3 * min(after - before for before, after in itertools.pairwise(ticks))
    places = next((n for n in range(MOST_PLACES) if all(abs(round(t, n) - t) < close for t in ticks)), None)
    texts = [f"{tick:.5g}" if places is None else f"{tick:.{places}f}" for tick in ticks]
    return [text.replace("-", "−") for text in texts]
