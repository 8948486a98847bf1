"""The registry, and what relpos derives from an encoding's class: its places, its form, its options, its card."""

import copy
import pickle
import re
from typing import Literal, get_args, get_origin

import pytest
import torch

import relpos
from relpos import encodings
from relpos.comparison.comparison import canonical_entry
from relpos.encodings import registry
from relpos.encodings.registry import FILES, encoding_class
from relpos.forms.call import Call
from relpos.forms.cards import compute_card, meanings_of, options_of, type_text
from relpos.forms.encoding import Encoding
from relpos.forms.rotation import SCALINGS, Scaling
from relpos.runs.settings import load_settings


def build(name, **options):
    return relpos.encoding(name, heads=2, head_dim=4, **options)


# Where an encoding acts, and the form of its bias


@pytest.mark.parametrize("name", relpos.names())
def test_an_encoding_acts_in_the_places_that_it_reports(name):
    """By its effect, not by its methods: what each place does to an input."""
    position = build(name)
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)
    length = 300  # past the default window; and positions past the length from which temperatures act
    x, (q, k) = torch.randn(1, length, 8), torch.randn(2, 1, 2, length, 4)
    gates = position.gates(x)
    positions = torch.arange(20000, 20000 + length)[None]
    call = Call(length, length, gates=gates, q=q, scale=0.5, token_positions=positions)
    rotated_q, _ = position.rotate(q, k, call)
    form = position.bias(call)
    effects = {
        "embedding": not torch.equal(position.embed(x), x),
        "query and key": not torch.equal(rotated_q, q),
        "score": form is not None and bool(form.block(call.i, call.j, q @ k.mT, call.visible(call.i)).abs().max() > 0),
    }
    assert position.places == tuple(place for place, seen in effects.items() if seen)
    assert relpos.card(name).places == position.places


@pytest.mark.parametrize(
    ("name", "parts", "place", "form"),
    [
        ("alibi", None, "score", "Toeplitz"),
        ("cable", None, "score", "RankOne"),
        ("fire", None, "score", "Scaled"),
        ("dape", None, "score", "Scored"),
        ("rope", None, "query and key", "none"),
        ("learned", None, "embedding", "none"),
        ("nope", None, "nowhere", "none"),
        ("sum", ["rope"], "query and key", "none"),
        ("sum", ["learned", "alibi"], "embedding, score", "Toeplitz"),
        ("sum", ["alibi", "learned"], "embedding, score", "Toeplitz"),
        ("sum", ["rope", "forgetting"], "query and key, score", "RankOne"),
        ("sum", ["sinusoidal", "xpos", "t5", "cable"], "embedding, query and key, score", "Toeplitz + RankOne"),
        ("sum", ["rope", "ssmax", "temperature"], "query and key", "none"),
        ("sum", ["nope"], "nowhere", "none"),
        ("sum", ["sum", "fire"], "score", "Toeplitz + RankOne + Scaled"),
    ],
)
def test_places_and_form_as_text(name, parts, place, form):
    position = build(name, **({} if parts is None else {"parts": parts}))
    assert (position.place, position.form) == (place, form)
    assert position.places == tuple(place.split(", ") if place != "nowhere" else ())
    assert position.to("meta").form == form
    if parts is None:
        assert (relpos.card(name).place, relpos.card(name).form) == (place, form)


@pytest.mark.parametrize(("parts", "place"), [(["rope", "alibi"], "query and key, score"), (["nope"], "nowhere")])
def test_dape_refuses_a_sum_that_does_more_than_add_a_bias(parts, place):
    with pytest.raises(ValueError, match=f"the place of 'sum' is: {place}"):
        build("dape", base="sum", base_options={"parts": parts})
    assert build("dape", base="sum", base_options={"parts": ["t5", "cable"]}).place == "score"


# The trained length

FIRE = {"length": 77}


