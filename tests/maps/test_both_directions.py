"""Pictures of attention in both directions."""

import itertools

import numpy as np
import pytest
import torch

import relpos
from relpos import draw
from relpos.maps.subject import EncodingSubject, Request
from relpos.pictures.draw import check_directions


def panels_of(figure):
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


@pytest.mark.parametrize("length", [25, 601])
@pytest.mark.parametrize("name", ["rope", "clipped"])
def test_a_heat_map_has_no_blank_entries(name, length):
    for causal in (True, False):
        picture = draw(name, heads=2, head_dim=8, length=length, causal=causal)
        blank = [np.ma.getmaskarray(panel.images[0].get_array()).any() for panel in panels_of(picture.figure)]
        assert blank == [causal] * 2
        assert ("in both directions" in picture.caption) != causal
        assert picture.numbers["causal"] is causal


def test_the_range_includes_the_keys_after_the_query():
    position = relpos.encoding("clipped", heads=3, head_dim=8)
    with torch.no_grad():
        position.table[:, : position.limit] = 7.0
    picture = draw(position, length=16, causal=False)
    assert [head["maximum"] for head in picture.numbers["layers"][0]["heads"]] == [7.0] * 3


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
@pytest.mark.parametrize(("length", "width"), [(12, 7.0), (512, 3.33), (65536, 3.33)])
def test_the_distances_of_a_profile_do_not_overlap(length, width, log):
    figure = draw("alibi", heads=2, length=length, show="profile", causal=False, log=log, width=width).figure
    figure.canvas.draw()
    labels = [label.get_window_extent(figure.canvas.get_renderer()) for label in figure.axes[0].get_xticklabels()]
    assert len(labels) >= 3
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(labels))


def test_several_profiles_and_a_contact_sheet_have_both_directions():
    together = draw(["alibi", "clipped"], heads=2, length=30, show="profile", causal=False)
    assert [len(line.get_xdata()) for axes in together.figure.axes for line in axes.lines] == [59] * 4
    assert "in both directions" in together.caption
    sheet = draw("alibi", heads=2, length=30, layer="all", causal=False)
    assert not np.isnan(sheet.maps[0].mean).any()


def test_directions_that_do_not_fit_are_refused():
    alibi, t5 = (EncodingSubject(name).view(Request(length=8, causal=name == "alibi")) for name in ("alibi", "t5"))
    with pytest.raises(ValueError, match=r"fire is defined for causal .* leave causal=False out\. .* symmetric=True"):
        draw("fire", causal=False)
    with pytest.raises(ValueError, match="alibi causal, t5 in both directions"):
        check_directions([alibi, t5], None)
    with pytest.raises(ValueError, match="t5 was trained with attention in both directions: leave causal=Tr"):
        check_directions([alibi, t5], True)
