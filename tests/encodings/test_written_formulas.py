"""The formulas of the cards as MathML, and the groups of a gallery."""

from xml.etree import ElementTree

import pytest

import relpos
from relpos.forms.cards import GROUPS, grouped
from relpos.forms.formulas import mathml, statements


def text(formula: str) -> str:
    return "".join(ElementTree.fromstring(mathml(formula)).itertext())


@pytest.mark.parametrize("name", relpos.names())
def test_a_formula_becomes_well_formed_mathml_with_all_its_signs(name):
    formula = relpos.card(name).formula
    parts, _ = statements(formula)
    assert parts
    for part in parts:
        left_out = " _^{}" if "Σ_{" not in part else " _^{}."  # the dots between the limits of a sum
        kept = sorted(sign for sign in part.replace("inf", "∞").replace("²", "2") if sign not in left_out)
        shown = sorted(sign for sign in text(part) if sign not in left_out)
        assert set(kept) - set(shown) <= set("()")  # parentheses of exponents are not shown
        assert set(shown) <= set(kept)
    assert " as in " not in formula  # complete in itself


def test_scripts_fences_and_sums_are_elements_of_their_own():
    tree = ElementTree.fromstring(mathml("m_h = 2^(−8h/H)"))
    assert ["".join(script.itertext()) for script in tree.iter("msub")] == ["mh"]
    base, exponent = tree.find(".//msup")
    assert (base.text, "".join(exponent.itertext())) == ("2", "−8h/H")
    below, above = list(ElementTree.fromstring(mathml("Σ_{t=j+1..i} x_t")).find(".//munderover"))[1:]
    assert ("".join(below.itertext()), "".join(above.itertext())) == ("t=j+1", "i")
    squared = ElementTree.fromstring(mathml("(S_i − S_j)²")).find(".//msup")
    assert "".join(squared[0].itertext()) == "(Si−Sj)"
    assert ElementTree.fromstring(mathml("r1")).find(".//msub")[1].text == "1"


def test_markup_in_a_formula_is_text():
    assert "<script" not in mathml("<script>alert(1)</script> & 'b'")
    assert text("<b>") == "<b>"


def test_every_encoding_has_one_group_by_where_it_acts():
    groups = grouped(map(relpos.card, relpos.names()))
    assert list(groups) == list(GROUPS.values())
    assert sorted(card.name for cards in groups.values() for card in cards) == relpos.names()
    assert relpos.card("rope").group == "query and key"
    assert relpos.card("kerple_log").group == "distance"
    assert relpos.card("cable").group == relpos.card("sum").group == "content"
