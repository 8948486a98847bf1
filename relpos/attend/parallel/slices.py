"""A sequence divided among the processes of a group: equal, contiguous slices, in the order of the ranks."""

import zlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch import distributed as dist

from relpos.attend.arguments import AttentionOptions, make_call
from relpos.forms.bias import Form, terms
from relpos.forms.call import Call
from relpos.forms.encoding import Encoding

SIZES = ("batch", "heads", "key heads", "tokens", "keys", "head_dim", "value_dim")


@dataclass(frozen=True)
class Slices:
    """The slices, and this process's own."""

    group: dist.ProcessGroup
    processes: int
    rank: int  # of this process
    length: int  # tokens per slice

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


@dataclass(frozen=True)
class Inputs:
    """What a scheme receives: the slice of one process, and what it shares with the others."""

    slices: Slices
    q: Tensor  # (batch, heads, length, head_dim)
    k: Tensor  # (batch, key_heads, length, head_dim)
    v: Tensor  # (batch, key_heads, length, value_dim)
    position: Encoding | None
    gates: Tensor | None  # (batch, heads, length, gate_size), computed from this process's hidden
    options: AttentionOptions  # documents, padding and positions are those of all tokens
    backend: str | None

    def call(self, all_queries: bool) -> Call:
        """The call over all keys, without gates: of all queries, or of those of this slice."""
        batch, heads, _, head_dim = self.q.shape
        total = self.slices.total
        # Of the tensors of the whole sequence, which are nowhere yet, only the shapes are read.
        q = self.q[:, :, :1].expand(batch, heads, total, head_dim) if all_queries else self.q
        k = self.k[:, :, :1].expand(batch, self.k.shape[1], total, head_dim)
        gates = None if self.gates is None else self.gates[:, :, :1].expand(batch, heads, total, -1)
        start = None if all_queries else self.slices.start
        options: AttentionOptions = {**self.options, "gates": gates, "start": start}
        return replace(make_call(q, k, self.position, **options), gates=None)

    @torch.no_grad()
    def form_of_two_tokens(self) -> tuple[tuple[Form, ...], bool]:
        """What the encoding does, tried on two tokens.

        Returns:
            The terms of its bias; and whether it changes q and k by its method `rotate` alone, of which nothing is
            known.
        """
        position = self.position
        if position is None:
            return (), False
        dtype, device = torch.promote_types(self.q.dtype, torch.float32), self.q.device
        gates = position.gates(torch.zeros(1, 2, position.width, dtype=dtype, device=device))
        q = torch.zeros(1, position.heads, 2, position.head_dim, dtype=dtype, device=device)
        causal = self.options["causal"]
        call = Call(2, 2, causal=causal, gates=gates, q=q, dtype=dtype, device=device, heads=position.heads)
        in_tables = position.rotation(call) is not None or position.query_factor(call) is not None
        return terms(position.bias(call)), "query and key" in position.places and not in_tables


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
        summary = torch.tensor([*sizes, zlib.crc32(repr(options).encode())])
        every = [torch.empty_like(summary) for _ in range(slices.processes)]
        dist.all_gather(every, summary, group=group)
        for process, other in enumerate(every):
            _compare(summary.tolist(), other.tolist(), slices.rank, process)
    if k.shape[2] != q.shape[2]:
        raise ValueError(
            f"with a group, q and k are of the same slice of tokens, but q has {q.shape[2]} and k has {k.shape[2]}."
        )
    return slices


def _compare(summary: list[int], other: list[int], rank: int, process: int) -> None:
    for name, size, other_size in zip(SIZES, summary, other, strict=False):
        if size == other_size:
            continue
        if name in ("tokens", "keys"):
            raise ValueError(
                f"with a group, all processes hold slices of the same length, but process {rank} has {size} {name} and "
                f"process {process} has {other_size}: divide the sequence evenly, with padding= at its end if need be."
            )
        raise ValueError(
            f"with a group, all processes hold slices of the same shape, but process {rank} has {name} {size} and "
            f"process {process} has {other_size}."
        )
    if summary[-1] != other[-1]:
        raise ValueError(
            f"with a group, all processes call attention with the same arguments, but those of process {rank} and "
            f"process {process} differ in the dtype, causal, window, scale, softcap, dropout, scheme, the encoding, or "
            "in whether documents, padding, positions, sinks or hidden are given."
        )
