"""What the Triton kernels leave out cannot be seen in what they give; in Triton's interpreter."""

import math
from collections import Counter
from functools import partial

import pytest
import torch
from kernel_cases import FAMILIES, assert_close, compare, documents, normal
from skipping_cases import (
    EPSILON,
    HEADS,
    LENGTH,
    SCALE,
    Case,
    cases,
    check_huge_factors,
    form,
    huge_factors,
    inputs_of,
    share_lost,
    weights_of,
)
from torch import Tensor

from relpos.attend import triton
from relpos.attend.kernel_inputs import make_inputs
from relpos.forms.bias import RankOne, Sum, Toeplitz
from relpos.forms.call import Call

if not triton.available()[0]:
    pytest.skip(triton.available()[1], allow_module_level=True)

from relpos.attend.triton import (
    backward_kernels,
    distance_kernel,
    forward_kernel,
    skipped_tiles,
    tile_sizes,
)
from relpos.attend.triton.gpu_operators import TritonKernel
from relpos.attend.triton.gpu_problem import GpuProblem
from relpos.attend.triton.tile_sizes import TileSize

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("short")]
UNIT = 64
DIRECTIONS = [True, pytest.param(False, marks=pytest.mark.slow)]
IN_MAKE_TEST = (
    "normal",
    "a decaying table with far spikes",
    "huge far values",
    "weighted gates, some of them negative",
)
TILES = {  # as on a GPU
    "forward": (128, 64),
    "grad_q": (64, 32),
    "grad_kv": (32, 128),
    "distance": (128, 64),
    "skipping": (64, 64),
}


@pytest.fixture
def short(monkeypatch):
    """Tiles of short sequences are skipped too, and are those of a GPU."""
    monkeypatch.setattr(skipped_tiles, "SHORTEST", 0)
    monkeypatch.setattr(tile_sizes, "tile_size", lambda kernel, *_: TileSize(*TILES[kernel], 4, 1))


@pytest.fixture
def tiles(monkeypatch):
    """The number of tiles that each kernel computes: all of them cap the scores of a tile once."""
    counts: Counter[str] = Counter()
    for module in (forward_kernel, backward_kernels, distance_kernel):

        def count(*args, module=module, capped=module.capped, **options):
            counts[module.__name__.rsplit(".", 1)[1]] += 1
            return capped(*args, **options)

        monkeypatch.setattr(module, "capped", count)
    return counts


def outside(ranges: Tensor, length: int) -> Tensor:
    """Entries outside the ranges of units, (heads, units, 2): (heads, rows, length)."""
    begin, stop = (x.repeat_interleave(UNIT, 1)[:, :, None] for x in ranges.view(HEADS, -1, 2).unbind(2))
    i = torch.arange(length)
    return ((i < begin) | (i >= stop))[:, :length]


def kept_keys(case: Case, causal: bool) -> GpuProblem:
    """The kernels' problem for a case, with the keys that they keep."""
    inputs = inputs_of(case, causal)
    problem = GpuProblem(inputs)
    skipped_tiles.keep_keys(problem, skipped_tiles.empty_record(inputs))
    return problem


def chosen_cases(causal: bool, every: bool) -> list[Case]:
    return [case for case in cases(causal) if every or case[0] in IN_MAKE_TEST]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("causal", DIRECTIONS, ids=["causal", "bidirectional"])
def test_what_a_row_loses_is_below_rounding_of_what_it_keeps(causal, every):
    """In every sum over the keys of a row, measured in float64 from the ranges that the kernels read."""
    shares = {}
    for case in chosen_cases(causal, every):
        problem = kept_keys(case, causal)
        shares[case[0]] = share_lost(case, causal, outside(problem.arguments["KEPT_KEYS"], LENGTH))
    assert shares["normal"] > 0.4
    assert shares["a decaying table with far spikes"] < 0.4
    if every:
        assert shares["gates"] > 0.4
        assert shares["weighted gates"] > 0.2  # the CPU, which looks at the scores, skips 0.44
        assert shares["a flat table and gates"] > 0.4
        assert shares["gates that attract the past"] < 0.1 or not causal
        assert shares["a growing table"] < 0.6


# -- Sums over the queries


