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
Splits = tuple[list[int], list[int]]  # how many values of a tensor each process sends to, and receives from, each other


class _Exchange(Function):
    """All-to-all of flat tensors; the gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, slices: Slices, splits: Sequence[Splits], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.slices, ctx.splits = slices, splits
        return tuple(_all_to_all(slices, x, *split) for x, split in zip(tensors, splits, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = ((received, sent) for sent, received in ctx.splits)
        return None, None, *(_all_to_all(ctx.slices, x, *split) for x, split in zip(grads, back, strict=True))


def _all_to_all(slices: Slices, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
    out = x.new_empty(sum(received))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=slices.group)
    return out


def heads_of_slices(slices: Slices, tensors: Sequence[Tensor], routes: Sequence[Routes]) -> list[Tensor]:
    """Exchange slices of all heads for the whole sequence of some heads.

    Tensors are (batch, heads, length, size); their routes may send a head to several processes. Returns the heads of
    this process, (batch, own heads, total, size).
    """
    flat, splits, shapes = [], [], []
    for x, route in zip(tensors, routes, strict=True):
        batch, _, length, size = x.shape
        heads, per_head = len(route[slices.rank]), batch * length * size
        flat.append(torch.cat([x[:, list(numbers)].reshape(-1) for numbers in route]))
        splits.append(([len(numbers) * per_head for numbers in route], [heads * per_head] * slices.processes))
        shapes.append((slices.processes, batch, heads, length, size))
    received = _Exchange.apply(slices, splits, *flat)  # type: ignore[no-untyped-call]
    by_process = [x.view(shape) for x, shape in zip(received, shapes, strict=True)]
    return [x.permute(1, 2, 0, 3, 4).flatten(2, 3) for x in by_process]


def slices_of_heads(slices: Slices, tensors: Sequence[Tensor], routes: Routes) -> list[Tensor]:
    """The way back: from some heads of the whole sequence, (batch, own heads, total, size), to all heads of this slice.

    Every head belongs to one process. Returns (batch, heads, length, size).
    """
    flat, splits, sizes = [], [], []
    for x in tensors:
        batch, heads, _, size = x.shape
        per_head = batch * slices.length * size
        by_process = x.reshape(batch, heads, slices.processes, slices.length, size).permute(2, 0, 1, 3, 4)
        flat.append(by_process.reshape(-1))
        splits.append(([heads * per_head] * slices.processes, [len(route) * per_head for route in routes]))
        sizes.append((batch, slices.length, size))
    order = torch.tensor([head for heads in routes for head in heads]).argsort().tolist()
    outs = []
    received = _Exchange.apply(slices, splits, *flat)  # type: ignore[no-untyped-call]
    for x, (_, counts), (batch, length, size) in zip(received, splits, sizes, strict=True):
        parts = [part.view(batch, -1, length, size) for part in x.split(counts)]
        outs.append(torch.cat(parts, dim=1)[:, order])
    return outs


def gather_tokens(slices: Slices, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tokens of all processes, (batch, heads, total, size), from (batch, heads, length, size) of each.

    Gradients are summed over the processes.
    """
    return [torch.cat(list(x), dim=2) for x in _every(slices, tensors)]


def sum_before(slices: Slices, x: Tensor) -> Tensor:
    """The sum of the tensors of all processes before this one (exclusive scan), in the dtype of x."""
    return _every(slices, [x])[0][: slices.rank].sum(0)


def _every(slices: Slices, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of all processes: (processes, …)."""
    flat = [x.expand(slices.processes, *x.shape).reshape(-1) for x in tensors]
    splits = [([x.numel()] * slices.processes,) * 2 for x in tensors]
    received = _Exchange.apply(slices, splits, *flat)  # type: ignore[no-untyped-call]
    return [out.view(slices.processes, *x.shape) for out, x in zip(received, tensors, strict=True)]


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
