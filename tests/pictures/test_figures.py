"""The pages of untrained encodings: layout, colours, ticks and files."""

import doctest
import itertools
import json
import re
import textwrap

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.colors import LogNorm
from typer.testing import CliRunner

import relpos
from relpos.cli import app
from relpos.forms.cards import GROUPS
from relpos.paper import figures as paper
from relpos.pictures import captions
from relpos.pictures import draw as drawing
from relpos.pictures.captions import latex
from relpos.pictures.colours import BOTH_SIGNS, ONE_SIGN
from relpos.pictures.draw import draw
from relpos.pictures.map_figures import bar_ticks
from relpos.pictures.printed_page import save, wrap_evenly

pytestmark = pytest.mark.heavy


def panels_of(figure):
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


def image_of(name, **options):
    """The image of the first panel."""
    return panels_of(draw(name, **{"heads": 1, "head_dim": 8, "length": 32, **options}).figure)[0].images[0]


def test_the_page_is_laid_out_as_printed():
    panels = panels_of(draw("alibi").figure)
    assert [panel.get_title() for panel in panels] == [f"Head {head}" for head in range(1, 13)]
    lefts, tops = ({round(getattr(panel.get_position(), side), 6) for panel in panels} for side in ("x0", "y1"))
    assert (len(tops), len(lefts)) == (4, 3)
    for panel in panels:
        assert panel.get_ylim() == (511.5, -0.5)  # row 0 on top
        assert [tick for tick in panel.get_xticks() if 0 <= tick <= 511] == [0, 100, 200, 300, 400, 500]
        drawn = panel.images[0].get_array()
        assert panel.images[0].get_extent() == [-0.5, 511.5, 511.5, -0.5]  # each entry around its position
        assert np.ma.getmaskarray(drawn)[np.triu_indices(512, 1)].all()  # blank above the diagonal
        assert not np.ma.getmaskarray(drawn)[np.tril_indices(512)].any()


@pytest.mark.parametrize(
    ("name", "width", "heads", "length"),
    [
        ("alibi", 7.0, 12, 512),
        ("alibi", 3.33, 1, 512),
        ("alibi", 7.0, 5, 512),
        ("alibi", 3.33, 12, 65536),
        ("clipped", 3.33, 12, 512),  # with a line above, and labels like −0.0025
    ],
)
def test_nothing_is_cut_off_and_nothing_overlaps(name, width, heads, length):
    figure = draw(name, width=width, heads=heads, length=length).figure
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    for axes in panels_of(figure):
        numbers = [label.get_window_extent(renderer) for label in axes.get_xticklabels()]
        assert all(first.x1 < second.x0 for first, second in itertools.pairwise(numbers))
    boxes = [axes.get_tightbbox(renderer) for axes in figure.axes]
    boxes += [text.get_window_extent(renderer) for text in figure.texts]
    for box in boxes:
        assert min(box.x0, box.y0, figure.bbox.x1 - box.x1, figure.bbox.y1 - box.y1) >= 0
    for first, second in itertools.combinations(boxes, 2):
        across = min(first.x1, second.x1) - max(first.x0, second.x0)
        down = min(first.y1, second.y1) - max(first.y0, second.y0)
        assert min(across, down) < 2  # dots, of 100 per inch


@pytest.mark.parametrize("width", [7.0, 3.33])
def test_the_numbers_of_a_contact_sheet_do_not_overlap(width):
    figure = draw("clipped", layer="all", width=width).figure
    figure.canvas.draw()
    boxes = [panel.xaxis.label.get_window_extent(figure.canvas.get_renderer()) for panel in panels_of(figure)]
    assert len(boxes) == 12
    assert all(first.x1 <= second.x0 for first, second in itertools.pairwise(boxes))


def test_the_axes_say_what_a_row_and_a_column_is():
    panels = panels_of(draw("alibi", heads=5, length=16).figure)
    assert [panel.get_ylabel() for panel in panels] == ["query position", "", "", "query position", ""]
    assert [panel.get_xlabel() for panel in panels] == ["", "", *["key position"] * 3]
    sheet = draw("alibi", heads=5, length=16, layer="all").figure
    assert "query position (down), key position (across)" in [text.get_text() for text in sheet.texts]


