"""The same numbers as transformers: T5's buckets, BLOOM's and MPT's ALiBi, every RoPE, whole attention layers."""

import pytest
import torch
from torch.testing import assert_close
from transformers import BloomConfig, GPTNeoXConfig, LlamaConfig, T5Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
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


# T5


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "limit"), [(32, 128), (64, 256), (8, 20)])
def test_t5_buckets_are_those_of_transformers(causal, buckets, limit):
    distance = torch.arange(-1000, 1001)
    theirs = T5Attention._relative_position_bucket(-distance, not causal, buckets, limit)
    assert torch.equal(bucket(distance, causal, buckets, limit), theirs)
    assert theirs.unique().numel() == (buckets if causal else buckets - 1)  # all in use: the future has no distance 0


def t5_attention(causal, buckets=32, limit=128):
    torch.manual_seed(0)
    config = T5Config(
        d_model=32,
        d_kv=8,
        num_heads=4,
        is_decoder=causal,
        dropout_rate=0.0,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=limit,
    )
    config._attn_implementation = "eager"
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    ours = relpos.encoding("t5", heads=4, head_dim=8, buckets=buckets, max_distance=limit)
    with torch.no_grad():
        theirs.relative_attention_bias.weight.normal_()
        ours.table.copy_(theirs.relative_attention_bias.weight.T)
    return theirs, ours


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "limit"), [(32, 128), (16, 40)])
def test_t5_bias_is_that_of_transformers(causal, buckets, limit):
    theirs, ours = t5_attention(causal, buckets, limit)
    expected = theirs.compute_bias(300, 300)[0].detach()
    if causal:
        expected = expected.masked_fill(torch.ones(300, 300).triu(1).bool(), -torch.inf)
    assert torch.equal(ours.map(300, causal=causal), expected)  # a table read at the same places: exact


@pytest.mark.parametrize("causal", [True, False])
def test_a_whole_t5_attention_layer_is_that_of_transformers(causal):
    theirs, ours = t5_attention(causal)
    x = normal(2, 40, 32)
    mask = torch.zeros(1, 1, 40, 40)
    if causal:
        mask = mask.masked_fill(torch.ones(40, 40).triu(1).bool(), torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = theirs(x, mask=mask)[0]
        q, k, v = (project(x).view(2, 40, 4, 8).transpose(1, 2) for project in (theirs.q, theirs.k, theirs.v))
        out = relpos.attention(q, k, v, ours, causal=causal, scale=1.0)  # T5 does not scale its scores
        assert_close(theirs.o(out.transpose(1, 2).reshape(2, 40, 32)), expected, **OUTPUT)


# ALiBi


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20, 25, 32, 40, 71, 112])
def test_press_slopes_are_blooms_up_to_a_constant_a_row(heads):
    length = 50
    theirs = build_alibi_tensor(torch.ones(1, length), heads, torch.float32)  # (heads, 1, length)
    ours = relpos.encoding("alibi", heads=heads, head_dim=8, slopes="press").map(length)
    last = ours[:, -1]  # sees every key
    # The constant is slope · distance ≤ 50; float32 keeps 4e-6 of it.
    assert_close(last - last[:, :1], theirs[:, 0] - theirs[:, 0, :1], rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20, 25, 32, 40, 71, 112])
def test_press_slopes_are_those_of_mpt(heads):
    length = 50
    theirs = build_mpt_alibi_tensor(heads, length)  # (heads, 1, length), distances of the last query
    ours = relpos.encoding("alibi", heads=heads, head_dim=8, slopes="press").map(length)
    assert_close(ours[:, -1], theirs[:, 0], rtol=1e-6, atol=0.0)


def test_a_whole_bloom_attention_layer_is_that_of_transformers():
    heads, head_dim, length = 6, 8, 30
    torch.manual_seed(0)
    theirs = BloomAttention(BloomConfig(hidden_size=heads * head_dim, n_head=heads), layer_idx=0).eval()
    x = normal(2, length, heads * head_dim)
    alibi = build_alibi_tensor(torch.ones(2, length), heads, torch.float32)
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        expected = theirs(x, torch.zeros_like(x), alibi=alibi, attention_mask=mask)[0]
        q, k, v = theirs.query_key_value(x).view(2, length, heads, 3, head_dim).permute(3, 0, 2, 1, 4)
        out = relpos.attention(q, k, v, relpos.encoding("alibi", heads, head_dim, slopes="press"))
        assert_close(theirs.dense(out.transpose(1, 2).reshape(2, length, -1)), expected, **OUTPUT)


