"""The native kernel gives what the reference defines, for every form, mask, shape, dtype and instruction set."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_cases import FAMILIES, LOGIT, Family, assert_close, check, compare, documents, normal, rotation

import relpos
from relpos.attend import native, reference
from relpos.attend.native import library
from relpos.forms.bias import Scaled, Toeplitz
from relpos.forms.call import Call

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not native.available()[0], reason=native.available()[1]),
    pytest.mark.usefixtures("two_threads"),
]
ISAS = library.isas() if native.available()[0] else []


OPTIONS = {
    "plain": lambda: {},
    "documents": lambda: {"documents": torch.stack([documents(30, 100, 70), documents(64, 128, 8)])},
    "padding": lambda: {"padding": torch.rand(2, 200) > 0.3},
    "left padding": lambda: {"padding": torch.arange(200) >= torch.tensor([[70], [0]])},
    "documents and padding": lambda: {
        "documents": torch.stack([documents(30, 100, 70), documents(64, 128, 8)]),
        "padding": torch.rand(2, 200) > 0.5,
    },
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_the_references_by_every_instruction_set(family, causal, option):
    torch.manual_seed(0)
    check(family, normal(2, 2, 2, 200, 200, 16), OPTIONS[option]() | {"causal": causal}, isas=ISAS)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("queries", [1, pytest.param(63, marks=pytest.mark.slow), 64, 100])
@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_queries_than_keys_are_the_last_positions(family, queries, causal):
    torch.manual_seed(1)
    check(family, normal(2, 4, 2, queries, 170, 24), {"causal": causal})


@pytest.mark.parametrize("head_dim", [1, 8, 16, 40, 64, 80, 128, 256])
def test_every_head_dim_by_every_instruction_set(head_dim):
    torch.manual_seed(2)
    check("sum", normal(1, 2, 1, 130, 130, head_dim), {}, isas=ISAS)


@pytest.mark.parametrize("length", [1, 5, 63, 64, 65, 130, 257, 333])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_length(family, length):
    torch.manual_seed(3)
    check(family, normal(1, 3, 3, length, length, 16), {})


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 2, 24], ids=["one head", "few heads", "many heads"])
@pytest.mark.parametrize("family", FAMILIES)
def test_however_the_work_is_shared_out(family, batch, threads):
    torch.manual_seed(4)
    torch.set_num_threads(threads)
    check(family, normal(batch, 2, 1, 240, 240, 12), {})


# -- Every further argument, by itself with every form and in both directions


def lse_gradient(queries: int) -> torch.Tensor:
    return torch.randn(2, 4, queries, dtype=torch.float64)


ARGUMENTS = {
    "start": lambda: {"start": 20},
    "window": lambda: {"window": (40, 10)},
    "a window of one token": lambda: {"window": (0, 0)},
    "a window over tiles": lambda: {"window": (70, 70), "start": 37},
    "sinks": lambda: {"sinks": torch.randn(4, dtype=torch.float64)},
    "sinks and no key": lambda: {
        "sinks": torch.randn(4, dtype=torch.float64),
        "padding": torch.zeros(2, 170, dtype=torch.bool),
        "grad_lse": lse_gradient(100),
    },
    "lse": lambda: {"grad_lse": lse_gradient(100)},
    "lse and sinks": lambda: {"grad_lse": lse_gradient(100), "sinks": torch.randn(4, dtype=torch.float64)},
    "softcap": lambda: {"softcap": 1.5},
    "a high softcap": lambda: {"softcap": 50.0},
    "dropout": lambda: {"dropout": 0.3, "seed": torch.tensor(2**62 + 12345)},
    "rotation": lambda: {"rotation": rotation(2, 100, 170, 12, "half")},
    "rotation of some dimensions": lambda: {"rotation": rotation(1, 100, 170, 5, "interleaved")},
    "all of them": lambda: {
        "start": 33,
        "window": (60, 20),
        "sinks": torch.randn(4, dtype=torch.float64),
        "grad_lse": lse_gradient(100),
        "softcap": 2.0,
        "dropout": 0.2,
        "seed": torch.tensor(7),
        "rotation": rotation(2, 100, 170, 10, "half", start=33),
        "padding": torch.rand(2, 170) > 0.3,
        "documents": torch.stack([documents(50, 50, 70), documents(120, 50)]),
    },
}


@pytest.mark.parametrize(
    ("causal", "argument"),
    [
        pytest.param(causal, argument, marks=[] if causal or argument == "all of them" else pytest.mark.slow)
        for causal in (True, False)
        for argument in ARGUMENTS
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_argument_by_every_instruction_set(family, causal, argument):
    torch.manual_seed(11)
    check(family, normal(2, 4, 2, 100, 170, 24), ARGUMENTS[argument]() | {"causal": causal}, isas=ISAS)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize(("queries", "keys", "start"), [(300, 70, 0), (70, 300, 0), (100, 90, 500), (130, 64, 63)])
@pytest.mark.parametrize("family", ["none", "toeplitz", "scaled"])
def test_queries_may_stand_anywhere(family, queries, keys, start, causal):
    torch.manual_seed(12)
    options = {"causal": causal, "start": start, "grad_lse": torch.randn(2, 2, queries, dtype=torch.float64)}
    check(family, normal(2, 2, 1, queries, keys, 16), options)
    check(family, normal(2, 2, 1, queries, keys, 16), options | {"window": (100, 30)})


@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 24), (64, 16), (192, 128), (40, 1), (512, 512), (16, 512)])
@pytest.mark.parametrize("family", ["sum", "scaled"])
def test_values_may_have_another_size(family, head_dim, value_dim):
    torch.manual_seed(13)
    # What cancels in the gradients is of the order of d·v, the root of value_dim.
    check(family, normal(1, 4, 2, 90, 130, head_dim, value_dim), {}, isas=ISAS, logit=LOGIT * max(1, value_dim / 32))


@pytest.mark.parametrize("length", [200, 1000])
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_windows_however_the_work_is_shared_out(threads, length):
    torch.manual_seed(14)
    torch.set_num_threads(threads)
    options = {"window": (130, 5), "causal": False}
    for batch, heads in ((1, 1), (1, 4), (24, 1)):
        check("toeplitz", normal(batch, heads, 1, length, length, 8), options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("argument", ["start", "sinks", "lse", "dropout", "rotation", "all of them"])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_by_every_instruction_set(family, argument, dtype):
    torch.manual_seed(15)
    check(family, normal(2, 4, 2, 100, 170, 24), ARGUMENTS[argument](), isas=ISAS, dtype=dtype)


@st.composite
def softmax_options(draw, batch, heads, queries):
    options = {"softcap": draw(st.sampled_from([None, None, 0.5, 3.0, 30.0]))}
    if draw(st.booleans()):
        options["sinks"] = torch.randn(heads).double()
    if draw(st.booleans()):
        options["grad_lse"] = torch.randn(batch, heads, queries).double()
    if draw(st.booleans()):
        options["dropout"] = draw(st.sampled_from([0.05, 0.1, 0.5]))
        options["seed"] = torch.tensor(draw(st.integers(0, 2**63 - 1)))
    return options


@st.composite
def calls(draw):
    """A family, tensors, options, whether to skip, an instruction set, a dtype and a number of threads."""
    batch, key_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    heads = key_heads * group
    keys = draw(st.integers(1, 220))
    family = draw(st.sampled_from(list(FAMILIES)))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    options = {"causal": draw(st.booleans())}
    packed = draw(st.booleans())
    if packed:
        cuts = torch.rand(batch, keys) < draw(st.sampled_from([0.01, 0.05, 0.5]))
        options["documents"] = cuts.long().cumsum(1)
    if packed or "rank one" in family or family == "sum" or draw(st.booleans()):  # the queries are tokens
        queries = draw(st.integers(1, keys))
        if draw(st.booleans()):
            options["start"] = draw(st.integers(0, keys - queries))
    else:
        queries, options["start"] = draw(st.integers(1, 220)), draw(st.integers(0, 300))
    if draw(st.booleans()):
        options["padding"] = torch.rand(batch, keys) < draw(st.sampled_from([0.0, 0.5, 0.95]))
    if draw(st.booleans()):
        options["window"] = draw(st.tuples(st.integers(0, 150), st.integers(0, 150)))
    options |= draw(softmax_options(batch, heads, queries))
    head_dim, value_dim = draw(st.integers(1, 72)), draw(st.integers(1, 72))
    pairs = draw(st.integers(0, head_dim // 2))
    if pairs:
        layout, rows = draw(st.sampled_from(["half", "interleaved"])), draw(st.sampled_from([1, batch]))
        options["rotation"] = rotation(rows, queries, keys, pairs, layout, options.get("start"))
    tensors = normal(batch, heads, key_heads, queries, keys, head_dim, value_dim)
    layout = draw(st.sampled_from(["contiguous", "packed", "transposed", "expanded gradient"]))
    if layout == "packed":  # (batch, length, 2, heads, head_dim) in memory
        tensors = [torch.stack([x.transpose(1, 2)] * 2, 2)[:, :, 1].transpose(1, 2) for x in tensors]
    if layout == "transposed":
        tensors = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in tensors]
    if layout == "expanded gradient":
        tensors[3] = torch.ones((), dtype=torch.float64).expand(tensors[3].shape)
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]))
    return family, tensors, options, draw(st.booleans()), draw(st.sampled_from(ISAS)), dtype, draw(st.integers(1, 3))


def check_call(drawn):
    family, tensors, options, skip, isa, dtype, threads = drawn
    torch.set_num_threads(threads)
    check(family, tensors, options, skip, logit=12.0, isas=[isa], dtype=dtype)


FUZZ = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


@settings(max_examples=300, **FUZZ)
@given(calls())
def test_any_shape_stride_form_and_mask(drawn):
    check_call(drawn)


@pytest.mark.slow
@settings(max_examples=10_000, **FUZZ)
@given(calls())
def test_any_shape_stride_form_and_mask_many_times(drawn):
    check_call(drawn)


@pytest.mark.parametrize("name", ["alibi", "kerple_log", "t5", "sandwich", "fire", "cable", "cable_nw", "forgetting"])
def test_encodings_run_through_their_forms(name):
    torch.manual_seed(5)
    q, k, v, grad = normal(2, 4, 4, 150, 150, 16)
    hidden = torch.randn(2, 150, 64)
    results = []
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(6)
        encoding = relpos.encoding(name, heads=4, head_dim=16).to(dtype)
        gates = encoding.gates(hidden.to(dtype)) if encoding.needs_hidden else None
        call = Call(150, 150, gates=gates, scale=0.25, dtype=dtype)
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
        attention = reference.attention if dtype == torch.float64 else native.attention
        out, _ = attention(q, k, v, encoding.bias(call), call)
        out.backward(grad.to(dtype))
        learned = {n: p.grad.double() for n, p in encoding.named_parameters() if p.grad is not None}
        results.append({"out": out.detach().double(), "q": q.grad.double(), "k": k.grad.double()} | learned)
    expected, ours = results
    assert ours.keys() == expected.keys()
    assert_close((n, ours[n], expected[n]) for n in expected)


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
def test_half_precision_is_computed_in_float32(dtype):
    q, k, v, _ = (x.to(dtype) for x in normal(1, 2, 2, 100, 100, 16))
    call = Call(100, 100, scale=0.25)
    ours, _ = native.attention(q, k, v, None, call)
    assert ours.dtype == dtype
    assert torch.equal(ours, native.attention(q.float(), k.float(), v.float(), None, call)[0].to(dtype))


def test_minus_infinity_in_a_table_is_a_window():
    torch.manual_seed(9)
    table = torch.zeros(2, 300, dtype=torch.float64)
    table[0, 50:] = table[1, 130:] = -math.inf
    results = compare(normal(1, 2, 2, 300, 300, 16), FAMILIES["toeplitz"], {"table": table}, {})
    assert all(ours.isfinite().all() for _, ours, _ in results)
    assert_close(results)


def test_a_row_masked_by_its_table_gets_nothing():
    q, k, v, grad = (x.float().requires_grad_() for x in normal(1, 1, 1, 70, 70, 8))
    table = torch.zeros(1, 70)
    table[0, 0] = -math.inf  # nobody sees itself, so the first position sees nothing
    out, _ = native.attention(q, k, v, Toeplitz(table, 0), Call(70, 70))
    out.backward(grad.detach())
    assert (out[:, :, 0] == 0).all()
    assert (out[:, :, 1:] != 0).all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


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
