"""The pictures: Figure 12 to the last tick, and what every picture must show."""

import json
from pathlib import Path

import numpy as np
import pytest

import relpos
from relpos.view.figures import bar_ticks, draw_heads, save
from relpos.view.maps import untrained
from relpos.view.paper import draw_figures

SEED = json.loads((Path(__file__).parent / "data" / "seed-figures.json").read_text())["figures"]


@pytest.fixture(scope="module")
def figure12():
    return draw_heads(relpos.encoding("alibi", heads=12, head_dim=64).map(512).numpy())


def test_figure_12_has_the_ticks_of_the_paper(figure12):
    printed = [sorted(ticks) for ticks in SEED["12"]["heads"].values()]
    shown = [sorted(ticks) for ticks in bar_ticks(figure12)]
    assert len(shown) == 12
    for head, (ours, theirs) in enumerate(zip(shown, printed, strict=True), start=1):
        np.testing.assert_allclose(ours, theirs, atol=1e-9, err_msg=f"head {head}")


def test_the_official_slopes_do_not_give_figure_12():
    """So the test above can fail."""
    maps = relpos.encoding("alibi", heads=12, head_dim=64, slopes="press").map(512).numpy()
    printed = [sorted(ticks) for ticks in SEED["12"]["heads"].values()]
    assert [sorted(ticks) for ticks in bar_ticks(draw_heads(maps))] != printed


def test_the_page_is_laid_out_as_printed(figure12):
    panels = [axes for axes in figure12.axes if axes.get_label() != "<colorbar>"]
    assert [panel.get_title() for panel in panels] == [f"Head {head}" for head in range(1, 13)]
    assert panels[0].get_subplotspec().get_gridspec().get_geometry() == (4, 3)
    for panel in panels:
        assert panel.get_ylim() == (511.5, -0.5)  # row 0 on top
        shown = [tick for tick in panel.get_xticks() if 0 <= tick <= 511]
        assert shown == [0, 100, 200, 300, 400, 500]
        drawn = panel.images[0].get_array()
        assert np.ma.getmaskarray(drawn)[np.triu_indices(512, 1)].all()  # blank above the diagonal
        assert not np.ma.getmaskarray(drawn)[np.tril_indices(512)].any()


@pytest.mark.parametrize("name", relpos.names())
def test_every_encoding_can_be_drawn_untrained(name, tmp_path):
    maps = untrained(name, heads=2, head_dim=8, length=24, seed=0, options={})
    assert maps.values.shape == (2, 24, 24)
    assert np.isfinite(maps.values[:, *np.tril_indices(24)]).all()
    assert save(draw_heads(maps.values, maps.caption), tmp_path / "new" / f"{name}.png").stat().st_size > 2000


def test_a_bias_of_both_signs_is_centred_on_zero():
    figure = draw_heads(relpos.encoding("clipped", heads=1, head_dim=8).map(32).numpy())
    norm = figure.axes[0].images[0].norm
    assert norm.vmin == -norm.vmax


def test_the_same_seed_draws_the_same_start():
    first, second, other = (untrained("kerple_log", 2, 8, 16, seed, {}).values for seed in (0, 0, 1))
    assert (first == second).all()
    assert not (first == other).all()


def test_the_figures_command_writes_png_and_pdf(tmp_path):
    written = [path.name for path, _ in draw_figures(tmp_path)]
    assert sorted(written) == sorted(path.name for path in tmp_path.iterdir())
    assert {"figure12-alibi.png", "figure12-alibi.pdf"} <= set(written)
    assert (tmp_path / "figure12-alibi.pdf").read_bytes().startswith(b"%PDF")


def test_a_picture_of_unknown_kind_is_refused(tmp_path, figure12):
    with pytest.raises(ValueError, match=r"must end in \.png, \.pdf, \.svg"):
        save(figure12, tmp_path / "figure.bmp")
