"""Several encodings together, and ssmax, which is mostly a part of others: each part acts in its place."""

import pytest
import torch
from plain import CLOSE, HEAD_DIM, HEADS, LENGTH, bias, build, hidden, qkv
from torch.testing import assert_close

import relpos
from relpos.forms.call import Call

TEMPERATURE = {"temperature": {"length": 3, "strength": 0.7}}
CALL = Call(LENGTH, LENGTH, dtype=torch.float64)


def summed(*parts):
    options = {name: options for name, options in TEMPERATURE.items() if name in parts}
    return build("sum", parts=list(parts), part_options=options)


def with_temperature(q):
    return q * build("temperature", **TEMPERATURE["temperature"]).query_factor(CALL)


@pytest.mark.parametrize(
    "parts",
    [
        ["rope", "temperature"],
        ["temperature", "rope"],
        ["rope", "ssmax"],
        ["ssmax", "temperature"],
        ["ssmax", "rope", "alibi", "temperature"],
    ],
    ids="+".join,
)
@torch.no_grad()
def test_a_sum_scales_rotates_and_adds_in_any_order(parts):
    q, k, _ = qkv()
    position = summed(*parts)
    scaled, rotating, added = q, None, 0.0
    for part in position.parts:
        factor = part.query_factor(CALL)
        scaled = scaled if factor is None else scaled * factor
        rotating = part if hasattr(part, "rope") else rotating
        added = added + (part.map(LENGTH).double() if part.places == ("score",) else 0.0)
    assert_close(relpos.scores(q, k, position), relpos.scores(scaled, k, rotating) + added, rtol=0.0, atol=1e-6)
    assert (position.rotation(CALL) is not None) == ("rope" in parts)  # left to the backend
    without_bias = summed(*[part for part in parts if part != "alibi"])
    assert_close(relpos.scores(*position.rotate(q, k, CALL)), relpos.scores(q, k, without_bias), **CLOSE)


@torch.no_grad()
def test_each_part_gets_its_own_gates():
    position, x = build("sum", parts=["cable", "t5", "forgetting", "cable_nw"]), hidden()
    expected = sum(bias(part, x=x) for part in position.parts)
    assert_close(bias(position, x=x), expected, **CLOSE)


@torch.no_grad()
def test_a_sum_inside_a_sum_scales_too():
    q, k, _ = qkv()
    inner = {"parts": ["rope", "temperature"], "part_options": TEMPERATURE}
    nested = build("sum", parts=["sum", "temperature"], part_options={"sum": inner, **TEMPERATURE})
    twice = summed("rope", "temperature", "temperature")
    assert_close(relpos.scores(q, k, nested), relpos.scores(q, k, twice), **CLOSE)
    assert nested.rotation(CALL) is not None


@torch.no_grad()
def test_two_rotations_and_a_factor_act_one_after_another():
    q, k, _ = qkv()
    twice = summed("rope", "rope", "temperature")
    assert twice.rotation(CALL) is None
    assert twice.query_factor(CALL) is None
    faster = relpos.encoding("rope", HEADS, HEAD_DIM, scaling="linear", factor=0.5)  # twice the angle
    assert_close(relpos.scores(q, k, twice), relpos.scores(with_temperature(q), k, faster), **CLOSE)


class Mirror(relpos.Encoding):
    """An encoding of a user, which is neither a rotation nor a factor."""

    paper, formula = "this test", "q_i and k_i with their dimensions in reverse order, at odd i"

    def rotate(self, q, k, call):
        odd = call.query_positions[:, None, :, None] % 2 == 1
        odd_keys = call.key_positions[:, None, :, None] % 2 == 1
        return torch.where(odd, q.flip(-1), q), torch.where(odd_keys, k.flip(-1), k)


@torch.no_grad()
def test_a_part_of_another_kind_acts_in_its_turn(monkeypatch):
    monkeypatch.setattr("relpos.encodings.registry._registered", {"mirror": Mirror})
    q, k, _ = qkv()
    position = summed("rope", "temperature", "mirror")
    assert position.rotation(CALL) is None
    rope = relpos.encoding("rope", HEADS, HEAD_DIM)
    expected = Mirror(HEADS, HEAD_DIM).rotate(*rope.rotate(with_temperature(q), k, CALL), CALL)
    assert_close(relpos.scores(q, k, position), relpos.scores(*expected), **CLOSE)


def test_the_map_of_a_sum_is_its_bias_alone():
    assert torch.equal(build("sum", parts=["rope", "alibi"]).map(7), build("alibi").map(7))
    with pytest.raises(ValueError, match="acts on the embedding, query and key and adds no bias"):
        build("sum", parts=["learned", "rope"]).map(7)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_ssmax_counts_the_keys_that_a_query_sees(causal, packed, padded):
    documents = torch.tensor([[3] * 5 + [1] * 9, [2] * 14]) if packed else None
    padding = torch.ones(2, LENGTH, dtype=torch.bool)
    padding[0, 2], padding[1, 9:] = False, False
    which = {"causal": causal, "documents": documents, "padding": padding if padded else None, "start": 3}
    call = Call(4, LENGTH, dtype=torch.float64, **which)
    position = build("ssmax")
    n = call.visible(call.i).sum(-1)[:, 0].double()  # (1 or batch, queries)
    factor = position.query_factor(call)[..., 0].detach()
    assert_close(factor, (position.s[:, None] * n.log()[:, None]).detach(), **CLOSE)


def test_ssmax_starts_with_an_average_factor_of_1_at_1024_tokens():
    factors = relpos.encoding("ssmax", HEADS, HEAD_DIM).query_factor(Call(1024, 1024))
    assert factors.mean().item() == pytest.approx(1.0, abs=0.005)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_factor_is_refused(value):
    q, k, v = (x.float() for x in qkv())
    position = relpos.encoding("ssmax", HEADS, HEAD_DIM)
    with torch.no_grad():
        position.s[1] = value
    with pytest.raises(ValueError, match=r"the factor of the queries holds (nan|inf): a parameter or an input"):
        relpos.attention(q, k, v, position)
