"""The native kernel gives what the reference defines, for every form, mask, shape, dtype and instruction set."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    ARGUMENTS,
    FAMILIES,
    FUZZ,
    LOGIT,
    Family,
    assert_close,
    calls,
    check,
    compare,
    laid_out,
    normal,
)

from relpos.attend import native
from relpos.attend.native import library
from relpos.forms.bias import Scaled, Toeplitz
from relpos.forms.call import Call

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not native.available()[0], reason=native.available()[1]),
    pytest.mark.usefixtures("two_threads"),
]
ISAS = library.isas() if native.available()[0] else []


SHAPES = {  # batch, heads, key heads, queries, keys, head_dim
    "square": (2, 4, 4, 200, 200, 16),
    "tiles": (2, 4, 2, 100, 170, 24),
    "few rows": (2, 4, 2, 3, 2100, 20),  # three pieces of 1024 keys, the last neither full nor a multiple of a vector
}
WINDOW = {"window": (130, 5), "causal": False}


def slow(shape: str, causal: bool, argument: str) -> bool:
    """The default run has every argument causal in tiles, and the masks in every shape and direction."""
    masks = ("plain", "documents", "padding", "left padding", "documents and padding", "all of them")
    return not (argument in masks if shape == "square" else causal or (shape == "tiles" and argument == "all of them"))


@pytest.mark.parametrize(
    ("shape", "causal", "argument"),
    [
        pytest.param(*case, marks=pytest.mark.slow if slow(*case) else [])
        for case in itertools.product(SHAPES, (True, False), ARGUMENTS)
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_the_references_by_every_instruction_set(family, shape, causal, argument):
    torch.manual_seed(0)
    queries, keys = SHAPES[shape][3:5]
    # Of 2,100 keys a total reaches 105, and a weight −0.2 or 0.8.
    logit = LOGIT if keys < 1000 else 85.0 if family in ("rank one, weighted", "sum") else 12.0
    options = ARGUMENTS[argument](queries, keys) | {"causal": causal}
    check(family, normal(*SHAPES[shape]), options, logit=logit, isas=ISAS)


def sizes():
    """Families, and the sizes and options that they are tried with."""
    some = ("none", "toeplitz", "scaled")
    for queries, causal in itertools.product((1, 63, 64), (True, False)):
        yield FAMILIES, (2, 4, 2, queries, 170, 24), {"causal": causal}
    for length in (1, 5, 63, 64, 65, 130, 257, 333):
        yield FAMILIES, (1, 3, 3, length, length, 16), {}
    for keys in (1, 2, 15, 16, 17, 127, 128, 129, 1023, 1024, 1025, 5000):
        yield FAMILIES, (1, 2, 1, 1, keys, 16), {}
    for head_dim in (1, 8, 16, 40, 64, 80, 128, 256):
        yield ["sum"], (1, 2, 1, 130, 130, head_dim), {}
    for head_dim in (1, 3, 4, 8, 15, 16, 17, 40, 64, 80, 100, 128, 160, 512):
        yield ["sum"], (1, 4, 2, 2, 150, head_dim), {}
    for key_heads, queries in itertools.product((1, 2, 6), (1, 2, 5, 8, 9)):
        yield ["sum"], (2, 6, key_heads, queries, 300, 16), {}
    for head_dim, value_dim in ((8, 24), (64, 16), (192, 128), (40, 1), (512, 512), (16, 512)):
        yield ["sum", "scaled"], (1, 4, 2, 90, 130, head_dim, value_dim), {}
    for head_dim, value_dim in ((64, 24), (8, 100), (100, 3), (3, 64)):
        yield ["toeplitz"], (2, 4, 2, 2, 200, head_dim, value_dim), {}
    starts = [(300, 70, 0), (70, 300, 0), (100, 90, 500), (130, 64, 63), (4, 100, 150)]
    for (queries, keys, start), causal in itertools.product(starts, (True, False)):
        options = {"causal": causal, "start": start, "grad_lse": torch.randn(2, 2, queries, dtype=torch.float64)}
        yield some, (2, 2, 1, queries, keys, 16), options
        yield some, (2, 2, 1, queries, keys, 16), options | {"window": (100, 30)}


SIZES = [
    pytest.param(family, shape, options, id=f"{family}-{'x'.join(map(str, shape))}-{' '.join(options)}")
    for families, shape, options in sizes()
    for family in families
]


@pytest.mark.parametrize(("family", "shape", "options"), SIZES)
def test_every_size_by_every_instruction_set(family, shape, options):
    torch.manual_seed(3)
    # What cancels in the gradients is of the order of d·v, the root of value_dim.
    check(family, normal(*shape), options, isas=ISAS, logit=LOGIT * max(1, shape[-1] / 32 if len(shape) == 7 else 1))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 2, 24], ids=["one head", "few heads", "many heads"])
@pytest.mark.parametrize("family", [*FAMILIES, "a window"])
def test_however_the_work_is_shared_out(family, batch, threads):
    torch.manual_seed(4)
    torch.set_num_threads(threads)
    if family == "a window":
        check("toeplitz", normal(batch, 2, 1, 200 if batch > 2 else 1000, 200 if batch > 2 else 1000, 8), WINDOW)
    else:
        check(family, normal(batch, 2, 1, 240, 240, 12), {})


@pytest.mark.parametrize("heads", [1, 12])
def test_threads_change_no_bit_of_few_rows(heads):
    torch.manual_seed(9)
    q, k, v, _ = (x.float() for x in normal(1, heads, 1, 2, 9000, 64))
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results += [native.attention(q, k, v, None, Call(2, 9000, scale=0.125))[0] for _ in range(5)]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("argument", ["start", "sinks", "lse", "dropout", "rotation", "all of them"])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_by_every_instruction_set(family, argument, dtype):
    torch.manual_seed(15)
    check(family, normal(*SHAPES["tiles"]), ARGUMENTS[argument](100, 170), isas=ISAS, dtype=dtype)


@pytest.mark.parametrize("layout", ["packed", "transposed"])
@pytest.mark.parametrize("family", ["scaled", "toeplitz"])
def test_few_rows_far_apart_and_transposed_are_read_where_they_lie(family, layout):
    torch.manual_seed(10)
    check(family, laid_out(normal(2, 4, 2, 2, 150, 20), layout), {}, isas=ISAS)


def check_call(drawn, skip, isa, threads):
    family, tensors, options, dtype = drawn
    torch.set_num_threads(threads)
    check(family, tensors, options, skip, logit=12.0, isas=[isa], dtype=dtype)


ANY_CALL = {
    "drawn": calls(list(FAMILIES), 220, 72),
    "skip": st.booleans(),
    "isa": st.sampled_from(ISAS),
    "threads": st.integers(1, 3),
}


@settings(max_examples=150, **FUZZ)
@given(**ANY_CALL)
def test_any_shape_stride_form_and_mask(drawn, skip, isa, threads):
    check_call(drawn, skip, isa, threads)


@pytest.mark.slow
@settings(max_examples=10_000, **FUZZ)
@given(**ANY_CALL)
def test_any_shape_stride_form_and_mask_many_times(drawn, skip, isa, threads):
    check_call(drawn, skip, isa, threads)


def test_a_scaled_bias_may_have_any_units():
    torch.manual_seed(7)
    tensors = normal(1, 2, 2, 150, 150, 8)
    base = FAMILIES["scaled"]
    for slope, shift in (
        ([0.0], [1.0]),  # no slope at all
        ([2.0, -2.0], [5.0, 5.0]),  # knots outside the range of x
        ([1e-30, -1e-30], [0.1, -0.1]),  # knots at ±10²⁹
        ([1.0, -1.0], [-0.47, 0.47]),  # two knots in one place
        (torch.randn(100).tolist(), torch.randn(100).tolist()),
    ):
        numbers = base.numbers(1, 2, Call(150, 150))
        numbers["slope"], numbers["shift"] = (torch.tensor(x).double() for x in (slope, shift))
        numbers["out"] = 0.3 * torch.randn(2, len(slope)).double()
        assert_close(compare(tensors, base, numbers, {}))


def test_a_scaled_table_need_not_grow():
    torch.manual_seed(8)

    def form(n, call):
        return Scaled(n["table"], 1 + n["row"], *(n[x] for x in ("slope", "shift", "out", "offset")), call.first)

    def numbers(batch, heads, call):
        own = FAMILIES["scaled"].numbers(batch, heads, call)
        own = {n: own[n] for n in ("slope", "shift", "out", "offset")}
        return own | {"table": torch.randn(call.keys).double(), "row": torch.rand(batch, call.queries).double()}

    family = Family(numbers, form)
    assert_close(compare(normal(2, 2, 2, 100, 150, 8), family, numbers(2, 2, Call(100, 150)), {}))


# -- Dtypes, numbers that are none, masks in the table


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("queries", "keys", "head_dim"), [(100, 100, 16), (2, 1100, 6), (2, 1100, 64), (2, 1100, 70)])
def test_half_precision_is_computed_in_float32(queries, keys, head_dim, dtype):
    q, k, v, _ = (x.to(dtype) for x in normal(2, 4, 2, queries, keys, head_dim))
    call = Call(queries, keys, scale=head_dim**-0.5, return_lse=True)
    for isa in ISAS:
        library.use(isa)
        out, lse = native.attention(q, k, v, None, call)
        expected, expected_lse = native.attention(q.float(), k.float(), v.float(), None, call)
        assert out.dtype == dtype
        # Of few rows the values are summed in other portions: the result may round to a neighbour.
        few = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6} if queries == 2 else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(out, expected.to(dtype), **few)
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=0)
    library.use(ISAS[0])


def test_minus_infinity_in_a_table_is_a_window():
    torch.manual_seed(9)
    table = torch.zeros(2, 300, dtype=torch.float64)
    table[0, 50:] = table[1, 130:] = -math.inf
    results = compare(normal(1, 2, 2, 300, 300, 16), FAMILIES["toeplitz"], {"table": table}, {})
    assert all(ours.isfinite().all() for _, ours, _ in results)
    assert_close(results)


def test_padding_can_hide_every_key():
    q, k, v, grad = (x.float().requires_grad_() for x in normal(2, 2, 2, 90, 90, 8))
    out, _ = native.attention(q, k, v, None, Call(90, 90, padding=torch.zeros(2, 90, dtype=torch.bool)))
    out.backward(grad.detach())
    for x in (out, q.grad, k.grad, v.grad):
        assert (x == 0).all()


@pytest.mark.parametrize("spoiled", ["q", "k", "v"])
def test_nan_reaches_every_row_that_sees_it(spoiled):
    tensors = dict(zip("qkv", (x.float() for x in normal(1, 2, 2, 300, 300, 16)), strict=False))
    table = -0.5 * torch.arange(300.0).repeat(2, 1)  # so steep that far tiles are skipped
    tensors[spoiled][0, 1, 100, 3] = math.nan
    out, _ = native.attention(*tensors.values(), Toeplitz(table, 0), Call(300, 300))
    rows = slice(100, 101 if spoiled == "q" else None)
    assert out[0, 1, rows].isnan().any(-1).all()
    assert out[0, 0].isfinite().all()
    assert out[0, 1, :64].isfinite().all()


@pytest.mark.parametrize(("offset", "jump"), [(1e9, 0.0), (0.0, 1e7)])
def test_large_cumulative_gates_keep_float32_accuracy(offset, jump):
    torch.manual_seed(10)
    total = (0.1 * torch.rand(1, 2, 400, dtype=torch.float64)).cumsum(-1) + offset
    total[..., 210:] += jump  # in the middle of a block: what follows must not lose its digits
    numbers = {"total": total, "weight": torch.rand(1, 2, 400).double()}
    assert_close(compare(normal(1, 2, 2, 400, 400, 16), FAMILIES["rank one, weighted"], numbers, {}), LOGIT)


def test_no_key_after_the_last_is_read():
    torch.manual_seed(11)
    q, k, v, _ = (x.float() for x in normal(1, 2, 2, 1, 64, 24))
    expected, _ = native.attention(q, k[:, :, :37].clone(), v[:, :, :37].clone(), None, Call(1, 37))
    k[:, :, 37:], v[:, :, 37:] = math.nan, math.nan
    out, _ = native.attention(q, k[:, :, :37], v[:, :, :37], None, Call(1, 37))
    assert torch.equal(out, expected)


def test_nan_is_not_swallowed_by_few_rows():
    torch.manual_seed(12)
    q, k, v, _ = (x.float() for x in normal(1, 2, 2, 1, 3000, 16))
    k[0, 0, 1500, 3] = math.nan
    out, _ = native.attention(q, k, v, None, Call(1, 3000))
    assert out[0, 0].isnan().all()
    assert out[0, 1].isfinite().all()
