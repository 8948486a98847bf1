"""A sequence divided among the processes of a group: equal, contiguous slices, in the order of the ranks."""

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

SIZES = ("batch", "heads", "key heads", "tokens", "keys", "head_dim", "value_dim")


@dataclass(frozen=True)
class Slices:
    """The slices, and this process's own.

    Attributes:
        group: The processes.
        processes: Their number.
        rank: The number of this process among them.
        length: Tokens per slice.
    """

    group: dist.ProcessGroup
    processes: int
    rank: int
    length: int

    @property
    def total(self) -> int:
        """Tokens of the whole sequence."""
        return self.processes * self.length

    @property
    def start(self) -> int:
        """Index of the first token of this process's slice."""
        return self.rank * self.length

    def tokens(self, process: int) -> slice:
        """The tokens of a process."""
        return slice(process * self.length, (process + 1) * self.length)

    def gather(self, x: Tensor | None) -> Tensor | None:
        """Integers or booleans of all tokens, from those of each slice: (rows, length, …) to (rows, total, …)."""
        if x is None:
            return None
        flat = x.contiguous().to(torch.uint8) if x.dtype == torch.bool else x.contiguous()
        parts = [torch.empty_like(flat) for _ in range(self.processes)]
        dist.all_gather(parts, flat, group=self.group)
        return torch.cat(parts, dim=1).to(x.dtype)


def check_group(group: object) -> dist.ProcessGroup:
    """The process group of the argument `group`."""
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group must be a process group of torch.distributed that this process is in, such as "
            f"torch.distributed.group.WORLD after init_process_group, not {group!r}."
        )
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not in the group: only the processes of a group call attention with it.")
    return group


def agree(group: dist.ProcessGroup, q: Tensor, k: Tensor, v: Tensor, options: object) -> Slices:
    """The slices of q, k and v, after a check that all processes call attention with the same sizes and options.

    Without it, other sizes would end in a deadlock. On an accelerator nothing is compared: reading would stall it.
    """
    slices = Slices(group, dist.get_world_size(group), dist.get_rank(group), q.shape[2])
    if q.device.type == "cpu":
        sizes = [q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], k.shape[3], v.shape[3]]
        own = torch.tensor([*sizes, zlib.crc32(repr(options).encode())])
        every = [torch.empty_like(own) for _ in range(slices.processes)]
        dist.all_gather(every, own, group=group)
        for process, other in enumerate(every):
            _compare(own.tolist(), other.tolist(), slices.rank, process)
    if k.shape[2] != q.shape[2]:
        raise ValueError(
            f"with a group, q and k are of the same slice of tokens, but q has {q.shape[2]} and k has {k.shape[2]}."
        )
    return slices


def _compare(own: list[int], other: list[int], rank: int, process: int) -> None:
    for name, ours, theirs in zip(SIZES, own, other, strict=False):
        if ours == theirs:
            continue
        if name in ("tokens", "keys"):
            raise ValueError(
                f"with a group, all processes hold slices of the same length, but process {rank} has {ours} {name} and "
                f"process {process} has {theirs}: divide the sequence evenly, with padding= at its end if need be."
            )
        raise ValueError(
            f"with a group, all processes hold slices of the same shape, but process {rank} has {name} {ours} and "
            f"process {process} has {theirs}."
        )
    if own[-1] != other[-1]:
        raise ValueError(
            f"with a group, all processes call attention with the same arguments, but those of process {rank} and "
            f"process {process} differ in the dtype, causal, window, scale, softcap, dropout, scheme, the encoding, or "
            "in whether documents, padding, positions, sinks or hidden are given."
        )
