"""The same numbers as transformers: buckets, ALiBi, every RoPE, temperatures. Whole models are in tests/attend."""

import pytest
import torch
from torch.testing import assert_close
from transformers import GPTNeoXConfig, Llama4TextConfig, LlamaConfig, T5Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gptj import modeling_gptj
from transformers.models.inkling import modeling_inkling
from transformers.models.inkling.configuration_inkling import InklingTextConfig
from transformers.models.llama import modeling_llama
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.ministral3 import modeling_ministral3
from transformers.models.ministral3.configuration_ministral3 import Ministral3Config
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

import relpos
from relpos.encodings.t5 import bucket
from relpos.forms.call import Call

HEADS, HEAD_DIM = 4, 64
# Both sides compute in float32, some in another order of operations: a few units in the last place (6e-8 each).
FREQUENCY = {"rtol": 1e-6, "atol": 0.0}
# A frequency off by 2 units in the last place turns position 100 by 100 · 1.2e-7 more: about 1e-5.
ROTATED = {"rtol": 0.0, "atol": 5e-5}
# Sums of at most 64 float32 terms of size 1.
OUTPUT = {"rtol": 0.0, "atol": 2e-6}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def future(length, value=-torch.inf):
    """A causal mask as transformers adds it."""
    return torch.full((length, length), value).triu(1)[None, None]


def eager(config):
    config._attn_implementation = "eager"
    return config


def project(layer, x, head_dim):
    """Queries, keys and values of a layer of transformers."""
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    return [projection(x).view(*x.shape[:2], -1, head_dim).transpose(1, 2) for projection in projections]


def output(layer, out):
    return layer.o_proj(out.transpose(1, 2).flatten(2))


# T5 and ALiBi


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "limit"), [(32, 128), (64, 256), (8, 20)])
def test_t5_buckets_are_those_of_transformers(causal, buckets, limit):
    distance = torch.arange(-1000, 1001)
    theirs = T5Attention._relative_position_bucket(-distance, not causal, buckets, limit)
    assert torch.equal(bucket(distance, causal, buckets, limit), theirs)
    assert theirs.unique().numel() == (buckets if causal else buckets - 1)  # all in use: the future has no distance 0


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "limit"), [(32, 128), (16, 40)])
@torch.no_grad()
def test_t5s_bias_is_that_of_transformers(causal, buckets, limit):
    torch.manual_seed(0)
    sizes = {"relative_attention_num_buckets": buckets, "relative_attention_max_distance": limit}
    config = eager(T5Config(d_model=32, d_kv=8, num_heads=4, is_decoder=causal, dropout_rate=0.0, **sizes))
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    ours = relpos.encoding("t5", heads=4, head_dim=8, buckets=buckets, max_distance=limit)
    theirs.relative_attention_bias.weight.normal_()
    ours.table.copy_(theirs.relative_attention_bias.weight.T)
    expected = theirs.compute_bias(300, 300)[0] + (future(300)[0] if causal else 0)
    assert torch.equal(ours.map(300, causal=causal), expected)  # a table read at the same places: exact


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20, 25, 32, 40, 71, 112])
def test_press_slopes_are_those_of_bloom_and_mpt(heads):
    length = 50
    last = relpos.encoding("alibi", heads=heads, head_dim=8, slopes="press").map(length)[:, -1]  # sees every key
    bloom = build_alibi_tensor(torch.ones(1, length), heads, torch.float32)  # (heads, 1, length)
    # BLOOM differs by a constant per row, slope · distance ≤ 50; float32 keeps 4e-6 of it.
    assert_close(last - last[:, :1], bloom[:, 0] - bloom[:, 0, :1], rtol=0.0, atol=1e-5)
    mpt = build_mpt_alibi_tensor(heads, length)  # (heads, 1, length), distances of the last query
    assert_close(last, mpt[:, 0], rtol=1e-6, atol=0.0)


# RoPE: frequencies and amplitude under every scaling

