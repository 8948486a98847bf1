"""What a scheme receives: this process's slice, and the call of attention as its encoding sees it."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from relpos.attend.arguments import AttentionOptions, make_call
from relpos.attend.parallel.slices import Slices
from relpos.forms.bias import Form, terms
from relpos.forms.call import Call
from relpos.forms.encoding import Encoding


@dataclass(frozen=True)
class Inputs:
    """The slice of one process, and what it shares with the others."""

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
def form_of_two_tokens(position: Encoding, causal: bool, q: Tensor) -> tuple[tuple[Form, ...], bool]:
    """What the encoding does, tried on two tokens.

    Returns:
        The terms of its bias; and whether it changes q and k by its method `rotate` alone, of which nothing is known.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    gates = position.gates(torch.zeros(1, 2, position.width, dtype=dtype, device=q.device))
    some = torch.zeros(1, position.heads, 2, position.head_dim, dtype=dtype, device=q.device)
    call = Call(2, 2, causal=causal, gates=gates, q=some, dtype=dtype, device=q.device, heads=position.heads)
    hidden = (
        "query and key" in position.places and position.rotation(call) is None and position.query_factor(call) is None
    )
    return terms(position.bias(call)), hidden
