"""Keys and values travel around a ring of the processes, and each merges what its queries find in every slice.

A block gives an output and a log-sum-exp; blocks are merged by these. The backward computes every block again: with the
final out and lse and the share w = e^(lse_block − lse) of a block in each row,

d out_block = w · d out,   d lse_block = w · (d out · (out_block − out) + d lse)

and the gradients of keys and values travel on with them, back to their owner. Each process holds two slices of keys and
values at a time. In causal attention the later processes have more blocks to compute than the earlier ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from relpos.attend.arguments import check_finite
from relpos.attend.backends import choose
from relpos.attend.parallel.blocks import Blocks
from relpos.attend.parallel.exchange import shift, sum_before
from relpos.attend.parallel.inputs import Inputs, form_of_two_tokens
from relpos.attend.parallel.slices import Slices
from relpos.forms.bias import Form, RankOne, Scaled, Sum, Toeplitz, terms

Result = tuple[Tensor, Tensor] | None  # output and log-sum-exp of a block; None if it has no key that is seen


def refuses(inputs: Inputs) -> str | None:
    """Why the ring cannot run a call, as a sentence; None if it can."""
    position, causal = inputs.position, inputs.options["causal"]
    if inputs.options["dropout"] or inputs.options["mask"] is not None:
        return (
            "dropout and mask= need indices in the whole sequence, and the blocks of a ring count from their own start."
        )
    if position is None:
        return None
    found, otherwise = form_of_two_tokens(position, causal, inputs.q)
    name = type(position).__name__
    for term in found:
        if not isinstance(term, Toeplitz | RankOne | Scaled):
            return f"the bias of {name} is a function of complete rows of scores, and a ring computes them in blocks."
        if isinstance(term, Scaled) and not causal:
            return f"the bias of {name} is scaled by each key in both directions, which a block of the ring is not."
        if isinstance(term, Scaled) and inputs.call(all_queries=False).lowest < 0:
            return f"the positions descend, and the bias of {name} is then not scaled by the queries of a block alone."
    return f"{name} changes queries and keys by a function of all tokens." if otherwise else None


def attention(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Attention over the slices: output (batch, heads, length, value_dim), and the log-sum-exp if asked for."""
    call, position, q = inputs.call(all_queries=False), inputs.position, inputs.q
    form = None
    if position is not None:
        factor = position.query_factor(call)
        if factor is not None:
            check_finite("factor of the queries", factor)
            q = q.to(call.dtype) * factor
        form = position.located_bias(replace(call, gates=inputs.gates))
        if form is not None:
            for name, numbers in form.tensors():
                check_finite(f"{name} of the bias", numbers)
            form = _continued(inputs.slices, form)
    blocks = Blocks(inputs.slices, call, position, form)
    tensors = [x for _, x in form.tensors()] if form is not None else []
    totals = [term.total for term in terms(form) if isinstance(term, RankOne)]
    sinks = [] if call.sinks is None else [call.sinks]

    def block(process: int, travelling: Sequence[Tensor], staying: Sequence[Tensor]) -> Result:
        if not blocks.sees(process):
            return None
        k, v, *of_keys = travelling
        q, *rest = staying
        own = blocks.make_call(process)
        if own.sinks is not None:
            own = replace(own, sinks=rest.pop())
        elif sinks:
            rest.pop()
        turned = process > inputs.slices.rank
        q, k, v = (x.flip(2) if turned else x for x in (q, k.to(q.dtype), v.to(q.dtype)))
        bias = blocks.make_form(process, rest, of_keys)
        out, lse = choose(inputs.backend, q, v, bias, own).attention(q, k, v, bias, own)
        assert lse is not None
        return (out.flip(2), lse.flip(2)) if turned else (out, lse)

    travelling, staying = [inputs.k, inputs.v, *totals], [q, *tensors, *sinks]
    out, lse = _Ring.apply(inputs.slices, block, len(travelling), *travelling, *staying)  # type: ignore[no-untyped-call]
    return out.to(inputs.v.dtype), lse if call.return_lse else None


