"""The heads divided among the processes: each sees the whole sequence for its share of the heads (DeepSpeed-Ulysses).

All-to-all exchanges slices of all heads for some heads of the whole sequence, and the result back. In between,
attention is that of one process, on any backend: running sums, tables and rotations are what they always are.
"""

from dataclasses import replace

from torch import Tensor

from relpos.attend.backends import choose, positioned
from relpos.attend.parallel.exchange import Routes, heads_of_slices, slices_of_heads
from relpos.attend.parallel.inputs import Inputs, form_of_two_tokens
from relpos.forms.bias import Scored
from relpos.forms.call import MaskFunction


def refuses(inputs: Inputs) -> str | None:
    """Why the heads cannot be divided, as a sentence; None if they can."""
    heads, processes, position = inputs.q.shape[1], inputs.slices.processes, inputs.position
    if heads % processes:
        return f"{heads} heads cannot be divided among {processes} processes: their number must be a multiple."
    if inputs.options["dropout"]:
        return (
            "what is dropped depends on the number of a head among all heads, which a process with some does not see."
        )
    if position is None:
        return None
    terms, otherwise = form_of_two_tokens(position, inputs.options["causal"], inputs.q)
    name = type(position).__name__
    if any(isinstance(term, Scored) and not term.by_head for term in terms):
        return f"the bias of {name} is computed from all heads together."
    if otherwise:
        return f"{name} changes queries and keys by a function of all heads."
    return None


def attention(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Attention over the slices: output (batch, heads, length, value_dim), and the log-sum-exp if asked for."""
    slices, heads, key_heads = inputs.slices, inputs.q.shape[1], inputs.k.shape[1]
    share, group = heads // slices.processes, heads // key_heads
    shares: Routes = [range(process * share, (process + 1) * share) for process in range(slices.processes)]
    of_keys: Routes = [sorted({head // group for head in some}) for some in shares]
    tensors, routes = [inputs.q, inputs.k, inputs.v], [shares, of_keys, of_keys]
    if inputs.gates is not None:
        tensors, routes = [*tensors, inputs.gates], [*routes, shares]
    q, k, v, *gates = heads_of_slices(slices, tensors, routes)
    own = shares[slices.rank]
    which = [of_keys[slices.rank].index(head // group) for head in own]
    if share % k.shape[1] or which != [number * k.shape[1] // share for number in range(share)]:
        k, v = k[:, which], v[:, which]  # key heads that serve different numbers of heads here
    call = inputs.call(all_queries=True)
    some = slice(own[0], own[-1] + 1)
    call = replace(
        call,
        heads=share,
        gates=gates[0] if gates else None,
        q=None if call.q is None else q.to(call.dtype),
        sinks=None if call.sinks is None else call.sinks[some],
        mask=None if call.mask is None else _of_heads(call.mask, own[0]),
    )
    q, k, form, call = positioned(q, k, inputs.position, call, heads=some)
    out, lse = choose(inputs.backend, q, v, form, call).attention(q, k, v.to(q.dtype), form, call)
    results = [out.to(v.dtype)] if lse is None else [out.to(v.dtype), lse[..., None]]
    out, *others = slices_of_heads(slices, results, shares)
    return out, others[0][..., 0] if others else None


def _of_heads(mask: object, start: int) -> MaskFunction:
    """A mask function for the heads from `start` on."""
    assert callable(mask)
    function: MaskFunction = lambda b, h, i, j: mask(b, h + start, i, j)  # noqa: E731
    return function
