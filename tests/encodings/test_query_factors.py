"""Temperature and SSMax against transformers' own layers, their formulas, and each other's combinations with rope."""

import math

import pytest
import torch
from plain import CLOSE, HEAD_DIM, HEADS, LENGTH, build, normal, qkv
from torch.testing import assert_close
from transformers import Llama4TextConfig
from transformers.models.inkling import modeling_inkling
from transformers.models.inkling.configuration_inkling import InklingTextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention
from transformers.models.ministral3 import modeling_ministral3
from transformers.models.ministral3.configuration_ministral3 import Ministral3Config

import relpos
from relpos.encodings.temperature import LENGTHS
from relpos.forms.call import Call

WIDTH = 64  # of the layers of transformers: 4 heads, 2 key heads, head_dim 16
SIZES = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def temperature(heads=HEADS, head_dim=HEAD_DIM, **options):
    return relpos.encoding("temperature", heads, head_dim, **options)


def factors(position, length=LENGTH, **arguments):
    """The factor of each query: (1 or batch, heads or 1, queries)."""
    return position.query_factor(Call(length, length, dtype=torch.float64, **arguments))[..., 0]


def project(layer, x):
    return [p(x).view(*x.shape[:2], -1, 16).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj)]


def future(length):
    return torch.full((length, length), -torch.inf).triu(1)[None, None]


# transformers


@torch.no_grad()
def test_a_whole_llama4_layer_without_rope_is_that_of_transformers():
    torch.manual_seed(0)
    config = Llama4TextConfig(**SIZES, floor_scale=4, attn_scale=0.3, no_rope_layers=[0], num_hidden_layers=1)
    config._attn_implementation = "eager"
    layer = Llama4TextAttention(config, layer_idx=0).eval()
    assert not layer.use_rope
    x = normal(2, 40, WIDTH, dtype=torch.float32)
    expected = layer(x, position_embeddings=None, attention_mask=future(40))[0]
    position = temperature(4, 16, rule="llama4", length=4, strength=0.3)
    out = relpos.attention(*project(layer, x), position)
    assert_close(layer.o_proj(out.transpose(1, 2).flatten(2)), expected, rtol=0.0, atol=2e-6)
    plain = relpos.attention(*project(layer, x))
    assert (layer.o_proj(plain.transpose(1, 2).flatten(2)) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("first", [0, 1000])
@torch.no_grad()
def test_a_whole_ministral3_layer_is_rope_and_temperature(first):
    torch.manual_seed(0)
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8}
    config = Ministral3Config(**SIZES, rope_parameters={**rope, "llama_4_scaling_beta": 0.2})
    config._attn_implementation = "eager"
    layer = modeling_ministral3.Ministral3Attention(config, layer_idx=0).eval()
    x, ids = normal(2, 40, WIDTH, dtype=torch.float32), torch.arange(first, first + 40)[None]
    waves = modeling_ministral3.Ministral3RotaryEmbedding(config)(x, ids)
    expected = layer(x, position_embeddings=waves, attention_mask=future(40), position_ids=ids)[0]
    position = relpos.encoding(
        "sum",
        4,
        16,
        parts=["rope", "temperature"],
        part_options={
            "rope": {"rope_parameters": rope},
            "temperature": {"rule": "ministral3", "length": 8, "strength": 0.2},
        },
    )
    out = relpos.attention(*project(layer, x), position, positions=ids)
    # Angles up to 1,040 carry errors of 1,040 · 6e-8 · factor.
    assert_close(layer.o_proj(out.transpose(1, 2).flatten(2)), expected, rtol=0.0, atol=2e-6 if first == 0 else 1e-4)


@torch.no_grad()
def test_inklings_factor_is_that_of_transformers(monkeypatch):
    """The queries that its layer hands to attention, with and without the factor."""
    handed = []

    def attention(module, query, key, value, *arguments, **options):
        handed.append(query)
        return torch.zeros(*query.shape[:1], query.shape[2], *query.shape[1::2]), None

    monkeypatch.setattr(modeling_inkling, "eager_attention_forward", attention)
    for floor in (None, 5):
        torch.manual_seed(0)
        config = InklingTextConfig(
            **SIZES, num_hidden_layers=1, layer_types=["hybrid"], log_scaling_n_floor=floor, log_scaling_alpha=0.4
        )
        config._attn_implementation = "eager"
        layer = modeling_inkling.InklingAttention(config, layer_idx=0).eval()
        assert not layer.is_sliding
        layer(normal(1, 40, WIDTH, dtype=torch.float32), attention_mask=None)
    plain, scaled = handed
    position = temperature(4, 16, rule="inkling", length=5, strength=0.4)
    ours, _ = position.rotate(plain, plain, Call(40, 40))
    assert_close(ours, scaled, rtol=1e-6, atol=1e-6)
    assert (scaled - plain)[:, :, 5:].abs().max() > 0.1
    assert torch.equal(scaled[:, :, :5], plain[:, :, :5])


