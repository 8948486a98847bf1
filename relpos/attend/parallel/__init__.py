"""Attention over one sequence that is divided among the processes of a group, by one of several schemes.

heads: Each process sees the whole sequence for its share of the heads (DeepSpeed-Ulysses). All-to-all exchanges slices
of all heads for some heads of the whole sequence, and the result back. In between, attention is that of one process, on
any backend: running sums, tables and rotations are what they always are.

ring: See ring.py.

gather: Keys and values of all processes are gathered, and each process computes complete rows of its own queries, with
all heads. It runs everything, also encodings that mix heads or read complete rows; keys and values of the whole
sequence must fit into the memory of each process.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor
from torch import distributed as dist

from relpos.attend.arguments import (
    AttentionOptions,
    Position,
    check_position,
    read_cu_seqlens,
    read_dropout,
    read_positions,
)
from relpos.attend.backends import attend
from relpos.attend.parallel import ring
from relpos.attend.parallel.exchange import Routes, gather_tokens, heads_of_slices, slices_of_heads
from relpos.attend.parallel.slices import Inputs, Slices, agree, check_group
from relpos.forms.bias import Form, Scored
from relpos.forms.encoding import Encoding
from relpos.system.errors import unknown


def attention_over_slices(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Position | None,
    group: object,
    scheme: str | None,
    backend: str | None,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor | None]:
    """Attention of this process's slice over the whole sequence; the arguments are those of `relpos.attention`."""
    members = check_group(group)
    if scheme is not None and scheme not in SCHEMES:
        raise unknown("scheme", scheme, SCHEMES)
    if isinstance(position, Form):
        raise ValueError("with a group, position= must be an encoding: a form has the numbers of one process.")
    if isinstance(options["mask"], Tensor):
        raise ValueError(
            "with a group, mask= must be a function (b, h, i, j) -> seen of indices in the whole sequence, not a "
            "tensor."
        )
    shared = {name: _summary(name, value) for name, value in options.items()}
    slices = agree(members, q, k, v, (scheme, str(q.dtype), _summary("position", position), shared))
    batch, length = q.shape[0], q.shape[2]
    gates = check_position(q, length, position, options)
    positions, documents = options["positions"], options["documents"]
    if positions is not None:
        positions = read_positions(positions, batch, length, position)
    if options["cu_seqlens"] is not None:
        documents = read_cu_seqlens(options["cu_seqlens"], documents, batch, slices.total)
    else:
        documents = _gathered(slices, "documents", documents, batch)
    share, seeds = read_dropout(options["dropout"], options["seed"])
    if seeds is not None and options["seed"] is None:  # all processes drop by the seed of the first
        seeds = seeds.to(q.device)
        dist.broadcast(seeds, dist.get_global_rank(members, 0), group=members)
        seeds = seeds.cpu()
    of_all: AttentionOptions = {
        **options,
        "hidden": None,
        "gates": None,
        "cu_seqlens": None,
        "documents": documents,
        "padding": _gathered(slices, "padding", options["padding"], batch),
        "positions": slices.gather(positions),
        "dropout": share,
        "seed": seeds,
    }
    inputs = Inputs(slices, q, k, v, position, gates, of_all, backend)
    for name in SCHEMES if scheme is None else (scheme,):
        refuses, run = SCHEMES[name]
        reason = refuses(inputs)
        if reason is None:
            return run(inputs)
    raise ValueError(f"the scheme {scheme!r} cannot run this: {reason} Leave scheme= out to let another one run it.")


def _summary(name: str, value: object) -> object:
    """What of an argument must be equal in all processes: the value, of a tensor or a function that it is given."""
    if name == "positions":
        return tuple(value.shape) if isinstance(value, Tensor) else value
    if isinstance(value, Encoding):
        return type(value).__name__, repr(getattr(value, "options", None))
    return value is not None if name == "seed" or isinstance(value, Tensor) or callable(value) else value


def _gathered(slices: Slices, name: str, x: Tensor | None, batch: int) -> Tensor | None:
    """Per-token integers of all slices; the shape is checked first, for other shapes would end in a deadlock."""
    if x is not None and (not isinstance(x, Tensor) or x.shape != (batch, slices.length)):
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"with a group, {name} is that of this process's slice, ({batch}, {slices.length}), not {shape}."
        )
    return slices.gather(x)


def refuses_heads(inputs: Inputs) -> str | None:
    """Why the heads cannot be divided, as a sentence; None if they can."""
    heads, processes = inputs.q.shape[1], inputs.slices.processes
    if heads % processes:
        return f"{heads} heads cannot be divided among {processes} processes: their number must be a multiple."
    if inputs.options["dropout"]:
        return (
            "what is dropped depends on the number of a head among all heads, which a process with some does not see."
        )
    terms, changes_queries = inputs.form_of_two_tokens()
    if any(isinstance(term, Scored) and not term.by_head for term in terms):
        return f"the bias of {type(inputs.position).__name__} is computed from all heads together."
    if changes_queries:
        return f"{type(inputs.position).__name__} changes queries and keys by a function of all heads."
    return None


def divide_heads(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Attention over the slices: output (batch, heads, length, value_dim), and the log-sum-exp if asked for."""
    slices, heads, key_heads = inputs.slices, inputs.q.shape[1], inputs.k.shape[1]
    share, group = heads // slices.processes, heads // key_heads
    shares: Routes = [range(process * share, (process + 1) * share) for process in range(slices.processes)]
    of_keys: Routes = [sorted({head // group for head in some}) for some in shares]
    tensors, routes = [inputs.q, inputs.k, inputs.v], [shares, of_keys, of_keys]
    if inputs.gates is not None:
        tensors, routes = [*tensors, inputs.gates], [*routes, shares]
    q, k, v, *gates = heads_of_slices(slices, tensors, routes)
    here = shares[slices.rank]  # this process's heads
    which = [of_keys[slices.rank].index(head // group) for head in here]
    if share % k.shape[1] or which != [number * k.shape[1] // share for number in range(share)]:
        k, v = k[:, which], v[:, which]  # key heads that serve different numbers of heads here
    call, mask, some = inputs.call(all_queries=True), inputs.options["mask"], slice(here[0], here[-1] + 1)
    call = replace(
        call,
        heads=share,
        gates=gates[0] if gates else None,
        q=None if call.q is None else q.to(call.dtype),
        sinks=None if call.sinks is None else call.sinks[some],
        mask=None if not callable(mask) else lambda b, h, i, j: mask(b, h + here[0], i, j),
    )
    out, lse = attend(q, k, v, inputs.position, call, inputs.backend, heads=some)
    out, *others = slices_of_heads(slices, [out] if lse is None else [out, lse[..., None]], shares)
    return out, others[0][..., 0] if others else None


def gather_keys(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Attention over the slices: output (batch, heads, length, value_dim), and the log-sum-exp if asked for."""
    tensors = [inputs.k, inputs.v] if inputs.gates is None else [inputs.k, inputs.v, inputs.gates]
    k, v, *gates = gather_tokens(inputs.slices, tensors)
    call = replace(inputs.call(all_queries=False), gates=gates[0] if gates else None)
    return attend(inputs.q, k, v, inputs.position, call, inputs.backend)


Refuses = Callable[[Inputs], str | None]  # why a scheme cannot run a call; all processes must answer the same
Attention = Callable[[Inputs], tuple[Tensor, Tensor | None]]
SCHEMES: dict[str, tuple[Refuses, Attention]] = {  # the first that can run a call is chosen
    "heads": (refuses_heads, divide_heads),
    "ring": (ring.refuses, ring.attention),
    "gather": (lambda inputs: None, gather_keys),
}
