"""Adding an encoding: one class, one registration. It then keeps every contract and is in every list."""

import json

import pytest
import torch
from contract_settings import HEAD_DIM, HEADS, SETTINGS
from contracts import contracts_for
from torch import nn
from typer.testing import CliRunner

import relpos
from relpos import encodings
from relpos.cli import app
from relpos.encodings import registry
from relpos.forms.bias import Scaled, Scored, Toeplitz
from relpos.forms.call import Call


# --- a complete new encoding ---
class Saturating(relpos.Encoding):
    """A learned penalty that saturates with distance."""

    paper = "this test"
    formula = "B_ij = −a·tanh(|i − j| / 8)"

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__(heads, head_dim)
        self.a = nn.Parameter(torch.ones(heads))

    def bias(self, call: Call) -> Toeplitz:
        return Toeplitz(-self.a.to(call.dtype)[:, None] * torch.tanh(call.distances.abs() / 8), call.zero)


# --- and its registration ---
@pytest.fixture
def _saturating():
    relpos.register("saturating", Saturating)
    yield
    registry._registered.pop("saturating")


@pytest.mark.usefixtures("_saturating")
@pytest.mark.parametrize("backend", SETTINGS)
def test_a_registered_class_keeps_every_contract(backend):
    for contract in contracts_for(SETTINGS[backend], Saturating(HEADS, HEAD_DIM)):
        contract(lambda: relpos.encoding("saturating", heads=HEADS, head_dim=HEAD_DIM), SETTINGS[backend])


@pytest.mark.usefixtures("_saturating")
def test_a_registered_class_is_listed_and_a_base_for_others():
    assert "saturating" in relpos.names()
    card = json.loads(CliRunner().invoke(app, ["ls", "saturating", "--json"]).stdout)
    assert card["formula"] == Saturating.formula
    assert (card["places"], card["form"], card["learned_per_head"]) == (["score"], "Toeplitz", 1)
    assert card["parameters"] == {"a": [12]}
    adapted = relpos.encoding("dape", heads=HEADS, head_dim=HEAD_DIM, base="saturating")
    assert isinstance(adapted.base, Saturating)


FILE = '''
from relpos.forms.encoding import Encoding
from relpos.forms.bias import Toeplitz

class Steep(Encoding):
    """A steep penalty.

    Args:
        slope: How steep it is.
    """

    paper, formula = "this test, arXiv 1234.56789", "B_ij = −slope·|i − j|"

    def __init__(self, heads: int, head_dim: int, *, slope: float = 2.0) -> None:
        super().__init__(heads, head_dim)
        self.slope = slope

    def bias(self, call):
        return Toeplitz(-self.slope * call.distances.abs().expand(self.heads, -1), call.zero)
'''


def test_one_file_and_one_line_are_all_that_an_encoding_needs(tmp_path, monkeypatch):
    (tmp_path / "steep.py").write_text(FILE)
    monkeypatch.setattr(encodings, "__path__", [*encodings.__path__, str(tmp_path)])
    monkeypatch.setitem(registry.FILES, "steep", ("steep", "Steep"))  # the line
    assert encodings.Steep(2, 4).map(3)[1, 2].tolist() == [-4, -2, 0]
    assert relpos.card("steep").options["slope"].meaning == "How steep it is."
    for arguments in (["ls"], ["ls", "steep"], ["ls", "--markdown"]):
        assert "steep" in CliRunner().invoke(app, arguments).stdout


# Mistakes, and the contracts that notice them


class Peeking(Saturating):
    """It reads the future."""

    def embed(self, x, start=0, documents=None):
        return x + x.mean(dim=1, keepdim=True)


class Idle(Saturating):
    """Its parameter has no effect."""

    def bias(self, call):
        return Toeplitz(0 * self.a.to(call.dtype)[:, None] - call.distances.abs(), call.zero)


class Counting(Saturating):
    """It counts tokens where positions are given."""

    def bias(self, call):
        def function(i, j, scores, visible):
            return -self.a.to(call.dtype)[:, None, None] * torch.tanh((i[:, None] - j).abs().to(call.dtype) / 8)

        return Scored(function, {"a": self.a})


class Last(Saturating):
    """It takes its queries for the last tokens."""

    bidirectional = False

    def bias(self, call):
        row = call.keys - call.queries + torch.arange(call.queries) + 2.0
        numbers = (torch.ones(1), torch.zeros(1), self.a[:, None], torch.zeros(HEADS))
        return Scaled(call.distances.abs(), row[None], *(x.to(call.dtype) for x in numbers), first=call.first)


class Unsteady(Saturating):
    """Its bias differs between calls."""

    calls = 0

    def bias(self, call):
        Unsteady.calls += 1
        return Toeplitz(-self.a.to(call.dtype)[:, None] * Unsteady.calls * call.distances.abs(), call.zero)


OF_THE_FUTURE = {
    "later_tokens_change_nothing_earlier",
    "decoding_step_by_step_is_the_whole_sequence",
    "packed_documents_are_separate_documents",
}


@pytest.mark.parametrize(
    ("cls", "noticed", "alone"),
    [
        (Peeking, OF_THE_FUTURE, False),
        (Idle, {"every_parameter_gets_a_gradient"}, True),
        (Counting, {"gaps_between_positions_are_hidden_tokens"}, True),
        (Last, {"queries_may_stand_anywhere"}, False),
        (Unsteady, {"a_static_map_is_the_same_for_any_input"}, False),
    ],
)
def test_a_mistake_breaks_its_contracts(cls, noticed, alone):
    broken, setting = set(), SETTINGS["reference"]
    for contract in contracts_for(setting, cls(HEADS, HEAD_DIM)):
        try:
            contract(lambda: cls(HEADS, HEAD_DIM), setting)
        except AssertionError:
            broken.add(contract.__name__)
    assert broken == noticed if alone else broken >= noticed


def test_a_rope_with_options_of_its_own_keeps_the_defaults_of_the_others():
    class Slow(encodings.Rope):
        """RoPE whose base is a power of ten."""

        def __init__(self, heads: int, head_dim: int, power: int = 6) -> None:
            super().__init__(heads, head_dim, base=10.0**power)

    q, k = torch.randn(2, 1, HEADS, 9, HEAD_DIM)
    expected = relpos.scores(q, k, relpos.encoding("rope", HEADS, HEAD_DIM, base=1e6))
    torch.testing.assert_close(relpos.scores(q, k, Slow(HEADS, HEAD_DIM)), expected)
