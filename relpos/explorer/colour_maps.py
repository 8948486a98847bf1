"""The colour maps of the figures, as 256 colours each."""

from functools import cache

import matplotlib as mpl
from matplotlib.colors import to_hex

from relpos.pictures.colours import BOTH_SIGNS, ONE_SIGN


@cache
def colour_maps() -> dict[str, list[str]]:
    """By name: sequential, diverging (grey at 0) and weights."""
    maps = {
        "sequential": mpl.colormaps[ONE_SIGN],
        "diverging": BOTH_SIGNS,
        "weights": mpl.colormaps[ONE_SIGN],
    }
    return {name: [to_hex(each(place / 255)) for place in range(256)] for name, each in maps.items()}
