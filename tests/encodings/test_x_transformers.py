"""The same numbers as x-transformers, for what transformers and the authors' code (test_golden.py) do not have."""

import torch
from torch.testing import assert_close
from x_transformers.x_transformers import DataDependentAlibi, RotaryEmbedding, apply_rotary_pos_emb

import relpos
from relpos.forms.call import Call

HEADS, HEAD_DIM, LENGTH = 4, 16, 90
WIDTH = HEADS * HEAD_DIM


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rope_scaled_by_ntk():
    q, k = normal(2, HEADS, LENGTH, HEAD_DIM), normal(2, HEADS, LENGTH, HEAD_DIM, seed=1)
    angles, _ = RotaryEmbedding(HEAD_DIM, base_rescale_factor=4.0).forward_from_seq_len(LENGTH)
    position = relpos.encoding("rope", HEADS, HEAD_DIM, layout="interleaved", scaling="ntk", factor=4.0)
    for ours, x in zip(position.rotate(q, k, Call(LENGTH, LENGTH)), (q, k), strict=True):
        # float32 on both sides; an angle of up to 90 is good to about 90 · 1.2e-7, times values up to 4.
        assert_close(ours, apply_rotary_pos_emb(x, angles), rtol=0.0, atol=5e-5)


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
        expected = theirs(x).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    # They subtract float32 sums of up to 100, good to 100 · 6e-8 · (terms added, 90)^½ or so.
    assert_close(ours.map(hidden=x), expected, rtol=0.0, atol=1e-4)
