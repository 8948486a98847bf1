"""Calls with few queries, as while decoding, give what the reference defines; the tiled backward follows on them."""

import math

import pytest
import torch
from native_cases import FAMILIES, assert_close, check, documents, normal

from relpos.attend import native, reference
from relpos.attend.native import library
from relpos.forms.call import Call
from relpos.forms.rotation import Rotation

pytestmark = [
    pytest.mark.skipif(not native.available()[0], reason=native.available()[1]),
    pytest.mark.usefixtures("two_threads"),
]
ISAS = library.isas() if native.available()[0] else []
KEYS = 2100  # three pieces of 1024 keys, the last neither full nor a multiple of a vector

OPTIONS = {
    "plain": lambda: {},
    "documents": lambda: {"documents": torch.stack([documents(1100, 999, 1), documents(5, 2093, 2)])},
    "padding": lambda: {"padding": torch.rand(2, KEYS) > 0.3},
    "left padding": lambda: {"padding": torch.arange(KEYS) >= torch.tensor([[1500], [0]])},
    "nothing to see": lambda: {"padding": torch.arange(KEYS) >= torch.tensor([[KEYS], [0]])},
    "window": lambda: {"window": (300, 7)},
    "softcap": lambda: {"softcap": 2.5},
    "sinks": lambda: {"sinks": torch.tensor([1.0, -2.0, 9.0, 0.0])},
    "queries in the middle": lambda: {"start": 1000},
    "everything": lambda: {
        "documents": torch.stack([documents(1000, 1050, 50), documents(5, 2093, 2)]),
        "padding": torch.rand(2, KEYS) > 0.5,
        "window": (900, 30),
        "softcap": 4.0,
        "sinks": torch.tensor([1.0, -2.0, 9.0, 0.0]),
        "start": 1040,
    },
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_the_references_by_every_instruction_set(family, causal, option):
    torch.manual_seed(0)
    # A total reaches 105, and a weight −0.2 or 0.8.
    logit = 85.0 if family in ("rank one, weighted", "sum") else 12.0
    check(family, normal(2, 4, 2, 3, KEYS, 20), OPTIONS[option]() | {"causal": causal}, logit=logit, isas=ISAS)


@pytest.mark.parametrize("queries", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_any_number_of_rows_per_key_head(key_heads, queries):
    torch.manual_seed(1)
    check("sum", normal(2, 6, key_heads, queries, 300, 16), {}, isas=ISAS)


@pytest.mark.parametrize("head_dim", [1, 3, 4, 8, 15, 16, 17, 40, 64, 80, 100, 128, 160, 512])
def test_every_head_dim_by_every_instruction_set(head_dim):
    torch.manual_seed(2)
    check("sum", normal(1, 4, 2, 2, 150, head_dim), {}, isas=ISAS)


@pytest.mark.parametrize("keys", [1, 2, 15, 16, 17, 127, 128, 129, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_of_keys(family, keys):
    torch.manual_seed(3)
    check(family, normal(1, 2, 1, 1, keys, 16), {}, isas=ISAS)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 24), (8, 100), (100, 3), (3, 64)])
def test_values_of_another_size(head_dim, value_dim):
    torch.manual_seed(4)
    q, k, v, grad = normal(2, 4, 2, 2, 200, max(head_dim, value_dim))
    tensors = [q[..., :head_dim], k[..., :head_dim], v[..., :value_dim], grad[..., :value_dim]]
    check("toeplitz", tensors, {}, isas=ISAS)


def test_queries_beyond_the_keys():
    torch.manual_seed(5)
    for family in ("none", "toeplitz"):
        check(family, normal(2, 4, 2, 4, 100, 16), {"causal": False, "start": 150}, isas=ISAS)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotations_are_applied(layout):
    torch.manual_seed(6)
    angle = torch.randn(1, 200, 6, dtype=torch.float64)
    tensors = normal(2, 4, 2, 3, 200, 20)
    results = []
    for attention, dtype in ((native.attention, torch.float32), (reference.attention, torch.float64)):
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        call = Call(
            3, 200, dtype=dtype, scale=0.3, rotation=Rotation(cos[:, 197:], sin[:, 197:], cos, sin, layout), batch=2
        )
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in tensors[:3])
        out, _ = attention(q, k, v, None, call)
        out.backward(tensors[3].to(dtype))
        results.append([x.detach().double() for x in (out, q.grad, k.grad, v.grad)])
    assert_close((str(i), ours, expected) for i, (ours, expected) in enumerate(zip(*results, strict=True)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [6, 64, 70])
def test_half_precision_is_converted_and_computed_in_float32(head_dim, dtype):
    torch.manual_seed(7)
    q, k, v, _ = (x.to(dtype) for x in normal(2, 4, 2, 2, 1100, head_dim))
    call = Call(2, 1100, scale=head_dim**-0.5, return_lse=True)
    for isa in ISAS:
        library.use(isa)
        out, lse = native.attention(q, k, v, None, call)
        expected, expected_lse = native.attention(*(x.float() for x in (q, k, v)), None, call)
        assert out.dtype == dtype
        # The values are summed in other portions: the result may round to a neighbour.
        torch.testing.assert_close(out, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=0)
    library.use(ISAS[0])


def test_the_log_sum_exp_and_its_gradient():
    torch.manual_seed(8)
    tensors = normal(2, 4, 2, 3, 1100, 16)
    sinks = torch.randn(4, dtype=torch.float64)
    results = []
    for attention, dtype in ((native.attention, torch.float32), (reference.attention, torch.float64)):
        call = Call(3, 1100, dtype=dtype, scale=0.25, sinks=sinks.to(dtype).requires_grad_(), return_lse=True)
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in tensors[:3])
        out, lse = attention(q, k, v, None, call)
        ((out * tensors[3].to(dtype)).sum() + lse.sin().sum()).backward()
        gradients = [x.grad.double() for x in (q, k, v, call.sinks)]
        results.append([out.detach().double(), lse.detach().double(), *gradients])
    assert_close((str(i), ours, expected) for i, (ours, expected) in enumerate(zip(*results, strict=True)))


