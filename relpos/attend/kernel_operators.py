"""A compiled kernel as torch operators: forward and backward, with fake versions for tracing, and autograd.

The arguments of the forward are the fields of `Inputs`, in their order; the schema is made of them.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, Protocol

import torch
from torch import Tensor

from relpos.attend.kernel_inputs import BIAS, LEARNED, NAMES, TENSORS, Inputs

# What PyTorch's schemas call the types of the fields.
TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "SymInt", bool: "bool", float: "float"}
ARGUMENTS = ", ".join(f"{TYPES[item.type]} {item.name}" for item in fields(Inputs))  # type: ignore[index]
Results = tuple[Tensor, Tensor, Tensor, Tensor]


class Kernel(Protocol):
    """What an operator runs. Results are the output (batch, heads, queries, value_dim); the natural log-sum-exp, empty
    unless asked for; the log-sum-exp that the backward reads; and a record for the backward, or an empty tensor."""

    def run(self, inputs: Inputs) -> Results:
        """The forward."""

    def fake(self, inputs: Inputs) -> Results:
        """Empty results of its shapes."""

    def gradients(
        self, inputs: Inputs, grad: Tensor, grad_lse: Tensor | None, results: Results, wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        """Gradients by the names of `LEARNED`; those of q, k, v and the sinks always, of the bias where wanted."""


def empty_out(inputs: Inputs) -> Tensor:
    """An empty output, laid out so that merging the heads copies nothing; not a view, so that it may be changed."""
    (batch, heads, queries, _), dim = inputs.q.shape, inputs.v.shape[-1]
    strides = (queries * heads * dim, dim, heads * dim, 1)
    return inputs.q.new_empty_strided((batch, heads, queries, dim), strides)


def register(name: str, kernel: Kernel) -> Callable[..., Results]:
    """Register `relpos::NAME` and `relpos::NAME_backward`, and return the forward, a function of `Inputs.values()`."""

    @torch.library.custom_op(
        f"relpos::{name}", mutates_args=(), schema=f"({ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)"
    )
    def forward(*arguments: Any) -> Results:
        return kernel.run(Inputs(*arguments))

    @forward.register_fake
    def _(*arguments: Any) -> Results:
        return kernel.fake(Inputs(*arguments))

    @torch.library.custom_op(
        f"relpos::{name}_backward",
        mutates_args=(),
        schema="(Tensor? grad, Tensor? grad_lse, Tensor out, Tensor lse, Tensor record, bool[] wanted, "
        f"{ARGUMENTS}) -> Tensor[]",
    )
    def backward(
        grad: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor, record: Tensor, wanted: list[bool],
        *arguments: Any,
    ) -> list[Tensor]:  # fmt: skip
        """Gradients in the order of LEARNED; where there is none, the tensor is empty."""
        grad = torch.zeros_like(out) if grad is None else grad
        if grad_lse is not None and not grad_lse.numel():  # of a log-sum-exp that was not asked for
            grad_lse = None
        names = frozenset(name for name, needed in zip(LEARNED, wanted, strict=True) if needed)
        grads = kernel.gradients(Inputs(*arguments), grad, grad_lse, (out, out, lse, record), names)
        return [grads.get(name, lse.new_empty(0)) for name in LEARNED]

    @backward.register_fake
    def _(
        grad: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor, record: Tensor, wanted: list[bool],
        *arguments: Any,
    ) -> list[Tensor]:  # fmt: skip
        inputs, learns = Inputs(*arguments), any(wanted[3:-1])
        names = {*"qkv", "sinks", *(BIAS if learns else ())}
        tensors = [(name, getattr(inputs, name)) for name in LEARNED]
        return [lse.new_empty(0) if x is None or name not in names else x.new_empty(x.shape) for name, x in tensors]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
        out, _, lse, record = output
        ctx.save_for_backward(*inputs[: len(TENSORS)], out, lse, record)
        ctx.options = inputs[len(TENSORS) :]
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        """Gradients for every argument of `forward`."""
        if grad is None and grad_lse is None:
            return (None,) * len(NAMES)
        try:
            *tensors, out, lse, record = ctx.saved_tensors
        except RuntimeError as error:  # PyTorch's words name neither attention nor a way on
            raise RuntimeError(
                "the backward of attention reads q, k, v and the output, and one of them was changed in place after "
                "the forward: write out = out + x in place of out += x."
            ) from error
        wanted = list(ctx.needs_input_grad[: len(LEARNED)])
        grads = backward(grad, grad_lse, out, lse, record, wanted, *tensors, *ctx.options)
        learned = [x if needed else None for x, needed in zip(grads, wanted, strict=True)]
        return (*learned, *[None] * (len(NAMES) - len(LEARNED)))

    def refuse_second_derivatives(ctx: Any, *_: Any) -> None:
        raise RuntimeError(
            "the compiled kernels have first derivatives only: for second derivatives pass backend='reference' or "
            "'chunks'."
        )

    forward.register_autograd(differentiate, setup_context=setup)
    backward.register_autograd(refuse_second_derivatives, setup_context=lambda ctx, inputs, output: None)
    return forward


def needs_operator(tensors: Iterable[Tensor | None]) -> bool:
    """Whether anything but the kernel must see the call: autograd, a trace, or a tensor that is not a plain one."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    graded = torch.is_grad_enabled()
    plain = (Tensor, torch.nn.Parameter)
    return any(x is not None and (type(x) not in plain or (graded and x.requires_grad)) for x in tensors)
