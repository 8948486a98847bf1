"""What a decoder keeps of one layer between its steps: keys, values and gates, and what the encoding computes of them.

The bias and the rotation of an encoding are computed for all tokens below a capacity, and again when that is exceeded
or when anything has changed of which they were made.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from relpos.attend import native
from relpos.attend.arguments import (
    AttentionOptions,
    Position,
    check_finite,
    check_position,
    make_call,
    read_positions,
)
from relpos.attend.backends import attend
from relpos.forms.bias import Form
from relpos.forms.call import Call, positions
from relpos.forms.checks import check_shape, integer_at_least
from relpos.forms.encoding import Encoding
from relpos.forms.rotation import Rotation, turn

LEAST_CAPACITY = 1024  # tokens of a table
LEAST_ROOM = 64  # tokens


def with_room(tokens: int) -> int:
    """The size of memory for these tokens and some more, so that all growth together copies each token a few times."""
    return tokens + max(LEAST_ROOM, tokens // 2)


class GrowingTensor:
    """A tensor (batch, heads, tokens, size) to which tokens are added in place.

    Args:
        capacity: Number of tokens to make room for at the start.
        overwrites: Whether tokens that were cropped may be overwritten. If not, every place is written once: what was
            returned stays.
    """

    def __init__(self, capacity: int = 0, overwrites: bool = False) -> None:
        self._capacity, self._overwrites = capacity, overwrites
        self._memory: Tensor | None = None  # (batch, heads, room, size)
        self._last: Tensor | None = None  # what was returned last

    def extend(self, before: Tensor, new: Tensor) -> Tensor:
        """The tokens `before` and the new ones, as a view; copies `before` unless it is what was returned last."""
        start, end = before.shape[2], before.shape[2] + new.shape[2]
        memory = self._memory
        if memory is not None:
            cropped = self._overwrites and len(before) == len(memory) and before.data_ptr() == memory.data_ptr()
            usable = (before is self._last or cropped) and end <= memory.shape[2]
            if not usable or memory.is_inference() != torch.is_inference_mode_enabled():
                memory = None
        if memory is None:
            memory = new.new_empty(*new.shape[:2], max(self._capacity, with_room(end)), new.shape[3])
            memory[:, :, :start] = before.detach()
            self._memory = memory
        memory[:, :, start:end] = new.detach() if new.requires_grad else new
        self._last = memory[:, :, :end]
        return self._last


class Cache:
    """Keys, values and gates of the tokens so far, of one attention layer: `relpos.attention(…, cache=cache)`.

    A step takes q, k, v (and hidden) of the new tokens alone; their keys and values are added here, and attention runs
    over all tokens so far. Memory grows by half, so a step copies nothing but the new tokens. Keys are kept rotated
    where their rotation depends on their position alone, and what an encoding computes for a step (tables, running
    sums) is kept as long as its parameters stay the same.

    Args:
        capacity: Number of tokens to make room for at the start; more are allowed.

    Example:
        >>> cache = relpos.Cache()
        >>> out = relpos.attention(q, k, v, position, hidden=x, cache=cache)  # the prompt
        >>> for token in ...:
        ...     out = relpos.attention(q, k, v, position, hidden=x, cache=cache)  # of one token each
    """

    def __init__(self, capacity: int = LEAST_ROOM) -> None:
        self._capacity = integer_at_least("capacity", capacity)
        self.tables = DecodingTables()
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        self._tensors: dict[str, Tensor] = {}  # k, v and gates: (batch, heads, tokens, size)
        self._memory = {name: GrowingTensor(self._capacity, overwrites=True) for name in ("k", "v", "gates")}
        self._rotated = False
        self._totals: native.RunningTotals | None = None

    @property
    def length(self) -> int:
        """Number of tokens so far: the `start` of `position.embed` for the next one."""
        return self._tensors["k"].shape[2] if self._tensors else 0

    def __len__(self) -> int:
        return self.length

    def crop(self, length: int) -> None:
        """Forget all tokens but the first ones, as speculative decoding does with those it rejects.

        Args:
            length: Number of tokens to keep; if negative, how many of the last ones to forget.

        Raises:
            ValueError: There are fewer tokens, or `length` is not an integer.

        Example:
            >>> cache.crop(-3)  # the last three tokens were rejected
        """
        if not isinstance(length, int) or isinstance(length, bool):
            raise ValueError(f"length must be an integer, the number of tokens to keep, not {length!r}.")
        tokens = length if length >= 0 else self.length + length
        if not 0 <= tokens <= self.length:
            raise ValueError(f"the cache holds {self.length} tokens: it cannot be cropped to {length}.")
        if tokens == 0:
            self.reset()  # an empty cache is a new one, also for other encodings
            return
        self._tensors = {name: x[:, :, :tokens] for name, x in self._tensors.items()}

    def reorder(self, index: Tensor) -> None:
        """Choose rows of the batch, as beam search does; rows may be repeated or left out.

        Args:
            index: Numbers of the rows, (new batch,).

        Example:
            >>> cache.reorder(torch.tensor([0, 0, 2]))  # the first beam twice, the second dropped
        """
        self._tensors = {name: x.index_select(0, index.to(x.device)) for name, x in self._tensors.items()}
        self._totals = None

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Position | None,
        backend: str | None,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor | None]:
        """Add the new tokens, and attend from them to all tokens so far; after an error the cache is what it was."""
        batch, _, tokens, _ = q.shape
        if options["start"] is not None or options["cu_seqlens"] is not None:
            raise ValueError("with a cache the queries are the last tokens: leave start and cu_seqlens out.")
        if k.shape[2] != tokens:
            raise ValueError(f"with a cache, q and k are of the new tokens, but q has {tokens} and k has {k.shape[2]}.")
        before, total = self.length, self.length + tokens
        documents, positions = options["documents"], options["positions"]
        if documents is not None:
            check_shape("documents", documents, (batch, total))
        if positions is not None:
            positions = read_positions(positions, batch, total, position)
        gates = check_position(q, tokens, position, options)
        encoding = position if isinstance(position, Encoding) else None
        try:
            where = new_positions(tokens, total, documents, positions, q.device)
            q, k, v, gates = self.append(q, k, v, gates, encoding, where)
            options = {**options, "hidden": None, "gates": gates, "start": before}
            call = make_call(q, k, position, **options)
            return attend_step(q, k, v, position, call, backend, self.tables, self._totals, self._rotated)
        except BaseException:
            self.crop(min(before, self.length))
            raise

    def append(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, position: Encoding | None, where: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Add the new tokens.

        Returns:
            The queries, rotated if the keys are; keys, values and gates of all tokens so far.
        """
        rotated = position is not None and position.rotates_by_position
        if self.length and rotated != self._rotated:
            raise ValueError("the cache holds keys of another encoding: make a cache of its own for each layer.")
        self._rotated = rotated
        new = {"k": k, "v": v} if gates is None else {"k": k, "v": v, "gates": gates}
        self._check(new)
        if rotated:
            assert position is not None
            q, new["k"] = self.tables.rotate(q, k, position, self.length, where)
        self._tensors = {name: self._extended(name, x) for name, x in new.items()}
        if gates is not None:
            gates = self._tensors["gates"]
            self._totals = extended_totals(self._totals, position, gates, k.shape[2])
        return q, self._tensors["k"], self._tensors["v"], gates

    def _check(self, new: dict[str, Tensor]) -> None:
        if not self.length:
            return
        if new.keys() != self._tensors.keys():
            raise ValueError("the cache holds keys of another encoding: make a cache of its own for each layer.")
        for name, x in new.items():
            old = self._tensors[name]
            if (x.shape[:2], x.shape[3:], x.dtype, x.device) != (old.shape[:2], old.shape[3:], old.dtype, old.device):
                raise ValueError(
                    f"{name} of the new tokens is {tuple(x.shape)}, {x.dtype}, on {x.device}, but the cache holds "
                    f"{tuple(old.shape)}, {old.dtype}, on {old.device}: only the number of tokens may differ."
                )

    def _extended(self, name: str, x: Tensor) -> Tensor:
        """The tokens so far and the new ones."""
        before = self._tensors[name] if self._tensors else x[:, :, :0]
        if torch.is_grad_enabled() and (x.requires_grad or before.requires_grad):
            # Gradients flow through a copy, not through memory that is written again.
            return torch.cat([before, x], dim=2)
        return self._memory[name].extend(before, x)


