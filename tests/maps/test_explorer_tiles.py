"""The tiles of the explorer against dense maps in float64, reduced by numpy."""

import numpy as np
import pytest
import torch
from explorer import client, get_tile, levels, make_scene, reduced_tile
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import relpos
from relpos.maps.map import HeadMap
from relpos.maps.toeplitz import ByDistance, FlatContent
from relpos.maps.values import HeadValues, TensorValues

pytestmark = pytest.mark.heavy

STATIC = ["alibi", "kerple_log", "kerple_power", "t5", "clipped", "sandwich", "window", "fire"]


def seen(dense):
    return np.where(np.isfinite(dense), dense, np.nan)


@pytest.mark.parametrize("length", [1, 2, 255, 257, 700])
@pytest.mark.parametrize("name", STATIC)
def test_every_tile_of_a_static_bias_is_the_reduced_map(name, length):
    web = client()
    scene = make_scene(web, subject=None, encoding=name, length=length, heads=2, seed=3)
    torch.manual_seed(3)
    dense = seen(relpos.encoding(name, 2, 64).double().map(length)[1].double().numpy())
    for level in levels(length):
        tiles = -(-length // (256 * 2**level))
        for row, column in {(0, 0), (tiles - 1, 0), (tiles - 1, tiles - 1), (0, tiles - 1)}:
            ours = get_tile(web, scene, "bias", 1, 2, level, row, column)
            theirs = reduced_tile(dense, level, row, column)
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5 * max(1.0, np.nanmax(np.abs(dense))))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["kerple_log", "t5", "window", "rope"])
def test_flat_is_the_softmax_over_equal_content(name, causal):
    length = 600
    web = client()
    scene = make_scene(web, subject=None, encoding=name, length=length, heads=2, seed=1, causal=causal)
    torch.manual_seed(1)
    position = relpos.encoding(name, 2, 64).double()
    if name == "rope":
        torch.manual_seed(1)
        q = torch.randn(128).view(1, 2, 1, 64).expand(1, 2, length, 64).double()
        logits = relpos.scores(q, q, position, causal=causal)[0, 0]
    else:
        logits = position.map(length, causal=causal)[0]
    weights = logits.softmax(dim=-1).masked_fill(logits == -torch.inf, torch.nan).numpy()
    for level in levels(length):
        ours = get_tile(web, scene, "flat", 1, 1, level, 0, 0)
        np.testing.assert_allclose(ours, reduced_tile(weights, level, 0, 0), rtol=2e-3, atol=1e-6)


def test_scores_of_rope_are_those_of_equal_tokens():
    web = client()
    scene = make_scene(web, subject=None, encoding="rope", length=300, heads=3)
    torch.manual_seed(0)
    q = torch.randn(192).view(1, 3, 1, 64).expand(1, 3, 300, 64)
    dense = seen(relpos.scores(q, q, relpos.encoding("rope", 3, 64))[0, 2].double().numpy())
    for level in levels(300):
        ours = get_tile(web, scene, "scores", 1, 3, level, 0, 0)
        np.testing.assert_allclose(ours, reduced_tile(dense, level, 0, 0), atol=2e-4)


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 90),
    size=st.sampled_from([1, 2, 4, 8, 16, 32]),
    causal=st.booleans(),
    hidden=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_cells_of_any_length_agree_with_the_entries(length, size, causal, hidden, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(length if causal else 2 * length - 1, generator=generator, dtype=torch.float64)
    if hidden:
        values[torch.rand(len(values), generator=generator) < 0.3] = -torch.inf
        values[len(values) - length] = 0.5  # distance 0 is seen, so that every row has a key
    side = -(-length // size)
    row, column = (int(torch.randint(side, (), generator=generator)) for _ in range(2))
    for source in (ByDistance(values, length), FlatContent(ByDistance(values, length))):
        ours = source.cells(row, side - row, column, side - column, size).planes
        theirs = HeadValues.cells(source, row, side - row, column, side - column, size).planes
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, equal_nan=True)
        low, high = source.extremes_without_first_key()
        expected = HeadValues.extremes_without_first_key(source)
        if np.isfinite(expected[0]):
            assert (low, high) == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_a_pyramid_has_the_same_cells_as_the_entries():
    generator = torch.Generator().manual_seed(0)
    entries = torch.randn(1100, 1100, generator=generator).masked_fill(torch.ones(1100, 1100).triu(1).bool(), torch.nan)

    head_map = HeadMap(TensorValues(entries))
    head_map.base = 1  # as if the length were far greater
    for level in (1, 2, 3):
        ours = head_map.tile(level, 0, 0).numpy()
        np.testing.assert_allclose(ours, reduced_tile(entries.numpy(), level, 0, 0), atol=1e-6)
    assert head_map.range == (float(np.nanmin(entries)), float(np.nanmax(entries)))


@pytest.mark.parametrize("name", ["kerple_log", "cable", "fire", "cope", "sinusoidal"])
def test_values_and_rows_are_entries_of_the_map(name):
    web = client()
    scene = make_scene(web, subject=None, encoding=name, length=70, heads=2)
    for show in scene["shows"]:
        tile = get_tile(web, scene, show, 1, 2, 0, 0, 0)
        base = f"/api/scenes/{scene['scene']}"
        row = web.get(f"{base}/row/{show}/1/2/50").json()
        assert row["step"] == 1
        assert row["mean"][:51] == pytest.approx(tile[1, 50, :51].tolist(), rel=1e-4, abs=1e-6)
        assert row["mean"][51:] == [None] * 19
        assert web.get(f"{base}/value/{show}/1/2/50/7").json()["value"] == pytest.approx(tile[1, 50, 7], abs=1e-5)
        assert web.get(f"{base}/value/{show}/1/2/7/50").json() == {"value": None}


def test_a_long_row_is_reduced():
    web = client()
    scene = make_scene(web, subject=None, encoding="alibi", length=10_000, heads=1)
    row = web.get(f"/api/scenes/{scene['scene']}/row/bias/1/1/9999").json()
    slope = 2.0**-8
    assert row["step"] == 3
    assert (row["low"][0], row["mean"][0], row["high"][0]) == pytest.approx(
        (-9999 * slope, -9998 * slope, -9997 * slope)
    )
    assert len(row["mean"]) == 3334
