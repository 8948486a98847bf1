"""The same numbers as x-transformers, for every encoding it has."""

import pytest
import torch
from torch.testing import assert_close
from x_transformers.x_transformers import (
    AbsolutePositionalEmbedding,
    AlibiPositionalBias,
    CoPE,
    DataDependentAlibi,
    RelativePositionBias,
    RotaryEmbedding,
    ScaledSinusoidalEmbedding,
    apply_rotary_pos_emb,
)

import relpos
from relpos.forms.call import Call

HEADS, HEAD_DIM, LENGTH = 4, 16, 90
WIDTH = HEADS * HEAD_DIM
FUTURE = torch.ones(LENGTH, LENGTH).triu(1).bool()
# float32 on both sides; an angle of up to 90 is good to about 90 · 1.2e-7, times values up to 4.
ROTATED = {"rtol": 0.0, "atol": 5e-5}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("heads", [2, 3, 6, 8, 12, 16, 20, 33])
@pytest.mark.parametrize("causal", [True, False])
def test_alibi_with_press_slopes(heads, causal):
    theirs = AlibiPositionalBias(heads)(LENGTH, LENGTH)
    if causal:
        theirs = theirs.masked_fill(FUTURE, -torch.inf)
    ours = relpos.encoding("alibi", heads, HEAD_DIM, slopes="press").map(LENGTH, causal=causal)
    assert_close(ours, theirs, rtol=1e-6, atol=0.0)  # their slopes are powers by repeated products


@pytest.mark.parametrize("causal", [True, False])
def test_t5(causal):
    torch.manual_seed(0)
    theirs = RelativePositionBias(scale=1.0, causal=causal, heads=HEADS)
    ours = relpos.encoding("t5", HEADS, HEAD_DIM)
    with torch.no_grad():
        ours.table.copy_(theirs.relative_attention_bias.weight.T)
        expected = theirs(LENGTH, LENGTH)
    if causal:
        expected = expected.masked_fill(FUTURE, -torch.inf)
    assert torch.equal(ours.map(LENGTH, causal=causal), expected)  # a table read at the same places: exact


ROPES = {  # options of relpos, and of their RotaryEmbedding
    "plain": ({}, {}),
    "a quarter of the head": ({"fraction": 0.25}, {"dim": HEAD_DIM // 4}),
    "half of the head": ({"fraction": 0.5}, {"dim": HEAD_DIM // 2}),
    "linear": ({"scaling": "linear", "factor": 4.0}, {"interpolation_factor": 4.0}),
    "ntk": ({"scaling": "ntk", "factor": 4.0}, {"base_rescale_factor": 4.0}),
}


@pytest.mark.parametrize("which", ROPES)
def test_interleaved_rope(which):
    options, theirs = ROPES[which]
    q, k = normal(2, HEADS, LENGTH, HEAD_DIM), normal(2, HEADS, LENGTH, HEAD_DIM, seed=1)
    angles, _ = RotaryEmbedding(**{"dim": HEAD_DIM, **theirs}).forward_from_seq_len(LENGTH)
    position = relpos.encoding("rope", HEADS, HEAD_DIM, layout="interleaved", **options)
    for ours, x in zip(position.rotate(q, k, Call(LENGTH, LENGTH)), (q, k), strict=True):
        assert_close(ours, apply_rotary_pos_emb(x, angles), **ROTATED)


@pytest.mark.parametrize("scale_base", [512, 40])
def test_xpos(scale_base):
    q, k = normal(2, HEADS, LENGTH, HEAD_DIM), normal(2, HEADS, LENGTH, HEAD_DIM, seed=1)
    angles, scale = RotaryEmbedding(HEAD_DIM, use_xpos=True, scale_base=scale_base).forward_from_seq_len(LENGTH)
    turned_q, turned_k = apply_rotary_pos_emb(q, angles, scale), apply_rotary_pos_emb(k, angles, scale**-1)
    expected = (turned_q @ turned_k.transpose(-1, -2)) * HEAD_DIM**-0.5
    ours = relpos.scores(q, k, relpos.encoding("xpos", HEADS, HEAD_DIM, scale_base=float(scale_base)))
    assert_close(ours, expected.masked_fill(FUTURE, -torch.inf), rtol=1e-5, atol=1e-4)  # sums of 16 rotated products


def test_cope_with_its_defaults():
    q, k = normal(2, HEADS, LENGTH, HEAD_DIM), normal(2, HEADS, LENGTH, HEAD_DIM, seed=1)
    theirs = CoPE(HEAD_DIM, HEADS, max_pos=20)
    ours = relpos.encoding("cope", HEADS, HEAD_DIM, npos=20)
    with torch.no_grad():
        theirs.pos_emb.copy_(normal(20, HEAD_DIM, seed=2))
        ours.table.copy_(theirs.pos_emb)
        logits = (q @ k.transpose(-1, -2) * HEAD_DIM**-0.5).masked_fill(FUTURE, -torch.inf)  # closes future gates
        expected = theirs(q, logits).masked_fill(FUTURE, -torch.inf)
    # Counts up to 19 in float32 (1e-6 each), times steps of q·e of up to about 20 a position.
    assert_close(ours.map(q=q, k=k), expected, rtol=0.0, atol=2e-4)
    assert_close(relpos.scores(q, k, ours).detach(), logits + expected, rtol=0.0, atol=2e-4)


def test_forgetting_is_data_dependent_alibi():
    torch.manual_seed(0)
    x = normal(2, LENGTH, WIDTH)
    theirs = DataDependentAlibi(WIDTH, HEADS)
    ours = relpos.encoding("forgetting", HEADS, HEAD_DIM)
    with torch.no_grad():
        linear = theirs.to_forget_gates[0]
        linear.bias.copy_(normal(HEADS, seed=3))  # theirs starts at 5, ours at 0
        ours.gate.weight.copy_(linear.weight)
        ours.gate.bias.copy_(linear.bias)
        expected = theirs(x).masked_fill(FUTURE, -torch.inf)
    # They subtract float32 sums of up to 100, good to 100 · 6e-8 · (terms added, 90)^½ or so.
    assert_close(ours.map(hidden=x), expected, rtol=0.0, atol=1e-4)


def test_learned_is_their_absolute_embedding_times_its_scale():
    torch.manual_seed(0)
    theirs = AbsolutePositionalEmbedding(WIDTH, max_seq_len=128)
    ours = relpos.encoding("learned", HEADS, HEAD_DIM, length=128)
    x = normal(2, LENGTH, WIDTH)
    with torch.no_grad():
        ours.weight.copy_(theirs.emb.weight * WIDTH**-0.5)  # theirs multiplies by dim^−½ on the way out
        assert_close(ours.embed(x), x + theirs(x), rtol=0.0, atol=1e-6)
        assert_close(ours.embed(x, start=30), x + theirs(x, offset=30), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("amplitude", [1.0, 0.1])
def test_sinusoidal_is_their_scaled_one_up_to_scale_and_order(amplitude):
    x = normal(2, LENGTH, WIDTH)
    theirs = ScaledSinusoidalEmbedding(WIDTH)
    ours = relpos.encoding("sinusoidal", HEADS, HEAD_DIM, amplitude=amplitude)
    for start in (0, 50):
        with torch.no_grad():
            sines, cosines = (theirs(x, offset=start) / theirs.scale * amplitude).chunk(2, dim=-1)
        added = ours.embed(x, start=start) - x
        assert_close(added[..., 0::2], sines.expand(2, -1, -1), **ROTATED)
        assert_close(added[..., 1::2], cosines.expand(2, -1, -1), **ROTATED)
