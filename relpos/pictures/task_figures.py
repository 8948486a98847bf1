"""Pictures of the accuracy on a task: by length, and by depth and length."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from relpos.pictures.curves import STYLE


def draw_accuracy(results: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw accuracy by length with its 95 % bounds, one curve per run; the trained length and chance are marked.

    Args:
        results: One result of `relpos.evaluation.task_scoring` per run, all of the same task.

    Returns:
        The figure.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for number, result in enumerate(results):
            _draw_curve(axes, result, f"C{number}")
        for length in sorted({result["trained_length"] for result in results if result["trained_length"]}):
            axes.axvline(length, color="0.6", linewidth=0.8, zorder=0)
            axes.annotate(
                "trained", (length, 1.0), xycoords=("data", "axes fraction"), xytext=(2, 2), textcoords="offset points"
            )
        axes.axhline(results[0]["chance"], color="0.6", linewidth=0.8, linestyle=":", label="chance", zorder=0)
        lengths = sorted({row["length"] for result in results for row in result["rows"]})
        axes.set_xscale("log", base=2)
        axes.set(xlabel="tokens", ylabel="answers right", ylim=(-0.03, 1.03))
        axes.set_title(f"{results[0]['task']}: accuracy by length", loc="right")
        axes.xaxis.set_major_locator(FixedLocator(lengths))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda length, _: f"{length:.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.legend(frameon=False, loc="best")
    return figure


def _draw_curve(axes: Axes, result: Mapping[str, Any], colour: str) -> None:
    """Draw the curve of one run, its bounds, and a cross at every length that its encoding refuses."""
    rows = [row for row in result["rows"] if row["error"] is None]
    lengths = [row["length"] for row in rows]
    axes.plot(
        lengths, [row["accuracy"] for row in rows], marker="o", markersize=3, color=colour, label=result["encoding"]
    )
    axes.fill_between(
        lengths, [row["low"] for row in rows], [row["high"] for row in rows], color=colour, alpha=0.15, linewidth=0
    )
    refused = [row["length"] for row in result["rows"] if row["error"] is not None]
    if refused:
        label = f"{result['encoding']}: refused"
        axes.plot(refused, np.zeros(len(refused)), "x", color=colour, markersize=5, label=label)


def draw_depths(result: Mapping[str, Any]) -> Figure:
    """Draw accuracy by depth (down) and length (across) as a heat map.

    Args:
        result: A result of `relpos.evaluation.task_scoring` with scores by depth.

    Returns:
        The figure.
    """
    lengths = [row["length"] for row in result["rows"]]
    depths = sorted({row["depth"] for row in result["depths"]})
    values = np.full((len(depths), len(lengths)), np.nan)
    for row in result["depths"]:
        values[depths.index(row["depth"]), lengths.index(row["length"])] = row["accuracy"]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(1.8 + 0.55 * len(lengths), 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        image = axes.imshow(np.ma.masked_invalid(values), cmap="viridis", vmin=0, vmax=1, aspect="auto")
        axes.set_facecolor("0.85")
        refused = any(row["error"] is not None for row in result["rows"])
        axes.set_xticks(range(len(lengths)), [str(length) for length in lengths], rotation=45)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axes.set(xlabel="tokens (grey: refused)" if refused else "tokens", ylabel="depth of the key")
        axes.set_title(f"{result['task']}, {result['encoding']}, trained at {result['trained_length']}")
        figure.colorbar(image, ax=axes, label="answers right", format=PercentFormatter(1.0))
    return figure
