"""Communication between the processes of a group, with gradients.

Every function is called by all processes at the same place of their program, forward and backward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from relpos.attend.parallel.slices import Slices

Routes = Sequence[Sequence[int]]  # the heads that each process receives


def heads_of_slices(slices: Slices, tensors: Sequence[Tensor], routes: Sequence[Routes]) -> list[Tensor]:
    """Exchange slices of all heads for the whole sequence of some heads (all-to-all).

    Args:
        slices: The slices.
        tensors: Each (batch, heads, length, size).
        routes: For each tensor, the heads that each process receives; a head may go to several.

    Returns:
        For each tensor the heads of this process, (batch, own heads, total, size).
    """
    return list(_HeadsOfSlices.apply(slices, routes, *tensors))  # type: ignore[no-untyped-call]


def slices_of_heads(slices: Slices, tensors: Sequence[Tensor], routes: Routes) -> list[Tensor]:
    """The way back: from some heads of the whole sequence to all heads of this process's slice.

    Args:
        slices: The slices.
        tensors: Each (batch, own heads, total, size).
        routes: The heads of each process; every head belongs to one.

    Returns:
        For each tensor, (batch, heads, length, size).
    """
    return list(_SlicesOfHeads.apply(slices, routes, *tensors))  # type: ignore[no-untyped-call]


def gather_tokens(slices: Slices, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tokens of all processes (all-gather); their gradients are summed over the processes (reduce-scatter).

    Args:
        slices: The slices.
        tensors: Each (batch, heads, length, size).

    Returns:
        For each tensor, (batch, heads, total, size).
    """
    return list(_GatherTokens.apply(slices, *tensors))  # type: ignore[no-untyped-call]


def sum_before(slices: Slices, x: Tensor) -> Tensor:
    """The sum of the tensors of all processes before this one (exclusive scan), in the dtype of x."""
    summed: Tensor = _SumBefore.apply(slices, x)  # type: ignore[no-untyped-call]
    return summed


class Transfer:
    """Tensors on their way from the process before this one in the ring."""

    def __init__(self, tensors: list[Tensor], sent: list[Tensor], works: list[Any]) -> None:
        self.tensors, self.sent, self.works = tensors, sent, works

    def wait(self) -> list[Tensor]:
        """The tensors, when they are there."""
        for work in self.works:
            work.wait()
        return self.tensors


def shift(slices: Slices, tensors: Sequence[Tensor]) -> Transfer:
    """Send tensors to the next process of the ring, and receive those of the process before, while others compute."""
    after, before = (
        dist.get_global_rank(slices.group, (slices.rank + step) % slices.processes)
        for step in (1, slices.processes - 1)
    )
    sent = [x.contiguous() for x in tensors]
    received = [torch.empty_like(x) for x in sent]
    operations = []
    for tag, (there, here) in enumerate(zip(sent, received, strict=True)):
        operations.append(dist.P2POp(dist.isend, there, after, slices.group, tag))
        operations.append(dist.P2POp(dist.irecv, here, before, slices.group, tag))
    return Transfer(received, sent, dist.batch_isend_irecv(operations))


class _HeadsOfSlices(Function):
    @staticmethod
    def forward(ctx: Any, slices: Slices, routes: Sequence[Routes], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.slices, ctx.routes, ctx.heads = slices, routes, [x.shape[1] for x in tensors]
        return tuple(_spread_heads(slices, x, route) for x, route in zip(tensors, routes, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own = (_collect_heads(ctx.slices, *each) for each in zip(grads, ctx.routes, ctx.heads, strict=True))
        return None, None, *own


class _SlicesOfHeads(Function):
    @staticmethod
    def forward(ctx: Any, slices: Slices, routes: Routes, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.slices, ctx.routes = slices, routes
        heads = sum(map(len, routes))
        return tuple(_collect_heads(slices, x, routes, heads) for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(_spread_heads(ctx.slices, grad, ctx.routes) for grad in grads)


class _GatherTokens(Function):
    @staticmethod
    def forward(ctx: Any, slices: Slices, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.slices = slices
        gathered = []
        for x in tensors:
            parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(slices.processes)]
            dist.all_gather(parts, x.contiguous(), group=slices.group)
            gathered.append(torch.cat(parts, dim=2))
        return tuple(gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slices = ctx.slices
        own = []
        for grad in grads:
            batch, heads, _, size = grad.shape
            by_process = grad.reshape(batch, heads, slices.processes, slices.length, size).movedim(2, 0).contiguous()
            received = torch.empty_like(by_process)
            dist.all_to_all_single(received, by_process, group=slices.group)
            # Summed here and in float32 at least, in the order of the processes: the same on every run.
            dtype = torch.promote_types(grad.dtype, torch.float32)
            own.append(received.sum(0, dtype=dtype).to(grad.dtype))
        return None, *own


class _SumBefore(Function):
    @staticmethod
    def forward(ctx: Any, slices: Slices, x: Tensor) -> Tensor:
        ctx.slices = slices
        return _every(slices, x)[: slices.rank].sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, _every(ctx.slices, grad)[ctx.slices.rank + 1 :].sum(0)


def _every(slices: Slices, x: Tensor) -> Tensor:
    """The tensors of all processes: (processes, …)."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(slices.processes)]
    dist.all_gather(parts, x.contiguous(), group=slices.group)
    return torch.stack(parts)


def _spread_heads(slices: Slices, x: Tensor, routes: Routes) -> Tensor:
    """(batch, heads, length, size) of each process to (batch, own heads, total, size)."""
    batch, _, length, size = x.shape
    own, per_head = len(routes[slices.rank]), batch * length * size
    sent = torch.cat([x[:, list(heads)].reshape(-1) for heads in routes])
    received = x.new_empty(slices.processes * own * per_head)
    dist.all_to_all_single(
        received,
        sent,
        output_split_sizes=[own * per_head] * slices.processes,
        input_split_sizes=[len(heads) * per_head for heads in routes],
        group=slices.group,
    )
    by_process = received.view(slices.processes, batch, own, length, size)
    return by_process.permute(1, 2, 0, 3, 4).reshape(batch, own, slices.total, size)


def _collect_heads(slices: Slices, x: Tensor, routes: Routes, heads: int) -> Tensor:
    """(batch, own heads, total, size) to (batch, heads, length, size); what several processes send back is added."""
    batch, own, _, size = x.shape
    length, per_head = slices.length, batch * slices.length * size
    sent = x.reshape(batch, own, slices.processes, length, size).permute(2, 0, 1, 3, 4).reshape(-1)
    received = x.new_empty(sum(map(len, routes)) * per_head)
    sizes = [len(each) * per_head for each in routes]
    dist.all_to_all_single(
        received,
        sent,
        output_split_sizes=sizes,
        input_split_sizes=[own * per_head] * slices.processes,
        group=slices.group,
    )
    collected = x.new_zeros(batch, heads, length, size)
    for part, each in zip(torch.split(received, sizes), routes, strict=True):
        collected.index_add_(1, torch.tensor(each, device=x.device), part.view(batch, len(each), length, size))
    return collected
