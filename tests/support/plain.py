"""What the tests of identities share: encodings off their start, inputs, and sums written out.

float64 wherever a formula is compared, so that a tolerance of 1e-10 leaves room for rounding and for nothing else.
"""

import math

import torch

import relpos

HEADS, HEAD_DIM, LENGTH = 3, 8, 14
WIDTH = HEADS * HEAD_DIM
CLOSE = {"rtol": 0.0, "atol": 1e-10}
SEEN = torch.ones(LENGTH, LENGTH).tril().bool()

SCORE = [name for name in relpos.names() if relpos.card(name).place == "score"]
TOEPLITZ = [name for name in relpos.names() if relpos.card(name).form == "Toeplitz"]
STATIC = [*TOEPLITZ, "fire", "nope"]


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def build(name, heads=HEADS, head_dim=HEAD_DIM, **options):
    """An encoding in float64, its parameters moved off their start (some start at 0, where nothing can be seen)."""
    torch.manual_seed(5)
    position = relpos.encoding(name, heads, head_dim, **options).double()
    with torch.no_grad():
        for parameter in position.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return position


def qkv(length=LENGTH, heads=HEADS, head_dim=HEAD_DIM, batch=2):
    return tuple(normal(batch, heads, length, head_dim, seed=seed) for seed in (1, 2, 3))


def hidden(length=LENGTH, width=WIDTH, batch=2):
    return normal(batch, length, width, seed=4)


@torch.no_grad()
def bias(position, length=LENGTH, causal=True, x=None):
    """The bias in float64: the scores of queries and keys that are all 0."""
    zero = torch.zeros(1 if x is None else len(x), position.heads, length, position.head_dim, dtype=torch.float64)
    return relpos.scores(zero, zero, position, hidden=x, causal=causal)


def copy(parameter, value):
    with torch.no_grad():
        parameter.copy_(torch.as_tensor(value, dtype=parameter.dtype))


def softplus(z):
    return math.log1p(math.exp(-abs(z))) + max(z, 0.0)


def affine(linear, x):
    """w_h·x_t + b_h by plain sums: a list of (heads × length) for x (length, width)."""
    w, b, rows = linear.weight.tolist(), linear.bias.tolist(), x.tolist()
    return [[sum(a * c for a, c in zip(w[h], row, strict=True)) + b[h] for row in rows] for h in range(len(w))]
