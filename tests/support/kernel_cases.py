"""Forms with numbers of their own, and calls, for holding the compiled kernels to the reference in float64."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from hypothesis import HealthCheck
from hypothesis import strategies as st
from torch import Tensor

from relpos.attend import native, reference
from relpos.attend.native import library
from relpos.forms.bias import Form, Projected, RankOne, Scaled, Sum, Toeplitz
from relpos.forms.call import Call
from relpos.forms.rotation import Rotation

Numbers = dict[str, Tensor]
Compared = tuple[str, Tensor, Tensor]  # name, ours, expected

SHARED = tuple(
    f"gradient of {n} by"
    for n in ("k", "sinks", "log_c", "threshold", "slope", "shift", "out", "offset", "relative", "key_table")
)
LOGIT = 8.0  # no logit of standard normal q and k and of the families' biases is larger


@dataclass(frozen=True)
class Family:
    """Random numbers for a form, and the form built from them in any dtype."""

    numbers: Callable[[int, int, Call], Numbers]  # batch, heads, call -> float64
    form: Callable[[Numbers, Call], Form | None]


def _toeplitz_numbers(batch: int, heads: int, call: Call) -> Numbers:
    return {"table": torch.randn(heads, len(call.distances), dtype=torch.float64)}


def _rank_one_numbers(batch: int, heads: int, call: Call) -> Numbers:
    return {"total": (0.1 * torch.rand(batch, heads, call.keys, dtype=torch.float64)).cumsum(-1)}


def _weighted_numbers(batch: int, heads: int, call: Call) -> Numbers:
    weight = torch.rand(batch, heads, call.keys, dtype=torch.float64) - 0.2  # some are negative
    return _rank_one_numbers(batch, heads, call) | {"weight": weight}


def _scaled_numbers(batch: int, heads: int, call: Call) -> Numbers:
    units = 12
    slope, shift = (torch.rand(units, dtype=torch.float64) * 2 - 1 for _ in range(2))
    slope[0], shift[1] = 0.0, 3.0  # a unit without a slope, and one whose knot lies outside
    return {
        "log_c": torch.tensor(0.1, dtype=torch.float64).log(),
        "threshold": torch.tensor(40.5, dtype=torch.float64),
        "slope": slope,
        "shift": shift,
        "out": torch.randn(heads, units, dtype=torch.float64),
        "offset": torch.randn(heads, dtype=torch.float64),
    }


def _scaled(n: Numbers, call: Call) -> Scaled:
    distance = torch.arange(max(call.length, call.highest + 1), dtype=call.dtype)
    row = torch.log1p(n["log_c"].exp() * torch.maximum(call.query_positions.to(call.dtype), n["threshold"]))
    return Scaled(
        torch.log1p(n["log_c"].exp() * distance), row, n["slope"], n["shift"], n["out"], n["offset"], call.first
    )


def _rank_one(n: Numbers, call: Call) -> RankOne:
    return RankOne(n["total"].double(), n.get("weight"), call.dtype, symmetric=not call.causal)


FAMILIES = {
    "none": Family(lambda *_: {}, lambda *_: None),
    "toeplitz": Family(_toeplitz_numbers, lambda n, call: Toeplitz(n["table"], call.zero)),
    "rank one": Family(_rank_one_numbers, _rank_one),
    "rank one, weighted": Family(_weighted_numbers, _rank_one),
    "sum": Family(
        lambda *a: _toeplitz_numbers(*a) | _weighted_numbers(*a),
        lambda n, call: Sum((Toeplitz(n["table"], call.zero), _rank_one(n, call))),
    ),
    "scaled": Family(_scaled_numbers, _scaled),
}


def _vectors_numbers(of_keys: bool, heads_of_table: bool) -> Callable[[int, int, Call], Numbers]:
    def numbers(batch: int, heads: int, call: Call) -> Numbers:
        tokens = call.keys if of_keys else call.queries
        table = (heads if heads_of_table else 1, len(call.distances), 5)
        drawn = [0.5 * torch.randn(shape, dtype=torch.float64) for shape in ((batch, heads, tokens, 5), table)]
        return dict(zip(("key_vectors", "key_table") if of_keys else ("vectors", "relative"), drawn, strict=True))

    return numbers


def _of_queries(n: Numbers, call: Call) -> Projected:
    return Projected(n["vectors"], n["relative"], call.zero, first=call.first)


def _of_keys(n: Numbers, call: Call) -> Projected:
    return Projected(n["key_vectors"], n["key_table"], call.zero, of_keys=True, first=call.first)


# What the Triton kernels run besides.
GPU_FAMILIES = FAMILIES | {
    "vectors of queries": Family(_vectors_numbers(False, True), _of_queries),
    "vectors of keys": Family(_vectors_numbers(True, False), _of_keys),
    "every form": Family(
        lambda *a: (
            FAMILIES["sum"].numbers(*a)
            | _scaled_numbers(*a)
            | _vectors_numbers(False, False)(*a)
            | _vectors_numbers(True, True)(*a)
        ),
        lambda n, call: Sum((FAMILIES["sum"].form(n, call), _scaled(n, call), _of_queries(n, call), _of_keys(n, call))),
    ),
}
OF_TOKENS = ("rank one", "sum", "every form")  # families whose queries are among the keys


def normal(
    batch: int, heads: int, key_heads: int, queries: int, keys: int, head_dim: int, value_dim: int | None = None
) -> list[Tensor]:
    """q, k, v and the gradient of the output, in float64 but exact in float32."""
    sizes = (head_dim, value_dim or head_dim)
    shapes = [(heads, queries, 0), (key_heads, keys, 0), (key_heads, keys, 1), (heads, queries, 1)]
    return [torch.randn(batch, h, n, sizes[size]).double() for h, n, size in shapes]


def rotation(
    batch: int, queries: int, keys: int, pairs: int, layout: str, start: int | None = None, stretch: float = 0.002
) -> Rotation:
    """A rotation whose angles differ in the batch, which stretches queries and shrinks keys, as xPos does."""
    theta = 10.0 ** -torch.linspace(0, 3, pairs, dtype=torch.float64)
    first = keys - queries if start is None else start
    angles = [torch.arange(n, dtype=torch.float64)[:, None] + m for n, m in ((queries, first), (keys, 0))]
    tables = []
    for angle, sign in zip(angles, (1, -1), strict=True):
        turned = (angle + 7 * torch.arange(batch)[:, None, None]) * theta  # (batch, tokens, pairs)
        size = torch.exp(sign * stretch * (angle - keys / 2))
        tables += [turned.cos() * size, turned.sin() * size]
    return Rotation(*(x.float().double() for x in tables), layout)


def documents(*lengths: int) -> Tensor:
    """Ids of documents of these lengths: (keys,)."""
    return torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])


def random_numbers(family: Family, tensors: list[Tensor], options: dict) -> Numbers:
    """Random numbers of the family for a call, in float64 but exact in float32."""
    (batch, heads, queries, _), keys = tensors[0].shape, tensors[1].shape[2]
    names = ("causal", "documents", "padding", "start", "token_positions", "window")
    places = {n: x for n, x in options.items() if n in names}
    return {n: x.float().double() for n, x in family.numbers(batch, heads, Call(queries, keys, **places)).items()}


def values_and_gradients(
    attention: Callable[..., Tensor],
    dtype: torch.dtype,
    tensors: list[Tensor],
    family: Family,
    numbers: Numbers,
    options: dict,
) -> Numbers:
    """The output and every gradient, by name; and the log-sum-exp, if the options hold `grad_lse`."""
    *qkv, grad = tensors
    (batch, heads, queries, head_dim), keys = qkv[0].shape, qkv[1].shape[2]
    wide = torch.promote_types(dtype, torch.float32)
    options = dict(options)
    grad_lse, sinks, rotation = (options.pop(name, None) for name in ("grad_lse", "sinks", "rotation"))
    # detach, and not clone: a view that is not contiguous must stay one.
    leaves = {n: x.detach().to(dtype).detach().requires_grad_() for n, x in zip("qkv", qkv, strict=True)}
    own = {n: x.to(torch.float64 if n == "total" else wide).clone().requires_grad_() for n, x in numbers.items()}
    if sinks is not None:
        options["sinks"] = own["sinks"] = sinks.to(wide).clone().requires_grad_()
    if rotation is not None:
        tables = (rotation.q_cos, rotation.q_sin, rotation.k_cos, rotation.k_sin)
        options["rotation"] = Rotation(*(x.to(wide) for x in tables), rotation.layout)
    call = Call(
        queries,
        keys,
        scale=head_dim**-0.5,
        dtype=wide,
        batch=batch,
        heads=heads,
        return_lse=grad_lse is not None,
        **options,
    )
    out, lse = attention(*leaves.values(), family.form(own, call), call)
    results = {"out": out.detach().double()}
    if grad_lse is None:
        assert lse is None
        out.backward(grad.to(dtype))
    else:
        seen = lse.isfinite()
        results["lse"] = torch.where(seen, lse, 0.0).detach().double()
        results["unseen"] = (lse == -torch.inf).double()
        torch.autograd.backward([out, lse], [grad.to(dtype), torch.where(seen, grad_lse.to(wide), 0.0)])
    gradients = {
        f"gradient of {n}": torch.zeros_like(x).double() if x.grad is None else x.grad.double()
        for n, x in (leaves | own).items()
    }
    return results | gradients


def compare(
    tensors: list[Tensor],
    family: Family,
    numbers: Numbers,
    options: dict,
    skip: bool = True,
    isas: Iterable[str] = (),
    dtype: torch.dtype = torch.float32,
    kernel: Callable[..., Tensor] | None = None,
) -> list[Compared]:
    """What a kernel gives, in float32, and the reference, in float64.

    Without `kernel`, the native one: by the chosen instruction set or by several.
    """
    expected = values_and_gradients(reference.attention, torch.float64, tensors, family, numbers, options)
    if kernel is not None:
        ours = values_and_gradients(kernel, dtype, tensors, family, numbers, options)
        return [(f"{name} by the kernel", ours[name], expected[name]) for name in expected]
    kernel, chosen = partial(native.attention, skip=skip), library.isa()
    compared = []
    try:
        for isa in isas or (chosen,):
            library.use(isa)
            ours = values_and_gradients(kernel, dtype, tensors, family, numbers, options)
            compared += [(f"{name} by {isa}", ours[name], expected[name]) for name in expected]
    finally:
        library.use(chosen)
    return compared


def assert_close(
    results: Iterable[Compared],
    logit: float = LOGIT,
    unit: float = 0.0,
    steps: int = 1,
    shared: tuple[str, ...] = SHARED,
) -> None:
    """Errors are rounding errors.

    A logit is a sum rounded to float32: it is off by a few units u = 2^−24 of the largest logit, and so, relatively, is
    its weight; a product or a sum adds a few u more. Everything else is linear in the weights. So the largest error is
    held to 32 u (1 + largest |logit|) of the largest entry. Where an entry is 0 by cancellation (a row of gradients of
    scores sums to 0), what cancelled was of the order of 1, as q, k, v and the gradient of the output are.

    In half precision, `unit` is half a unit in the last place of 1. The output is rounded to it, and from the rounded
    output the backward computes what it subtracts from all gradients of a row. What is summed over many rows, as the
    gradient of a number that they share, collects these errors.

    The gradient of a key, and of a number of the bias that all rows share, is a sum over them, of gradients of weights
    that are sums over value_dim: their errors add up as a random walk of `steps` = rows · value_dim steps, each a small
    part of the bound. (If all rows see one key only, its gradient is 0, and what is left is this walk.) `shared` are
    the beginnings of their names.
    """
    for name, ours, expected in results:
        assert ours.shape == expected.shape, name
        error = (ours - expected).abs().max().item()
        walk = max(1.0, steps**0.5 / 8) if name.startswith(shared) else 1.0
        bound = walk * (32 * 2.0**-24 * (1 + logit) + 32 * unit) * max(1.0, expected.abs().max().item())
        assert error <= bound, f"{name} is off by {error:.2e}, more than {bound:.2e}"


def check(
    family: str,
    tensors: list[Tensor],
    options: dict,
    skip: bool = True,
    logit: float = LOGIT,
    isas: Iterable[str] = (),
    dtype: torch.dtype = torch.float32,
    kernel: Callable[..., Tensor] | None = None,
) -> None:
    """The kernel is as close to the reference as rounding allows, for random numbers of the family."""
    batch, heads, queries, _ = tensors[0].shape
    numbers = random_numbers(GPU_FAMILIES[family], tensors, options)
    unit = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0
    if unit:
        tensors = [x.to(dtype).double() for x in tensors]
    compared = compare(tensors, GPU_FAMILIES[family], numbers, options, skip, isas, dtype, kernel)
    assert_close(compared, logit, unit, steps=batch * heads * queries * tensors[2].shape[3])


# -- Arguments of a call with a batch of 2 and 4 heads

SINKS = torch.tensor([1.0, -2.0, 9.0, 0.0], dtype=torch.float64)


def packed(keys: int) -> torch.Tensor:
    short = min(50, keys // 4)
    return torch.stack([documents(keys // 2 - short, short, keys - keys // 2), documents(5, keys - 7, 2)])


def lse_gradient(queries: int) -> torch.Tensor:
    return torch.randn(2, 4, queries, dtype=torch.float64)


ARGUMENTS = {  # by the numbers of queries and keys
    "plain": lambda n, m: {},
    "documents": lambda n, m: {"documents": packed(m)},
    "padding": lambda n, m: {"padding": torch.rand(2, m) > 0.3},
    "left padding": lambda n, m: {"padding": torch.arange(m) >= torch.tensor([[2 * m // 3], [0]])},
    "nothing to see": lambda n, m: {"padding": torch.arange(m) >= torch.tensor([[m], [0]])},
    "documents and padding": lambda n, m: {"documents": packed(m), "padding": torch.rand(2, m) > 0.5},
    "start": lambda n, m: {"start": (m - n) // 3},
    "window": lambda n, m: {"window": (m // 4, 10)},
    "a window of one token": lambda n, m: {"window": (0, 0)},
    "a window over tiles": lambda n, m: {"window": (70, 70), "start": (m - n) // 2},
    "sinks": lambda n, m: {"sinks": SINKS},
    "sinks and no key": lambda n, m: {
        "sinks": SINKS,
        "padding": torch.zeros(2, m, dtype=torch.bool),
        "grad_lse": lse_gradient(n),
    },
    "lse": lambda n, m: {"grad_lse": lse_gradient(n)},
    "lse and sinks": lambda n, m: {"grad_lse": lse_gradient(n), "sinks": SINKS},
    "softcap": lambda n, m: {"softcap": 1.5},
    "a high softcap": lambda n, m: {"softcap": 50.0},
    "dropout": lambda n, m: {"dropout": 0.3, "seed": torch.tensor(2**62 + 12345)},
    "rotation": lambda n, m: {"rotation": rotation(2, n, m, 8, "half", stretch=0.3 / m)},
    "rotation of some dimensions": lambda n, m: {"rotation": rotation(1, n, m, 5, "interleaved", stretch=0.3 / m)},
    "all of them": lambda n, m: {
        "start": (m - n) // 2,
        "window": (m // 3, 20),
        "sinks": SINKS,
        "grad_lse": lse_gradient(n),
        "softcap": 2.0,
        "dropout": 0.2,
        "seed": torch.tensor(7),
        "rotation": rotation(2, n, m, 8, "half", start=(m - n) // 2, stretch=0.3 / m),
        "padding": torch.rand(2, m) > 0.3,
        "documents": packed(m),
    },
}


def options_of(argument: str, shape: Sequence[int]) -> dict:
    """The arguments of a case for a shape (batch, heads, key_heads, queries, keys, …)."""
    options = ARGUMENTS[argument](*shape[3:5])
    for name, axis in (("sinks", 0), ("grad_lse", 1)):
        if name in options:
            options[name] = options[name].narrow(axis, 0, shape[1])
    return options


# -- Any call

FUZZ = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


def laid_out(tensors: list[torch.Tensor], layout: str) -> list[torch.Tensor]:
    """The tensors with other strides."""
    if layout == "packed":  # (batch, length, 2, heads, head_dim) in memory
        return [torch.stack([x.transpose(1, 2)] * 2, 2)[:, :, 1].transpose(1, 2) for x in tensors]
    if layout == "transposed":
        return [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in tensors]
    if layout == "expanded gradient":
        return [*tensors[:3], torch.ones((), dtype=torch.float64).expand(tensors[3].shape)]
    return tensors


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
def calls(draw, families, longest, widest):
    """A family, tensors, options and a dtype."""
    batch, key_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    heads = key_heads * group
    keys = draw(st.integers(1, longest))
    family = draw(st.sampled_from(families))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    options = {"causal": draw(st.booleans())}
    packed = draw(st.booleans())
    if packed:
        cuts = torch.rand(batch, keys) < draw(st.sampled_from([0.01, 0.05, 0.5]))
        options["documents"] = cuts.long().cumsum(1)
    if packed or family.startswith(OF_TOKENS) or draw(st.booleans()):  # the queries are tokens
        queries = draw(st.integers(1, keys))
        if draw(st.booleans()):
            options["start"] = draw(st.integers(0, keys - queries))
    else:
        queries, options["start"] = draw(st.integers(1, longest)), draw(st.integers(0, longest))
    if draw(st.booleans()):
        options["padding"] = torch.rand(batch, keys) < draw(st.sampled_from([0.0, 0.5, 0.95]))
    if draw(st.booleans()):
        options["window"] = draw(st.tuples(st.integers(0, 150), st.integers(0, 150)))
    options |= draw(softmax_options(batch, heads, queries))
    head_dim, value_dim = draw(st.integers(1, widest)), draw(st.integers(1, widest))
    pairs = draw(st.integers(0, head_dim // 2))
    if pairs:
        layout, rows = draw(st.sampled_from(["half", "interleaved"])), draw(st.sampled_from([1, batch]))
        options["rotation"] = rotation(rows, queries, keys, pairs, layout, options.get("start"))
    tensors = normal(batch, heads, key_heads, queries, keys, head_dim, value_dim)
    tensors = laid_out(tensors, draw(st.sampled_from(["contiguous", "packed", "transposed", "expanded gradient"])))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]))
    return family, tensors, options, dtype
