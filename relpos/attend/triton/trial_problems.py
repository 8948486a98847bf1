"""Problems with random numbers for the Triton kernels, and how far a backend is from the definition in float64."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from relpos.attend import reference
from relpos.attend.arguments import Position, make_call
from relpos.attend.backends import Backend, positioned
from relpos.encodings.registry import encoding
from relpos.forms.bias import Projected, RankOne, Scaled, Sum, Toeplitz
from relpos.forms.call import Call

Numbers = dict[str, Tensor]
UNITS = 32  # of the network of a Scaled form
# Largest difference from the definition, relative to the largest entry: a few units in the last place of the products,
# whose rounding the backward meets several times.
LIMITS = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-5}


@dataclass(frozen=True, kw_only=True)
class TrialProblem:
    """Sizes, the terms of the bias, and arguments of attention, of which every number is random."""

    terms: tuple[str, ...] = ()  # names in TERMS
    batch: int = 2
    heads: int = 4
    key_heads: int = 2
    queries: int = 200
    keys: int = 200
    head_dim: int = 64
    value_dim: int = 64
    size: int = 64  # of the vectors of a Projected term
    steep: float = 0.0  # by how much the bias falls per token, so that far tiles do not matter
    strided: bool = False  # whether heads lie between tokens in memory, as projections leave them
    # Arguments of attention; documents, padding, positions and sinks are made where they are True.
    options: Mapping[str, Any] = field(default_factory=dict)

    def numbers(self, dtype: torch.dtype) -> Numbers:
        """Random numbers by name, in float64 on the CPU, but exact in `dtype` where the kernels multiply them in it."""
        draw = torch.Generator().manual_seed(0)

        def normal(*shape: int, exact_in: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float32).to(exact_in).double()

        tensors = {
            "q": normal(self.batch, self.heads, self.queries, self.head_dim, exact_in=dtype),
            "k": normal(self.batch, self.key_heads, self.keys, self.head_dim, exact_in=dtype),
            "v": normal(self.batch, self.key_heads, self.keys, self.value_dim, exact_in=dtype),
            "gradient": normal(self.batch, self.heads, self.queries, self.value_dim, exact_in=dtype),
            "gradient of lse": normal(self.batch, self.heads, self.queries),
        }
        if "sinks" in self.options:
            tensors["sinks"] = normal(self.heads)
        call = self.call()
        for name in self.terms:
            for number, (shape, kind) in TERMS[name][0](self, call).items():
                x = normal(*shape, exact_in=dtype if kind == "vector" else torch.float32)
                tensors[number] = x.abs().cumsum(-1).float().double() / 16 if kind == "growing" else x
        if self.steep and "table" in tensors:
            tensors["table"] -= self.steep * call.distances.abs()
        if self.steep and "total" in tensors:
            tensors["total"] += self.steep * torch.arange(self.keys)
            tensors["weight"] = tensors["weight"].abs() / 4 + 0.5
        return tensors

    def call(self) -> Call:
        """The call without what is tensors, for the sizes of tables."""
        places = {name: self.options[name] for name in ("causal", "start") if name in self.options}
        return Call(self.queries, self.keys, batch=self.batch, heads=self.heads, **places)

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """The arguments of attention besides q, k, v, the position and the sinks."""
        index = torch.arange(self.keys, device=device).expand(self.batch, -1)
        row = torch.arange(self.batch, device=device)[:, None]
        made = {
            "documents": (index + 11 * row) // (self.keys * 2 // 5 + 1),  # two or three
            "padding": (index + row) % 7 != 3,
            "positions": index + index // 5 * 2 + row,  # with gaps
        }
        options = {name: made.get(name, value) for name, value in self.options.items() if name != "sinks"}
        return options | {"return_lse": True}

    def position(self, numbers: Numbers) -> Position | None:
        """The bias made of the numbers, or a rotary encoding."""
        made = [TERMS[name][1](numbers, self.call()) for name in self.terms]
        if not made:
            return None
        return made[0] if len(made) == 1 else Sum(tuple(made))


Shapes = dict[str, tuple[tuple[int, ...], str]]  # name: shape and kind


def _table(problem: TrialProblem, call: Call) -> Shapes:
    return {"table": ((call.heads, len(call.distances)), "")}


def _short_table(problem: TrialProblem, call: Call) -> Shapes:
    return {"short table": ((call.heads, 2 * _limit(call) + 1), "")}


def _limit(call: Call) -> int:
    return call.keys // 3


def _clipped(n: Numbers, call: Call) -> Toeplitz:
    limit = _limit(call)
    distance = call.distances.long().to(n["short table"].device)
    return Toeplitz(n["short table"][:, distance.clamp(-limit, limit) + limit], call.zero, ends=(-limit, limit))


def _totals(problem: TrialProblem, call: Call) -> Shapes:
    shape = (call.batch, call.heads, call.keys)
    return {"total": (shape, "growing"), "weight": (shape, "")}


def _network(problem: TrialProblem, call: Call) -> Shapes:
    return {
        "curve": ((call.length,), "growing"),
        "row": ((1, call.queries), ""),
        "slope": ((UNITS,), ""),
        "shift": ((UNITS,), ""),
        "network": ((call.heads, UNITS), ""),
        "offset": ((call.heads,), ""),
    }


def _scaled(n: Numbers, call: Call) -> Scaled:
    network = (n["slope"], n["shift"], n["network"] / UNITS**0.5, n["offset"])
    return Scaled(n["curve"], n["row"].abs() + 1.0, *network, first=call.first)


def _vectors(problem: TrialProblem, call: Call) -> Shapes:
    return {
        "vectors": ((call.batch, call.heads, call.queries, problem.size), "vector"),
        "relative": ((1, len(call.distances), problem.size), "vector"),
    }


def _key_vectors(problem: TrialProblem, call: Call) -> Shapes:
    return {
        "key vectors": ((call.batch, call.heads, call.keys, problem.size), "vector"),
        "key relative": ((call.heads, len(call.distances), problem.size), "vector"),
    }


def _smaller(vectors: Tensor) -> Tensor:
    """Vectors whose products with normal ones are of the order of 1; times a power of two, which rounds nothing."""
    return vectors * 2.0 ** -((vectors.shape[-1].bit_length() - 1) // 2)


def _rotation(n: Numbers, call: Call) -> Position:
    return encoding("rope", heads=call.heads, head_dim=n["q"].shape[-1]).to(n["q"].device)


# The random numbers that a term needs, and the term made of them.
TERMS: dict[str, tuple[Callable[[TrialProblem, Call], Shapes], Callable[[Numbers, Call], Any]]] = {
    "Toeplitz": (_table, lambda n, call: Toeplitz(n["table"], call.zero)),
    "Toeplitz with ends": (_short_table, _clipped),
    "RankOne": (_totals, lambda n, call: RankOne(n["total"], n["weight"], symmetric=not call.causal)),
    "RankOne without weights": (
        lambda problem, call: {"total": _totals(problem, call)["total"]},
        lambda n, call: RankOne(n["total"], symmetric=not call.causal),
    ),
    "Scaled": (_network, _scaled),
    "Projected": (_vectors, lambda n, call: Projected(_smaller(n["vectors"]), n["relative"], call.zero)),
    "Projected of keys": (
        _key_vectors,
        lambda n, call: Projected(_smaller(n["key vectors"]), n["key relative"], call.zero, of_keys=True),
    ),
    "rope": (lambda problem, call: {}, _rotation),
}


def results(
    problem: TrialProblem,
    backend: Backend,
    dtype: torch.dtype,
    device: torch.device,
    numbers: Numbers,
    backward: bool = True,
) -> Numbers:
    """The output, the log-sum-exp and every gradient, by name, in float64 on the CPU."""
    leaves = make_leaves(numbers, dtype, device)
    q, k, v = (interleaved(leaves[name]) if problem.strided else leaves[name] for name in "qkv")
    with torch.set_grad_enabled(backward):
        out, lse = run(backend, q, k, v, problem.position(leaves), problem.arguments(device) | sinks_of(leaves))
    assert lse is not None
    seen = lse.isfinite()
    values = {"out": out, "lse": torch.where(seen, lse, 0.0), "rows that see nothing": ~seen}
    if backward:
        learned = {name: x for name, x in leaves.items() if x.requires_grad}
        grads = torch.autograd.grad(
            [out, lse],
            list(learned.values()),
            [leaves["gradient"], torch.where(seen, leaves["gradient of lse"], 0.0)],
            allow_unused=True,
            materialize_grads=True,
        )
        values |= {f"gradient of {name}": x for name, x in zip(learned, grads, strict=True)}
    return {name: x.detach().double().cpu() for name, x in values.items()}


def make_leaves(numbers: Numbers, dtype: torch.dtype, device: torch.device) -> Numbers:
    """The numbers as attention receives them, with gradients."""
    kinds = dict.fromkeys(("q", "k", "v", "gradient"), dtype) | {"total": torch.float64}
    wide = torch.promote_types(dtype, torch.float32)
    return {
        name: x.to(device, kinds.get(name, wide)).requires_grad_(not name.startswith("gradient"))
        for name, x in numbers.items()
    }


def interleaved(x: Tensor) -> Tensor:
    """The same values (batch, heads, tokens, size), with the heads between the tokens in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def sinks_of(leaves: Numbers) -> dict[str, Tensor]:
    """The argument `sinks`, if there are any."""
    return {"sinks": leaves["sinks"]} if "sinks" in leaves else {}


def run(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, position: Position | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Attention by one backend, as `relpos.attention` runs it, without the check at first use."""
    q, k, form, call = positioned(q, k, position, make_call(q, k, position, **options))
    reason = backend.refuses(q, v, form, call)
    if reason is not None:
        raise ValueError(reason)
    return backend.attention(q, k, v, form, call)


def exact(problem: TrialProblem, numbers: Numbers, backward: bool = True) -> Numbers:
    """What the definition gives, in float64 on the CPU."""
    return results(problem, reference, torch.float64, torch.device("cpu"), numbers, backward)


def difference(ours: Numbers, expected: Numbers) -> tuple[float, str]:
    """The largest difference, relative to the largest entry of its tensor, and the name of that tensor."""
    largest, where = 0.0, "out"
    for name, x in expected.items():
        error, entry = float((ours[name] - x).abs().max()), float(x.abs().max())
        relative = error / entry if entry else math.inf if error else 0.0
        if math.isnan(relative) or relative > largest:
            largest, where = relative, name
        if math.isnan(relative):
            break
    return largest, where


def one_line(error: BaseException) -> str:
    """An exception in one line: compilers write pages."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300].rstrip('.')}"
