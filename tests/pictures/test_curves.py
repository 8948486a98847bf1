"""The curves of evaluation: what is drawn where."""

import pytest
from matplotlib.collections import PolyCollection

from relpos.pictures.curves import draw_accuracy, draw_curves, draw_depths, draw_positions
from relpos.pictures.printed_page import save


def row(length, perplexity, error=None):
    bounds = {"low": perplexity and 0.9 * perplexity, "high": perplexity and 1.2 * perplexity}
    return {"length": length, "perplexity": perplexity, **bounds, "error": error}


SERIES = {
    "alibi": [row(256, 20.0), row(1024, 21.0), row(15360, 22.0)],
    "rope": [row(256, 20.0), row(1024, 150.0), row(15360, 690.0)],
    "learned": [row(256, 20.5), row(1024, None, "too long"), row(15360, None, "too long")],
}
BINS = [{"from": 0, "to": 16, "loss": 4.0, "control": 4.0, "low": 3.8, "high": 4.3}] + [
    {"from": 2**n, "to": 2 ** (n + 1), "loss": 4.0 - n / 10, "control": 3.5, "low": 3.0, "high": 4.2}
    for n in range(4, 9)
]


def test_a_curve_has_every_length_the_trained_one_marked_and_the_interval_as_a_band():
    axes = draw_curves(SERIES, 256).axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert list(axes.get_xticks()) == [256, 1024, 15360]
    rope = next(line for line in axes.lines if line.get_label() == "rope")
    assert list(zip(*rope.get_data(), strict=True)) == [(256, 20.0), (1024, 150.0), (15360, 690.0)]
    bands = [band for band in axes.collections if isinstance(band, PolyCollection)]
    assert len(bands) == 3
    assert bands[1].get_paths()[0].vertices[:, 1].max() == pytest.approx(1.2 * 690)
    assert any(list(line.get_xdata()) == [256, 256] for line in axes.lines)  # the trained length
    assert [text.get_text() for text in axes.texts] == ["trained length"]


def test_a_curve_that_stops_says_so():
    figure = draw_curves(SERIES, None)
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert names == ["alibi", "rope", "learned (only to 256)"]
    crosses = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in crosses] == [([256], [20.5])]


def test_rows_without_an_interval_or_without_a_number_are_drawn(tmp_path):
    alone = {**row(256, 20.0), "low": None, "high": None}
    figure = draw_curves({"one": [alone], "none": [row(256, None, "refused")]}, 256)
    assert save(figure, tmp_path / "curve.png").stat().st_size > 2000
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert names == ["one", "none (refused)"]


def test_many_names_stand_beside_the_panel(tmp_path):
    figure = draw_curves({f"run {number}": SERIES["alibi"] for number in range(9)}, 256)
    axes = figure.axes[0]
    legend = axes.get_legend().get_window_extent()
    assert legend.x0 >= axes.get_window_extent().x1
    assert legend.x1 <= figure.bbox.x1


def test_no_two_of_many_curves_look_alike():
    axes = draw_curves({f"run {number}": SERIES["alibi"] for number in range(13)}, 256).axes[0]
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in axes.get_legend().get_lines()}
    assert len(looks) == 13


def test_curves_near_the_lowest_have_a_panel_of_their_own():
    near = {name: [row(256, x), row(1024, x)] for name, x in (("alibi", 20.0), ("cable", 19.0), ("fire", 23.0))}
    all_of_them, lowest = draw_curves(SERIES | near | {"nope": [row(256, 40.0)]}, 256).axes
    assert len(all_of_them.get_legend_handles_labels()[1]) == 6
    assert lowest.get_legend_handles_labels()[1] == ["alibi", "cable", "fire"]
    assert lowest.get_ylim()[1] < 30
    assert len(lowest.get_legend().get_texts()) == 6
    assert len(draw_curves(near, 256).axes) == 1  # nothing is far from the lowest


def test_positions_have_their_control_beside_them():
    axes = draw_positions({"alibi": BINS}, 64).axes[0]
    assert axes.get_xscale() == "log"
    own, control = axes.lines[:2]
    assert list(own.get_ydata()) == [bin_["loss"] for bin_ in BINS]
    assert list(control.get_ydata()) == [bin_["control"] for bin_ in BINS]
    assert own.get_color() == control.get_color()
    assert (own.get_linestyle(), control.get_linestyle()) == ("-", "--")
    assert all(bin_["from"] <= x <= bin_["to"] for bin_, x in zip(BINS, own.get_xdata(), strict=True))


TASK = {
    "task": "passkey",
    "encoding": "rope",
    "trained_length": 64,
    "chance": 0.1,
    "rows": [
        {"length": 64, "accuracy": 0.9, "low": 0.8, "high": 0.95, "error": None},
        {"length": 128, "accuracy": 0.4, "low": 0.3, "high": 0.5, "error": None},
        {"length": 256, "accuracy": None, "low": None, "high": None, "error": "no."},
    ],
    "depths": [
        {"length": length, "depth": depth, "accuracy": value}
        for length, depth, value in ((64, 0.0, 0.8), (64, 1.0, 1.0), (128, 0.0, 0.1), (128, 1.0, 0.7))
    ],
}


def test_accuracy_on_a_task_is_a_curve_and_a_map_by_depth():
    axes = draw_accuracy([TASK]).axes[0]
    curve, refused = (
        next(line for line in axes.lines if line.get_label() == name) for name in ("rope", "rope: refused")
    )
    assert curve.get_xydata().tolist() == [[64, 0.9], [128, 0.4]]
    assert refused.get_xdata().tolist() == [256]
    assert any(set(line.get_xdata()) == {64} for line in axes.lines)  # the trained length
    assert any(set(line.get_ydata()) == {0.1} for line in axes.lines)  # chance
    axes = draw_depths(TASK).axes[0]
    shown = axes.images[0].get_array()
    assert shown[:, :2].tolist() == [[0.8, 0.1], [1.0, 0.7]]
    assert shown.mask[:, 2].all()
    assert "refused" in axes.get_xlabel()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0%", "100%"]
