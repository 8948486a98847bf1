"""The Triton kernels, in Triton's interpreter, give what the reference defines: every form, argument, shape, dtype."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from kernel_cases import ARGUMENTS, FUZZ, GPU_FAMILIES, calls, check, normal, options_of

import relpos
from relpos.attend import native, triton
from relpos.attend.kernel_inputs import Inputs
from relpos.forms.bias import Projected, RankOne, Scaled, Scored, Sum, Toeplitz
from relpos.forms.call import Call

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not triton.available()[0], reason=triton.available()[1]),
]
SHAPE = (2, 2, 1, 41, 45, 16)  # batch, heads, key heads, queries, keys, head_dim: tiles of 32 that are not full
FAMILIES = list(GPU_FAMILIES)
UNSQUARE = ("none", "toeplitz", "rank one", "rank one, weighted", "sum")  # vectors per distance need square tiles
CAUSAL_ONLY = ("scaled", "every form")  # a factor per query is defined for earlier keys


VECTORS = torch.ones(1, 2, 9, 3)


def runs_in_make_test(family: str, argument: str, causal: bool) -> bool:
    """Every form plain and with all arguments, every argument with one of the single forms."""
    single = [name for name in FAMILIES if name != "every form"]
    turn = list(ARGUMENTS).index(argument) % len(single)
    return causal and (argument in ("plain", "all of them") or family == single[turn])


@pytest.mark.parametrize(
    ("family", "argument", "causal"),
    [
        pytest.param(*case, marks=[] if runs_in_make_test(*case) else pytest.mark.slow)
        for case in itertools.product(FAMILIES, ARGUMENTS, (True, False))
        if case[2] or case[0] not in CAUSAL_ONLY
    ],
)
def test_values_and_gradients_are_the_references(family, argument, causal):
    torch.manual_seed(0)
    check(family, normal(*SHAPE), options_of(argument, SHAPE) | {"causal": causal}, kernel=triton.attention)


@pytest.mark.parametrize(
    "family", ["toeplitz", "rank one, weighted", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES)]
)
def test_half_precision(family):
    torch.manual_seed(1)
    check(family, normal(*SHAPE), options_of("lse and sinks", SHAPE), dtype=torch.float16, kernel=triton.attention)
    # Widened before each product, since the interpreter cannot multiply bfloat16: its rounding is that of the inputs.
    check(family, normal(*SHAPE), options_of("plain", SHAPE), dtype=torch.bfloat16, kernel=triton.attention)


# As on a GPU: kernels have tiles of different sizes, which are not square.
TILES = {"forward": (128, 64), "grad_q": (64, 32), "grad_kv": (32, 128), "distance": (128, 64)}


@pytest.mark.parametrize(
    ("family", "causal"),
    [
        ("sum", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in itertools.product(UNSQUARE, (True, False))),
    ],
)
def test_tiles_of_a_gpu(family, causal, monkeypatch):
    from relpos.attend.triton import tile_sizes

    monkeypatch.setattr(tile_sizes, "tile_size", lambda kernel, *_: tile_sizes.TileSize(*TILES[kernel], 4, 1))
    torch.manual_seed(7)
    check(family, normal(1, 2, 1, 150, 150, 16), {"causal": causal}, kernel=triton.attention)


def test_a_distance_of_zero_between_two_tokens_has_no_gradient(monkeypatch):
    """Steps of CABLE are often exactly 0: of |total_i − total_j| the definition then takes the derivative 0."""
    from relpos.attend.triton import tile_sizes

    monkeypatch.setattr(tile_sizes, "tile_size", lambda kernel, *_: tile_sizes.TileSize(*TILES[kernel], 4, 1))
    torch.manual_seed(8)
    q, k, v = torch.randn(3, 1, 2, 150, 8)
    step = torch.randn(1, 2, 150).relu()
    gradients = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        steps = step.to(dtype).requires_grad_()
        form = RankOne.of_steps(steps, None, dtype, symmetric=True)
        out = relpos.attention(*(x.to(dtype) for x in (q, k, v)), form, causal=False, backend=backend)
        gradients.append(torch.autograd.grad(out.square().sum(), steps)[0].double())
    assert (step == 0).sum() > 100
    assert (gradients[0] - gradients[1]).abs().max() < 1e-5 * gradients[1].abs().max()


@pytest.mark.parametrize("weighted", [False, True])
def test_far_keys_of_a_steep_head_weigh_nothing(weighted):
    """Their tiles lie hundreds of powers of two below the nearest one, and must not become the maximum of a row."""
    torch.manual_seed(9)
    q, k, v = torch.randn(3, 1, 2, 150, 8)
    step, weight = 1 + torch.rand(2, 1, 2, 150)
    results = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v, step, weight)]
        form = RankOne.of_steps(inputs[3], inputs[4] if weighted else None, dtype)
        out = relpos.attention(*inputs[:3], form, backend=backend)
        learned = inputs if weighted else inputs[:4]
        results.append([out, *torch.autograd.grad(out.square().sum(), learned)])
    for ours, exact in zip(*results, strict=True):
        assert (ours - exact).abs().max() < 1e-5 * exact.abs().max()


@settings(max_examples=5, **FUZZ)
@given(calls(FAMILIES, 70, 40))
def test_any_shape_stride_form_and_mask(drawn):
    check_call(drawn)


@pytest.mark.slow
@settings(max_examples=400, **FUZZ)
@given(calls(FAMILIES, 140, 80))
def test_any_shape_stride_form_and_mask_many_times(drawn):
    check_call(drawn)


def check_call(drawn):
    family, tensors, options, dtype = drawn
    if family in CAUSAL_ONLY:
        options["causal"] = True
    check(family, tensors, options, logit=12.0, dtype=dtype, kernel=triton.attention)


def small_call(name: str, **options: object):
    """A function that computes output and gradients of an encoding on fixed inputs."""
    torch.manual_seed(2)
    position = relpos.encoding(name, heads=2, head_dim=8)
    q, k, v = (torch.randn(2, 2, 50, 8, requires_grad=True) for _ in range(3))
    hidden = torch.randn(2, 50, 16)

    def run(backend: str = "triton") -> list[torch.Tensor]:
        out = relpos.attention(q, k, v, position, hidden=hidden, backend=backend, **options)
        learned = [q, k, v, *(p for p in position.parameters() if p.requires_grad)]
        return [out, *torch.autograd.grad(out.square().sum(), learned)]

    return run


@pytest.mark.parametrize("name", ["clipped", "fire", "cable"])
def test_two_runs_give_the_same_bits(name):
    run = small_call(name)
    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.parametrize("family", ["toeplitz", "scaled", "vectors of queries"])
def test_several_programs_share_a_diagonal(family, monkeypatch):
    from relpos.attend.triton import gpu_operators

    monkeypatch.setattr(gpu_operators, "TILES_PER_PROGRAM", 1)
    torch.manual_seed(7)
    check(family, normal(2, 2, 2, 70, 70, 8), {}, kernel=triton.attention)


@pytest.mark.parametrize("queries", [1, 64])
def test_any_number_of_heads_fits_into_a_grid(queries, monkeypatch):
    """The second and the third axis of a GPU's grid end at 65,535, of which the interpreter knows nothing."""
    from triton.runtime import interpreter

    from relpos.attend.triton import skipped_tiles

    grids = {}
    monkeypatch.setattr(
        interpreter.GridExecutor, "__call__", lambda kernel, *_, **__: grids.update({kernel.fn.__name__: kernel.grid})
    )
    monkeypatch.setattr(skipped_tiles, "SHORTEST", 0)
    batch, heads = 70_000, 2
    q, k, v = torch.randn(3, batch, heads, 64, 1, requires_grad=True)
    form = Sum((Toeplitz(torch.randn(heads, 64)), RankOne(torch.zeros(batch, heads, 64, dtype=torch.float64))))
    form.terms[0].table.requires_grad_()
    relpos.attention(q[:, :, :queries], k, v, form, start=64 - queries, backend="triton").sum().backward()
    forward = {"decoding_kernel"} if queries == 1 else {"forward_kernel", "kept_keys_kernel"}
    assert forward | {"grad_q_kernel", "grad_kv_kernel", "distance_kernel"} < grids.keys()
    for name, grid in grids.items():
        assert max(grid[1:], default=1) <= 65_535, name
        assert grid[0] < 2**31, name


