"""Adding an encoding: one class, one registration. It then keeps every contract and is in every list."""

import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from contracts import HEAD_DIM, HEADS, SETTINGS, contracts_for
from torch import nn
from typer.testing import CliRunner

import relpos
from relpos.cli import app
from relpos.encodings import registry
from relpos.encodings.call import Call
from relpos.encodings.forms import Toeplitz


# --- the whole of a new encoding ---
class Window(relpos.Encoding):
    """A learned penalty that saturates with distance."""

    place = "score"
    form = "Toeplitz"
    learns = "1"
    directions = "both"
    paper = "this test"
    formula = "B_ij = −a·tanh(|i − j| / 8)"

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__(heads, head_dim)
        self.a = nn.Parameter(torch.ones(heads))

    def bias(self, call: Call) -> Toeplitz:
        return Toeplitz(-self.a.to(call.dtype)[:, None] * torch.tanh(call.distances.abs() / 8), call.zero)


# --- and its registration ---
@pytest.fixture
def _window():
    relpos.register("window", Window)
    yield
    registry._registered.pop("window")


@pytest.mark.usefixtures("_window")
@pytest.mark.parametrize("backend", SETTINGS)
def test_a_registered_class_keeps_every_contract(backend):
    for contract in contracts_for(SETTINGS[backend]):
        contract(lambda: relpos.encoding("window", heads=HEADS, head_dim=HEAD_DIM), SETTINGS[backend])


@pytest.mark.usefixtures("_window")
def test_a_registered_class_is_listed_and_a_base_for_others():
    assert "window" in relpos.names()
    found = json.loads(CliRunner().invoke(app, ["ls", "window", "--json"]).stdout)
    assert found["formula"] == Window.formula
    adapted = relpos.encoding("dape", heads=HEADS, head_dim=HEAD_DIM, base="window")
    assert isinstance(adapted.base, Window)


def test_a_new_encoding_needs_one_class_of_13_lines():
    """The number that CONTRIBUTING.md tells."""
    lines = [line for line in inspect.getsource(Window).splitlines() if line.strip()]
    told = re.search(r"a whole one: (\d+) lines", (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text())
    assert told is not None
    assert len(lines) == int(told[1]) == 13


def test_the_contracts_can_fail():
    """A bias that peeks at the future must not pass for a good one."""

    class Peeking(Window):
        def embed(self, x, start=0, documents=None):
            return x + x.mean(dim=1, keepdim=True)

    failing, setting = [], SETTINGS["reference"]
    for contract in contracts_for(setting):
        try:
            contract(lambda: Peeking(HEADS, HEAD_DIM), setting)
        except AssertionError:
            failing.append(contract.__name__)
    assert "later_tokens_change_nothing_earlier" in failing
    assert "decoding_step_by_step_is_the_whole_sequence" in failing
    assert "packed_documents_are_separate_documents" in failing