@pytest.mark.parametrize("name", relpos.names())
def test_every_encoding_can_be_drawn_untrained(name, tmp_path):
    picture = draw(name, heads=2, head_dim=8, length=24)
    drawn = picture.maps[0].mean
    assert drawn.shape == (2, 24, 24)
    assert np.isfinite(drawn[:, *np.tril_indices(24)]).all()
    assert picture.save(tmp_path / "new" / f"{name}.png").stat().st_size > 2000


def clipped_with_ranges(*ranges):
    """The encoding `clipped` with one head per range, whose bias rises over distances from low to high."""
    position = relpos.encoding("clipped", heads=len(ranges), head_dim=8)
    share = torch.linspace(-1, 1, position.table.shape[1]).abs()  # from 0 at the diagonal to 1
    with torch.no_grad():
        position.table.copy_(torch.stack([low + (high - low) * share for low, high in ranges]))
    return position


def test_each_head_has_its_own_range_and_one_that_is_practically_constant_looks_so():
    """As a head of Figure 13 that spans −0.1335 to −0.129, which colours centred on 0 made solid navy."""
    figure = draw(clipped_with_ranges((-0.1335, -0.129), (-1, 1), (-3, -1)), length=512).figure
    flat, signed, negative = panels_of(figure)
    titles = [axes.get_title() for axes in (flat, signed, negative)]
    assert titles == ["Head 1: practically constant", "Head 2", "Head 3"]
    drawn = flat.images[0].to_rgba(flat.images[0].get_array())[np.tril_indices(512)]
    assert np.ptp(drawn, axis=0).max() < 0.25  # one colour, to the eye; 0.9 over the full range
    assert min(bar_ticks(figure)[0]) >= -0.1335
    assert "−0.132" in [label.get_text()[:6] for label in figure.axes[1].get_yticklabels()]  # absolute
    ends = [(panel.images[0].norm.vmin, panel.images[0].norm.vmax) for panel in (signed, negative)]
    np.testing.assert_allclose(ends, [(-1, 1), (-3, -1)], atol=0.02)


@pytest.mark.parametrize(
    ("ranges", "colours"),
    [
        ([(-1, 0.497), (-0.507, 1), (0, 0)], BOTH_SIGNS),  # heads of Figure 14; the rule per head drew the line at 0.5
        ([(-1, 1), (-1, 0.1), (-1, 0.9)], ONE_SIGN),  # one head has nearly no positive values
        ([(-1, 1), (2, 3)], ONE_SIGN),  # centred on 0, the second would be one shade
    ],
)
@pytest.mark.parametrize("layer", ["last", "all"])
def test_a_page_has_one_colour_map(ranges, colours, layer):
    images = [
        panel.images[0] for panel in panels_of(draw(clipped_with_ranges(*ranges), length=512, layer=layer).figure)
    ]
    assert len(images) == len(ranges)
    assert {image.cmap.name for image in images} == {getattr(colours, "name", colours)}
    for image, (low, high) in zip(images, ranges, strict=True):
        most = max(-low, high, 0.025)
        expected = (-most, most) if colours is BOTH_SIGNS else (low, high)
        assert (image.norm.vmin, image.norm.vmax) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("name", [ONE_SIGN, BOTH_SIGNS])
def test_the_colours_are_lighter_the_larger_the_value(name):
    """So a picture reads in grey too, whatever colours are seen."""
    colours = mpl.colormaps[name] if isinstance(name, str) else name
    rgb = colours(np.linspace(0, 1, 200))[:, :3]
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)  # sRGB
    luminance = linear @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(luminance) > 0).all()
    assert luminance[-1] - luminance[0] > 0.6


def test_weights_are_drawn_on_a_logarithmic_scale_and_a_constant_map_has_one_tick():
    assert isinstance(image_of("alibi", show="weights").norm, LogNorm)
    assert len(bar_ticks(draw("nope", heads=1, length=8, head_dim=4).figure)[0]) == 1


@pytest.mark.parametrize("length", [128, 16384])
def test_weights_can_be_told_apart_at_any_length(length):
    """A floor of 1e-4 at every length drew uniform attention over 16,384 tokens, 6e-5 each, in one colour."""
    picture = draw("nope", heads=1, head_dim=4, length=length, show="weights")
    image = panels_of(picture.figure)[0].images[0]
    rows = image.norm(1 / np.array([length / 8, length / 4, length / 2, length]))  # what uniform attention gives
    assert (rows > -1e-6).all()
    assert (np.diff(rows) < -0.03).all()
    head = picture.numbers["layers"][0]["heads"][0]
    assert (head["minimum"], head["maximum"]) == pytest.approx((1 / length, 1), rel=1e-5)