@pytest.mark.parametrize(
    ("name", "options", "filled"),
    [
        *[(name, {}, {"length": 77}) for name in ("fire", "learned", "rope")],
        ("fire", {"length": 9}, {"length": 9}),
        ("alibi", {"slopes": "press"}, {"slopes": "press"}),
        ("dape", {}, {}),
        ("dape", {"base": "fire"}, {"base": "fire", "base_options": FIRE}),
        (
            "dape",
            {"base": "fire", "base_options": {"length": 9, "c": 1.0}},
            {"base": "fire", "base_options": {"length": 9, "c": 1.0}},
        ),
        (
            "dapev2",
            {"base": "dape", "base_options": {"base": "fire"}},
            {"base": "dape", "base_options": {"base": "fire", "base_options": FIRE}},
        ),
        ("sum", {"parts": ["alibi", "fire"]}, {"parts": ["alibi", "fire"], "part_options": {"fire": FIRE}}),
        ("sum", {"parts": ["alibi"]}, {"parts": ["alibi"]}),
        (
            "sum",
            {"parts": ["fire"], "part_options": {"fire": {"c": 1.0}}},
            {"parts": ["fire"], "part_options": {"fire": {"c": 1.0, **FIRE}}},
        ),
        ("rope", {"base": 5e5}, {"base": 5e5, "length": 77}),  # a number, not the name of an encoding
    ],
)
def test_the_trained_length_reaches_the_encodings_that_have_an_option_for_it(name, options, filled):
    before = copy.deepcopy(options)
    assert encoding_class(name).options_for_length(options, 77) == filled
    assert options == before  # those of the caller are not changed


@pytest.mark.parametrize("name", relpos.names())
def test_the_options_for_a_length_make_an_encoding(name):
    options = encoding_class(name).options_for_length({}, 33)
    assert build(name, **options).options.get("length", 33) == 33


# Options and cards


@pytest.mark.parametrize("name", relpos.names())
def test_every_option_is_explained_in_a_docstring_and_nothing_else(name):
    explained = set(meanings_of(encoding_class(name))) - {"heads", "head_dim", "width"}
    assert explained == set(options_of(encoding_class(name))) - {"width"}
    assert all(len(option.meaning) > 10 and option.type for option in relpos.card(name).options.values())
    assert relpos.card(name).summary.endswith(".")


def test_meanings_are_read_from_docstrings_in_google_style():
    class Documented:
        """A summary.

        Args:
            heads: Not this one: that
                is certain.
            leak: A slope.

        Returns:
            nothing: at all.
        """

    class Derived(Documented):
        """Another.

        Args:
            leak: Another slope.
        """

    assert meanings_of(Documented) == {"heads": "Not this one: that is certain.", "leak": "A slope."}
    assert meanings_of(Derived) == {"heads": "Not this one: that is certain.", "leak": "Another slope."}
    assert meanings_of(type("Bare", (), {})) == {}


def test_types_are_written_as_people_write_them():
    options = relpos.card("rope").options
    assert options["layout"].type == '"half" | "interleaved"'
    assert (options["base"].type, options["factor"].type) == ("float", "float | None")
    assert options["rope_parameters"].type == "Mapping[str, object] | None"
    assert type_text(list[int]) == "list[int]"


CHOICES = [
    (name, key, choice)
    for name in relpos.names()
    for key, option in options_of(encoding_class(name)).items()
    if get_origin(option.annotation) is Literal
    for choice in get_args(option.annotation)
]


