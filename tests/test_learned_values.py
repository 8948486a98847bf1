"""How many values an encoding learns: what its card says, what the instance says, and what its parameters count."""

import inspect
from fractions import Fraction

import pytest

import relpos
from relpos.encodings.registry import encoding_class

LEARNING = [  # options that change how many values are learned
    ("clipped", {"limit": 5}),
    ("t5", {"buckets": 8}),
    ("cope", {"npos": 7}),
    ("fire", {"units": 3}),
    ("dape", {"units": 3}),
    ("dapev2", {"units": 3}),
    ("learned", {"length": 9, "width": 11}),
    ("cable", {"width": 11}),
    ("forgetting", {"width": 11}),
]


def learned_by_formula(formula, name, options):
    """A card's formula, computed for 5 heads and head_dim 6."""
    keywords = inspect.signature(encoding_class(name).__init__).parameters
    defaults = {key: keyword.default for key, keyword in keywords.items()}
    width = options.get("width", 5 * 6)
    # dape's base is kerple_log, 2 values per head; sum's parts are alibi and cable_nw.
    known = {**defaults, **options, "H": Fraction(5), "d": 6, "width": width, "base": 2, "parts": width + 1}
    return eval(formula.replace("·", "*"), {"__builtins__": {}}, known)


def counted_per_head(position):
    return Fraction(sum(parameter.numel() for parameter in position.parameters()), position.heads)


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in relpos.names()), *LEARNING])
def test_an_encoding_learns_as_many_values_as_its_card_says(name, options):
    position = relpos.encoding(name, heads=5, head_dim=6, **options)
    formula = relpos.card(name).learns.split("; by default ")[0]
    assert counted_per_head(position) == learned_by_formula(formula, name, options)
    assert position.learned_per_head == float(counted_per_head(position))
    assert f"learned_per_head={position.learned_per_head:g}" in repr(position)


@pytest.mark.parametrize("name", relpos.names())
def test_by_default_an_encoding_learns_as_many_values_as_the_list_says(name):
    position = relpos.encoding(name, heads=5, head_dim=6)
    assert counted_per_head(position) == learned_by_formula(relpos.card(name).learns_by_default, name, {})


def test_a_frozen_parameter_is_not_counted_as_learned():
    position = relpos.encoding("kerple_log", heads=5, head_dim=6)
    position.r1.raw.requires_grad_(False)
    assert position.learned_per_head == 1


def test_options_of_a_part_hold_for_every_part_of_its_name():
    parts = {"parts": ["t5", "alibi", "t5"], "part_options": {"t5": {"buckets": 8}}}
    position = relpos.encoding("sum", heads=5, head_dim=6, **parts)
    assert [position.parts[0].buckets, position.parts[2].buckets] == [8, 8]
    assert position.learned_per_head == 16