# RoPE: frequencies and amplitude under every scaling

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
PARAMETERS = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "linear, another base": {"rope_type": "linear", "rope_theta": 500000.0, "factor": 2.5},
    "linear, half the head": {
        "rope_type": "linear",
        "rope_theta": 1e4,
        "factor": 4.0,
        "partial_rotary_factor": 0.5,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "dynamic, half the head": {
        "rope_type": "dynamic",
        "rope_theta": 1e4,
        "factor": 4.0,
        "partial_rotary_factor": 0.5,
    },
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
    "proportional": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "proportional, with a factor": {
        "rope_type": "proportional",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "factor": 4.0,
    },
    "proportional, the whole head": {"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0},
}
MAXIMUM = 2048


def llama_config(parameters, **more):
    """A Llama of one small layer with these rope_parameters, eager attention."""
    config = LlamaConfig(
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAXIMUM,
        rope_parameters=dict(parameters),
        **more,
    )
    config._attn_implementation = "eager"
    return config


def rope(parameters, **options):
    return relpos.encoding("rope", HEADS, HEAD_DIM, length=MAXIMUM, rope_parameters=parameters, **options)


def frequencies(position, length):
    """What relpos turns each pair by at position 1 of a document of this length, in float32."""
    theta = position.rope.frequencies(torch.tensor([[length]]), torch.float32)
    return theta.reshape(-1)


@pytest.mark.parametrize("which", PARAMETERS)
def test_rope_frequencies_and_amplitude_are_those_of_transformers(which):
    parameters = PARAMETERS[which]
    config, position = llama_config(parameters), rope(parameters)
    for length in (100, 256, 257, 2048, 2049, 5000, 20000):  # within and past both trained lengths, 256 and 2048
        theirs, amplitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=length)
        assert_close(frequencies(position, length), theirs, **FREQUENCY)
        assert position.rope.amplitude == pytest.approx(amplitude, rel=1e-12)  # Python floats on both sides


def test_an_attention_factor_counts_only_where_transformers_reads_it():
    for kind in ("linear", "dynamic", "llama3", "proportional"):
        parameters = {**LLAMA3, "rope_type": kind, "attention_factor": 0.5}
        _, amplitude = ROPE_INIT_FUNCTIONS[kind](llama_config(parameters))
        assert amplitude == 1.0
        assert rope(parameters).rope.amplitude == amplitude, kind


def test_options_of_our_own_mean_the_same_as_the_dictionary():
    # Ours: the trained length is `length`; theirs: original_max_position_embeddings. rope_theta is `base`.
    given = relpos.encoding("rope", HEADS, HEAD_DIM, scaling="yarn", factor=8.0, length=256, base=10000.0)
    assert torch.equal(frequencies(given, 100), frequencies(rope(YARN), 100))
    half = relpos.encoding("rope", HEADS, HEAD_DIM, scaling="linear", factor=4.0, fraction=0.5)
    assert torch.equal(frequencies(half, 100), frequencies(rope(PARAMETERS["linear, half the head"]), 100))


def test_the_old_key_type_is_read_like_rope_type():
    parameters = {"type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    theirs, _ = ROPE_INIT_FUNCTIONS["linear"](llama_config(parameters))
    assert_close(frequencies(rope(parameters), 10), theirs, **FREQUENCY)


# RoPE: the rotation itself


def rotated(position, q, k, documents=None):
    call = Call(q.shape[2], k.shape[2], documents=documents)
    return position.rotate(q, k, call)


ROTATIONS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    **{name: PARAMETERS[name] for name in ("linear", "dynamic", "yarn", "llama3", "proportional")},
    "longrope": {**LONG, "factor": 8.0},
}


@pytest.mark.parametrize("length", [90, 300])
@pytest.mark.parametrize("which", ROTATIONS)
def test_half_layout_rotates_like_llama(which, length):
    config = llama_config(ROTATIONS[which])
    config.max_position_embeddings = maximum = 128  # 300 is past it, and past the trained length of longrope
    q, k = normal(2, HEADS, length, HEAD_DIM), normal(2, 2, length, HEAD_DIM, seed=1)
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, torch.arange(length)[None])
    theirs = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    position = relpos.encoding("rope", HEADS, HEAD_DIM, length=maximum, rope_parameters=ROTATIONS[which])
    for ours, expected in zip(rotated(position, q, k), theirs, strict=True):
        assert_close(ours, expected, rtol=0.0, atol=length * 5e-7 * 4)  # angles up to `length`, values up to 4


def test_interleaved_layout_rotates_like_gpt_j():
    q, k = normal(2, HEADS, 70, HEAD_DIM), normal(2, HEADS, 70, HEAD_DIM, seed=1)
    sin, cos = modeling_gptj.create_sinusoidal_positions(70, HEAD_DIM)[None].chunk(2, dim=-1)
    position = relpos.encoding("rope", HEADS, HEAD_DIM, layout="interleaved")
    for ours, x in zip(rotated(position, q, k), (q, k), strict=True):
        theirs = modeling_gptj.apply_rotary_pos_emb(x.transpose(1, 2), sin, cos).transpose(1, 2)
        assert_close(ours, theirs, **ROTATED)