@pytest.mark.parametrize(("name", "option", "choice"), CHOICES)
def test_every_choice_of_an_option_is_accepted(name, option, choice):
    factors = {"short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}
    more = {"rope_parameters": factors} if choice == "longrope" else {}
    assert build(name, **{option: choice}, **more).options[option] == choice
    assert set(get_args(Scaling)) == set(SCALINGS)


def test_the_file_of_cards_is_current():
    """After a change of an encoding, `make cards` writes it again."""
    assert registry.written_cards() == {name: registry.builtin_card(name) for name in FILES}


@pytest.mark.parametrize(("alias", "name"), [("kerple", "kerple_log"), ("fox", "forgetting"), ("t5_bias", "t5")])
def test_an_encoding_can_be_asked_for_by_another_name(alias, name, tmp_path):
    assert alias not in relpos.names()  # which lists every encoding once
    assert type(build(alias)) is type(build(name))
    assert relpos.card(alias) == relpos.card(name)
    assert relpos.card(name).aliases == (alias,)
    assert load_settings(None, {"model.encoding": alias}) == load_settings(None, {"model.encoding": name})
    by_options = [f"{alias}:a=1", alias, name]
    assert [canonical_entry(encoding) for encoding in by_options] == [f"{name}:a=1", name, name]


def test_an_encoding_of_ones_own_may_have_the_name_of_an_alias(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    relpos.register("fox", type("Fox", (encoding_class("nope"),), {}))
    assert type(build("fox")).__name__ == "Fox"
    assert "fox" in relpos.names()


@pytest.mark.parametrize(
    ("name", "arguments", "error", "sentence"),
    [
        ("rope", {"num_heads": 2, "head_dim": 4}, TypeError, "no argument 'num_heads': it is called 'heads' here"),
        ("rope", {"heads": 2, "dim_head": 4}, TypeError, "no argument 'dim_head': it is called 'head_dim' here"),
        (
            "rope",
            {"heads": 2, "head_dim": 4, "theta": 5e5},
            ValueError,
            "rope has no option 'theta': it is called 'base'",
        ),
        ("rope", {"heads": 2, "head_dim": 4, "rope_theta": 5e5}, ValueError, "it is called 'base' here"),
        (
            "alibi",
            {"heads": 2, "head_dim": 4, "theta": 1},
            ValueError,
            "unknown option of alibi 'theta'. Allowed: slopes.",
        ),
    ],
)
def test_words_of_other_libraries_get_ours(name, arguments, error, sentence):
    with pytest.raises(error, match=re.escape(sentence)):
        relpos.encoding(name, **arguments)


def test_settings_say_our_word_for_an_option_too():
    with pytest.raises(ValueError, match="rope has no option 'rope_theta': it is called 'base' here"):
        load_settings(None, {"model.encoding": "rope", "model.options.rope_theta": 5e5})


def test_learned_values_as_text():
    texts = {name: relpos.card(name).learned for name in ("alibi", "fire", "cope", "learned")}
    assert texts == {"alibi": "0", "fire": "38.5", "cope": "341.3", "learned": "65,536"}


def test_computing_a_card_does_not_change_what_is_drawn_next():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    compute_card("kerple_log", encoding_class("kerple_log"))
    assert torch.equal(torch.rand(3), expected)


# Printing, copying, importing, and what is refused


def test_an_encoding_prints_its_options_as_passed_or_by_default():
    assert repr(build("alibi")) == "Alibi(heads=2, head_dim=4, slopes='geometric', learned_per_head=0)"
    assert repr(encodings.Alibi(2, 4, slopes="press")).startswith("Alibi(heads=2, head_dim=4, slopes='press',")
    assert "heads=2, head_dim=4, width=None, step='softplus', learned" in repr(build("cable", step="softplus"))
    dape = build("dape", base="fire", base_options={"c": 1.0})
    assert "base='fire', base_options={'c': 1.0}, units=32," in repr(dape)


@pytest.mark.parametrize("name", relpos.names())
def test_a_copy_and_an_unpickled_encoding_print_the_same(name):
    position = build(name)
    assert repr(copy.deepcopy(position)) == repr(pickle.loads(pickle.dumps(position))) == repr(position)


@pytest.mark.parametrize(("file", "cls"), FILES.values())
def test_every_class_can_be_imported_from_the_package(file, cls):
    assert issubclass(getattr(encodings, cls), Encoding)
    assert getattr(encodings, cls).__module__ == f"relpos.encodings.{file}"
    assert cls in dir(encodings)


class Needy(Encoding):
    """A class with an option that has no default."""

    paper = formula = "none"

    def __init__(self, heads, head_dim, *, table):
        super().__init__(heads, head_dim)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: encodings.Cable(2, 4, step="gelu"), ValueError, r"unknown step 'gelu'\..* Allowed: relu, softplus\."),
        (encodings.Alibi, TypeError, "missing 2 required positional arguments: 'heads' and 'head_dim'"),
        (lambda: encodings.Alibi(2, 4, slope="press"), TypeError, "unexpected keyword argument 'slope'"),
        (lambda: encodings.Alibbi, AttributeError, r"module 'relpos\.encodings' has no attribute 'Alibbi'"),
        (lambda: relpos.register("needy", Needy), TypeError, "Needy must have a default value for its option table"),
    ],
)
def test_what_is_wrong_is_refused_by_name(call, error, words):
    with pytest.raises(error, match=words):
        call()
    assert "needy" not in relpos.names()