def test_the_defaults_are_those_of_transformers():
    llama4, ministral3 = Llama4TextConfig(), Ministral3Config().rope_parameters
    assert (temperature().length, temperature().strength) == (llama4.floor_scale, llama4.attn_scale)
    position = temperature(rule="ministral3")
    assert position.length == ministral3["original_max_position_embeddings"] == LENGTHS["ministral3"]
    assert position.strength == ministral3["llama_4_scaling_beta"]
    assert temperature(rule="inkling", length=9).strength == InklingTextConfig().log_scaling_alpha
    assert InklingTextConfig().log_scaling_n_floor is None  # it has no default length


# Formulas


@pytest.mark.parametrize(
    ("rule", "tau"),
    [
        ("llama4", lambda i: 1 + 0.1 * math.log(1 + (i + 1) // 3)),
        ("ministral3", lambda i: 1 + 0.1 * math.log(1 + i // 3)),
        ("inkling", lambda i: 1 + 0.1 * math.log(max((i + 1) / 3, 1))),
    ],
)
def test_temperature_multiplies_each_row_of_scores(rule, tau):
    q, k, _ = qkv()
    position = temperature(rule=rule, length=3)
    expected = torch.tensor([tau(i) for i in range(LENGTH)], dtype=torch.float64)[:, None]
    assert_close(relpos.scores(q, k, position), relpos.scores(q, k) * expected, **CLOSE)
    positions = torch.tensor([[0, 1, 5, 6, 7, 100, 101, 102, 103, 104, 105, 106, 107, 9000]])
    expected = torch.tensor([tau(i) for i in positions[0].tolist()], dtype=torch.float64)[:, None]
    scores = relpos.scores(q, k, position, positions=positions)
    assert_close(scores, relpos.scores(q, k) * expected, **CLOSE)


def test_ssmax_multiplies_each_row_of_scores_by_the_logarithm_of_what_it_sees():
    q, k, _ = qkv()
    position = build("ssmax")
    s = position.s.detach()[:, None, None]
    n = torch.arange(1, LENGTH + 1, dtype=torch.float64)[:, None]
    seen = torch.ones(LENGTH, LENGTH).tril().bool()
    scores = relpos.scores(q, k, position).detach()
    assert_close(scores[:, :, seen], (relpos.scores(q, k) * s * n.log())[:, :, seen], **CLOSE)
    both = relpos.scores(q, k, position, causal=False).detach()
    assert_close(both, relpos.scores(q, k, causal=False) * s * math.log(LENGTH), **CLOSE)


def test_ssmax_is_the_softmax_to_the_base_n():
    """SSMax as the paper defines it: n^(s·z_i) / Σ_j n^(s·z_j), for each row of n scores z."""
    q, k, v = qkv(batch=1)
    position = build("ssmax")
    out = relpos.attention(q, k, v, position).detach()
    scores = relpos.scores(q, k)
    for h, s in enumerate(position.s.tolist()):
        for i in range(LENGTH):
            powers = (i + 1) ** (s * scores[0, h, i, : i + 1])
            assert_close(out[0, h, i], (powers / powers.sum()) @ v[0, h, : i + 1], **CLOSE)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_ssmax_counts_the_keys_that_a_query_sees(causal, packed, padded):
    documents = torch.tensor([[3] * 5 + [1] * 9, [2] * 14]) if packed else None
    padding = torch.ones(2, LENGTH, dtype=torch.bool)
    padding[0, 2], padding[1, 9:] = False, False
    call = Call(
        4, LENGTH, causal=causal, documents=documents, padding=padding if padded else None, dtype=torch.float64, start=3
    )
    position = build("ssmax")
    n = call.visible(call.i).sum(-1)[:, 0].double()  # (1 or batch, queries)
    factor = position.query_factor(call)[..., 0].detach()
    assert_close(factor, (position.s[:, None] * n.log()[:, None]).detach(), **CLOSE)


def test_ssmax_starts_with_an_average_factor_of_1_at_1024_tokens():
    average = factors(relpos.encoding("ssmax", HEADS, HEAD_DIM), 1024).mean().item()
    assert average == pytest.approx(1.0, abs=0.005)
    position = relpos.encoding("ssmax", HEADS, HEAD_DIM, start=0.43)
    assert position.s.tolist() == pytest.approx([0.43] * HEADS)


# Together with others

PARTS = [
    ["rope", "temperature"],
    ["temperature", "rope"],
    ["rope", "ssmax"],
    ["ssmax", "temperature"],
    ["ssmax", "rope", "alibi", "temperature"],
]
TEMPERATURE = {"temperature": {"length": 3, "strength": 0.7}}


def summed(parts, **options):
    given = {name: each for name, each in {**TEMPERATURE, **options}.items() if name in parts}
    return build("sum", parts=parts, part_options=given)


def expected_scores(position, q, k):
    """The parts of a sum one after another: factors, then rotations, then biases."""
    parts = list(position.parts)
    for part in parts:
        factor = part.query_factor(Call(LENGTH, LENGTH, dtype=torch.float64))
        q = q if factor is None else q * factor
    biases = [part.map(LENGTH) for part in parts if part.places == ("score",)]
    rotating = [part for part in parts if part.places == ("query and key",) and hasattr(part, "rope")]
    scores = relpos.scores(q, k, rotating[0] if rotating else None)
    return scores + sum(bias.double() for bias in biases)


@pytest.mark.parametrize("parts", PARTS, ids="+".join)
@torch.no_grad()
def test_a_sum_scales_and_rotates_in_any_order(parts):
    q, k, _ = qkv()
    position = summed(parts)
    assert_close(relpos.scores(q, k, position), expected_scores(position, q, k), rtol=0.0, atol=1e-6)
    call = Call(LENGTH, LENGTH, dtype=torch.float64)
    assert (position.rotation(call) is not None) == ("rope" in parts)  # left to the backend
    without_bias = summed([part for part in parts if part != "alibi"])
    assert_close(relpos.scores(*position.rotate(q, k, call)), relpos.scores(q, k, without_bias), **CLOSE)


@torch.no_grad()
def test_a_sum_inside_a_sum_scales_too():
    q, k, _ = qkv()
    inner = {"parts": ["rope", "temperature"], "part_options": TEMPERATURE}
    nested = build("sum", parts=["sum", "temperature"], part_options={"sum": inner, **TEMPERATURE})
    twice = summed(["rope", "temperature", "temperature"])
    assert_close(relpos.scores(q, k, nested), relpos.scores(q, k, twice), **CLOSE)
    assert nested.rotation(Call(LENGTH, LENGTH)) is not None


@torch.no_grad()
def test_two_rotations_and_a_factor_act_one_after_another():
    q, k, _ = qkv()
    twice = summed(["rope", "rope", "temperature"])
    call = Call(LENGTH, LENGTH, dtype=torch.float64)
    assert twice.rotation(call) is None
    assert twice.query_factor(call) is None
    slower = relpos.encoding("rope", HEADS, HEAD_DIM, scaling="linear", factor=0.5)  # twice the angle
    once = relpos.scores(q * factors(temperature(**TEMPERATURE["temperature"]))[..., None], k, slower)
    assert_close(relpos.scores(q, k, twice), once, **CLOSE)


class Mirror(relpos.Encoding):
    """An encoding of a user's own, which is neither a rotation nor a factor."""

    paper, formula = "this test", "q_i and k_i with their dimensions in reverse order, at odd i"

    def rotate(self, q, k, call):
        odd = call.query_positions[:, None, :, None] % 2 == 1
        odd_keys = call.key_positions[:, None, :, None] % 2 == 1
        return torch.where(odd, q.flip(-1), q), torch.where(odd_keys, k.flip(-1), k)


@torch.no_grad()
def test_a_part_of_another_kind_acts_in_its_turn(monkeypatch):
    monkeypatch.setattr("relpos.encodings.registry._registered", {"mirror": Mirror})
    q, k, _ = qkv()
    call = Call(LENGTH, LENGTH, dtype=torch.float64)
    position = summed(["rope", "temperature", "mirror"])
    assert position.rotation(call) is None
    rope = relpos.encoding("rope", HEADS, HEAD_DIM)
    scaled = q * factors(temperature(**TEMPERATURE["temperature"]))[..., None]
    expected = relpos.scores(*Mirror(HEADS, HEAD_DIM).rotate(*rope.rotate(scaled, k, call), call))
    assert_close(relpos.scores(q, k, position), expected, **CLOSE)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_factor_is_refused(value):
    q, k, v = (x.float() for x in qkv())
    position = relpos.encoding("ssmax", HEADS, HEAD_DIM)
    with torch.no_grad():
        position.s[1] = value
    with pytest.raises(ValueError, match=r"the factor of the queries holds (nan|inf): a parameter or an input"):
        relpos.attention(q, k, v, position)