def test_partial_rotation_interleaved_is_that_of_gpt_j():
    turned = 24  # GPT-J's rotary_dim
    q = normal(2, HEADS, 70, HEAD_DIM)
    sin, cos = modeling_gptj.create_sinusoidal_positions(70, turned)[None].chunk(2, dim=-1)
    theirs = modeling_gptj.apply_rotary_pos_emb(q[..., :turned].transpose(1, 2), sin, cos).transpose(1, 2)
    position = relpos.encoding("rope", HEADS, HEAD_DIM, layout="interleaved", fraction=turned / HEAD_DIM)
    ours, _ = rotated(position, q, q)
    assert_close(ours, torch.cat([theirs, q[..., turned:]], dim=-1), **ROTATED)


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


# Whole Llama attention layers


def llama_layer(parameters):
    torch.manual_seed(0)
    config = llama_config(parameters)
    layer = modeling_llama.LlamaAttention(config, layer_idx=0).eval()
    return layer, modeling_llama.LlamaRotaryEmbedding(config)


def llama_qkv(layer, x):
    def split(y):
        return y.view(*x.shape[:2], -1, HEAD_DIM).transpose(1, 2)

    return split(layer.q_proj(x)), split(layer.k_proj(x)), split(layer.v_proj(x))


@pytest.mark.parametrize("which", ["default", "linear", "yarn", "llama3", "proportional", "longrope"])
@torch.no_grad()
def test_a_whole_llama_attention_layer_is_that_of_transformers(which):
    layer, rotary = llama_layer(ROTATIONS[which])
    x = normal(2, 60, HEADS * HEAD_DIM)
    mask = torch.full((60, 60), -torch.inf).triu(1)[None, None]
    embeddings = rotary(x, torch.arange(60)[None])
    expected = layer(x, position_embeddings=embeddings, attention_mask=mask)[0]
    q, k, v = llama_qkv(layer, x)
    assert k.shape[1] == 2  # grouped heads: two key heads serve four
    out = relpos.attention(q, k, v, rope(ROTATIONS[which]))
    assert_close(layer.o_proj(out.transpose(1, 2).flatten(2)), expected, rtol=0.0, atol=1e-5)


@torch.no_grad()
def test_packed_documents_are_position_ids_that_start_anew():
    layer, rotary = llama_layer(ROTATIONS["default"])
    sizes = ([20, 1, 39], [33, 17, 10])
    documents = torch.stack([torch.repeat_interleave(torch.tensor([5, 2, 8]), torch.tensor(row)) for row in sizes])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in sizes])
    x = normal(2, 60, HEADS * HEAD_DIM)
    seen = (documents[:, :, None] == documents[:, None, :]) & torch.ones(60, 60).tril().bool()
    mask = torch.zeros(2, 1, 60, 60).masked_fill(~seen[:, None], -torch.inf)
    expected = layer(x, position_embeddings=rotary(x, positions), attention_mask=mask)[0]
    q, k, v = llama_qkv(layer, x)
    out = relpos.attention(q, k, v, rope(ROTATIONS["default"]), documents=documents)
    assert_close(layer.o_proj(out.transpose(1, 2).flatten(2)), expected, rtol=0.0, atol=1e-5)


@torch.no_grad()
def test_the_rotation_starts_anew_in_each_document_like_position_ids():
    # Scores within a document do not see a common shift, so the rotated queries themselves are compared.
    q = normal(1, HEADS, 30, HEAD_DIM)
    documents = torch.tensor([[1] * 12 + [2] * 18])
    positions = torch.cat([torch.arange(12), torch.arange(18)])[None]
    _, rotary = llama_layer(ROTATIONS["default"])
    cos, sin = rotary(q, positions)
    theirs, _ = modeling_llama.apply_rotary_pos_emb(q, q, cos, sin)
    assert_close(rotated(rope(ROTATIONS["default"]), q, q, documents)[0], theirs, **ROTATED)


# Sinusoidal


def test_sinusoidal_is_marians_table_up_to_the_order_of_dimensions():
    width, length = 32, 200
    theirs = MarianSinusoidalPositionalEmbedding(length, width).create_weight()  # all sines, then all cosines
    ours = relpos.encoding("sinusoidal", heads=4, head_dim=8).embed(torch.zeros(1, length, width))[0]
    # Theirs is computed in float64; our angles, up to 200, are float32: 200 · 1.2e-7.
    assert_close(torch.cat([ours[:, 0::2], ours[:, 1::2]], dim=1), theirs, rtol=0.0, atol=5e-5)
