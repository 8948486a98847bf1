"""The kernel as torch operators: `relpos::attention` and its backward, with fake versions for tracing and autograd.

The arguments of the forward are the fields of `Inputs`, in their order; the schema is made of them.
"""

import ctypes
import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from relpos.attend.native import library
from relpos.attend.native.library import Array, constant
from relpos.attend.native.packing import TablePacking, TotalsPacking, kinds
from relpos.attend.native.problem import BIAS, LEARNED, NAMES, TENSORS, Inputs, Problem

# What PyTorch's schemas call the types of the fields.
TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "SymInt", bool: "bool", float: "float"}
ARGUMENTS = ", ".join(f"{TYPES[item.type]} {item.name}" for item in fields(Inputs))  # type: ignore[index]

_last_counts: Tensor | None = None


def skipped_fraction() -> float:
    """Share of the visible tiles that the last forward, in any thread, did not compute."""
    counts = _last_counts
    if counts is None:
        return 0.0
    visible, scored = counts[:, 1].sum().item(), counts[:, 2].sum().item()
    return 1.0 - scored / visible if visible else 0.0


def make_problem(inputs: Inputs) -> tuple[Problem, list[TablePacking | TotalsPacking]]:
    """The problem for the kernel, with its bias packed."""
    problem = Problem(inputs)
    return problem, [kind(inputs, problem) for kind in kinds(inputs)]


def skipping_words(inputs: Inputs) -> int:
    """Length of the record of skipped tiles (native/src/skipping.h), in 64-bit words; 0 if none is ever skipped."""
    forms = kinds(inputs)
    if not (inputs.skip and forms and all(form.skips for form in forms)) or inputs.softcap or inputs.dropout:
        return 0
    tile, first = constant("TILE"), inputs.start
    batch, heads, queries, _ = inputs.q.shape
    key_blocks = (inputs.k.shape[2] + tile - 1) // tile
    query_blocks = (first + queries - 1) // tile - first // tile + 1
    return batch * heads * constant("SKIP_COUNTS") + (batch * heads * query_blocks * key_blocks + 7) // 8


def empty_out(inputs: Inputs) -> Tensor:
    """An empty output, laid out so that merging the heads copies nothing; not a view, so that it may be changed."""
    (batch, heads, queries, _), dim = inputs.q.shape, inputs.v.shape[-1]
    strides = (queries * heads * dim, dim, heads * dim, 1)
    return inputs.q.new_empty_strided((batch, heads, queries, dim), strides)


