"""Curves of trainings and evaluations: losses, perplexity by length, loss by position, and accuracy on a task."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator, PercentFormatter

STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
}
MARKERS = "osD^vP*XphH<>d"
# Paul Tol's muted scheme, which the colour-blind can tell apart; the markers help where there are more curves.
COLORS = ("#332288", "#cc6677", "#117733", "#88ccee", "#aa4499", "#999933", "#882255", "#44aa99", "#ddcc77", "#555555")
DASHED = (0, (4, 2))
PANELS = 3  # panels beside each other
FEW = 5  # most names for which the legend fits inside the panel
# Curves within this factor of the lowest have a panel of their own, if another exceeds it by the other factor.
NEAR, FAR = 1.25, 5

Rows = Sequence[Mapping[str, Any]]  # of an evaluation: one per length, or one per bin of positions


def draw_losses(entries: Sequence[Mapping[str, float]], title: str) -> Figure:
    """Draw training and held-out loss against tokens, from the lines of a run's log."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, label in (("loss", "train"), ("heldout", "heldout")):
        points = [(entry["tokens"], entry[name]) for entry in entries if name in entry]
        if points:
            axes.plot(*zip(*points, strict=True), label=label)
    axes.set(xlabel="tokens", ylabel="loss", title=title)
    if axes.lines:
        axes.legend()
    return figure


def draw_curves(series: Mapping[str, Rows], trained_length: int | None, metric: str = "perplexity") -> Figure:
    """Draw perplexity by length, both logarithmic, one curve per name in the legend.

    The band is the interval of the rows. A curve ends with a cross where the encoding refuses longer inputs, and its
    name in the legend says where. The trained length is marked if it is known. Curves near the lowest, of which one
    would lie on the other, have a second panel of their own.
    """
    near = _nearest(series)
    width = (7.0 if near else 4.8) + (1.8 if len(series) > FEW else 0.4)
    with _panels(width, 3.5, columns=2 if near else 1) as (figure, panels):
        lengths = sorted({int(row["length"]) for rows in series.values() for row in rows})
        for axes, shown in zip(panels, (list(series), near), strict=False):
            for number, (name, rows) in enumerate(series.items()):
                if name in shown:
                    _draw_curve(axes, number, name, rows, min(0.15, 0.3 / len(shown)))
            axes.set_yscale("log")
            _plain_numbers(axes)
            _length_axis(axes, lengths, "length in tokens")
            _mark_trained(axes, trained_length)
            _add_grid(axes)
        panels[0].set_ylabel(metric)
        if near:
            panels[1].set_title("the lowest", loc="right", fontsize=8)
        _add_legend(panels[-1], len(series), panels[0])
    return figure


def _nearest(series: Mapping[str, Rows]) -> list[str]:
    """Names whose curves stay near the lowest, if others are so far away that these cannot be told apart."""
    values = {
        name: {int(row["length"]): float(row["perplexity"]) for row in rows}
        for name, rows in series.items()
        if rows and all(row["error"] is None for row in rows)
    }
    lowest: dict[int, float] = {}
    for curve in values.values():
        lowest |= {length: min(x, lowest.get(length, x)) for length, x in curve.items()}
    near = [name for name, curve in values.items() if all(x <= NEAR * lowest[n] for n, x in curve.items())]
    far = any(x > FAR * lowest[length] for curve in values.values() for length, x in curve.items())
    return near if far and len(near) > 1 else []


def _draw_curve(axes: Axes, number: int, name: str, rows: Rows, alpha: float) -> None:
    good = [row for row in rows if row["error"] is None]
    stops = good != list(rows)
    label = name if not stops else f"{name} (only to {good[-1]['length']})" if good else f"{name} (refused)"
    color = COLORS[number % len(COLORS)]
    points = [[row[key] for row in good] for key in ("length", "perplexity")]
    marker, line = MARKERS[number % len(MARKERS)], "-" if number < len(COLORS) else DASHED
    axes.plot(*points, color=color, marker=marker, markersize=3.5, linestyle=line, linewidth=1.3, label=label)
    _draw_band(axes, points[0], good, color, alpha)
    if good and stops:
        axes.plot(good[-1]["length"], good[-1]["perplexity"], "x", color=color, markersize=9)