@pytest.mark.skipif(not native.available()[0], reason=native.available()[1])
def test_dropout_drops_the_weights_that_the_cpu_drops():
    torch.manual_seed(3)
    q, k = torch.randn(2, 2, 4, 40, 8).unbind(0)
    v = torch.eye(40).expand(2, 4, 40, 40)  # the output is the weights
    options = {"dropout": 0.4, "seed": 2**62 + 99}
    ours, cpu = (relpos.attention(q, k, v, backend=backend, **options) for backend in ("triton", "native"))
    assert torch.equal(ours == 0, cpu == 0)
    assert 0.3 < ((cpu == 0).double().mean() * 40 * 40 - 780) / 820 < 0.5  # 780 of 1,600 lie in the future


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("name", "options"), [("clipped", {"limit": 7}), ("t5", {"buckets": 8, "max_distance": 9})])
def test_constant_ends_of_a_table_get_the_gradient_of_their_sums(name, options, causal):
    torch.manual_seed(4)
    position = relpos.encoding(name, heads=2, head_dim=8, **options)
    q, k, v, grad = torch.randn(4, 2, 2, 70, 8)
    results = []
    for backend, dtype in (("reference", torch.float64), ("triton", torch.float32)):
        position = position.to(dtype)
        out = relpos.attention(*(x.to(dtype) for x in (q, k, v)), position, causal=causal, window=50, backend=backend)
        results += torch.autograd.grad(out, position.table, grad.to(dtype))
    torch.testing.assert_close(results[1].double(), results[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ["none", "rank one, weighted", "every form"])
def test_nothing_around_the_inputs_is_read(family):
    """NaN in the memory before and after q, k and v changes no bit."""
    torch.manual_seed(5)
    tensors = normal(*SHAPE)
    numbers = GPU_FAMILIES[family].numbers(SHAPE[0], SHAPE[1], Call(*SHAPE[3:5]))
    form = GPU_FAMILIES[family].form(
        {n: x if n == "total" else x.float() for n, x in numbers.items()}, Call(*SHAPE[3:5])
    )
    outs = []
    for fill in (0.0, torch.nan):
        framed = [torch.full((*x.shape[:2], x.shape[2] + 80, x.shape[3] + 40), fill) for x in tensors[:3]]
        views = [x[:, :, 40:-40, 20:-20] for x in framed]
        for view, x in zip(views, tensors, strict=False):
            view.copy_(x)
        leaves = [view.detach().requires_grad_() for view in views]
        out, _ = triton.attention(*leaves, form, Call(*SHAPE[3:5], batch=2, heads=2))
        outs.append([out, *torch.autograd.grad(out.sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def test_padding_may_hold_anything():
    torch.manual_seed(6)
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    padding = torch.arange(40)[None] >= 9
    clean = relpos.attention(q, k, v, padding=padding, backend="triton")
    k[:, :, :9], v[:, :, :9] = torch.nan, torch.inf
    assert torch.equal(relpos.attention(q, k, v, padding=padding, backend="triton"), clean)


def test_the_operators_are_well_formed():
    from relpos.attend.triton import gpu_operators

    q, k, v = (torch.randn(1, 2, 33, 8, requires_grad=True) for _ in range(3))
    table = torch.randn(2, 33, requires_grad=True)
    torch.library.opcheck(gpu_operators.forward, Inputs(q, k, v, table, scale=0.3).values())


def test_a_compiled_graph_gives_the_same_bits():
    position = relpos.encoding("cable", heads=2, head_dim=8)
    q, hidden = torch.randn(1, 2, 50, 8, requires_grad=True), torch.randn(1, 50, 16)

    def forward(q):
        return relpos.attention(q, q, q, position, hidden=hidden, window=20, backend="triton")

    results = []
    for function in (forward, torch.compile(forward, backend="aot_eager", fullgraph=True)):
        out = function(q)
        results.append([out, *torch.autograd.grad(out.square().sum(), [q, *position.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_no_number_that_changes_from_call_to_call_compiles_a_kernel_anew():
    """Triton compiles again for an integer that becomes 1 or a multiple of 16, unless the kernel says otherwise."""
    from relpos.attend.triton import (
        backward_kernels,
        distance_kernel,
        forward_kernel,
        gpu_problem,
        skipped_tiles,
        tile_bounds,
    )
    from relpos.attend.triton.tiles import CHANGING

    kernels = (
        forward_kernel.forward_kernel,
        backward_kernels.grad_q_kernel,
        backward_kernels.grad_kv_kernel,
        distance_kernel.distance_kernel,
        tile_bounds.bias_bounds_kernel,
        tile_bounds.key_bounds_kernel,
        skipped_tiles.kept_keys_kernel,
        skipped_tiles.row_factors_kernel,
        skipped_tiles.kept_rows_kernel,
        skipped_tiles.kept_diagonals_kernel,
    )
    for kernel in kernels:
        numbers = {name for name in gpu_problem.names(kernel) if name.islower()}
        strides = {name for name in numbers if len(name) == 3 and name[1] == "_"}
        assert numbers - strides <= set(CHANGING)


@pytest.mark.parametrize(
    ("form", "options", "reason"),
    [
        (Scored(lambda i, j, scores, visible: scores), {}, "one tile at a time"),
        (RankOne(torch.zeros(1, 2, 9).double()) + RankOne(torch.zeros(1, 2, 9).double()), {}, "one RankOne term"),
        (
            Scaled(*(torch.ones(n) for n in (9,)), torch.ones(1, 9), *torch.ones(2, 3), torch.ones(2, 3), torch.ones(2),
                   column=torch.ones(1, 9)),
            {"causal": False},
            "scaled per key too",
        ),
        (
            Projected(VECTORS, VECTORS[0, :1]) + Projected(VECTORS, VECTORS[0, :1]),
            {},
            "one Projected term of the queries",
        ),
        (None, {"mask": torch.ones(9, 9, dtype=torch.bool)}, "cannot run mask="),
        (Toeplitz(torch.ones(2, 99)), {"positions": torch.arange(9)[None] * 3}, "difference of two indices"),
    ],
)  # fmt: skip
def test_what_it_cannot_run_is_refused_by_a_sentence(form, options, reason):
    q = torch.randn(1, 2, 9, 4)
    with pytest.raises(ValueError, match=f"the backend 'triton' cannot run this: .*{reason}"):
        relpos.attention(q, q, q, form, backend="triton", **options)


def test_wide_heads_and_double_precision_are_refused():
    q = torch.randn(1, 1, 4, 260)
    for x, reason in ((q, "head_dim and value_dim up to 256"), (q[..., :8].double(), "computes in float32")):
        with pytest.raises(ValueError, match=reason):
            relpos.attention(x, x, x, backend="triton")