def attend_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Position | None,
    call: Call,
    backend: str | None,
    tables: "DecodingTables",
    totals: native.RunningTotals | None,
    rotated: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a decoding step: with packed tables where they serve, as any other call where not."""
    if not isinstance(position, Form):
        out = tables.attention(q, k, v, position, call, backend, totals)
        if out is not None:
            return out
    return attend(q, k, v, position, call, backend, rotated)


def extended_totals(
    totals: native.RunningTotals | None, position: Encoding | None, gates: Tensor, new: int
) -> native.RunningTotals | None:
    """The running totals of all tokens, from those of earlier ones; None while a prompt is read, or if impossible."""
    latest = increments(position, gates[:, :, -new:]) if new <= native.FEW else None
    if latest is None:
        return None
    tokens = gates.shape[2]
    if totals is not None:
        totals.crop(tokens - new)
        if totals.length == tokens - new and totals.append(*latest):
            return totals
    every = increments(position, gates)
    assert every is not None
    fresh = native.RunningTotals(*every, with_room(tokens))
    return fresh if fresh.fits else None


def new_positions(
    tokens: int, total: int, documents: Tensor | None, given: Tensor | None, device: torch.device
) -> Tensor | None:
    """Positions of the last tokens, (1 or batch, tokens), or None if they are their numbers."""
    if given is not None:
        return given[:, -tokens:]
    return None if documents is None else positions(total, documents, device)[:, -tokens:]


class Snapshot:
    """Detects changes to a module.

    Parameters are compared by value: a change through `.data` leaves no other trace, and a table that is out of date
    would give wrong results without a sign.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        places = [place for part in module.modules() for place in (part._parameters, part._buffers, vars(part))]
        self.tensors = [(p, name, x.detach().clone()) for p in places for name, x in p.items() if isinstance(x, Tensor)]
        self.settings = [
            (vars(part), name, copy.deepcopy(value))
            for part in module.modules()
            for name, value in vars(part).items()
            if name[0] != "_" and name not in ("training", "options") and not isinstance(value, Tensor)
        ]

    def unchanged(self, module: nn.Module) -> bool:
        """Whether this is the same module, with equal parameters, buffers and attributes."""
        if module is not self.module:
            return False
        for place, name, before in self.tensors:
            now = place.get(name)
            if now is None or now.dtype != before.dtype or now.device != before.device or not torch.equal(now, before):
                return False
        return all(place.get(name) == before for place, name, before in self.settings)