def _continued(slices: Slices, form: Form) -> Form:
    """The form with running sums that go on from those of the slices before, in float64."""
    if isinstance(form, Sum):
        return Sum(tuple(_continued(slices, term) for term in form.terms))
    if not isinstance(form, RankOne):
        return form
    return replace(form, total=form.total + sum_before(slices, form.total[..., -1:]), step=None)


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any, slices: Slices, block: Callable[..., Result], travelling: int, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        held, staying = list(tensors[:travelling]), tensors[travelling:]
        merged: Result = None
        for step in range(slices.processes):
            arriving = shift(slices, held) if step < slices.processes - 1 else None
            merged = _merge(merged, block((slices.rank - step) % slices.processes, held, staying))
            held = held if arriving is None else arriving.wait()
        assert merged is not None  # of its own slice, at least
        ctx.slices, ctx.block, ctx.travelling = slices, block, travelling
        ctx.save_for_backward(*tensors, *merged)
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        slices: Slices = ctx.slices
        *tensors, out, lse = ctx.saved_tensors
        held, staying = tensors[: ctx.travelling], tensors[ctx.travelling :]
        wanted = ctx.needs_input_grad[3 + ctx.travelling :]
        own: list[Tensor | None] = [None] * len(staying)
        sums = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in held]
        returning = None
        for step in range(slices.processes):
            arriving = shift(slices, held) if step < slices.processes - 1 else None
            leaves = [x.detach().requires_grad_() for x in held]
            stay = [x.detach().requires_grad_(needed) for x, needed in zip(staying, wanted, strict=True)]
            with torch.enable_grad():
                result = ctx.block((slices.rank - step) % slices.processes, leaves, stay)
            grads = _gradients(result, out, lse, d_out, d_lse, [*leaves, *stay])
            if returning is not None:  # the sums of this slice's gradients, from the processes before
                sums = returning.wait()
            sums = [x if grad is None else x + grad for x, grad in zip(sums, grads, strict=False)]
            own = [_add(x, grad) for x, grad in zip(own, grads[len(held) :], strict=True)]
            returning = shift(slices, sums)
            held = held if arriving is None else arriving.wait()
        assert returning is not None
        back = [x.to(held[number].dtype) for number, x in enumerate(returning.wait())]
        return None, None, None, *back, *own


def _gradients(
    result: Result, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, leaves: list[Tensor]
) -> list[Tensor | None]:
    """Gradients of a block's tensors, None for those that do not matter to it."""
    if result is None:
        return [None] * len(leaves)
    part, own_lse = result
    with torch.no_grad():
        share = (own_lse - lse).exp().where(own_lse > -torch.inf, 0.0)  # (batch, heads, length)
        d_part = share[..., None] * d_out
        d_own = share * ((d_out * (part - out)).sum(-1) + d_lse)
    needed = [x for x in leaves if x.requires_grad]
    grads = torch.autograd.grad(result, needed, (d_part.to(part.dtype), d_own.to(own_lse.dtype)), allow_unused=True)
    by_leaf = {id(x): grad for x, grad in zip(needed, grads, strict=True)}
    return [by_leaf.get(id(x)) for x in leaves]


def _merge(merged: Result, part: Result) -> Result:
    """The result of two sets of keys from that of each, in float32 at least."""
    if merged is None or part is None:
        return merged if part is None else _widened(part)
    (out, lse), (more, more_lse) = merged, _widened(part)
    whole = torch.logaddexp(lse, more_lse)
    shares = [(x - whole).exp().where(x > -torch.inf, 0.0)[..., None] for x in (lse, more_lse)]
    return out * shares[0] + more * shares[1], whole


def _widened(part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    out, lse = part
    return out.to(torch.promote_types(out.dtype, torch.float32)), lse


def _add(x: Tensor | None, grad: Tensor | None) -> Tensor | None:
    return x if grad is None else grad if x is None else x + grad
