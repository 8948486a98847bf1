"""The cards of the encodings, and their file in the user's cache folder."""

import json
import os
import subprocess
import sys

import pytest
import torch

import relpos
from relpos.encodings import registry
from relpos.forms import cards


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and no card in memory."""
    monkeypatch.setenv("RELPOS_CACHE", str(tmp_path))
    monkeypatch.setattr(registry, "_cards", {})
    return tmp_path


def computed():
    return {name: cards.compute_card(name, registry.encoding_class(name)) for name in registry.FILES}


def test_cards_read_from_the_cache_are_those_of_the_classes(cache):
    assert relpos.card("fire") == computed()["fire"]
    (file,) = cache.rglob("*.json")
    assert file == cards.cache_file()
    assert cards.read_cards() == computed()


def test_cards_are_computed_once(cache, monkeypatch):
    relpos.card("alibi")
    monkeypatch.setattr(registry, "_cards", {})
    monkeypatch.setattr(registry, "compute_card", None)  # calling it would fail
    assert relpos.card("rope").place == "query and key"


def test_learned_values_as_text(cache):
    texts = {name: relpos.card(name).learned for name in ("alibi", "fire", "cope", "learned")}
    assert texts == {"alibi": "0", "fire": "38.5", "cope": "341.3", "learned": "65,536"}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"alibi": {}}', '{"alibi": {"parameters": 3}}', "\x00"])
def test_a_damaged_file_is_computed_again(cache, text):
    file = cards.cache_file()
    file.parent.mkdir()
    file.write_text(text)
    assert relpos.card("t5").learned_per_head == 32
    assert set(json.loads(file.read_text())) == set(registry.FILES)


def test_cards_work_where_nothing_can_be_written(cache, monkeypatch):
    (cache / "file").write_text("in the way of a folder")
    monkeypatch.setenv("RELPOS_CACHE", str(cache / "file" / "cache"))
    assert relpos.card("alibi").form == "Toeplitz"
    assert [path.name for path in cache.iterdir()] == ["file"]


def test_other_sources_have_other_cards(cache, tmp_path, monkeypatch):
    before = cards.cache_file()
    folder = tmp_path / "sources" / "forms"
    folder.mkdir(parents=True)
    (folder / "cards.py").write_text("1")
    monkeypatch.setattr(cards, "__file__", str(folder / "cards.py"))
    changed = cards.cache_file()
    (folder / "cards.py").write_text("2")
    assert len({before, changed, cards.cache_file()}) == 3
    (folder / "cards.py").unlink()
    assert cards.cache_file() is None


def test_a_card_does_not_change_what_is_drawn_next(cache):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    relpos.card("kerple_log")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.heavy
def test_only_the_first_list_imports_torch(tmp_path):
    code = "from relpos.cli import app; import sys\ntry: app(['ls'])\nexcept SystemExit: print('torch' in sys.modules)"
    env = {**os.environ, "RELPOS_CACHE": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout
        for _ in range(2)
    ]
    assert runs[0].splitlines()[-1] == "True"
    assert runs[1].splitlines()[-1] == "False"
    assert runs[0].splitlines()[:-1] == runs[1].splitlines()[:-1]