@dataclass
class Tables:
    """The bias and the rotation of an encoding for all tokens below a capacity."""

    snapshot: Snapshot
    capacity: int
    dtype: torch.dtype
    device: torch.device
    rotation: "RotationTable | None" = None
    bias: native.PackedBias | None = None
    packed: bool = False  # whether the bias has been looked for


class DecodingTables:
    """The tables of one encoding, between the decoding steps of one layer."""

    def __init__(self) -> None:
        self._tables: Tables | None = None
        self._totals: native.RunningTotals | None = None
        self._gates: Tensor | None = None  # those of which the totals were made: (batch, heads, tokens, gate_size)
        self._room = GrowingTensor(overwrites=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DecodingTables":
        return DecodingTables()  # they belong to the encoding that was copied

    def __reduce__(self) -> tuple[type["DecodingTables"], tuple[()]]:
        return DecodingTables, ()

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Encoding | None,
        call: Call,
        backend: str | None,
        totals: native.RunningTotals | None = None,
    ) -> tuple[Tensor, Tensor | None] | None:
        """Compute attention of few queries with the packed bias, or return None if that cannot serve this call.

        Returns:
            The output and the log-sum-exp, as `native.attention` returns them.
        """
        if position is None or call.queries > native.FEW or "score" not in position.places:
            return None
        projected = "query and key" in position.places and not position.rotates_by_position  # still to be rotated
        elsewhere = backend not in (None, "native") or not call.causal or not call.among_keys
        if projected or elsewhere or call.token_positions is not None:
            return None
        if not _is_plain(position, q, k, v, call.sinks) or native.refuses(q, v, None, call) is not None:
            return None
        packed = totals if totals is not None else self._bias(position, call)
        return None if packed is None else native.attention(q, k, v, None, call, packed=packed)

    def _bias(self, position: Encoding, call: Call) -> native.PackedBias | None:
        """The packed bias of an encoding, if it is the same for every input and serves this call."""
        if not _is_fixed(position):
            return None
        tables = self._for(position, call.length, call.dtype, call.device)
        if not tables.packed:
            tables.bias, tables.packed = _packed_bias(position, tables), True
        # Where positions restart, there is not one factor per position.
        unusable = tables.bias is not None and tables.bias.scaled and call.documents is not None
        return None if unusable else tables.bias

    def rotate(
        self, q: Tensor, k: Tensor, position: Encoding, start: int, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Rotate the queries and keys of new tokens, whose rotation depends on their positions alone.

        Returns:
            Queries and keys of the same shapes and dtypes.
        """
        tokens, dtype = q.shape[2], torch.promote_types(q.dtype, torch.float32)
        if positions is None and tokens <= native.FEW and _is_plain(position, q, k):
            tables = self._for(position, start + tokens, dtype, q.device)
            if tables.rotation is None:
                tables.rotation = _rotation_table(position, tables)
            return tables.rotation.turn(q, k, start)
        if positions is None:
            positions = torch.arange(start, start + tokens, device=q.device)[None]
        rotation = position.rotation(Call(tokens, tokens, dtype=dtype, device=q.device, token_positions=positions))
        assert rotation is not None
        turned_q, turned_k = rotation.apply(q.to(dtype), k.to(dtype))
        return turned_q.to(q.dtype), turned_k.to(k.dtype)

    def totals(self, position: Encoding | None, gates: Tensor | None, new: int) -> native.RunningTotals | None:
        """The running totals of all tokens, for caches that may reorder and crop what they hold without saying so.

        Returns:
            The totals, packed again if earlier gates are not the same; None if they cannot be kept.
        """
        if gates is None:
            return None
        before, known = self._gates, gates.shape[2] - new
        same = before is not None and before.shape[:2] == gates.shape[:2] and before.shape[2] >= known
        if before is not None and same:
            before = before[:, :, :known]
            same = torch.equal(before, gates[:, :, :known])
        self._totals = extended_totals(self._totals if same else None, position, gates, new)
        if self._totals is None:
            self._gates = None
        elif before is not None and same:
            self._gates = self._room.extend(before, gates[:, :, known:])
        else:
            self._room = GrowingTensor(overwrites=True)
            self._gates = self._room.extend(gates[:, :, :known], gates[:, :, known:])
        return self._totals

    @torch.no_grad()
    def _for(self, position: Encoding, length: int, dtype: torch.dtype, device: torch.device) -> Tables:
        """The tables for at least `length` tokens, those at hand if they still hold."""
        tables = self._tables
        if (
            tables is None
            or tables.capacity < length
            or tables.dtype != dtype
            or tables.device != device
            or not tables.snapshot.unchanged(position)
        ):
            capacity = max(LEAST_CAPACITY, 1 << (length + length // 8 - 1).bit_length())
            tables = self._tables = Tables(Snapshot(position), capacity, dtype, device)
        return tables


@torch.no_grad()
def _packed_bias(position: Encoding, tables: Tables) -> native.PackedBias | None:
    """The encoding's bias in the kernel's layout, or None if the kernel does not run it."""
    call = Call(tables.capacity, tables.capacity, dtype=tables.dtype, device=tables.device)
    form = position.bias(call)
    if form is None or native.refuses_call(form, call) is not None:
        return None
    for name, numbers in form.tensors():
        check_finite(name, numbers)
    return native.PackedBias(form, tables.capacity)


def increments(position: Encoding | None, gates: Tensor | None) -> tuple[Tensor, Tensor | None] | None:
    """The steps and weights of tokens with these gates, if the kernel can read the bias from their running sums."""
    if position is None or gates is None or gates.device.type != "cpu" or gates.dtype != torch.float32:
        return None
    return None if native.needs_operator((gates,)) or not native.available()[0] else position.increments(gates)


def _is_fixed(position: Encoding) -> bool:
    """Whether its bias is the same for every input and every length."""
    return not (position.needs_hidden or position.needs_scores or position.depends_on_length)


def _is_plain(position: Encoding, *tensors: Tensor | None) -> bool:
    """Whether no gradient and no trace needs to see what is computed from the encoding and these tensors."""
    learns = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in position.parameters())
    return not learns and not native.needs_operator(tensors)


class RotationTable:
    """The rotation of an encoding for all tokens below a capacity, laid out for few operations per step.

    Where all dimensions are rotated in halves (a, b), a rotation is x · (cos, cos) + (b, a) · (−sin, sin).
    """

    def __init__(self, rotation: Rotation, head_dim: int) -> None:
        self.rotation, self.pairs = rotation, rotation.q_cos.shape[2]
        self.together = (
            rotation.layout == "half"
            and 2 * self.pairs == head_dim
            and torch.equal(rotation.q_cos, rotation.k_cos)
            and torch.equal(rotation.q_sin, rotation.k_sin)
        )
        cos, sin = rotation.k_cos[0], rotation.k_sin[0]  # (capacity, pairs)
        self.cos, self.sin = torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)

    def turn(self, q: Tensor, k: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys of the tokens from `start` on."""
        rows, heads = slice(start, start + q.shape[2]), q.shape[1]
        if not self.together:
            r = self.rotation
            turned_q = turn(q.to(self.cos.dtype), r.q_cos[:, rows], r.q_sin[:, rows], r.layout)
            turned_k = turn(k.to(self.cos.dtype), r.k_cos[:, rows], r.k_sin[:, rows], r.layout)
            return turned_q.to(q.dtype), turned_k.to(k.dtype)
        x = torch.cat([q, k], dim=1).to(self.cos.dtype)
        turned = torch.addcmul(x * self.cos[rows], x.roll(self.pairs, -1), self.sin[rows]).to(q.dtype)
        return turned[:, :heads], turned[:, heads:]


@torch.no_grad()
def _rotation_table(position: Encoding, tables: Tables) -> RotationTable:
    """The encoding's rotation."""
    rotation = position.rotation(Call(tables.capacity, tables.capacity, dtype=tables.dtype, device=tables.device))
    assert rotation is not None
    return RotationTable(rotation, position.head_dim)
