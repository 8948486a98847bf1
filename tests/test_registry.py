"""The registry and the cards that `relpos ls` reads without importing anything."""

import inspect

import pytest

import relpos
from relpos.encodings.encoding import Encoding
from relpos.encodings.registry import FILES, _card_of_class, encoding_class


@pytest.mark.parametrize("name", FILES)
def test_the_card_read_from_the_source_is_that_of_the_class(name):
    read, live = relpos.card(name), _card_of_class(name, encoding_class(name))
    assert {key: meaning for key, (_, meaning) in read.options.items()} == {
        key: meaning for key, (_, meaning) in live.options.items()
    }
    assert {key: eval(default) for key, (default, _) in read.options.items()} == {
        key: eval(default) for key, (default, _) in live.options.items()
    }
    for field in ("name", "summary", "place", "form", "learns", "directions", "paper", "formula"):
        assert getattr(read, field) == getattr(live, field)
        assert getattr(read, field)


@pytest.mark.parametrize("name", FILES)
def test_every_option_is_explained(name):
    assert all(meaning for _, meaning in relpos.card(name).options.values())
    keywords = {p.name for p in inspect.signature(encoding_class(name).__init__).parameters.values()}
    assert set(encoding_class(name).options) == keywords - {"self", "heads", "head_dim"}


@pytest.mark.parametrize("name", FILES)
def test_the_form_on_the_card_is_the_form_it_gives(name):
    import torch

    from relpos.encodings.call import Call

    position = relpos.encoding(name, heads=2, head_dim=4)
    assert isinstance(position, Encoding)
    gates, q = position.gates(torch.randn(1, 5, 8)), torch.randn(1, 2, 5, 4)
    form = position.bias(Call(5, 5, gates=gates, q=q))
    assert (type(form).__name__ if form else "none") == relpos.card(name).form
    acts = {
        "embedding": type(position).embed is not Encoding.embed,
        "query and key": type(position).rotate is not Encoding.rotate,
        "score": form is not None,
        "nowhere": False,
    }
    places = [place for place, does in acts.items() if does]
    everywhere = ["embedding", "query and key", "score"]  # a sum acts wherever its parts do
    assert places == (everywhere if name == "sum" else [p for p in [position.place] if p != "nowhere"])