def draw_positions(series: Mapping[str, Rows], trained_length: int | None) -> Figure:
    """Draw loss by position in the window, one curve per name in the legend, from the bins of an evaluation.

    The dashed line of the same colour is the control: the same tokens, predicted from as many tokens as were trained.
    """
    with _panels(5.2 if len(series) <= FEW else 6.6, 3.5) as (figure, (axes,)):
        for number, (name, bins) in enumerate(series.items()):
            color = COLORS[number % len(COLORS)]
            _draw_bins(axes, bins, (color, color), 1.0, min(0.15, 0.3 / len(series)), name)
        axes.plot([], [], color="0.3", linewidth=1.0, linestyle=DASHED, label="its control")
        _length_axis(axes, _doublings(series), "position in the window")
        _mark_trained(axes, trained_length)
        axes.set_ylabel("loss")
        _add_grid(axes)
        _add_legend(axes, len(series) + 1)
    return figure


def draw_position_panels(series: Mapping[str, Rows], trained_length: int | None) -> Figure:
    """Draw loss by position as `draw_positions` does, one panel per name, on common axes."""
    columns = min(PANELS, len(series))
    rows = math.ceil(len(series) / columns)
    with _panels(2.2 * columns + 0.6, 1.6 * rows + 0.5, rows, columns, shared=True) as (figure, panels):
        ticks = _doublings(series)
        for axes, (name, bins) in zip(panels, series.items(), strict=False):
            _draw_bins(axes, bins, COLORS[:2], 1.1, 0.15)
            _length_axis(axes, ticks[:: math.ceil(len(ticks) / 5)], "")
            if trained_length is not None:
                axes.axvline(trained_length, color="0.45", linewidth=0.8, linestyle=":", zorder=0)
            axes.set_title(name, loc="left", pad=3)
            _add_grid(axes)
        for axes in panels[len(series) :]:
            axes.set_axis_off()
        figure.supxlabel("position in the window", fontsize=8)
        figure.supylabel("loss", fontsize=8)
    return figure