def test_weights_below_the_scale_are_an_arrow_and_their_true_minimum_is_reported():
    picture = draw("alibi", heads=2, length=128, show="weights")
    bias = -torch.arange(128).double()[:, None] + torch.arange(128)
    for head, (entry, slope) in enumerate(zip(picture.numbers["layers"][0]["heads"], (2**-4, 2**-8), strict=True)):
        weights = (slope * bias).masked_fill(bias > 0, -torch.inf).softmax(-1)
        assert entry["minimum"] == pytest.approx(float(weights[bias <= 0].min()), rel=1e-4)
        bar = panels_of(picture.figure)[head].images[0].colorbar
        assert bar.extend == ("min" if entry["minimum"] < bar.vmin else "neither")
    assert [panel.images[0].colorbar.extend for panel in panels_of(picture.figure)] == ["min", "neither"]


@pytest.mark.parametrize(("sink", "arrows"), [(50.0, "max"), (-50.0, "min"), (None, "neither")])
@pytest.mark.parametrize("shared", [False, True])
def test_a_few_extreme_scores_do_not_set_the_colours_of_the_others(sink, arrows, shared):
    """The scores of a sink, one key of 256, made Figure 15 mostly grey."""
    scores = torch.rand(2, 256, 256, generator=torch.Generator().manual_seed(0)) * 4 - 2
    if sink is not None:
        scores[:, :, 0] = sink
    scores = scores.masked_fill(torch.ones(256, 256).triu(1).bool(), -torch.inf)
    picture = draw(scores, show="scores", shared_scale=shared)
    for panel in panels_of(picture.figure):
        assert panel.images[0].cmap is BOTH_SIGNS
        assert (panel.images[0].norm.vmin, panel.images[0].norm.vmax) == pytest.approx((-2, 2), abs=0.5)
    assert [axes._colorbar.extend for axes in picture.figure.axes if axes.get_label() == "<colorbar>"] == [arrows] * (
        1 if shared else 2
    )
    ends = [(head["minimum"], head["maximum"]) for head in picture.numbers["layers"][0]["heads"]]
    seen = scores.masked_fill(scores == -torch.inf, 0.0)
    assert ends == [(float(head.min()), float(head.max())) for head in seen]  # the true range


def test_a_bias_is_drawn_over_its_full_range():
    bias = torch.rand(1, 256, 256) * 4 - 2
    bias[:, :, 0] = 50.0
    image = panels_of(draw(bias, show="bias").figure)[0].images[0]
    assert (image.norm.vmax, image.colorbar.extend) == (50.0, "neither")


def test_a_shared_scale_has_one_bar_and_one_norm():
    figure = draw("alibi", heads=4, length=32, shared_scale=True).figure
    norms = {(panel.images[0].norm.vmin, panel.images[0].norm.vmax) for panel in panels_of(figure)}
    assert norms == {(-31 / 4, 0.0)}
    assert len(bar_ticks(figure)) == 1


def test_one_head_of_many_is_drawn():
    (panel,) = panels_of(draw("alibi", heads=4, length=32, head=[3]).figure)
    assert panel.get_title() == "Head 3"
    assert panel.images[0].get_array()[31, 0] == -31 / 2**6


def test_a_head_that_adds_nothing_is_named_and_counted():
    position = relpos.encoding("cable", heads=3, head_dim=8)
    with torch.no_grad():
        position.steps.bias.copy_(torch.tensor([-100.0, 1.0, -100.0]))
    picture = draw(position, length=32)
    titles = [axes.get_title() for axes in panels_of(picture.figure)]
    assert titles == ["Head 1: bias exactly 0", "Head 2", "Head 3: bias exactly 0"]
    assert "Bias exactly 0: 2 of 3 heads." in picture.caption
    heads = picture.numbers["layers"][0]["heads"]
    assert [head["note"] for head in heads] == ["bias exactly 0", None, "bias exactly 0"]
    assert [head["uniformity"] is None for head in heads] == [True, False, True]


def test_a_map_without_any_pattern_has_no_numbers():
    picture = draw("nope", heads=2, head_dim=8, length=24)
    (layer,) = picture.numbers["layers"]
    assert layer["uniformity"] is layer["context_dependence"] is None
    assert "uniformity along diagonals and context dependence are not defined" in picture.caption


