"""Keys and values travel around a ring of the processes, and each merges what its queries find in every slice.

A block gives an output and a log-sum-exp; blocks are merged by these. The backward computes every block again: with the
final out and lse and the share w = e^(lse_block − lse) of a block in each row,

d out_block = w · d out,   d lse_block = w · (d out · (out_block − out) + d lse)

and the gradients of keys and values travel on with them, back to their owner. Each process holds two slices of keys and
values at a time. In causal attention the later processes have more blocks to compute than the earlier ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from relpos.attend.backends import choose, positioned
from relpos.attend.parallel.exchange import shift, sum_before
from relpos.attend.parallel.slices import Inputs, Slices
from relpos.forms.bias import Form, Positions, RankOne, Scaled, Sum, Toeplitz, terms
from relpos.forms.call import Call
from relpos.forms.encoding import Encoding
from relpos.forms.rotation import Rotation

Result = tuple[Tensor, Tensor] | None  # output and log-sum-exp of a block; None if it has no key that is seen


def refuses(inputs: Inputs) -> str | None:
    """Why the ring cannot run a call, as a sentence; None if it can."""
    position, causal = inputs.position, inputs.options["causal"]
    if inputs.options["dropout"] or inputs.options["mask"] is not None:
        return (
            "dropout and mask= need indices in the whole sequence, and the blocks of a ring count from their own start."
        )
    parts, changes_queries = inputs.form_of_two_tokens()
    name = type(position).__name__
    for term in parts:
        if not isinstance(term, Toeplitz | RankOne | Scaled):
            return f"the bias of {name} is a function of complete rows of scores, and a ring computes them in blocks."
        if isinstance(term, Scaled) and not causal:
            return f"the bias of {name} is scaled by each key in both directions, which a block of the ring is not."
        if isinstance(term, Scaled) and inputs.call(all_queries=False).lowest < 0:
            return f"the positions descend, and the bias of {name} is then not scaled by the queries of a block alone."
    return f"{name} changes queries and keys by a function of all tokens." if changes_queries else None


def attention(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Attention over the slices: output (batch, heads, length, value_dim), and the log-sum-exp if asked for."""
    call, position = inputs.call(all_queries=False), inputs.position
    # Rotated are the queries and keys of each block.
    q, _, form, _ = positioned(inputs.q, inputs.k, position, replace(call, gates=inputs.gates), rotated=True)
    form = None if form is None else _continued(inputs.slices, form)
    blocks = Blocks(inputs.slices, call, position, form)
    tensors = [x for _, x in form.tensors()] if form is not None else []
    totals = [term.total for term in terms(form) if isinstance(term, RankOne)]
    sinks = [] if call.sinks is None else [call.sinks]

    def block(process: int, travelling: Sequence[Tensor], staying: Sequence[Tensor]) -> Result:
        if not blocks.sees(process):
            return None
        k, v, *of_keys = travelling
        q, *rest = staying
        part = blocks.make_call(process)
        if part.sinks is not None:
            part = replace(part, sinks=rest.pop())
        elif sinks:
            rest.pop()
        turned = process > inputs.slices.rank
        q, k, v = (x.flip(2) if turned else x for x in (q, k.to(q.dtype), v.to(q.dtype)))
        bias = blocks.make_form(process, rest, of_keys)
        out, lse = choose(inputs.backend, q, v, bias, part).attention(q, k, v, bias, part)
        assert lse is not None
        return (out.flip(2), lse.flip(2)) if turned else (out, lse)

    travelling, staying = [inputs.k, inputs.v, *totals], [q, *tensors, *sinks]
    out, lse = _Ring.apply(inputs.slices, block, len(travelling), *travelling, *staying)  # type: ignore[no-untyped-call]
    return out.to(inputs.v.dtype), lse if call.return_lse else None


def _continued(slices: Slices, form: Form) -> Form:
    """The form with running sums that continue those of the slices before, in float64."""
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
        of_staying: list[Tensor | None] = [None] * len(staying)
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
            of_staying = [_add(x, grad) for x, grad in zip(of_staying, grads[len(held) :], strict=True)]
            returning = shift(slices, sums)
            held = held if arriving is None else arriving.wait()
        assert returning is not None
        back = [x.to(held[number].dtype) for number, x in enumerate(returning.wait())]
        return None, None, None, *back, *of_staying


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
    if part is None:
        return merged
    more, more_lse = part[0].to(torch.promote_types(part[0].dtype, torch.float32)), part[1]
    if merged is None:
        return more, more_lse
    out, lse = merged
    total = torch.logaddexp(lse, more_lse)
    shares = [(x - total).exp().where(x > -torch.inf, 0.0)[..., None] for x in (lse, more_lse)]
    return out * shares[0] + more * shares[1], total


def _add(x: Tensor | None, grad: Tensor | None) -> Tensor | None:
    return x if grad is None else grad if x is None else x + grad


