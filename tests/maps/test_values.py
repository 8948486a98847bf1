"""The values of heads, in every form, against dense scores in float64 that numpy reduces."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from dense_layers import DenseLayer
from explorer import TILE, levels, reduced_tile
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import relpos
from relpos.attend.arguments import LayerCall
from relpos.maps.head_values import CompleteRows, Entries, difference, flat_values, head_values
from relpos.maps.layer import open_layer
from relpos.maps.map import HeadMap
from relpos.maps.rank_one import RankOneValues
from relpos.maps.scaled import ScaledValues
from relpos.maps.toeplitz import ByDistance, FlatContent
from relpos.maps.values import HeadValues, TensorValues

HEADS, HEAD_DIM = 3, 8


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def make_case(name, length, key_heads=HEADS, seed=0, options=None, **arguments):
    torch.manual_seed(seed)
    return DenseLayer(relpos.encoding(name, HEADS, HEAD_DIM, **(options or {})), length, key_heads, **arguments)


CASES = [
    *((name, "bias", length, {}) for name in ("alibi", "fire", "window") for length in (1, 2, 255, 700)),
    *((name, "bias", 300, {}) for name in ("kerple_log", "kerple_power", "t5", "clipped", "sandwich", "sum")),
    *((name, "bias", 300, {"seed": 1}) for name in ("cable", "cable_nw", "forgetting")),
    *((name, "scores", 60, {}) for name in ("cope", "dape", "kcable", "sinusoidal")),
    *(
        (name, show, 300, {"key_heads": key_heads, **arguments})
        for name, key_heads in (("rope", 3), ("kerple_log", 1), ("nope", 3), ("t5", 3))
        for arguments in ({}, {"causal": False}, {"window": 40}, {"softcap": 2.0})
        for show in ("scores", "weights")
    ),
]


@pytest.mark.parametrize(("name", "show", "length", "options"), CASES)
def test_every_tile_row_and_profile_is_that_of_the_dense_map(name, show, length, options, monkeypatch):
    case = make_case(name, length, **options)
    dense, values = case.dense(show)[2], head_values(case.layer, 2, show)
    head_map = HeadMap(values)
    close = {"rtol": 2e-5, "atol": 2e-5 * max(1.0, np.nanmax(np.abs(dense)))}
    for level in levels(length):
        last = -(-length // (TILE * 2**level)) - 1
        for row, column in {(0, 0), (last, 0), (last, last), (0, last)}:
            ours = head_map.tile(level, row, column).numpy()
            np.testing.assert_allclose(ours, reduced_tile(dense, level, row, column), **close)
    np.testing.assert_allclose(head_map.range, (np.nanmin(dense), np.nanmax(dense)), **close)
    others = dense[:, 1:] if length > 1 else dense
    np.testing.assert_allclose(head_map.range_without_sink, (np.nanmin(others), np.nanmax(others)), **close)
    query = length // 2
    step, row = head_map.row(query)
    assert step == 1
    np.testing.assert_allclose(row.numpy(), np.stack([dense[query]] * 3), **close)
    for key in (query, length - 1):
        value = head_map.value(query, key)
        np.testing.assert_allclose(np.nan if value is None else value, dense[query, key], **close)
    distances = [d for d in (0, 1, 39, length - 1) if d < length] + ([] if values.causal else [-1, 1 - length])
    profiles = [values.profile(torch.tensor(distances)).numpy()]
    monkeypatch.setattr("relpos.maps.values.ONE_PASS", 0)  # a longer map has its diagonals one by one
    profiles.append(values.profile(torch.tensor(distances)).numpy())
    for column, distance in enumerate(distances):
        along = np.diagonal(dense, -distance)
        along = along[np.isfinite(along)]
        expected = [along.min(), along.mean(), along.max()] if along.size else [np.nan] * 3
        for profile in profiles:
            np.testing.assert_allclose(profile[:, column], expected, **close)
    if show == "weights":
        entropy = torch.special.entr(torch.from_numpy(np.nan_to_num(dense))).sum(-1).mean()
        assert values.mean_entropy() == pytest.approx(float(entropy), rel=1e-4)


def any_values(kind, length, seed, generator):
    """Values in a closed form, and others that compute the same entry by entry."""
    if kind in ("cable", "cable_nw", "forgetting", "fire"):
        layer = make_case(kind, length, seed=seed).layer
        return head_values(layer, seed % HEADS, "bias"), Entries(layer, seed % HEADS, "bias")
    causal, hidden = "both" not in kind, "hidden" in kind
    values = torch.randn(length if causal else 2 * length - 1, generator=generator, dtype=torch.float64)
    if hidden:
        values[torch.rand(len(values), generator=generator) < 0.3] = -torch.inf
        values[len(values) - length] = 0.5  # distance 0 is seen, so that every row has a key
    table = ByDistance(values, length)
    closed = FlatContent(table) if "flat" in kind else table
    return closed, TensorValues(closed.block(0, length, 0, length).double())


DISTANCES = [f"{kind}{seen}{way}" for kind in ("table", "flat") for seen in ("", " hidden") for way in ("", " both")]


@hypothesis_settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(["cable", "cable_nw", "forgetting", "fire", *DISTANCES]),
    length=st.integers(1, 150),
    size=st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
    seed=st.integers(0, 99),
)
def test_any_cells_of_a_closed_form_are_those_of_the_entries(kind, length, size, seed):
    generator = torch.Generator().manual_seed(seed)
    closed, entries = any_values(kind, length, seed, generator)
    side = -(-length // size)
    row, column = (int(torch.randint(side, (), generator=generator)) for _ in range(2))
    ours = closed.cells(row, side - row, column, side - column, size).planes
    expected = HeadValues.cells(entries, row, side - row, column, side - column, size).planes
    scale = float(expected[expected.isfinite()].abs().max()) if expected.isfinite().any() else 1.0
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5 * max(0.1, scale), equal_nan=True)
    without_sink = HeadValues.extremes_without_first_key(entries)
    if np.isfinite(without_sink[0]):
        assert closed.extremes_without_first_key() == pytest.approx(without_sink, rel=1e-4, abs=1e-5 * max(1.0, scale))


@pytest.mark.parametrize("length", [1, 2, 37, 300])
@pytest.mark.parametrize("name", ["fire", "cable", "cable_nw", "forgetting"])
def test_diagonals_of_a_closed_form_are_those_of_the_entries(name, length, monkeypatch):
    """FIRE with a threshold within the sequence, and a function that rises and falls."""
    position = relpos.encoding(name, HEADS, HEAD_DIM, **({"length": 20} if name == "fire" else {}))
    if name == "fire":
        for parameter in (position.inner.weight, position.inner.bias, position.outer.weight):
            parameter.normal_()
    hidden = torch.randn(1, length, position.width) if position.needs_hidden else None
    q = torch.zeros(1, HEADS, length, HEAD_DIM)
    values = head_values(open_layer(1, LayerCall(q, q, position, {"hidden": hidden})), 1, "bias")
    assert values.closed
    size = -(-length // 30)
    side = -(-length // size)
    for ours, direct in zip(
        values.cells(0, side, 0, side, size), HeadValues.cells(values, 0, side, 0, side, size), strict=True
    ):
        torch.testing.assert_close(ours.double(), direct.double(), rtol=1e-5, atol=1e-4)
    computed, direct = values.diagonals(), HeadValues.diagonals(values)
    exact = ("count", "mean", "variance", "within", "between", *(("low", "high") if computed.extremes else ()))
    for statistic in (*exact, "largest"):
        ours, expected = getattr(computed, statistic), getattr(direct, statistic)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-4)
    for limit in (length, 0):  # in one pass, and one by one
        monkeypatch.setattr("relpos.maps.values.ONE_PASS", limit)
        profile = values.profile(torch.arange(length))
        torch.testing.assert_close(profile, direct.profile[:, 0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["kerple_log", "t5", "window", "cable"])
def test_flat_is_the_softmax_over_equal_content(name, causal):
    length = 600 if name != "cable" else 90
    case = make_case(name, length, causal=causal)
    weights = np.nan_to_num(case.dense("bias")[1], nan=-np.inf)
    weights = torch.from_numpy(weights).softmax(-1).masked_fill(torch.from_numpy(weights == -np.inf), torch.nan)
    head_map = HeadMap(flat_values(case.layer, 1))
    for level in levels(length):
        expected = reduced_tile(weights.numpy(), level, 0, 0)
        np.testing.assert_allclose(head_map.tile(level, 0, 0), expected, rtol=2e-3, atol=1e-6)
    entropy = torch.special.entr(weights.nan_to_num()).sum(-1).mean()
    assert head_map.values.mean_entropy() == pytest.approx(float(entropy), rel=1e-5)


def test_weights_leave_a_share_to_a_learned_sink():
    case = make_case("alibi", 50, sinks=torch.tensor([0.5, 1.0, 2.0]))
    dense = relpos.scores(case.q, case.k, case.position)[0, 1]
    with_sink = torch.cat([dense, torch.ones(50, 1, dtype=torch.float64)], dim=1).softmax(-1)[:, :50]
    ours = head_values(case.layer, 1, "weights").block(0, 50, 0, 50).nan_to_num()
    torch.testing.assert_close(ours.double(), with_sink, atol=1e-6, rtol=1e-5)


def test_a_difference_is_that_of_the_entries():
    a, b = (make_case(name, 300, seed=1) for name in ("t5", "fire"))
    for second in (b, make_case("t5", 300, seed=2)):
        dense = a.dense("bias")[1] - second.dense("bias")[1]
        head_map = HeadMap(difference(*(head_values(case.layer, 1, "bias") for case in (a, second))))
        for level in levels(300):
            np.testing.assert_allclose(head_map.tile(level, 0, 0), reduced_tile(dense, level, 0, 0), atol=1e-5)
        assert head_map.range == pytest.approx((np.nanmin(dense), np.nanmax(dense)), abs=1e-5)
    with pytest.raises(ValueError, match="300 and 200 tokens"):
        difference(head_values(a.layer, 0, "bias"), head_values(make_case("t5", 200).layer, 0, "bias"))


@pytest.mark.parametrize(("name", "seed"), [("cable_nw", 2), ("fire", 0), ("fire", 1), ("fire", 2)])
def test_a_tile_of_a_long_map_is_exact(name, seed):
    """5,000 tokens are longer than FIRE's threshold, from which on rows are scaled."""
    layer = make_case(name, 5000, seed=seed).layer
    values, entries = head_values(layer, 1, "bias"), Entries(layer, 1, "bias")
    ours = values.cells(0, 157, 0, 157, 32).planes
    for row, column in ((3, 1), (156, 0), (156, 155), (100, 100), (156, 156), (60, 55), (140, 3)):
        cell = entries.block(32 * row, min(32 * row + 32, 5000), 32 * column, min(32 * column + 32, 5000)).double()
        cell = cell[cell.isfinite()]
        expected = torch.stack([cell.amin(), cell.mean(), cell.amax()]).float()
        torch.testing.assert_close(ours[:, row, column], expected, rtol=1e-5, atol=1e-5)