@pytest.mark.parametrize(("name", "words"), [("clipped", "untrained: random start values"), ("alibi", None)])
def test_start_values_are_called_untrained_in_the_picture(name, words):
    for options in ({}, {"show": "profile"}, {"layer": "all"}):
        picture = draw(name, heads=2, head_dim=8, length=24, **options)
        above = [text.get_text() for text in picture.figure.texts if "untrained" in text.get_text()]
        assert (words in above) == ("untrained" in picture.caption) == (words is not None)


def test_the_profile_is_the_bias_against_distance():
    (axes,) = panels_of(draw("alibi", heads=3, length=40, show="profile").figure)
    for head, line in enumerate(axes.lines, start=1):
        np.testing.assert_allclose(line.get_ydata(), -np.arange(40) * 2 ** (-8 * head / 3), rtol=1e-6)
    assert not axes.collections  # no band: a diagonal has one value
    (axes,) = panels_of(draw("cable", heads=2, head_dim=8, length=24, show="profile").figure)
    assert len(axes.collections) == 2


def test_a_profile_of_many_heads_has_a_panel_for_each_and_one_of_few_has_lines_that_can_be_told_apart():
    panels = panels_of(draw("kerple_log", heads=5, length=40, show="profile").figure)
    assert [panel.get_title() for panel in panels] == [f"Head {head}" for head in range(1, 6)]
    assert [len(panel.lines) for panel in panels] == [1] * 5
    (panel,) = panels_of(draw("kerple_log", heads=12, length=40, show="profile", head=[1, 6, 12]).figure)
    colours = np.array([mpl.colors.to_rgb(line.get_color()) for line in panel.lines])
    assert (np.linalg.norm(colours[:, None] - colours, axis=-1) + 9 * np.eye(3)).min() > 0.3


def test_a_pdf_has_every_heat_map_as_an_image_of_its_cells(tmp_path):
    """Not resampled to the dots of a page; the PNG of the same figure is as before."""
    picture = draw("alibi", heads=2, length=300)
    before = picture.save(tmp_path / "before.png").read_bytes()
    pdf = picture.save(tmp_path / "alibi.pdf").read_bytes()
    assert len(re.findall(rb"/Height 300\b.*?/Width 300\b", pdf, re.DOTALL)) >= 2
    assert picture.save(tmp_path / "after.png").read_bytes() == before


@pytest.mark.parametrize(("show", "name"), [("bias", "bias"), ("scores", "score"), ("weights", "weight")])
def test_the_colour_bars_of_the_last_column_say_what_they_show(show, name):
    figure = draw("alibi", heads=5, length=16, show=show).figure
    bars = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    assert [axes.get_ylabel() for axes in bars] == ["", "", name, "", name]


def test_all_encodings_are_on_one_page_grouped_by_where_position_acts():
    page = draw(all=True, length=24)
    panels = panels_of(page.figure)
    assert sorted(panel.get_title() for panel in panels if panel.get_title()) == relpos.names()
    words = [text.get_text() for text in page.figure.texts]
    assert [word for word in words if word in GROUPS.values()] == list(GROUPS.values())
    for panel, numbers in zip(panels[::2], page.numbers["encodings"], strict=False):
        assert panel.images[0].get_array().shape == (24, 24)
        assert numbers["group"] == relpos.card(numbers["encoding"]).group
    alibi = next(panel for panel in panels if panel.get_title() == "alibi")
    drawn = np.ma.filled(alibi.images[0].get_array(), np.nan)
    np.testing.assert_array_equal(drawn, draw("alibi", length=24).maps[0].mean[5])
    assert "constant before training, or at this length: cope, nope" in page.caption


def test_a_mass_picture_with_a_flat_head_says_why_it_falls_at_the_far_end():
    assert "A flat head falls at the far end too" in draw("nope", heads=2, length=64, show="mass").caption
    both = draw("nope", heads=2, length=64, show="mass", causal=False)  # and then it says nothing
    assert "far end" not in both.caption


def test_a_profile_may_have_logarithmic_distances():
    axes = panels_of(draw("alibi", heads=2, length=2000, show="profile", log=True).figure)[0]
    places = axes.transData.transform([(distance, 0) for distance in (0, 10, 100, 1000)])[:, 0]
    assert places[0] < places[1]
    assert places[2] - places[1] == pytest.approx(places[3] - places[2])
    np.testing.assert_array_equal(axes.lines[0].get_xdata(), np.arange(2000))


