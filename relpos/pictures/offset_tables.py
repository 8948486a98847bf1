"""Learned biases over 2-D offsets of image patches (Swin, BEiT): one small map per head, read from the weights."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from relpos.attend.arguments import LayerCall
from relpos.maps.diagonals import Share
from relpos.maps.layer import Layer, open_layer
from relpos.maps.map import Map
from relpos.pictures.subjects import Subject

if TYPE_CHECKING:
    from relpos.pretrained.layer_position import LayerPosition
    from relpos.runs.run import Run

ALL = 10**6  # wider than any window
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


def window_layer(number: int, table: Tensor) -> Layer:
    """One window of patches, row by row, with the bias that a table (heads, rows, columns) gives them."""
    from relpos.pretrained.attention_interface import ModelBias, dense

    heads, rows, columns = table.shape
    high, wide = (rows + 1) // 2, (columns + 1) // 2
    y, x = (each.flatten() for each in torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij"))
    bias = table[:, y[:, None] - y + high - 1, x[:, None] - x + wide - 1]  # (heads, patches, patches)
    zeros = table.new_zeros(1).expand(1, heads, high * wide, 1)
    return open_layer(number, LayerCall(zeros, zeros, ModelBias(heads, 1, (dense(bias[None]),)), {"causal": False}))


def table_positions(run: "Run") -> "list[LayerPosition] | None":
    """Where position lives in each layer of a model that reads images, if it is a 2-D table in all of them."""
    from relpos.pretrained.positions import layer_positions

    if getattr(run.model, "main_input_name", "input_ids") != "pixel_values":
        return None
    positions = layer_positions(run.model)
    return positions if positions and all(each.kind == "table 2-D" for each in positions) else None


def tables_subject(run: "Run", positions: "list[LayerPosition]", numbers: list[int]) -> Subject:
    """The tables of some layers, read from the weights: the model is not run.

    Raises:
        ValueError: The layers have different numbers of heads, as the stages of Swin have.
    """
    tables = []
    for number in numbers:
        bias = positions[number - 1].bias
        assert bias is not None
        tables.append(bias(ALL))
    if len({table.shape for table in tables}) > 1:
        heads = [len(table) for table in tables]
        raise ValueError(f"the layers of {run.folder.name} have {min(heads)} to {max(heads)} heads: give one layer.")
    layers = [window_layer(number, table) for number, table in zip(numbers, tables, strict=True)]
    which = "all layers" if len(numbers) > 1 else f"layer {numbers[0]} of {len(positions)}"
    name = positions[numbers[0] - 1].title
    high, wide = ((size + 1) // 2 for size in tables[0].shape[1:])
    about = {
        "model": {
            "folder": str(run.folder),
            "layers": len(positions),
            "position": {"name": name, "layers": [each.words for each in positions]},
        },
        "input": None,
    }
    ending = f"in windows of {high} × {wide} patches."
    heading = f"{name}, {run.model.config.model_type} ({run.folder.name}), {which}"
    return Subject(name, "score", layers, None, run.folder.name, heading, ending, about, tables=tables)
