"""The difference of two maps, entry by entry."""

from torch import Tensor

from relpos.maps.by_distance import ByDistance
from relpos.maps.head_maps import HeadMap
from relpos.maps.sources import Source


class Difference(Source):
    """a − b, where both are seen.

    Args:
        a: One source.
        b: Another, of the same length.
    """

    def __init__(self, a: Source, b: Source) -> None:
        self.length, self.a, self.b = a.length, a, b

    def block(self, first: int, end: int, left: int, right: int) -> Tensor:
        return self.a.block(first, end, left, right) - self.b.block(first, end, left, right)


def difference_map(a: HeadMap, b: HeadMap) -> HeadMap:
    """The map of a − b.

    Raises:
        ValueError: The maps have different lengths.
    """
    if a.length != b.length:
        raise ValueError(
            f"a difference needs maps of one length, and these have {a.length:,} and {b.length:,} tokens: give both "
            "the same length."
        )
    if isinstance(a.source, ByDistance) and isinstance(b.source, ByDistance) and a.source.zero == b.source.zero:
        return HeadMap(ByDistance(a.source.values - b.source.values, a.length))
    return HeadMap(Difference(a.source, b.source))
