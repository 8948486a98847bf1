"""Maps of learned biases over 2-D offsets of image patches (Swin, BEiT), one per head, and the names of their axes."""

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from relpos.maps.diagonals import Share
from relpos.maps.map import Map

DOWN, ACROSS = "rows, query − key", "columns, query − key"


def offset_map(number: int, table: Tensor) -> Map:
    """The map of a table (heads, rows, columns) of a layer, with offset 0 in the middle; NaN beside a narrow one."""
    heads, rows, columns = table.shape
    side = max(rows, columns)
    values = np.full((heads, side, side), np.nan, dtype=np.float32)
    top, left = (side - rows) // 2, (side - columns) // 2
    values[:, top : top + rows, left : left + columns] = table.float().cpu().numpy()
    nothing = Share([None] * heads, None)  # diagonals of offsets mean nothing
    distances, profile = np.empty(0, np.int64), np.empty((3, heads, 0), np.float32)
    return Map(number, "bias", False, side, 1, values, values, values, distances, profile, nothing, None)


def name_offsets(figure: Figure, side: int) -> None:
    """Name the axes of all panels by offsets in place of positions."""
    most = (side - 1) // 2
    step = max(1, round(most / 3))
    shown = [offset for offset in range(-most, most + 1) if offset % step == 0]
    places, words = [offset + most for offset in shown], [str(offset).replace("-", "−") for offset in shown]
    for axes in figure.axes:
        if axes.get_label() == "<colorbar>":
            continue
        axes.set_xticks(places, words)
        axes.set_yticks(places, words)
        if axes.get_xlabel():
            axes.xaxis.label.set_text(ACROSS)
        if axes.get_ylabel():
            axes.yaxis.label.set_text(DOWN)