def draw_accuracy(results: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw accuracy by length with its 95 % bounds, one curve per run; the trained length and chance are marked.

    `results` are those of one task. A cross is at every length that an encoding refuses.
    """
    with _panels(5.2, 3.4, fixed=False) as (figure, (axes,)):
        for number, result in enumerate(results):
            color, name = f"C{number}", result["encoding"]
            rows = [row for row in result["rows"] if row["error"] is None]
            lengths = [row["length"] for row in rows]
            axes.plot(lengths, [row["accuracy"] for row in rows], marker="o", markersize=3, color=color, label=name)
            _draw_band(axes, lengths, rows, color, 0.15)
            refused = [row["length"] for row in result["rows"] if row["error"] is not None]
            if refused:
                axes.plot(refused, np.zeros(len(refused)), "x", color=color, markersize=5, label=f"{name}: refused")
        for length in sorted({result["trained_length"] for result in results if result["trained_length"]}):
            axes.axvline(length, color="0.6", linewidth=0.8, zorder=0)
            axes.annotate(
                "trained", (length, 1.0), xycoords=("data", "axes fraction"), xytext=(2, 2), textcoords="offset points"
            )
        axes.axhline(results[0]["chance"], color="0.6", linewidth=0.8, linestyle=":", label="chance", zorder=0)
        _length_axis(
            axes, sorted({row["length"] for result in results for row in result["rows"]}), "tokens", small=None
        )
        axes.set(ylabel="answers right", ylim=(-0.03, 1.03))
        axes.set_title(f"{results[0]['task']}: accuracy by length", loc="right")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.legend(frameon=False, loc="best")
    return figure


def draw_depths(result: Mapping[str, Any]) -> Figure:
    """Draw accuracy on a task by depth (down) and length (across) as a heat map."""
    lengths = [row["length"] for row in result["rows"]]
    depths = sorted({row["depth"] for row in result["depths"]})
    values = np.full((len(depths), len(lengths)), np.nan)
    for row in result["depths"]:
        values[depths.index(row["depth"]), lengths.index(row["length"])] = row["accuracy"]
    with _panels(1.8 + 0.55 * len(lengths), 3.6, fixed=False) as (figure, (axes,)):
        image = axes.imshow(np.ma.masked_invalid(values), cmap="viridis", vmin=0, vmax=1, aspect="auto")
        axes.set_facecolor("0.85")
        refused = any(row["error"] is not None for row in result["rows"])
        axes.set_xticks(range(len(lengths)), [str(length) for length in lengths], rotation=45)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axes.set(xlabel="tokens (grey: refused)" if refused else "tokens", ylabel="depth of the key")
        axes.set_title(f"{result['task']}, {result['encoding']}, trained at {result['trained_length']}")
        figure.colorbar(image, ax=axes, label="answers right", format=PercentFormatter(1.0))
    return figure


@contextlib.contextmanager
def _panels(
    width: float, height: float, rows: int = 1, columns: int = 1, shared: bool = False, fixed: bool = True
) -> Iterator[tuple[Figure, Sequence[Axes]]]:
    """A figure of panels in our style, with `shared` on common axes.

    With `fixed`, its layout is computed once, before it is saved.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, list(figure.subplots(rows, columns, squeeze=False, sharex=shared, sharey=shared).flat)
        if fixed:
            _fix_layout(figure)


def _fix_layout(figure: Figure) -> None:
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def _draw_band(axes: Axes, x: Sequence[float], rows: Rows, color: str, alpha: float) -> None:
    known = [(place, row["low"], row["high"]) for place, row in zip(x, rows, strict=True) if row["low"] is not None]
    places, low, high = zip(*known, strict=True) if known else ((), (), ())
    axes.fill_between(places, low, high, color=color, alpha=alpha, linewidth=0)


def _draw_bins(axes: Axes, bins: Rows, colors: Sequence[str], line: float, alpha: float, label: str = "") -> None:
    """Draw loss and control by position; a bin at the geometric mean of its ends, its centre on a logarithmic axis."""
    middle = [(max(bin_["from"], 1) * bin_["to"]) ** 0.5 for bin_ in bins]
    axes.plot(middle, [bin_["loss"] for bin_ in bins], color=colors[0], linewidth=1.3, label=label)
    axes.plot(middle, [bin_["control"] for bin_ in bins], color=colors[1], linewidth=line, linestyle=DASHED)
    _draw_band(axes, middle, bins, colors[0], alpha)


def _doublings(series: Mapping[str, Rows]) -> list[int]:
    """The ends of the bins that are powers of two, or all if none is."""
    ends = sorted({int(bin_["to"]) for bins in series.values() for bin_ in bins})
    return [end for end in ends if end & (end - 1) == 0] or ends


def _length_axis(axes: Axes, lengths: Sequence[int], title: str, small: int | None = 8) -> None:
    """Set a logarithmic length axis with a tick at each length; more than `small` have smaller labels."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(lengths), [str(length) for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(title)
    if small is not None and len(lengths) > small:
        axes.tick_params(axis="x", labelsize=7)


def _mark_trained(axes: Axes, length: int | None) -> None:
    if length is None:
        return
    axes.axvline(length, color="0.45", linewidth=0.8, linestyle="--", zorder=0)
    axes.annotate(
        "trained length",
        (length, 1),
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


def _add_grid(axes: Axes) -> None:
    axes.grid(color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _add_legend(axes: Axes, names: int, of: Axes | None = None) -> None:
    """Add a legend of the curves of some axes, beside the panel if there are many names."""
    beside: Any = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if names > FEW else {"loc": "best"}
    axes.legend(*(of or axes).get_legend_handles_labels(), frameon=False, fontsize=7, **beside)
