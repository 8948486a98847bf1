"""Whole models of transformers with every attention replaced by relpos.attention: the same logits.

The models are small and random, with weights large enough for position to matter: each test also shows that another
encoding gives other logits. Lengths reach three times past what the model's configuration says it was trained on.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import transformers

import relpos

TRAINED, VOCABULARY, LAYERS = 64, 97, 3
# Logits of up to 6 after three layers in float32, whose last place there is 5e-7: some dozens of roundings.
CLOSE = {"rtol": 0.0, "atol": 3e-5}
DIFFERENT = 1e-2


class Family(NamedTuple):
    """How to build a model, and what its attention layers do."""

    name: str  # of its classes in transformers
    sizes: dict[str, Any]
    layers: Callable[[Any], list]
    qkv: Callable[[Any, torch.Tensor], tuple]
    output: str  # the output projection


def split(x, head_dim):
    """(batch, length, heads × head_dim) → (batch, heads, length, head_dim)."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


ROTARY = {
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 96,
    "max_position_embeddings": TRAINED,
    "attn_implementation": "eager",
}
FAMILIES = {
    "bloom": Family(
        "Bloom",
        {"hidden_size": 48, "n_head": 6, "n_layer": LAYERS},
        lambda model: [block.self_attention for block in model.transformer.h],
        lambda layer, x: layer._reshape(layer.query_key_value(x)),
        "dense",
    ),
    "mpt": Family(
        "Mpt",
        {"d_model": 48, "n_heads": 6, "n_layers": LAYERS},
        lambda model: [block.attn for block in model.transformer.blocks],
        lambda layer, x: tuple(split(y, 8) for y in layer.Wqkv(x).chunk(3, dim=-1)),
        "out_proj",
    ),
    "gpt_neox": Family(  # rotates a part of each head
        "GPTNeoX",
        {"hidden_size": 64, **ROTARY},
        lambda model: [block.attention for block in model.gpt_neox.layers],
        lambda layer, x: split(layer.query_key_value(x), 48).chunk(3, dim=-1),
        "dense",
    ),
    "llama": Family(  # has fewer key heads than heads
        "Llama",
        {"hidden_size": 48, "num_key_value_heads": 2, "head_dim": 16, **ROTARY},
        lambda model: [block.self_attn for block in model.model.layers],
        lambda layer, x: tuple(split(project(x), 16) for project in (layer.q_proj, layer.k_proj, layer.v_proj)),
        "o_proj",
    ),
}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
ROTATIONS = {
    "default": DEFAULT,
    "dynamic": DEFAULT | {"rope_type": "dynamic", "factor": 2.0},
    "yarn": DEFAULT | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED},
    "a quarter": DEFAULT | {"partial_rotary_factor": 0.25},
    "a half": DEFAULT | {"partial_rotary_factor": 0.5},
}


def build(family, length, rotation=None):
    torch.manual_seed(0)
    name, sizes = FAMILIES[family].name, dict(FAMILIES[family].sizes)
    if rotation is not None:
        sizes["rope_parameters"] = dict(ROTATIONS[rotation])
    if family == "mpt":  # it refuses more than max_seq_len: its way past the trained length is to raise it
        sizes["max_seq_len"] = max(TRAINED, length)
    config = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, initializer_range=0.15, **sizes)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def attach(family, model, position, padding=None):
    """Give each attention layer a forward that calls `relpos.attention`."""

    def forward(layer, hidden_states, residual=None, **_):
        q, k, v = FAMILIES[family].qkv(layer, hidden_states)
        out = relpos.attention(q, k, v, position, padding=padding, scale=getattr(layer, "softmax_scale", None))
        out = getattr(layer, FAMILIES[family].output)(out.transpose(1, 2).flatten(2))
        return out if residual is None else out + residual, None

    for layer in FAMILIES[family].layers(model):
        layer.forward = partial(forward, layer)


@torch.no_grad()
def logits(model, length, **options):
    tokens = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(length))
    return model(tokens, use_cache=False, **options).logits


def alibi(slopes):
    return relpos.encoding("alibi", 6, 8, slopes=slopes)


def rope(rotation):
    return relpos.encoding("rope", 4, 16, length=TRAINED, rope_parameters=ROTATIONS[rotation])


CASES = [
    *((family, None, length) for family in ("bloom", "mpt") for length in (40, TRAINED, 200)),
    ("bloom", None, 90),  # with padding on the left
    *(("gpt_neox", rotation, length) for rotation in ("a quarter", "a half") for length in (40, TRAINED, 200)),
    *(("llama", rotation, length) for rotation in ("default", "dynamic", "yarn") for length in (40, TRAINED, 200)),
]


@pytest.mark.parametrize(("family", "rotation", "length"), CASES)
def test_the_logits_are_the_models_and_another_encoding_gives_others(family, rotation, length):
    seen, options, padding = torch.ones(2, length, dtype=torch.bool), {}, None
    if length == 90:
        seen[0, :25] = False
        options, padding = {"attention_mask": seen.long()}, seen
    if rotation is None:
        position, other = alibi("press"), alibi("geometric")
    else:
        # Up to the trained length, dynamic scaling is none.
        another = "yarn" if rotation == "default" or (rotation == "dynamic" and length <= TRAINED) else "default"
        position, other = rope(rotation), rope(another)
    model = build(family, length, rotation)
    theirs = logits(model, length, **options)
    attach(family, model, position, padding)
    torch.testing.assert_close(logits(model, length, **options)[seen], theirs[seen], **CLOSE)
    attach(family, model, other, padding)
    assert (logits(model, length, **options) - theirs)[seen].abs().max() > DIFFERENT


def test_dynamic_scaling_ends_with_the_long_input_that_needed_it():
    model = build("llama", 200, "dynamic")
    theirs = {length: logits(model, length) for length in (200, 40)}
    attach("llama", model, rope("dynamic"))
    for length, expected in theirs.items():
        torch.testing.assert_close(logits(model, length), expected, **CLOSE)