@dataclass(frozen=True)
class Blocks:
    """The blocks of the scores between this process's queries and the keys of each slice, as calls of attention.

    A block counts tokens from 0 in the earlier of its two slices, and from `length` on in the later one. Where the keys
    come after the queries, both are read backwards: then the keys of every block come first, as in decoding, and a
    backend that decodes runs it.
    """

    slices: Slices
    call: Call  # of this process's queries over all keys, without gates
    position: Encoding | None  # for its rotation
    form: Form | None  # over the whole sequence; running sums and weights are those of this process's tokens

    def apart(self, process: int) -> int:
        """How many tokens lie between this slice and that of a process; −1 for its own slice."""
        return max(-1, (abs(self.slices.rank - process) - 1) * self.slices.length)

    def sees(self, process: int) -> bool:
        """Whether a query of this slice may see a key of the slice of a process."""
        rank, call = self.slices.rank, self.call
        if process == rank:
            return True
        if process > rank and call.causal:
            return False
        if call.window is not None and call.window[process > rank] <= self.apart(process):
            return False
        if call.documents is not None and call.device.type == "cpu":
            earlier, later = sorted([process, rank])
            before = call.documents[:, self.slices.tokens(earlier)][:, -1]
            return bool((before == call.documents[:, self.slices.tokens(later)][:, 0]).any())
        return True

    def make_call(self, process: int) -> Call:
        """The call of the block; sinks take part in the block of the process's own slice, and in no other."""
        call, length, backwards = self.call, self.slices.length, process > self.slices.rank
        own, other = self.slices.tokens(self.slices.rank), self.slices.tokens(process)
        padding = None if call.padding is None else _turned(call.padding[:, other], backwards)
        block = replace(
            call,
            keys=length,
            start=0,
            padding=padding,
            token_positions=None,
            rotation=self.rotation(process),
            return_lse=True,
        )
        if process == self.slices.rank:
            return replace(block, documents=None if call.documents is None else call.documents[:, own])
        window, documents = None, None
        if call.window is not None:
            window = (call.window[backwards] - self.apart(process), 0)
        if call.documents is not None:
            both = [_turned(call.documents[:, tokens], backwards) for tokens in (other, own)]
            documents = torch.cat(both, dim=1)
        return replace(block, causal=True, start=length, window=window, documents=documents, sinks=None)

    def rotation(self, process: int) -> Rotation | None:
        """The rotation of this slice's queries and of the keys of a process, as tables of one slice each."""
        if self.position is None:
            return None
        own, other = (self.position.rotation(self._tokens(rank)) for rank in (self.slices.rank, process))
        if own is None or other is None:
            return None
        tables = (own.q_cos, own.q_sin, other.k_cos, other.k_sin)
        q_cos, q_sin, k_cos, k_sin = (_turned(table, process > self.slices.rank) for table in tables)
        return Rotation(q_cos, q_sin, k_cos, k_sin, own.layout)

    def _tokens(self, process: int) -> Call:
        """The tokens of a slice, with their positions and lengths in the whole sequence, as queries and keys."""
        call, tokens = self.call, self.slices.tokens(process)
        return replace(
            call,
            queries=self.slices.length,
            keys=self.slices.length,
            start=None,
            documents=None,
            padding=None,
            token_positions=call.key_positions[:, tokens],
            token_lengths=call.key_lengths[:, tokens],
        )

    def make_form(self, process: int, tensors: list[Tensor], totals: list[Tensor]) -> Form | None:
        """The bias of the block, from the tensors of the whole form, in the order of `Form.tensors`.

        Each RankOne term has the running sums of the keys too, (batch, heads, length).
        """
        next_tensor, next_total, parts = iter(tensors), iter(totals), []
        for term in terms(self.form):
            values = {name: next(next_tensor) for name, _ in term.tensors()}
            total = next(next_total) if isinstance(term, RankOne) else None
            parts.append(self._term(replace(term, **values), process, total))  # type: ignore[type-var]
        return None if not parts else parts[0] if len(parts) == 1 else Sum(tuple(parts))

    def _term(self, term: Form, process: int, total: Tensor | None) -> Form:
        rank, length, backwards = self.slices.rank, self.slices.length, process > self.slices.rank
        apart, first = (0, 0) if process == rank else (self.apart(process), length)
        if isinstance(term, RankOne):
            assert total is not None
            if process == rank:
                return term
            weight = None if term.weight is None else F.pad(_turned(term.weight, backwards, -1), (length, 0))
            both = [_turned(x.expand_as(term.total), backwards, -1) for x in (total, term.total)]
            return replace(term, total=torch.cat(both, dim=-1), weight=weight)
        assert isinstance(term, Toeplitz | Scaled)
        if isinstance(term, Scaled):
            term = replace(term, first=first, column=term.column if process == rank else None)
            if process == rank and term.column is not None:
                term = replace(term, column=term.column[:, self.slices.tokens(rank)])
        elif backwards:
            term = replace(term, table=term.table.flip(1), zero=term.table.shape[1] - 1 - term.zero)
        if term.where is not None:
            queries, keys = term.where.queries, term.where.keys[:, self.slices.tokens(process)]
            sign = -1 if backwards else 1
            where = Positions(sign * _turned(queries, backwards), sign * _turned(keys, backwards), first)
            return replace(term, where=where)
        if isinstance(term, Scaled):
            return replace(term, table=term.table[apart : apart + 2 * length])
        return replace(term, zero=term.zero + apart)


def _turned(x: Tensor, backwards: bool, axis: int = 1) -> Tensor:
    """The tokens in order, or backwards."""
    return x.flip(axis) if backwards else x