def gradients() -> dict[str, Tensor]:
    """Gradients of the output, whose sizes differ from query to query: (1, heads, length, 1), to be multiplied."""
    sizes = {name: torch.ones(1, HEADS, LENGTH, 1) for name in ("huge far away", "the last alone", "the first half")}
    sizes["huge far away"][:, :, -70:] = 1e6
    sizes["the last alone"][:, :, :-1] = 0
    sizes["the first half"][:, :, LENGTH // 2 :] = 0
    return sizes | {"of many sizes": (3 * torch.randn(1, HEADS, LENGTH, 1)).exp2()}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("causal", DIRECTIONS, ids=["causal", "bidirectional"])
def test_what_a_key_loses_is_below_rounding_of_the_largest_factor_of_its_queries(causal, every):
    kinds = gradients()
    for turn, case in enumerate(chosen_cases(causal, every)):
        name, q, k, _, table, total, weight = case
        problem = kept_keys(case, causal)
        numbers = [None if x is None else x.double() for x in (table, total, weight)]
        weights = weights_of(q, k, form(*numbers, causal), causal)[0]
        of_lse = torch.randn(1, HEADS, LENGTH).exp()
        for kind in kinds if every else [list(kinds)[turn]]:
            grad = torch.randn(q.shape) * kinds[kind]
            problem.set_strides("g", grad)
            problem.arguments |= {"GRAD": grad, "GRAD_LSE": of_lse}
            skipped_tiles.keep_rows(problem)
            lost = outside(problem.arguments["KEPT_ROWS"], LENGTH).transpose(1, 2)  # (heads, queries, keys)
            norm = q[0].double().norm(dim=-1)
            factors = [grad[0].double().abs().sum(-1), of_lse[0].double()]
            factors += [factor * norm for factor in factors]
            if weight is not None:
                factors += [factor * weight[0].double().abs() for factor in factors[:2]]
            for number, factor in enumerate(factors):
                largest = (factor[:, :, None] * ~lost).amax(1)  # of what is computed for a key: (heads, keys)
                if number != 1:  # no sum has the gradient of the log-sum-exp alone
                    dropped = (weights * lost * factor[:, :, None]).sum(1)
                    assert (dropped <= 4 * EPSILON * largest).all(), f"{name}, {kind}, factor {number}"


# -- Whole calls


def results_of(case: Case, causal: bool, grad: Tensor, skip: bool) -> list[Tensor]:
    """The output and all gradients."""
    _, *tensors, table, total, weight = case
    leaves = [x.detach().requires_grad_() for x in tensors]
    numbers = [None if x is None else x.detach().clone().requires_grad_() for x in (table, total, weight)]
    out, _ = triton.attention(*leaves, form(*numbers, causal), Call(LENGTH, LENGTH, causal=causal, scale=SCALE), skip)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in (*leaves, *numbers) if x is not None)]


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_skipping_changes_nothing_beyond_rounding(causal):
    for case in cases(causal):
        grad = torch.randn(case[1].shape)
        results = [results_of(case, causal, grad, skip) for skip in (True, False)]
        for skipped, complete in zip(*results, strict=True):
            assert (skipped - complete).abs().max() <= 64 * EPSILON * complete.abs().max(), case[0]


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        pytest.param(name, causal, marks=[] if number in (0, 4, 9, 10) and causal else pytest.mark.slow)
        for number, name in enumerate(huge_factors())
        for causal in (True, False)
    ],
)
def test_nothing_is_lost_where_a_tiny_weight_is_multiplied_by_a_huge_number(name, causal):
    check_huge_factors(name, causal, triton.attention)


STEEP = {
    "toeplitz": lambda keys: {"table": -2 * torch.arange(1 - keys, keys).abs().double().repeat(2, 1)},
    "rank one": lambda keys: {"total": torch.rand(2, 2, keys).double().cumsum(-1)},
    "sum": lambda keys: {
        "table": -torch.arange(1 - keys, keys).abs().double().repeat(2, 1),
        "total": (0.3 * torch.rand(2, 2, keys).double()).cumsum(-1),
        "weight": torch.rand(2, 2, keys).double() + 0.5,
    },
}


@pytest.mark.parametrize("causal", DIRECTIONS, ids=["causal", "bidirectional"])
@pytest.mark.parametrize(
    "family", ["sum", *(pytest.param(family, marks=pytest.mark.slow) for family in ("toeplitz", "rank one"))]
)
def test_skipping_respects_documents_padding_and_everything_else(family, causal, tiles):
    keys, start, queries = 420, 30, 390
    padding = torch.rand(2, keys) > 0.2
    padding[0, 128:192] = False
    options = {
        "documents": torch.stack([documents(300, 120), documents(10, 410)]),
        "padding": padding,
        "causal": causal,
        "start": start,
        "sinks": torch.tensor([0.5, -1.0]).double(),
        "grad_lse": torch.randn(2, 2, queries).double(),
    }
    numbers = STEEP[family](keys)
    if "table" in numbers:
        numbers["table"] = numbers["table"][:, keys - 1 if causal else start : 2 * keys - 1 if causal else None]
    tensors = normal(2, 2, 1, queries, keys, 16)
    found = {}
    for skip in (True, False):
        tiles.clear()
        kernel = partial(triton.attention, skip=skip)
        assert_close(compare(tensors, FAMILIES[family], numbers, options, kernel=kernel), logit=24.0)
        found[skip] = dict(tiles)
    assert found[True]["forward_kernel"] < 0.8 * found[False]["forward_kernel"]
    assert all(found[True][kernel] < found[False][kernel] for kernel in found[False]), found