@pytest.mark.parametrize("heads", [1, 12])
def test_threads_change_no_bit(heads):
    torch.manual_seed(9)
    q, k, v, _ = (x.float() for x in normal(1, heads, 1, 2, 9000, 64))
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results += [native.attention(q, k, v, None, Call(2, 9000, scale=0.125))[0] for _ in range(5)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_rows_far_apart_and_transposed_are_read_where_they_lie():
    torch.manual_seed(10)
    packed = [torch.stack([x.transpose(1, 2)] * 2, 2)[:, :, 1].transpose(1, 2) for x in normal(2, 4, 2, 2, 150, 20)]
    check("scaled", packed, {}, isas=ISAS)
    transposed = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in normal(2, 4, 2, 2, 150, 20)]
    check("toeplitz", transposed, {}, isas=ISAS)


def test_no_key_after_the_last_is_read():
    torch.manual_seed(11)
    q, k, v, _ = (x.float() for x in normal(1, 2, 2, 1, 64, 24))
    expected, _ = native.attention(q, k[:, :, :37].clone(), v[:, :, :37].clone(), None, Call(1, 37))
    k[:, :, 37:], v[:, :, 37:] = math.nan, math.nan
    out, _ = native.attention(q, k[:, :, :37], v[:, :, :37], None, Call(1, 37))
    assert torch.equal(out, expected)


def test_nan_is_not_swallowed():
    torch.manual_seed(12)
    q, k, v, _ = (x.float() for x in normal(1, 2, 2, 1, 3000, 16))
    k[0, 0, 1500, 3] = math.nan
    out, _ = native.attention(q, k, v, None, Call(1, 3000))
    assert out[0, 0].isnan().all()
    assert out[0, 1].isfinite().all()
