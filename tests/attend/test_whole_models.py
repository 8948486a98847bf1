"""Whole models of transformers with every attention replaced by relpos.attention: the same logits.

The models are small and random, with weights large enough for position to matter: each test also shows that another
encoding gives other logits. Lengths reach three times past what the model's configuration says it was trained on.
"""

from functools import partial

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    MptForCausalLM,
)

import relpos

TRAINED = 64
LENGTHS = (40, TRAINED, 200)
VOCABULARY, LAYERS = 97, 3
# Logits of up to 6 after three layers in float32, whose last place there is 5e-7: some dozens of roundings.
CLOSE = {"rtol": 0.0, "atol": 3e-5}
DIFFERENT = 1e-2


def tokens(length, batch=2):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def logits(model, length, **options):
    return model(tokens(length), use_cache=False, **options).logits


def merged(heads):
    """(batch, heads, length, head_dim) → (batch, length, width)."""
    return heads.transpose(1, 2).flatten(2)


def replace(layers, attention):
    """Give each attention layer a forward that calls `attention(layer, hidden_states, …)`."""
    for layer in layers:
        layer.forward = partial(attention, layer)


def assert_same_with(position, other, model, attach, length, **options):
    """The model's logits do not change when its attention is ours with `position`, and do with `other`."""
    theirs = logits(model, length, **options)
    attach(model, position)
    ours = logits(model, length, **options)
    attach(model, other)
    moved = logits(model, length, **options)
    seen = options.get("attention_mask", torch.ones(ours.shape[:2])).bool()
    torch.testing.assert_close(ours[seen], theirs[seen], **CLOSE)
    assert (moved - theirs)[seen].abs().max() > DIFFERENT


# ALiBi: BLOOM and MPT

HEADS, HEAD_DIM = 6, 8


def alibi(slopes):
    return relpos.encoding("alibi", HEADS, HEAD_DIM, slopes=slopes)


def bloom():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HEADS * HEAD_DIM, "n_head": HEADS, "n_layer": LAYERS}
    return BloomForCausalLM(BloomConfig(**sizes, initializer_range=0.15)).eval()


def attach_to_bloom(model, position, padding=None):
    def attention(layer, hidden_states, residual, **_):
        q, k, v = layer._reshape(layer.query_key_value(hidden_states))
        return layer.dense(merged(relpos.attention(q, k, v, position, padding=padding))) + residual, None

    replace([block.self_attention for block in model.transformer.h], attention)


@pytest.mark.parametrize("length", LENGTHS)
def test_bloom(length):
    assert_same_with(alibi("press"), alibi("geometric"), bloom(), attach_to_bloom, length)


def test_bloom_with_left_padding():
    seen = torch.ones(2, 90, dtype=torch.bool)
    seen[0, :25] = False

    def attach(model, position):
        attach_to_bloom(model, position, padding=seen)

    assert_same_with(alibi("press"), alibi("geometric"), bloom(), attach, 90, attention_mask=seen.long())


def mpt(length):
    torch.manual_seed(0)
    # MPT writes its bias out for max_seq_len tokens and refuses more: its way past the trained length is to raise it.
    sizes = {"vocab_size": VOCABULARY, "d_model": HEADS * HEAD_DIM, "n_heads": HEADS, "n_layers": LAYERS}
    config = MptConfig(**sizes, max_seq_len=max(TRAINED, length), initializer_range=0.15)
    return MptForCausalLM(config).eval()


def attach_to_mpt(model, position):
    def attention(layer, hidden_states, **_):
        q, k, v = (
            x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for x in layer.Wqkv(hidden_states).chunk(3, dim=-1)
        )
        return layer.out_proj(merged(relpos.attention(q, k, v, position, scale=layer.softmax_scale))), None

    replace([block.attn for block in model.transformer.blocks], attention)


@pytest.mark.parametrize("length", LENGTHS)
def test_mpt(length):
    assert_same_with(alibi("press"), alibi("geometric"), mpt(length), attach_to_mpt, length)


# RoPE: GPT-NeoX turns a part of each head, Llama has fewer key heads than heads

ROPE_HEADS, ROPE_HEAD_DIM = 4, 16


def rope(**parameters):
    return relpos.encoding("rope", ROPE_HEADS, ROPE_HEAD_DIM, length=TRAINED, rope_parameters=parameters)


def gpt_neox(parameters):
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=ROPE_HEADS * ROPE_HEAD_DIM,
        num_attention_heads=ROPE_HEADS,
        num_hidden_layers=LAYERS,
        intermediate_size=96,
        max_position_embeddings=TRAINED,
        rope_parameters=dict(parameters),
        initializer_range=0.15,
        attn_implementation="eager",
    )
    return GPTNeoXForCausalLM(config).eval()


def attach_to_gpt_neox(model, position):
    def attention(layer, hidden_states, **_):
        qkv = layer.query_key_value(hidden_states).unflatten(-1, (ROPE_HEADS, 3 * ROPE_HEAD_DIM)).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=-1)
        return layer.dense(merged(relpos.attention(q, k, v, position))), None

    replace([block.attention for block in model.gpt_neox.layers], attention)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_gpt_neox_with_partial_rotation(fraction, length):
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": fraction}
    whole = rope(rope_type="default", rope_theta=10000.0)
    assert_same_with(rope(**parameters), whole, gpt_neox(parameters), attach_to_gpt_neox, length)


ROTATIONS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": TRAINED},
}


def llama(parameters):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        num_attention_heads=ROPE_HEADS,
        num_key_value_heads=2,
        head_dim=ROPE_HEAD_DIM,
        num_hidden_layers=LAYERS,
        intermediate_size=96,
        max_position_embeddings=TRAINED,
        rope_parameters=dict(parameters),
        initializer_range=0.15,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).eval()


def attach_to_llama(model, position):
    def attention(layer, hidden_states, **_):
        q, k, v = (
            project(hidden_states).unflatten(-1, (-1, ROPE_HEAD_DIM)).transpose(1, 2)
            for project in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        assert (q.shape[1], k.shape[1]) == (ROPE_HEADS, 2)
        return layer.o_proj(merged(relpos.attention(q, k, v, position))), None

    replace([block.self_attn for block in model.model.layers], attention)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("which", ROTATIONS)
def test_llama_with_grouped_key_heads(which, length):
    # Up to the trained length, dynamic scaling is none.
    another = "yarn" if which == "default" or (which == "dynamic" and length <= TRAINED) else "default"
    position, other = rope(**ROTATIONS[which]), rope(**ROTATIONS[another])
    assert_same_with(position, other, llama(ROTATIONS[which]), attach_to_llama, length)


def test_dynamic_scaling_ends_with_the_long_input_that_needed_it():
    model = llama(ROTATIONS["dynamic"])
    theirs = {length: logits(model, length) for length in (200, 40)}
    attach_to_llama(model, rope(**ROTATIONS["dynamic"]))
    for length, expected in theirs.items():
        torch.testing.assert_close(logits(model, length), expected, **CLOSE)