# -- What is computed


def run(bias: Sum | Toeplitz | RankOne | None, length: int, **options: object) -> None:
    """Forward and backward of one head, of which nothing is kept."""
    q, k, v = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3))
    out, _ = triton.attention(q, k, v, bias, Call(length, length, scale=0.25, **options))
    out.sum().backward()


def alibi(length: int, slope: float) -> Toeplitz:
    return Toeplitz((-slope * torch.arange(length))[None].requires_grad_(), 0)


def test_a_steep_bias_costs_linear_work(tiles):
    """Twice the length is twice the tiles; without skipping it would be four times as many."""
    counts = []
    for length in (512, 1024):
        tiles.clear()
        run(alibi(length, 1.0), length)
        counts.append(dict(tiles))
    for kernel in counts[0]:
        assert counts[1][kernel] <= 2.2 * counts[0][kernel], counts
    tiles.clear()
    run(alibi(1024, 1e-3), 1024)  # a flat one
    assert tiles["forward_kernel"] == 8 * 9  # the 8 × 16 tiles of 128 × 64 that are visible
    assert counts[1]["forward_kernel"] <= 8 * 3


def test_running_totals_like_those_of_cable_are_skipped(tiles):
    steps = torch.rand(1, 1, 1024).double()
    run(RankOne((0.6 * steps).cumsum(-1).requires_grad_(), None, torch.float32), 1024)
    assert tiles["forward_kernel"] < 8 * 9 / 2
    assert tiles["backward_kernels"] < (16 * 17 + 32 * 5) / 2  # 64 × 32 by grad_q, 32 × 128 by grad_kv


def test_windows_cost_linear_work(tiles):
    counts = []
    for length in (512, 1024):
        tiles.clear()
        run(alibi(length, 0.0), length, window=(100, 0))
        counts.append(dict(tiles))
    for kernel in counts[0]:
        assert counts[1][kernel] <= 2.2 * counts[0][kernel], counts


def test_a_query_of_a_large_gradient_is_computed_for_more_keys(tiles):
    """What grad_kv computes follows the gradients, not the forward's tiles alone."""
    bias, length = alibi(640, 0.5), 640
    q, k, v = torch.randn(3, 1, 1, length, 16)
    counts = {}
    for size in (1.0, 1e8):
        inputs = make_inputs(q, k, v, bias, Call(length, length, scale=0.25), skip=True)
        results = TritonKernel().run(inputs)
        grad = torch.ones(1, 1, length, 16)
        grad[:, :, -1] *= size
        tiles.clear()
        TritonKernel().gradients(inputs, grad, None, results, frozenset("qkv"))
        counts[size] = tiles["backward_kernels"]
    assert counts[1e8] > counts[1.0]


def test_what_has_no_bounds_is_not_skipped(tiles):
    bias = alibi(512, 1.0)
    visible = 4 * 5
    for options in ({"softcap": 5.0}, {"dropout": 0.1, "seed": torch.tensor(1)}):
        tiles.clear()
        run(bias, 512, **options)
        assert tiles["forward_kernel"] == visible
    tiles.clear()
    q, k, v = torch.randn(3, 1, 1, 512, 16)
    triton.attention(q, k, v, bias, Call(512, 512), skip=False)
    assert tiles["forward_kernel"] == visible


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("spoiled", [math.nan, math.inf, 1e25])
@pytest.mark.parametrize("of", ["k", "v", "table", "total", "weight"])
def test_a_far_number_that_is_not_finite_is_never_skipped(of, spoiled):
    length = 320
    q, k, v = torch.randn(3, 1, 1, length, 16)
    numbers = {
        "table": (-2.0 * torch.arange(length))[None],
        "total": (2 * torch.rand(1, 1, length)).double().cumsum(-1),
        "weight": torch.rand(1, 1, length) + 0.5,
    }
    {"k": k, "v": v, **numbers}[of][..., 300 if of == "table" else 5, *([slice(None)] if of in "kv" else [])] = spoiled
    bias = form(*numbers.values(), True, length)
    outs = [triton.attention(q, k, v, bias, Call(length, length, scale=0.25), skip)[0] for skip in (True, False)]
    assert torch.equal(outs[0].isnan(), outs[1].isnan())
    torch.testing.assert_close(*outs, equal_nan=True)
