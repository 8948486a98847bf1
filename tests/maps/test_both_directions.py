"""Pictures of attention in both directions, held to dense scores and to numpy."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import relpos
from relpos.attend.arguments import LayerCall
from relpos.maps import map as maps
from relpos.maps.layer import encoding_layer, open_layer
from relpos.maps.map import map_of_layer
from relpos.maps.scaled import has_pieces
from relpos.pictures.draw import check_directions, draw

HEADS, HEAD_DIM = 3, 8
BOTH = [
    *(name for name in relpos.names() if relpos.encoding(name, heads=HEADS, head_dim=HEAD_DIM).bidirectional),
    "symmetric fire",
]


def encoding(name):
    if name == "symmetric fire":
        return relpos.encoding("fire", heads=HEADS, head_dim=HEAD_DIM, length=20, symmetric=True)
    return relpos.encoding(name, heads=HEADS, head_dim=HEAD_DIM)


class Opened:
    """A layer in both directions, with the tensors that it was opened with, in float64."""

    def __init__(self, position, length):
        self.position = position.double()
        self.hidden = torch.randn(1, length, HEADS * HEAD_DIM).double() if position.needs_hidden else None
        self.q, self.k = torch.randn(2, 1, HEADS, length, HEAD_DIM).double()
        self.layer = open_layer(1, LayerCall(self.q, self.k, self.position, {"hidden": self.hidden, "causal": False}))

    @torch.no_grad()
    def dense(self, show):
        """The map in one piece (heads, length, length): from `relpos.scores`, and with numpy's own softmax."""
        scores = relpos.scores(self.q, self.k, self.position, hidden=self.hidden, causal=False)[0].numpy()
        if show == "bias":
            return scores - relpos.scores(self.q, self.k, causal=False)[0].numpy()
        if show == "scores":
            return scores
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("length", [1, 13])
def test_rows_are_those_of_the_dense_scores(name, length):
    opened = Opened(encoding(name), length)
    assert not opened.layer.causal
    shows = ["scores", "weights"] + ["bias"] * (opened.layer.form is not None)
    for show in shows:
        rows = opened.layer.rows(show, 0, length - 1)
        assert rows.shape == (HEADS, length, length)
        np.testing.assert_allclose(rows, opened.dense(show), rtol=1e-6, atol=1e-9)
        middle = opened.layer.rows(show, length // 2, length // 2)
        np.testing.assert_allclose(middle[:, 0], rows[:, length // 2], rtol=1e-9, atol=1e-12)


def reduce(values, size):
    """Minimum, mean and maximum of every cell of a map (heads, length, length), by numpy."""
    starts = np.arange(0, values.shape[-1], size)
    low, total, high, count = (
        function.reduceat(function.reduceat(x, starts, axis=1), starts, axis=2)
        for function, x in (
            (np.minimum, values),
            (np.add, values),
            (np.maximum, values),
            (np.add, np.ones_like(values)),
        )
    )
    return low, total / count, high


def measure(first, second):
    """Uniformity of one map and context dependence of two, as they are defined: None where nothing varies."""
    distances = range(1 - len(first), len(first))
    within = sum(np.diagonal(first, -d).var() * (len(first) - abs(d)) for d in distances) / first.size
    both = np.stack([first, second])
    constant = [values.std() < 1e-6 * np.abs(values).max() + 1e-30 for values in both]
    uniform = None if constant[0] else 1 - within / first.var()
    return uniform, None if all(constant) else ((first - second) ** 2).mean() / (2 * both.var())


@given(
    name=st.sampled_from(
        ["alibi", "rope", "clipped", "t5", "kerple_log", "cable", "sum", "sandwich", "dape", "symmetric fire"]
    ),
    show=st.sampled_from(["bias", "scores", "weights"]),
    length=st.integers(1, 70),
    pixels=st.integers(1, 40),
    numbers=st.sampled_from([1, 300, 2000, 10**6]),
)
@settings(max_examples=60, deadline=None)
def test_tiles_reduce_to_what_the_dense_map_reduces_to(name, show, length, pixels, numbers):
    torch.manual_seed(length)
    opened = Opened(encoding(name), length)
    other = Opened(opened.position, length)
    show = "scores" if opened.layer.form is None else show
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maps, "NUMBERS", numbers)
        computed = map_of_layer(opened.layer, show, other.layer, pixels)
    values, compared = opened.dense(show), other.dense(show)
    assert computed.mean.shape[-1] <= pixels
    assert not computed.causal
    for ours, direct in zip((computed.low, computed.mean, computed.high), reduce(values, computed.cell), strict=True):
        np.testing.assert_allclose(ours, direct, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(computed.distances, np.arange(1 - length, length))
    assert computed.profile.shape == (3, HEADS, 2 * length - 1)
    for column, distance in enumerate(computed.distances):
        along = np.diagonal(values, -distance, 1, 2)  # query − key
        np.testing.assert_allclose(
            computed.profile[:, :, column], (along.min(1), along.mean(1), along.max(1)), rtol=1e-5, atol=1e-6
        )
    for head in range(HEADS):
        uniform, context = measure(values[head], compared[head])
        assert computed.uniformity.heads[head] == (None if uniform is None else pytest.approx(uniform, abs=1e-6))
        assert computed.context.heads[head] == (None if context is None else pytest.approx(context, abs=1e-6))


@pytest.mark.parametrize("length", [513, 1025, 1100])  # cells of 2 and 3 entries a side, the last ones cut off
@pytest.mark.parametrize("name", ["alibi", "clipped", "t5"])
def test_a_long_bias_of_the_distance_is_exact_without_its_entries(name, length, monkeypatch):
    opened = Opened(encoding(name), length)
    monkeypatch.setattr(maps, "_pass_over_entries", lambda *arguments: pytest.fail("the entries were computed"))
    computed = map_of_layer(opened.layer, "bias", opened.layer)
    values = opened.dense("bias")
    assert computed.cell == math.ceil(length / 512)
    for ours, direct in zip((computed.low, computed.mean, computed.high), reduce(values, computed.cell), strict=True):
        np.testing.assert_allclose(ours, direct, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(computed.profile[1, :, length - 1 :], values[:, :, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(computed.profile[1, :, : length - 1], values[:, 0, :0:-1], rtol=1e-5, atol=1e-6)
    assert computed.uniformity.overall == 1.0
    assert computed.context.overall == 0.0


@torch.no_grad()
def test_a_long_bias_of_symmetric_fire_is_computed_entry_by_entry():
    """Its rows are not the scales of keys after the query: it must not be reduced by its pieces."""
    opened = Opened(encoding("symmetric fire"), 600)
    assert has_pieces(encoding_layer(opened.position, 600).form)
    assert not has_pieces(opened.layer.form)
    computed = map_of_layer(opened.layer, "bias")
    assert computed.cell == 2
    for ours, direct in zip((computed.low, computed.mean, computed.high), reduce(opened.dense("bias"), 2), strict=True):
        np.testing.assert_allclose(ours, direct, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["alibi", "clipped", "kerple_log", "sandwich", "t5"])
def test_a_short_bias_of_the_distance_is_exactly_uniform(name):
    """Also where sums of squares would round: the deviations from the first entry of a diagonal are exactly 0."""
    opened = Opened(encoding(name), 141)
    computed = map_of_layer(opened.layer, "bias", Opened(opened.position, 141).layer)
    assert computed.uniformity.heads == [1.0] * HEADS
    assert computed.context.heads == [0.0] * HEADS


def test_a_negative_distance_is_a_key_after_the_query():
    """The table of `clipped` begins with distance −limit."""
    position = encoding("clipped")
    computed = map_of_layer(encoding_layer(position, 20, causal=False), "bias")
    table = position.table.detach().numpy()
    np.testing.assert_array_equal(computed.profile[1], table[:, position.limit - 19 : position.limit + 20])


def panels_of(figure):
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


@pytest.mark.parametrize("length", [25, 601])
@pytest.mark.parametrize("name", ["alibi", "rope", "clipped"])
def test_a_heat_map_has_no_blank_entries(name, length):
    picture = draw(name, heads=2, head_dim=8, length=length, causal=False)
    for panel in panels_of(picture.figure):
        assert not np.ma.getmaskarray(panel.images[0].get_array()).any()
    assert "in both directions" in picture.caption
    assert picture.numbers["causal"] is False
    causal = draw(name, heads=2, head_dim=8, length=length)
    assert np.ma.getmaskarray(panels_of(causal.figure)[0].images[0].get_array()).any()
    assert "direction" not in causal.caption
    assert causal.numbers["causal"] is True


def test_the_range_includes_the_keys_after_the_query():
    position = encoding("clipped")
    with torch.no_grad():
        position.table[:, : position.limit] = 7.0
    picture = draw(position, length=16, causal=False)
    assert [head["maximum"] for head in picture.numbers["layers"][0]["heads"]] == [7.0] * HEADS


@pytest.mark.parametrize("log", [False, True])
def test_a_profile_shows_both_signs_of_the_distance(log):
    axes = panels_of(draw("alibi", heads=3, length=400, show="profile", causal=False, log=log).figure)[0]
    distance = np.arange(-399, 400)
    for head, line in enumerate(axes.lines, start=1):
        np.testing.assert_array_equal(line.get_xdata(), distance)
        np.testing.assert_allclose(line.get_ydata(), -np.abs(distance) * 2 ** (-8 * head / 3), rtol=1e-6)
    places = axes.transData.transform([(x, 0) for x in (-100, -10, 0, 10, 100)])[:, 0]
    gaps = np.diff(places)
    assert (gaps > 0).all()
    np.testing.assert_allclose(gaps, gaps[::-1])
    assert (gaps[0] < 5 * gaps[1]) == log
    ticks, low, high = axes.get_xticks(), *axes.get_xlim()
    assert sorted(-tick for tick in ticks) == list(ticks)
    assert low <= -399 < 399 <= high
    assert axes.get_xlabel() == "distance (query − key)"


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("width", [7.0, 3.33])
@pytest.mark.parametrize("length", [12, 512, 3000, 65536])
def test_the_distances_of_a_profile_do_not_overlap(length, width, log):
    figure = draw("alibi", heads=2, length=length, show="profile", causal=False, log=log, width=width).figure
    figure.canvas.draw()
    labels = [label.get_window_extent(figure.canvas.get_renderer()) for label in figure.axes[0].get_xticklabels()]
    assert len(labels) >= 3
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(labels))


def test_several_profiles_and_a_contact_sheet_have_both_directions():
    together = draw(["alibi", "clipped"], heads=2, length=30, show="profile", causal=False)
    assert [len(line.get_xdata()) for line in together.figure.axes[0].lines] == [59] * 4
    assert "in both directions" in together.caption
    sheet = draw("alibi", heads=2, length=30, layer="all", causal=False)
    assert not np.isnan(sheet.maps[0].mean).any()


def test_a_causal_encoding_is_refused_in_both_directions():
    pattern = (
        r"fire is defined for causal attention only: leave causal=False out\. In both .* symmetric=True, kerple_log"
    )
    with pytest.raises(ValueError, match=pattern):
        draw("fire", causal=False)


def test_profiles_of_different_directions_are_refused():
    subjects = [
        SimpleNamespace(label=label, layers=[SimpleNamespace(causal=causal)])
        for label, causal in (("alibi", True), ("runs/encoder", False))
    ]
    with pytest.raises(ValueError, match="alibi causal, runs/encoder in both directions"):
        check_directions(subjects, None)
    with pytest.raises(ValueError, match="runs/encoder was trained with attention in both directions: leave causal=Tr"):
        check_directions(subjects, True)