def test_each_bias_has_the_values_of_its_form():
    kinds = {"t5": ByDistance, "cable": RankOneValues, "fire": ScaledValues, "cope": CompleteRows, "sum": Entries}
    for name, kind in kinds.items():
        assert type(head_values(make_case(name, 20).layer, 0, "bias")) is kind
    layer = make_case("fire", 100).layer
    faster = replace(layer, form=replace(layer.form, row=torch.arange(1.0, 101.0)[None] ** 3))
    assert type(head_values(faster, 0, "bias")) is Entries  # rows grow faster than the table


def test_a_pyramid_has_the_same_cells_as_the_entries():
    generator = torch.Generator().manual_seed(0)
    entries = torch.randn(1100, 1100, generator=generator).masked_fill(torch.ones(1100, 1100).triu(1).bool(), torch.nan)
    head_map = HeadMap(TensorValues(entries))
    head_map.base = 1  # as if the length were far greater
    for level in (1, 2, 3):
        expected = reduced_tile(entries.numpy(), level, 0, 0)
        np.testing.assert_allclose(head_map.tile(level, 0, 0), expected, atol=1e-6)
    assert head_map.range == (float(np.nanmin(entries)), float(np.nanmax(entries)))
    assert head_map.range_without_sink == (float(np.nanmin(entries[:, 1:])), float(np.nanmax(entries[:, 1:])))


def test_a_long_row_is_reduced():
    step, row = HeadMap(ByDistance(-torch.arange(10_000.0), 10_000)).row(9999)
    assert step == 3
    assert row.shape == (3, 3334)
    assert row[:, 0].tolist() == [-9999, -9998, -9997]


def test_the_distance_between_two_inputs_follows_from_running_sums():
    first, second = (head_values(make_case("cable", 200, seed=seed).layer, 0, "bias") for seed in (0, 1))
    apart = (first.block(0, 200, 0, 200) - second.block(0, 200, 0, 200)).double().square().nansum()
    assert first.squared_difference(second) == pytest.approx(float(apart), rel=1e-5)
    assert first.squared_difference(first) == 0
