"""Curves of evaluations: perplexity by length, loss by position."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
}
MARKERS = "osD^vP*Xph"
# Paul Tol's muted scheme, which the colour-blind can tell apart; the markers help where there are more curves.
COLORS = ("#332288", "#cc6677", "#117733", "#88ccee", "#aa4499", "#999933", "#882255", "#44aa99", "#ddcc77", "#555555")
PANELS = 3  # panels beside each other
FEW = 5  # most names for which the legend fits inside the panel


def draw_curves(
    series: Mapping[str, Sequence[Mapping[str, Any]]], trained_length: int | None, metric: str = "perplexity"
) -> Figure:
    """Draw perplexity by length, both logarithmic.

    The band is the interval of the rows. A curve ends with a cross where the encoding refuses longer inputs, and its
    name in the legend says where.

    Args:
        series: One curve per name in the legend: the rows of an evaluation, one per length.
        trained_length: Marked on the length axis; None if it is unknown.
        metric: What the rows' perplexity is called.

    Returns:
        The figure.
    """
    with mpl.rc_context(STYLE):
        figure, axes = _page(len(series))
        lengths = sorted({int(row["length"]) for rows in series.values() for row in rows})
        for number, (name, rows) in enumerate(series.items()):
            good = [row for row in rows if row["error"] is None]
            stops = good != list(rows)
            label = name if not stops else f"{name} (only to {good[-1]['length']})" if good else f"{name} (refused)"
            color = _color(number)
            points = [[row[key] for row in good] for key in ("length", "perplexity")]
            axes.plot(*points, color=color, marker=MARKERS[number % 10], markersize=3.5, linewidth=1.3, label=label)
            _band(axes, points[0], good, color, len(series))
            if good and stops:
                axes.plot(good[-1]["length"], good[-1]["perplexity"], "x", color=color, markersize=9)
        axes.set_yscale("log")
        _plain_numbers(axes)
        _lengths_below(axes, lengths, "length in tokens", trained_length)
        axes.set_ylabel(metric)
        _finish(figure, axes, len(series))
    return figure


def draw_positions(series: Mapping[str, Sequence[Mapping[str, Any]]], trained_length: int | None) -> Figure:
    """Draw loss by position in the window.

    The dashed line of the same colour is the control: the same tokens, predicted from as many tokens as were trained.

    Args:
        series: One curve per name in the legend: the bins of `relpos.evaluation.evaluation`.
        trained_length: Marked on the position axis; None if it is unknown.

    Returns:
        The figure.
    """
    with mpl.rc_context(STYLE):
        figure, axes = _page(len(series))
        ends = sorted({int(bin_["to"]) for bins in series.values() for bin_ in bins})
        for number, (name, bins) in enumerate(series.items()):
            # A bin is drawn at its centre, which on a logarithmic axis is the geometric mean of its ends.
            middle = [(max(bin_["from"], 1) * bin_["to"]) ** 0.5 for bin_ in bins]
            color = _color(number)
            axes.plot(middle, [bin_["loss"] for bin_ in bins], color=color, linewidth=1.3, label=name)
            axes.plot(middle, [bin_["control"] for bin_ in bins], color=color, linewidth=1.0, linestyle=(0, (4, 2)))
            _band(axes, middle, bins, color, len(series))
        axes.plot([], [], color="0.3", linewidth=1.0, linestyle=(0, (4, 2)), label="its control")
        doublings = [end for end in ends if end & (end - 1) == 0] or ends
        _lengths_below(axes, doublings, "position in the window", trained_length)
        axes.set_ylabel("loss")
        _finish(figure, axes, len(series) + 1)
    return figure


def draw_position_panels(series: Mapping[str, Sequence[Mapping[str, Any]]], trained_length: int | None) -> Figure:
    """Draw loss by position with one panel per curve, all on the same scale, since many curves would hide each other.

    Args:
        series: One panel per title: the bins of `relpos.evaluation.evaluation`.
        trained_length: Marked on the position axis; None if it is unknown.

    Returns:
        The figure.
    """
    columns = min(PANELS, len(series))
    rows = math.ceil(len(series) / columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2.2 * columns + 0.6, 1.6 * rows + 0.5), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
        ends = sorted({int(bin_["to"]) for bins in series.values() for bin_ in bins})
        ticks = [end for end in ends if end & (end - 1) == 0] or ends
        for axes, (name, bins) in zip(panels, series.items(), strict=False):
            middle = [(max(bin_["from"], 1) * bin_["to"]) ** 0.5 for bin_ in bins]
            axes.plot(middle, [bin_["loss"] for bin_ in bins], color=COLORS[0], linewidth=1.3)
            axes.plot(middle, [bin_["control"] for bin_ in bins], color=COLORS[1], linewidth=1.1, linestyle=(0, (4, 2)))
            _band(axes, middle, bins, COLORS[0], 1)
            _lengths_below(axes, ticks[:: math.ceil(len(ticks) / 5)], "", None)
            if trained_length is not None:
                axes.axvline(trained_length, color="0.45", linewidth=0.8, linestyle=":", zorder=0)
            axes.set_title(name, loc="left", pad=3)
            axes.grid(color="0.92", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
        for axes in panels[len(series) :]:
            axes.set_axis_off()
        figure.supxlabel("position in the window", fontsize=8)
        figure.supylabel("loss", fontsize=8)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
    return figure


def _page(curves: int) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.2 if curves <= FEW else 6.6, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _band(axes: Axes, x: Sequence[float], rows: Sequence[Mapping[str, Any]], color: Any, curves: int) -> None:
    known = [(place, row) for place, row in zip(x, rows, strict=True) if row["low"] is not None]
    low, high = ([row[key] for _, row in known] for key in ("low", "high"))
    axes.fill_between([place for place, _ in known], low, high, color=color, alpha=min(0.15, 0.3 / curves), linewidth=0)


def _lengths_below(axes: Axes, lengths: Sequence[int], title: str, trained_length: int | None) -> None:
    """Set a logarithmic length axis with a tick at each length, and mark the trained length."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(lengths), [str(length) for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(title)
    if len(lengths) > 8:
        axes.tick_params(axis="x", labelsize=7)
    if trained_length is not None:
        axes.axvline(trained_length, color="0.45", linewidth=0.8, linestyle="--", zorder=0)
        axes.annotate(
            "trained length",
            (trained_length, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            color="0.35",
            fontsize=7,
        )


def _plain_numbers(axes: Axes) -> None:
    """Label a logarithmic axis with plain numbers, even if it spans less than a decade."""
    low, high = axes.get_ylim()
    wide = high / low > 20
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if wide else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _finish(figure: Figure, axes: Axes, names: int) -> None:
    axes.grid(color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    beside = names > FEW
    axes.legend(
        loc="center left" if beside else "best",
        bbox_to_anchor=(1.0, 0.5) if beside else None,
        frameon=False,
        fontsize=7,
    )
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
