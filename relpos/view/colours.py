"""From value to colour: a map and a range per head, or one for all panels of a page."""

import itertools
from collections.abc import Sequence

from matplotlib.colors import Colormap, LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.ticker import MaxNLocator

from relpos.view.captions import SPAN_OF_FLAT
from relpos.view.maps import Map

LEAST_WEIGHT = 1e-4  # weights below it have one colour
MOST_PLACES = 6  # of a tick's number
# Lightness rises from end to end, in both maps: printed grey, and for the colour-blind, more is lighter. The second one
# is grey at 0, blue below and yellow above.
ONE_SIGN = "viridis"
BOTH_SIGNS = LinearSegmentedColormap.from_list(
    "blue-grey-yellow", ["#081d58", "#2c5fb4", "#8d8f94", "#eda93b", "#fff09a"], N=512
)


class Colours:
    """The colours of every panel of a page."""

    def __init__(self, maps: Sequence[Map], heads: Sequence[int], shared: bool) -> None:
        ranges = [found.range(head) for found in maps for head in heads]
        self.weights = maps[0].show == "weights"
        self.shared = (min(low for low, _ in ranges), max(high for _, high in ranges)) if shared else None

    def range(self, found: Map, head: int) -> tuple[float, float]:
        """What occurs in a head, or on the page."""
        low, high = self.shared or found.range(head)
        return (max(low, LEAST_WEIGHT), max(high, 2 * LEAST_WEIGHT)) if self.weights else (low, high)

    def colours(self, found: Map, head: int) -> str | Colormap:
        """The colour map of a head."""
        return BOTH_SIGNS if self._signed(found, head) else ONE_SIGN

    def norm(self, found: Map, head: int) -> Normalize:
        """From value to colour: centred on 0 where both signs occur, logarithmic for weights.

        A head that is practically constant looks constant: its colours span no less than `SPAN_OF_FLAT`, and as in all
        others of one sign the largest value is the lightest.
        """
        low, high = self.range(found, head)
        if self.weights:
            return LogNorm(low, high, clip=True)
        if self._signed(found, head):
            most = max(-low, high, SPAN_OF_FLAT / 2)
            return Normalize(-most, most)
        return Normalize(min(low, high - SPAN_OF_FLAT), high)

    def _signed(self, found: Map, head: int) -> bool:
        return not self.weights and both_signs(*self.range(found, head))


def both_signs(low: float, high: float) -> bool:
    """Whether positive and negative values matter alike: the smaller side is at least half of the larger.

    Where it is less, colours centred on 0 would leave much of the map unused; and 0 itself means little to a softmax.
    """
    below, above = sorted((-low, high))
    return below > 0.5 * above


def linear_ticks(low: float, high: float) -> list[float]:
    """The values that a colour bar from `low` to `high` names: one, if no numbers of a few places tell them apart."""
    if high - low <= 1e-4 * max(abs(low), abs(high)):
        return [high + 0.0]
    margin = 1e-6 * (high - low)
    ticks = MaxNLocator(nbins=9, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    return [float(tick) + 0.0 for tick in ticks if low - margin <= tick <= high + margin]


def tick_words(ticks: Sequence[float]) -> list[str]:
    """The ticks as absolute numbers, with as many places as they need."""
    if len(ticks) == 1:
        return [f"{ticks[0]:.4g}".replace("-", "−")]
    close = 1e-3 * min(after - before for before, after in itertools.pairwise(ticks))
    places = next((n for n in range(MOST_PLACES) if all(abs(round(t, n) - t) < close for t in ticks)), None)
    texts = [f"{tick:.5g}" if places is None else f"{tick:.{places}f}" for tick in ticks]
    return [text.replace("-", "−") for text in texts]
