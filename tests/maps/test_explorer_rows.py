"""Cells that are reduced by rows (RankOne, FIRE) and entries that come from queries and keys, against dense maps."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from explorer import client, get_tile, levels, make_scene, reduced_tile
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import relpos
from relpos.attend.arguments import LayerCall
from relpos.maps.entries import Entries
from relpos.maps.head_values import flat_values, head_values
from relpos.maps.layer import open_layer
from relpos.maps.rank_one import RankOneValues
from relpos.maps.scaled import ScaledValues
from relpos.maps.values import HeadValues

pytestmark = pytest.mark.heavy


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def make_layer(name, length, heads=3, key_heads=3, seed=0, **arguments):
    """A layer, and what it was made of: q, k, hidden and the encoding, in float64."""
    torch.manual_seed(seed)
    position = relpos.encoding(name, heads, 8)
    q, k = torch.randn(1, heads, length, 8), torch.randn(1, key_heads, length, 8)
    hidden = torch.randn(1, length, position.width) if position.needs_hidden else None
    layer = open_layer(1, LayerCall(q, k, position, {"hidden": hidden, **arguments}))
    wide = None if hidden is None else hidden.double()
    return layer, q.double(), k.double(), wide, position.double()


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["cable", "cable_nw", "forgetting", "fire"]),
    length=st.integers(1, 150),
    size=st.sampled_from([1, 4, 8, 16, 32, 64]),
    seed=st.integers(0, 99),
)
def test_cells_by_rows_agree_with_the_entries(name, length, size, seed):
    layer, *_ = make_layer(name, length, seed=seed)
    source = head_values(layer, seed % 3, "bias")
    assert isinstance(source, ScaledValues if name == "fire" else RankOneValues)
    side = -(-length // size)
    generator = torch.Generator().manual_seed(seed)
    row, column = (int(torch.randint(side, (), generator=generator)) for _ in range(2))
    ours = source.cells(row, side - row, column, side - column, size).planes
    theirs = HeadValues.cells(Entries(layer, seed % 3, "bias"), row, side - row, column, side - column, size).planes
    scale = float(theirs[theirs.isfinite()].abs().max()) if theirs.isfinite().any() else 1.0
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * max(1.0, scale), equal_nan=True)
    expected = HeadValues.extremes_without_first_key(Entries(layer, seed % 3, "bias"))
    assert source.extremes_without_first_key() == pytest.approx(expected, rel=1e-4, abs=1e-5 * max(1.0, scale))


@pytest.mark.parametrize("arguments", [{}, {"causal": False}, {"window": 40}, {"softcap": 2.0}])
@pytest.mark.parametrize(("name", "key_heads"), [("rope", 3), ("kerple_log", 1), ("nope", 3), ("t5", 3)])
def test_scores_and_weights_are_those_of_attention(name, key_heads, arguments):
    length = 300
    layer, q, k, hidden, position = make_layer(name, length, key_heads=key_heads, **arguments)
    dense = relpos.scores(q, k, position, hidden=hidden, **arguments)[0]
    for show, computed in (("scores", dense), ("weights", dense.softmax(-1))):
        values = computed.masked_fill(dense == -torch.inf, torch.nan).numpy()[2]
        source = head_values(layer, 2, show)
        for level in levels(length):
            side = -(-length // 2**level)
            ours = source.cells(0, min(side, 256), 0, min(side, 256), 2**level).planes.numpy()
            theirs = reduced_tile(values, level, 0, 0)[:, : ours.shape[1], : ours.shape[2]]
            np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_weights_leave_a_share_to_a_learned_sink():
    layer, q, k, _, position = make_layer("alibi", 50, sinks=torch.tensor([0.5, 1.0, 2.0]))
    dense = relpos.scores(q, k, position)[0, 1]
    with_sink = torch.cat([dense, torch.ones(50, 1, dtype=torch.float64)], dim=1).softmax(-1)[:, :50]
    ours = head_values(layer, 1, "weights").block(0, 50, 0, 50).nan_to_num()
    torch.testing.assert_close(ours.double(), with_sink, atol=1e-6, rtol=1e-5)


def test_entropy_is_that_of_the_rows():
    layer, q, k, _, position = make_layer("kerple_log", 120)
    weights = relpos.scores(q, k, position)[0, 1].softmax(-1)
    expected = torch.special.entr(weights).sum(-1)
    torch.testing.assert_close(Entries(layer, 1, "weights").entropy.double(), expected, atol=1e-4, rtol=1e-4)
    flat = torch.special.entr(position.map(120)[1].softmax(-1)).sum(-1).mean()
    assert flat_values(layer, 1).mean_entropy == pytest.approx(float(flat), rel=1e-6)


def test_flat_of_a_bias_that_is_no_function_of_the_distance():
    layer, _, _, hidden, position = make_layer("cable", 90)
    dense = position.map(hidden=hidden)[0, 1].softmax(-1)
    ours = flat_values(layer, 1).block(0, 90, 0, 90).nan_to_num()
    torch.testing.assert_close(ours.double(), dense, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["cope", "dape", "kcable"])
def test_forms_that_read_complete_rows(name):
    layer, q, k, hidden, position = make_layer(name, 60)
    dense = relpos.scores(q, k, position, hidden=hidden)[0, 1]
    dense = dense.masked_fill(dense == -torch.inf, torch.nan)
    ours = head_values(layer, 1, "scores").block(10, 50, 5, 45)
    torch.testing.assert_close(ours.double(), dense[10:50, 5:45], atol=1e-4, rtol=1e-4, equal_nan=True)


def test_a_difference_is_that_of_the_entries():
    web = client()
    scenes = [make_scene(web, subject=None, encoding=name, length=300, heads=2, seed=1) for name in ("t5", "fire")]
    maps = []
    for name in ("t5", "fire"):
        torch.manual_seed(1)
        maps.append(relpos.encoding(name, 2, 64).map(300)[1].double().numpy())
    with np.errstate(invalid="ignore"):
        dense = maps[0] - maps[1]  # NaN where neither is seen: −inf − −inf
    base = f"/api/difference/{scenes[0]['scene']}/{scenes[1]['scene']}"
    for level in levels(300):
        reply = web.get(f"{base}/tiles/bias/1/2/1/2/{level}/0/0")
        ours = np.frombuffer(reply.content, "<f4").reshape(3, 256, 256)
        np.testing.assert_allclose(ours, reduced_tile(dense, level, 0, 0), atol=1e-5)
    span = web.get(f"{base}/head/bias/1/2/1/2").json()
    assert (span["low"], span["high"]) == pytest.approx((np.nanmin(dense), np.nanmax(dense)), abs=1e-5)
    other = make_scene(web, subject=None, encoding="t5", length=200, heads=2)
    reply = web.get(f"/api/difference/{scenes[0]['scene']}/{other['scene']}/tiles/bias/1/1/1/1/0/0/0")
    assert reply.status_code == 400
    assert "300 and 200 tokens" in reply.json()["error"]


def test_a_tile_of_a_long_rank_one_map_is_exact():
    web = client()
    scene = make_scene(web, subject=None, encoding="cable_nw", length=5000, heads=2, seed=2)
    tile = get_tile(web, scene, "bias", 1, 1, 5, 0, 0)
    layer = web.explorer.scene(scene["scene"]).layer("bias", 1)
    total = layer.form.total[0, 0].numpy()
    for row, column in ((3, 1), (156, 0), (156, 155), (100, 100)):
        i, j = np.meshgrid(np.arange(row * 32, min(row * 32 + 32, 5000)), np.arange(column * 32, column * 32 + 32))
        cell = (-(total[i] - total[np.minimum(j, 4999)]))[(j <= i) & (j < 5000)]
        np.testing.assert_allclose(tile[:, row, column], [cell.min(), cell.mean(), cell.max()], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_tile_of_a_long_fire_map_is_exact(seed):
    layer, *_ = make_layer("fire", 5000, seed=seed)  # longer than FIRE's threshold, from which on rows are scaled
    source, entries = head_values(layer, 1, "bias"), Entries(layer, 1, "bias")
    ours = source.cells(0, 157, 0, 157, 32).planes
    for row, column in ((3, 1), (156, 0), (156, 155), (100, 100), (156, 156), (60, 55), (140, 3)):
        theirs = entries.block(32 * row, min(32 * row + 32, 5000), 32 * column, min(32 * column + 32, 5000)).double()
        theirs = theirs[theirs.isfinite()]
        expected = torch.stack([theirs.amin(), theirs.mean(), theirs.amax()]).float()
        torch.testing.assert_close(ours[:, row, column], expected, rtol=1e-5, atol=1e-5)


def test_a_map_whose_rows_grow_faster_than_its_table_is_reduced_entry_by_entry():
    layer, *_ = make_layer("fire", 100)
    form = replace(layer.form, row=torch.arange(1.0, 101.0)[None] ** 3)
    faster = replace(layer, form=form)
    assert isinstance(head_values(layer, 0, "bias"), ScaledValues)
    assert not isinstance(head_values(faster, 0, "bias"), ScaledValues)