def test_the_same_seed_draws_the_same_start(tmp_path):
    first, again, other = (draw("kerple_log", heads=2, length=16, seed=seed) for seed in (0, 0, 1))
    for suffix in (".png", ".pdf", ".svg"):
        files = [picture.save(tmp_path / f"{place}{suffix}") for place, picture in enumerate((first, again, other))]
        assert files[0].read_bytes() == files[1].read_bytes()
        assert files[0].read_bytes() != files[2].read_bytes()
    assert "Head 2" in (tmp_path / "0.svg").read_text()  # text stays text
    assert b"/FontFile2" in (tmp_path / "0.pdf").read_bytes()  # fonts are embedded
    assert first._repr_png_() == (tmp_path / "0.png").read_bytes()  # what a notebook shows


def test_a_figure_of_unknown_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.png, \.pdf, \.svg"):
        save(draw("alibi", heads=1, length=8).figure, tmp_path / "figure.bmp")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("module", [captions, drawing, paper], ids=lambda module: module.__name__)
def test_the_examples_in_the_docstrings_are_right(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


# Captions


def test_no_sentence_of_a_caption_begins_with_a_number():
    """“context dependence 0. 3 of 12 heads” reads as 0.3."""
    caption = draw("sinusoidal", length=128).caption
    assert "context dependence 0. Practically constant (values span less than 0.05): 3 of 12 heads." in caption
    assert not [sentence for sentence in caption.split(". ") if sentence[0].isdigit()]


@pytest.mark.parametrize("show", ["bias", "profile", "mass"])
def test_a_picture_without_its_caption_is_shorter_and_keeps_the_text(show, tmp_path):
    with_caption, without = (draw("kerple_log", heads=2, length=64, show=show, caption=c) for c in (True, False))
    heights = [picture.figure.get_figheight() for picture in (with_caption, without)]
    assert heights[1] < heights[0] - 0.2
    drawn = [" ".join(text.get_text() for text in picture.figure.texts) for picture in (with_caption, without)]
    assert ["kerple_log" in text for text in drawn] == [True, False]
    assert without.caption == with_caption.caption
    about = json.loads(without.save(tmp_path / "a.json").read_text())
    assert about["caption"] == without.caption
    assert about["caption_latex"] + "\n" == without.save(tmp_path / "a.txt").read_text()


def test_the_command_writes_the_caption_that_is_not_in_the_picture(tmp_path):
    for flag, texts in (("--caption", []), ("--no-caption", [tmp_path / "a.txt"])):
        result = CliRunner().invoke(app, ["draw", "alibi", "--length", "16", flag, "--out", str(tmp_path / "a.png")])
        assert result.exit_code == 0, result.output
        assert list(tmp_path.glob("*.txt")) == texts
    assert (tmp_path / "a.txt").read_text().startswith("alibi: the additive bias (12 heads, head\\_dim 64).")


def test_a_caption_for_latex_has_no_character_that_latex_reads_otherwise():
    text = latex("a_b & 5 % of #1: {x} ~ 2^3 × −4 < $5 – “q” \\cmd …")
    assert text == (
        r"a\_b \& 5\,\% of \#1: \{x\} \textasciitilde{} 2\textasciicircum{}3 $\times$ $-$4 $<$ \$5 -- ``q'' "
        r"\textbackslash{}cmd \ldots{}"
    )
    assert text.isascii()


@pytest.mark.parametrize("most", [24, 60, 126])
def test_the_lines_of_a_caption_are_about_equally_long(most):
    words = (
        "rope, GPT-2 nano, layer 4 of 4: the attention scores on 256 tokens of 2000-Clinton-1, from token 10240. " * 2
    ).split()
    for count in range(1, len(words)):
        text = " ".join(words[:count])
        lines, greedy = wrap_evenly(text, most), textwrap.wrap(text, most)
        assert " ".join(lines) == text
        assert len(lines) == len(greedy)
        assert max(map(len, lines)) <= most
        assert len(lines[-1]) >= len(greedy[-1])
        if len(lines) > 1 and most > 24:
            assert len(lines[-1]) > 0.3 * max(map(len, lines))
    assert wrap_evenly("", most) == []


def test_a_caption_does_not_part_a_name_from_its_number():
    text = "alibi: the additive bias (12 heads, head_dim 64). Each cell is the mean of 32 × 32 entries."
    for most in range(20, 90):
        assert not any(line.endswith(("head_dim", "×")) or line.startswith("×") for line in wrap_evenly(text, most))
