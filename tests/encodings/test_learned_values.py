"""How many values an encoding learns: what the instance says, what its card says, and a count by hand."""

from fractions import Fraction

import pytest

import relpos

H, D = 5, 6  # heads, head_dim
WIDTH = H * D


def dape(units, base=2):  # over kerple_log, which has 2 values per head
    return base + 2 * units + Fraction(units, H) + units + 1


def dapev2(units, base=2):
    return base + 6 * units + Fraction(units, H) + 3 * units + 1


BY_HAND = [  # values per head
    ("alibi", {}, 0),
    ("cable", {}, 2 * (WIDTH + 1)),
    ("cable", {"width": 11}, 2 * 12),
    ("cable_nw", {}, WIDTH + 1),
    ("clipped", {}, 513),
    ("clipped", {"limit": 5}, 11),
    ("cope", {}, Fraction(64 * D, H)),
    ("cope", {"npos": 7}, Fraction(7 * D, H)),
    ("dape", {}, dape(32)),
    ("dape", {"units": 3}, dape(3)),
    ("dape", {"base": "alibi"}, dape(32, base=0)),
    ("dapev2", {}, dapev2(32)),
    ("dapev2", {"units": 3}, dapev2(3)),
    ("fire", {}, 33 + Fraction(66, H)),
    ("fire", {"units": 3}, 4 + Fraction(8, H)),
    ("forgetting", {}, WIDTH + 1),
    ("forgetting", {"width": 11}, 12),
    ("kcable", {}, WIDTH + 1),
    ("kerple_log", {}, 2),
    ("kerple_power", {}, 2),
    ("learned", {}, Fraction(1024 * WIDTH, H)),
    ("learned", {"length": 9, "width": 11}, Fraction(9 * 11, H)),
    ("nope", {}, 0),
    ("rope", {}, 0),
    ("sandwich", {}, 0),
    ("sinusoidal", {}, 0),
    ("sum", {}, WIDTH + 1),  # alibi and cable_nw
    ("sum", {"parts": ["t5", "kerple_log"]}, 34),
    ("t5", {}, 32),
    ("t5", {"buckets": 8}, 8),
    ("xpos", {}, 0),
]


@pytest.mark.parametrize(("name", "options", "values"), BY_HAND)
def test_an_encoding_learns_as_many_values_as_counted_by_hand(name, options, values):
    position = relpos.encoding(name, heads=H, head_dim=D, **options)
    assert position.learned_per_head == float(values)
    assert f"learned_per_head={float(values):g}" in repr(position)


@pytest.mark.parametrize("name", relpos.names())
def test_a_card_counts_the_values_and_shapes_of_12_heads_with_head_dim_64(name):
    card, position = relpos.card(name), relpos.encoding(name, heads=12, head_dim=64)
    assert card.learned_per_head == sum(parameter.numel() for parameter in position.parameters()) / 12
    assert card.parameters == {key: tuple(parameter.shape) for key, parameter in position.named_parameters()}


def test_a_frozen_parameter_is_not_counted_as_learned():
    position = relpos.encoding("kerple_log", heads=5, head_dim=6)
    position.r1.raw.requires_grad_(False)
    assert position.learned_per_head == 1


def test_options_of_a_part_hold_for_every_part_of_its_name():
    parts = {"parts": ["t5", "alibi", "t5"], "part_options": {"t5": {"buckets": 8}}}
    position = relpos.encoding("sum", heads=5, head_dim=6, **parts)
    assert [position.parts[0].buckets, position.parts[2].buckets] == [8, 8]
    assert position.learned_per_head == 16