def run(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the forward, as the operator does, but without the operator's cost of some ten microseconds."""
    return run_problem(inputs, make_problem(inputs)[0])


def run_problem(inputs: Inputs, problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the forward for the problem that was made of the inputs."""
    global _last_counts  # noqa: PLW0603
    p = problem.fields
    rows = inputs.q.shape[:3]
    out, lse = empty_out(inputs), torch.empty(2, *rows, dtype=torch.float32)
    words = skipping_words(inputs)
    skipping = torch.zeros(words, dtype=torch.int64)
    p.out, p.lse, p.skipping = Array.of(out), lse.data_ptr(), skipping.data_ptr() or None
    problem.run("relpos_forward")
    heads, counts = rows[0] * rows[1], constant("SKIP_COUNTS")
    _last_counts = skipping[: heads * counts].view(heads, counts).clone() if words else None
    return out, natural(lse, inputs.sinks) if inputs.return_lse else lse.new_empty(0), lse, skipping


def natural(lse: Tensor, sinks: Tensor | None) -> Tensor:
    """The natural logarithm of the sum, from the kernel's two parts in base 2; −inf for a row without any term."""
    total = torch.where(lse[0] == math.inf, -math.inf, (lse[0] + lse[1]) * math.log(2.0))
    # A sum is at least its sink, which in base 2 may be beyond float32.
    return total if sinks is None else torch.maximum(total, sinks.float()[:, None])


@torch.library.custom_op(
    "relpos::attention", mutates_args=(), schema=f"({ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output, natural log-sum-exp (empty unless asked for), log-sum-exp for the backward, record of skipping.

    The output is (batch, heads, queries, value_dim). The log-sum-exp for the backward, (2, batch, heads, queries), has
    base 2 and two parts: the largest score of a row, and the logarithm of the remaining sum.
    """
    return run(Inputs(*arguments))


@forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = Inputs(*arguments)
    rows, q = inputs.q.shape[:3], inputs.q
    return (
        empty_out(inputs),
        q.new_empty(rows if inputs.return_lse else 0, dtype=torch.float32),
        q.new_empty(2, *rows, dtype=torch.float32),
        q.new_empty(skipping_words(inputs), dtype=torch.int64),
    )


@torch.library.custom_op(
    "relpos::attention_backward",
    mutates_args=(),
    schema=f"(Tensor? grad, Tensor? grad_lse, Tensor out, Tensor lse, Tensor skipping, bool learns, {ARGUMENTS}) "
    "-> Tensor[]",
)
def backward(
    grad: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor, skipping: Tensor, learns: bool,
    *arguments: Any,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, of the tensors of the bias if it `learns`, and of the sinks, in the order of LEARNED.

    Where there is none, the tensor is empty.
    """
    inputs = Inputs(*arguments)
    problem, forms = make_problem(inputs)
    p = problem.fields
    grad = torch.zeros_like(out) if grad is None else grad
    grads = {
        name: torch.empty_like(x, memory_format=torch.contiguous_format)
        for name, x in zip("qkv", arguments, strict=False)
    }
    p.grad_q, p.grad_k, p.grad_v = (Array.of(x) for x in grads.values())
    p.grad_out, p.out, p.lse = problem.array(grad), problem.array(out), problem.keep(lse).data_ptr()
    p.skipping = problem.keep(skipping).data_ptr() or None
    if grad_lse is not None:
        p.grad_lse = problem.keep(grad_lse.float()).data_ptr()
    sums: dict[str, Tensor] = {}
    if learns:
        slots = library.load().relpos_slots(ctypes.byref(p))
        for form in forms:
            sums |= form.buffers(slots)
        for name, x in sums.items():
            setattr(p, name, x.data_ptr())
    problem.run("relpos_backward")
    if learns:
        for form in forms:
            grads |= form.gradients(sums)
    if inputs.sinks is not None:
        grads["sinks"] = sinks_gradient(inputs.sinks, out, lse, grad, grad_lse)
    return [grads.get(name, lse.new_empty(0)) for name in LEARNED]


def sinks_gradient(sinks: Tensor, out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None) -> Tensor:
    """A sink takes its share of every row from the output, and adds to its log-sum-exp: (heads,)."""
    share = (sinks.float()[:, None] - natural(lse, sinks)).exp()  # (batch, heads, queries)
    moved = -(out.float() * grad.float()).sum(-1)
    if grad_lse is not None:
        moved = moved + grad_lse
    return (share * moved).sum((0, 2)).to(sinks.dtype)


@backward.register_fake
def _(
    grad: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor, skipping: Tensor, learns: bool,
    *arguments: Any,
) -> list[Tensor]:  # fmt: skip
    inputs = Inputs(*arguments)
    names = {*"qkv", "sinks", *(BIAS if learns else ())}
    tensors = [(name, getattr(inputs, name)) for name in LEARNED]
    return [lse.new_empty(0) if x is None or name not in names else x.new_empty(x.shape) for name, x in tensors]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, _, lse, skipping = output
    ctx.save_for_backward(*inputs[: len(TENSORS)], out, lse, skipping)
    ctx.options = inputs[len(TENSORS) :]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    """Gradients for every argument of `forward`."""
    if grad is None and grad_lse is None:
        return (None,) * len(NAMES)
    try:
        *tensors, out, lse, skipping = ctx.saved_tensors
    except RuntimeError as error:  # PyTorch's words name neither attention nor a way on
        raise RuntimeError(
            "the backward of attention reads q, k, v and the output, and one of them was changed in place after the "
            "forward: write out = out + x in place of out += x."
        ) from error
    wanted = ctx.needs_input_grad[: len(LEARNED)]
    learns = any(wanted[3:-1])
    grads = backward(grad, grad_lse, out, lse, skipping, learns, *tensors, *ctx.options)
    learned = [x if needed else None for x, needed in zip(grads, wanted, strict=True)]
    return (*learned, *[None] * (len(NAMES) - len(LEARNED)))


def _refuse_second_derivatives(ctx: Any, *_: Any) -> None:
    raise RuntimeError(
        "the native kernel has first derivatives only: for second derivatives pass backend='reference' or 'chunks'."
    )


forward.register_autograd(_differentiate, setup_context=_setup)
backward.register_autograd(_refuse_second_derivatives, setup_context=lambda ctx, inputs, output: None)


def needs_operator(tensors: Iterable[Tensor | None]) -> bool:
    """Whether anything but the kernel must see the call: autograd, a trace, or a tensor that is not a plain one."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    graded = torch.is_grad_enabled()
    plain = (Tensor, torch.nn.Parameter)
    return any(x is not None and (type(x) not in plain or (graded and x.requires_grad)) for x in tensors)
