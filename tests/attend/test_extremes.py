"""Numbers at the edge of float32: all backends agree, with each other and with float64."""

import math

import pytest
import torch
from torch import Tensor

import relpos
from relpos.attend import chunks, native, reference
from relpos.forms.bias import RankOne, Toeplitz
from relpos.forms.call import Call

BACKENDS = [native, chunks, reference]
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=[x.__name__.rsplit(".", 1)[1] for x in BACKENDS])
each_direction = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
LENGTH = 150


def qkv(dtype: torch.dtype = torch.float32, length: int = LENGTH, size: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, 1, 1, length, 8, generator=generator)
    return [x.to(dtype).requires_grad_() for x in (q * size, k, v)]


def run(backend, form, leaves: list[Tensor], inputs: list[Tensor], causal: bool = True) -> list[Tensor]:
    """The output and the gradients of q, k, v and of the tensors of the bias."""
    q = leaves[0]
    out, _ = backend.attention(*leaves, form, Call(q.shape[2], q.shape[2], causal=causal, scale=8**-0.5, dtype=q.dtype))
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(4)).to(q.dtype)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in (*leaves, *inputs))]


def gated(backend, steps: Tensor, weight: float | None, causal: bool, dtype: torch.dtype) -> list[Tensor]:
    """Attention with cable's bias from these steps (length,) and weights."""
    step = steps.to(dtype)[None, None].clone().requires_grad_()
    weights = None if weight is None else torch.full((1, 1, LENGTH), weight, dtype=dtype, requires_grad=True)
    form = RankOne(step.double().cumsum(-1), weights, dtype, symmetric=not causal)
    return run(backend, form, qkv(dtype), [step] if weights is None else [step, weights], causal)


@each_direction
@each_backend
@pytest.mark.parametrize(
    ("step", "weight"),
    [(1e37, 1), (3e38, 1), (1, 3e38), (0, 3e38), (3e38, 3e38), (3e38, None), (1e-39, 1), (1e-39, None)],
)
def test_gates_of_any_size_are_right(backend, step, weight, causal):
    """Also their gradients, unless those come near the largest float32 themselves."""
    steps = torch.full((LENGTH,), float(step))
    ours = gated(backend, steps, weight, causal, torch.float32)
    expected = gated(reference, steps, weight, causal, torch.float64)
    for number, (a, b) in enumerate(zip(ours, expected, strict=True)):
        if b.abs().max() > 1e36:
            continue
        off = (a.double() - b).abs().max() / b.abs().max().clamp(min=1e-30)
        assert off <= 2e-5, f"result {number} is off by {off:.1e}"


@pytest.mark.parametrize(("name", "gates"), [("forgetting", [-3e38]), ("cable", [3e38, 1.0]), ("cable", [0.0, 3e38])])
def test_encodings_take_gates_of_any_size(name, gates):
    position = relpos.encoding(name, heads=1, head_dim=8)
    q, k, v = qkv()
    each = torch.tensor(gates).expand(1, 1, LENGTH, len(gates))
    out = relpos.attention(q, k, v, position, gates=each)
    expected = relpos.attention(q.double(), k.double(), v.double(), position, gates=each.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


@each_direction
@each_backend
def test_denormal_steps_beside_others_have_their_gradient(backend, causal):
    """In both directions the sign of a difference decides, be it ever so small."""
    steps = torch.ones(LENGTH)
    steps[:10] = 1e-39
    ours = gated(backend, steps, None, causal, torch.float32)
    expected = gated(reference, steps, None, causal, torch.float64)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@each_backend
def test_a_row_that_sees_only_minus_infinity_gets_0_and_sends_back_no_nan(backend):
    table = torch.zeros(1, LENGTH)
    table[0, 0] = -math.inf  # nobody sees itself, so the first position sees nothing
    table.requires_grad_()
    results = run(backend, Toeplitz(table, 0), qkv(), [table])
    out, q_grad = results[:2]
    assert (out[:, :, 0] == 0).all()
    assert (q_grad[:, :, 0] == 0).all()
    assert (out[:, :, 1:] != 0).any(-1).all()
    assert all(x.isfinite().all() for x in results)


@each_backend
def test_a_table_as_large_as_float32_is_no_nan(backend):
    table = torch.zeros(1, LENGTH)
    table[0, 3], table[0, 5] = 3e38, -3e38
    table.requires_grad_()
    leaves = qkv()
    results = run(backend, Toeplitz(table, 0), leaves, [table])
    assert all(x.isfinite().all() for x in results)
    torch.testing.assert_close(results[0][:, :, 3:], leaves[2].detach()[:, :, :-3])  # three back, and nothing else


@each_backend
@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
def test_saturated_rows_keep_their_gradients(backend, size):
    """Logits of 10^4 and more: one key gets all the weight, or two share it, and rounding the logits decides how.

    Where float32 and float64 agree on the weights, they agree on the gradients; what a row saturates to is exact.
    """
    torch.manual_seed(0)
    leaves, wide = qkv(size=size), qkv(torch.float64, size=size)
    ours, expected = run(backend, None, leaves, []), run(reference, None, wide, [])
    logits = relpos.scores(wide[0], wide[1]).detach()[0, 0]
    first, second = logits.topk(2, dim=-1).values.unbind(-1)
    sharp = first - second > 105  # e^−105 is below float32's smallest number: (length,)
    assert sharp.sum() >= (LENGTH // 2 if size > 1e3 else 1)
    assert (ours[1][0, 0, sharp] == 0).all()  # the gradient of q: nothing moves
    torch.testing.assert_close(ours[0][0, 0, sharp].double(), expected[0][0, 0, sharp], rtol=0, atol=0)
    # Keys and values: logits are off by 2^−23 of their size, weights by as much of themselves.
    off = 4 * 2**-24 * logits.tril().nan_to_num(neginf=0).abs().max()
    assert (ours[3] - expected[3]).abs().max() <= off * expected[3].abs().max()
    assert (ours[2] - expected[2]).abs().max() <= off * size * 8**-0.5 * 8


@pytest.mark.parametrize("name", ["alibi", "kerple_log", "t5", "fire", "cable", "forgetting", "rope"])
def test_the_default_dtype_changes_nothing(name):
    """Inputs are float32; new tensors on the way must have the dtype that they are meant to have."""
    torch.manual_seed(0)
    position = relpos.encoding(name, heads=2, head_dim=8)
    tensors = torch.randn(3, 1, 2, 70, 8).unbind(0)
    hidden, grad = torch.randn(1, 70, 16), torch.randn(1, 2, 70, 8)

    def results() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = relpos.attention(*leaves, position, hidden=hidden, backend="native")
        return [out.detach(), *torch.autograd.grad(out, [*leaves, *position.parameters()], grad)]

    plain = results()
    torch.set_default_dtype(torch.float64)
    try:
        wide = results()
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(wide, plain, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