MAXIMUM = 2048
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 256}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.01 * k for k in range(HEAD_DIM // 2)],
    "long_factor": [1.0 + 1.5 * k for k in range(HEAD_DIM // 2)],
    "original_max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
PARAMETERS = {
    "linear": LINEAR,
    "linear, another base": {**LINEAR, "rope_theta": 500000.0, "factor": 2.5},
    "linear, half the head": {**LINEAR, "partial_rotary_factor": 0.5},
    "dynamic": DYNAMIC,
    "dynamic, half the head": {**DYNAMIC, "factor": 4.0, "partial_rotary_factor": 0.5},
    "yarn": YARN,
    "yarn, factor 1": {**YARN, "factor": 1.0},
    "yarn, factor null": {**YARN, "factor": None},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, other betas": {**YARN, "beta_fast": 16, "beta_slow": 2},
    "yarn, null betas": {**YARN, "beta_fast": None, "beta_slow": None, "attention_factor": None},
    "yarn, attention factor": {**YARN, "attention_factor": 1.25},
    "yarn, mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn, mscale alone": {**YARN, "mscale": 0.707},
    "yarn, attention factor over mscale": {**YARN, "attention_factor": 0.9, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn, half the head": {**YARN, "partial_rotary_factor": 0.5},
    "yarn, ramp of no width": {**YARN, "beta_fast": 1, "beta_slow": 1, "truncate": False},
    "llama3": LLAMA3,
    "llama3, other bands": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 16.0, "factor": 32.0},
    "longrope": {**LONG, "factor": 8.0},
    "longrope, factor 1": {**LONG, "factor": 1.0},
    "longrope, no factor, as Phi-3": LONG,
    "longrope, factor null": {**LONG, "factor": None},
    "longrope, attention factor": {**LONG, "factor": 8.0, "attention_factor": 1.5},
    "proportional": PROPORTIONAL,
    "proportional, with a factor": {**PROPORTIONAL, "partial_rotary_factor": 0.75, "factor": 4.0},
    "proportional, the whole head": {"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0},
    "the old key type": {"type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    # An attention factor counts only where transformers reads it.
    **{
        f"{kind}, attention factor": {**LLAMA3, "rope_type": kind, "attention_factor": 0.5}
        for kind in ("linear", "dynamic", "llama3", "proportional")
    },
}


def llama_config(parameters, maximum=MAXIMUM):
    """A Llama of one small layer with these rope_parameters, eager attention."""
    sizes = {"hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS, "num_key_value_heads": 2}
    rope_parameters = dict(parameters)
    return eager(
        LlamaConfig(**sizes, head_dim=HEAD_DIM, max_position_embeddings=maximum, rope_parameters=rope_parameters)
    )


def rope(parameters, **options):
    return relpos.encoding("rope", HEADS, HEAD_DIM, **{"length": MAXIMUM, "rope_parameters": parameters, **options})


def frequencies(position, length):
    """What relpos turns each pair by at position 1 of a document of this length, in float32."""
    return position.rope.frequencies(torch.tensor([[length]]), torch.float32).reshape(-1)


@pytest.mark.parametrize("which", PARAMETERS)
def test_rope_frequencies_and_amplitude_are_those_of_transformers(which):
    parameters = PARAMETERS[which]
    config, position = llama_config(parameters), rope(parameters)
    kind = parameters.get("rope_type") or parameters["type"]
    for length in (100, 256, 257, 2048, 2049, 5000, 20000):  # within and past both trained lengths, 256 and 2048
        theirs, amplitude = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)
        assert_close(frequencies(position, length), theirs, **FREQUENCY)
        assert position.rope.amplitude == pytest.approx(amplitude, rel=1e-12)  # Python floats on both sides


def test_options_of_our_own_mean_the_same_as_the_dictionary():
    # Ours: the trained length is `length`; theirs: original_max_position_embeddings. rope_theta is `base`.
    options = relpos.encoding("rope", HEADS, HEAD_DIM, scaling="yarn", factor=8.0, length=256, base=10000.0)
    assert torch.equal(frequencies(options, 100), frequencies(rope(YARN), 100))
    half = relpos.encoding("rope", HEADS, HEAD_DIM, scaling="linear", factor=4.0, fraction=0.5)
    assert torch.equal(frequencies(half, 100), frequencies(rope(PARAMETERS["linear, half the head"]), 100))


# RoPE: the rotation itself, and attention layers

ROTATIONS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    **{name: PARAMETERS[name] for name in ("linear", "dynamic", "yarn", "llama3", "proportional", "longrope")},
}


def rotated(position, q, k, documents=None):
    return position.rotate(q, k, Call(q.shape[2], k.shape[2], documents=documents))


@pytest.mark.parametrize("length", [90, 300])
@pytest.mark.parametrize("which", ROTATIONS)
def test_half_layout_rotates_like_llama(which, length):
    maximum = 128  # 300 is past it, and past the trained length of longrope
    q, k = normal(2, HEADS, length, HEAD_DIM), normal(2, 2, length, HEAD_DIM, seed=1)
    waves = modeling_llama.LlamaRotaryEmbedding(llama_config(ROTATIONS[which], maximum))(q, torch.arange(length)[None])
    theirs = modeling_llama.apply_rotary_pos_emb(q, k, *waves)
    for ours, expected in zip(rotated(rope(ROTATIONS[which], length=maximum), q, k), theirs, strict=True):
        assert_close(ours, expected, rtol=0.0, atol=length * 5e-7 * 4)  # angles up to `length`, values up to 4


@pytest.mark.parametrize("turned", [24, HEAD_DIM])  # GPT-J's rotary_dim
def test_interleaved_layout_rotates_like_gpt_j(turned):
    q, k = normal(2, HEADS, 70, HEAD_DIM), normal(2, HEADS, 70, HEAD_DIM, seed=1)
    sin, cos = modeling_gptj.create_sinusoidal_positions(70, turned)[None].chunk(2, dim=-1)
    position = relpos.encoding("rope", HEADS, HEAD_DIM, layout="interleaved", fraction=turned / HEAD_DIM)
    for ours, x in zip(rotated(position, q, k), (q, k), strict=True):
        theirs = modeling_gptj.apply_rotary_pos_emb(x[..., :turned].transpose(1, 2), sin, cos).transpose(1, 2)
        assert_close(ours, torch.cat([theirs, x[..., turned:]], dim=-1), **ROTATED)


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
def test_partial_rotation_in_halves_is_that_of_gpt_neox(fraction):
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": fraction}
    config = GPTNeoXConfig(hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, rope_parameters=dict(parameters))
    q, k = normal(2, HEADS, 70, HEAD_DIM), normal(2, HEADS, 70, HEAD_DIM, seed=1)
    cos, sin = modeling_gpt_neox.GPTNeoXRotaryEmbedding(config)(q, torch.arange(70)[None])
    assert cos.shape[-1] == int(fraction * HEAD_DIM)
    theirs = modeling_gpt_neox.apply_rotary_pos_emb(q, k, cos, sin)
    for ours, expected in zip(rotated(rope(parameters), q, k), theirs, strict=True):
        assert_close(ours, expected, **ROTATED)


# Temperatures: 4 heads, 2 key heads, head_dim 16

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def temperature(**options):
    return relpos.encoding("temperature", 4, 16, **options)


@torch.no_grad()
def test_llama4s_attention_layer_without_rope_is_that_of_transformers():
    torch.manual_seed(0)
    config = eager(Llama4TextConfig(**SIZES, floor_scale=4, attn_scale=0.3, no_rope_layers=[0], num_hidden_layers=1))
    layer = Llama4TextAttention(config, layer_idx=0).eval()
    assert not layer.use_rope
    x = normal(2, 40, 64)
    expected = layer(x, position_embeddings=None, attention_mask=future(40))[0]
    out = relpos.attention(*project(layer, x, 16), temperature(rule="llama4", length=4, strength=0.3))
    assert_close(output(layer, out), expected, **OUTPUT)
    assert (output(layer, relpos.attention(*project(layer, x, 16))) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("first", [0, 1000])
@torch.no_grad()
def test_ministral3s_attention_layer_is_rope_and_temperature(first):
    torch.manual_seed(0)
    scaling = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8}
    config = eager(Ministral3Config(**SIZES, rope_parameters={**scaling, "llama_4_scaling_beta": 0.2}))
    layer = modeling_ministral3.Ministral3Attention(config, layer_idx=0).eval()
    x, ids = normal(2, 40, 64), torch.arange(first, first + 40)[None]
    waves = modeling_ministral3.Ministral3RotaryEmbedding(config)(x, ids)
    expected = layer(x, position_embeddings=waves, attention_mask=future(40), position_ids=ids)[0]
    options = {"rope": {"rope_parameters": scaling}}
    options["temperature"] = {"rule": "ministral3", "length": 8, "strength": 0.2}
    position = relpos.encoding("sum", 4, 16, parts=["rope", "temperature"], part_options=options)
    out = relpos.attention(*project(layer, x, 16), position, positions=ids)
    # Angles up to 1,040 carry errors of 1,040 · 6e-8 · factor.
    assert_close(output(layer, out), expected, rtol=0.0, atol=2e-6 if first == 0 else 1e-4)


@torch.no_grad()
def test_inklings_factor_is_that_of_transformers(monkeypatch):
    """The queries that its layer passes to attention, with and without the factor."""
    queries = []

    def attention(module, query, key, value, *arguments, **options):
        queries.append(query)
        return torch.zeros(*query.shape[:1], query.shape[2], *query.shape[1::2]), None

    monkeypatch.setattr(modeling_inkling, "eager_attention_forward", attention)
    for floor in (None, 5):
        torch.manual_seed(0)
        more = {"num_hidden_layers": 1, "layer_types": ["hybrid"], "log_scaling_alpha": 0.4}
        config = eager(InklingTextConfig(**SIZES, **more, log_scaling_n_floor=floor))
        layer = modeling_inkling.InklingAttention(config, layer_idx=0).eval()
        assert not layer.is_sliding
        layer(normal(1, 40, 64), attention_mask=None)
    plain, scaled = queries
    ours, _ = temperature(rule="inkling", length=5, strength=0.4).rotate(plain, plain, Call(40, 40))
    assert_close(ours, scaled, rtol=1e-6, atol=1e-6)
    assert (scaled - plain)[:, :, 5:].abs().max() > 0.1
    assert torch.equal(scaled[:, :, :5], plain[:, :, :5])


def test_the_defaults_of_temperatures_are_those_of_transformers():
    llama4, ministral3 = Llama4TextConfig(), Ministral3Config().rope_parameters
    assert (temperature().length, temperature().strength) == (llama4.floor_scale, llama4.attn_scale)
    position = temperature(rule="ministral3")
    assert position.length == ministral3["original_max_position_embeddings"]
    assert position.strength == ministral3["llama_4_scaling_beta"]
    assert temperature(rule="inkling", length=9).strength == InklingTextConfig().log_scaling_alpha
    assert InklingTextConfig().log_scaling_n_floor is None  # it has no default length


def test_sinusoidal_is_marians_table_up_to_the_order_of_dimensions():
    width, length = 32, 200
    theirs = MarianSinusoidalPositionalEmbedding(length, width).create_weight()  # all sines, then all cosines
    ours = relpos.encoding("sinusoidal", heads=4, head_dim=8).embed(torch.zeros(1, length, width))[0]
    # Theirs is computed in float64; our angles, up to 200, are float32: 200 · 1.2e-7.
    assert_close(torch.cat([ours[:, 0::2], ours[:, 1::2]], dim=1), theirs, rtol=0.0, atol=5e-5)
