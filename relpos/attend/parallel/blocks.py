"""The block of the scores between this process's queries and the keys of one slice, as a call of attention of its own.

A block counts tokens from 0 in the earlier of its two slices, and from `length` on in the later one. Where the keys
come after the queries, both are read backwards: then the keys of every block come first, as in decoding, and a backend
that decodes runs it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.attend.parallel.slices import Slices
from relpos.forms.bias import Form, Positions, RankOne, Scaled, Sum, Toeplitz, terms
from relpos.forms.call import Call
from relpos.forms.encoding import Encoding
from relpos.forms.rotation import Rotation


@dataclass(frozen=True)
class Blocks:
    """How to make the blocks of one call.

    Attributes:
        slices: The slices.
        call: The call of this process's queries over all keys, without gates.
        position: The encoding, for its rotation.
        form: Its bias over the whole sequence; running sums and weights are those of this process's tokens.
    """

    slices: Slices
    call: Call
    position: Encoding | None
    form: Form | None

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
        own, other = (self.position.rotation(self._tokens(each)) for each in (self.slices.rank, process))
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
        """The bias of the block.

        Args:
            process: Whose keys the block has.
            tensors: The tensors of the whole form, in the order of `Form.tensors`.
            totals: The running sums of the keys, (batch, heads, length), of each RankOne term.
        """
        waiting, of_keys, made = list(tensors), list(totals), []
        for term in terms(self.form):
            names = [name for name, _ in term.tensors()]
            own, waiting = waiting[: len(names)], waiting[len(names) :]
            filled = replace(term, **dict(zip(names, own, strict=True)))  # type: ignore[type-var]
            total = of_keys.pop(0) if isinstance(term, RankOne) else None
            made.append(self._term(filled, process, total))
        return None if not made else made[0] if len(made) == 1 else Sum(tuple(made))

    def _term(self, term: Form, process: int, total: Tensor | None) -> Form:
        rank, length, backwards = self.slices.rank, self.slices.length, process > self.slices.rank
        apart, first = (0, 0) if process == rank else (self.apart(process), length)
        if isinstance(term, RankOne):
            assert total is not None
            if process == rank:
                return term
            weight = None if term.weight is None else F.pad(_turned(term.weight, backwards, -1), (length, 0))
            both = [_turned(each.expand_as(term.total), backwards, -1) for each in (total, term.total)]
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
