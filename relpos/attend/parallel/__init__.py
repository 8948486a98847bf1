"""Attention over one sequence that is divided among the processes of a group.

To add a scheme: write a module with `refuses` and `attention`, and add its line to `SCHEMES`.
"""

from typing import Protocol

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
from relpos.attend.parallel import gather, heads, ring
from relpos.attend.parallel.inputs import Inputs
from relpos.attend.parallel.slices import Slices, agree, check_group
from relpos.forms.bias import Form
from relpos.forms.encoding import Encoding
from relpos.system.errors import unknown


class Scheme(Protocol):
    """What a scheme's module holds."""

    def refuses(self, inputs: Inputs) -> str | None:
        """Why the scheme cannot run a call, as a sentence; None if it can. All processes must answer the same."""

    def attention(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """The output of this process's slice, (batch, heads, length, value_dim), and the log-sum-exp if asked for."""


SCHEMES: dict[str, Scheme] = {"heads": heads, "ring": ring, "gather": gather}  # the first that can run a call is chosen


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
    """Attention of this process's slice over the whole sequence; the arguments are those of `relpos.attention`.

    Returns:
        The output of the slice, (batch, heads, length, value_dim), and the log-sum-exp if asked for.
    """
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
    needed = gates if position is not None and position.needs_hidden else None
    inputs = Inputs(slices, q, k, v, position, needed, of_all, backend)
    return SCHEMES[choose_scheme(scheme, inputs)].attention(inputs)


def choose_scheme(scheme: str | None, inputs: Inputs) -> str:
    """The name of the scheme: the one asked for, or the first that can run the call."""
    if scheme is None:
        return next(name for name, module in SCHEMES.items() if module.refuses(inputs) is None)
    reason = SCHEMES[scheme].refuses(inputs)
    if reason is not None:
        raise ValueError(
            f"the scheme {scheme!r} cannot run this: {reason} Leave scheme= out to let another one run it."
        )
    return scheme


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
        found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"with a group, {name} is that of this process's slice, ({batch}, {slices.length}), not {found}."
        )
    return slices.gather(x)
