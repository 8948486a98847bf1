"""What an encoding computes for a decoding step, kept from step to step: its bias and its rotation.

Both are computed for all tokens below a capacity, and again when that is exceeded or when anything has changed of which
they were made. Parameters are compared by value: a change through `.data` leaves no other trace, and a table that is
out of date would give wrong results without a sign.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from relpos.attend import native
from relpos.attend.arguments import check_finite
from relpos.attend.native import RunningTotals as Running
from relpos.forms.call import Call
from relpos.forms.encoding import Encoding
from relpos.forms.rotation import Rotation, turn

LEAST_CAPACITY = 1024  # tokens
LEAST_ROOM = 64  # tokens


class Watch:
    """Tells whether a module is as it was."""

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

    watch: Watch
    capacity: int
    dtype: torch.dtype
    device: torch.device
    waves: "Waves | None" = None
    ready: native.PackedBias | None = None
    biased: bool = field(default=False)  # whether `ready` has been looked for


class Kept:
    """The tables of one encoding, between the decoding steps of one layer."""

    def __init__(self) -> None:
        self._tables: Tables | None = None
        self._running: Running | None = None
        self._gates = torch.empty(0)  # those of which the running sums were made: (batch, heads, room, gate_size)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Kept":
        return Kept()  # they belong to the encoding that was copied

    def __reduce__(self) -> tuple[type["Kept"], tuple[()]]:
        return Kept, ()

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Encoding | None,
        call: Call,
        backend: str | None,
        running: Running | None = None,
    ) -> tuple[Tensor, Tensor | None] | None:
        """Compute attention of few queries with the kept bias, or return None if that cannot serve this call.

        Args:
            q: Queries, (batch, heads, queries, head_dim), rotated if the encoding rotates.
            k: Keys, (batch, key_heads, keys, head_dim), likewise.
            v: Values, (batch, key_heads, keys, value_dim).
            position: The encoding.
            call: The call of attention.
            backend: The backend that the caller asks for.
            running: The bias of an encoding with running sums, if a cache keeps it.

        Returns:
            The output and the log-sum-exp, as `native.attention` returns them.
        """
        places = () if position is None or call.queries > native.FEW else position.places
        if position is None or "score" not in places:
            return None
        projected = "query and key" in places and not position.rotates_by_position  # still to be rotated
        elsewhere = backend not in (None, "native") or not call.causal or not call.among_keys
        if projected or elsewhere or call.token_positions is not None:
            return None
        if not _is_plain(position, q, k, v, call.sinks) or native.refuses(q, v, None, call) is not None:
            return None
        ready: native.PackedBias | Running | None = running
        if running is None and _is_fixed(position):
            tables = self._for(position, call.length, call.dtype, call.device)
            if not tables.biased:
                tables.ready, tables.biased = _ready(position, tables), True
            ready = tables.ready
            if isinstance(ready, native.PackedBias) and ready.scaled and call.documents is not None:
                return None  # positions restart, and there is one factor per position
        return None if ready is None else native.attention(q, k, v, None, call, packed=ready)

    def rotate(
        self, q: Tensor, k: Tensor, position: Encoding, start: int, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Rotate the queries and keys of new tokens, whose rotation depends on their positions alone.

        Args:
            q: Queries, (batch, heads, tokens, head_dim).
            k: Keys, (batch, key_heads, tokens, head_dim).
            position: The encoding, whose `rotates_by_position` is true.
            start: Index of the first of the tokens.
            positions: Their positions, (1 or batch, tokens), or None if they are the indices.

        Returns:
            Queries and keys of the same shapes and dtypes.
        """
        tokens, dtype = q.shape[2], torch.promote_types(q.dtype, torch.float32)
        if positions is None and tokens <= native.FEW and _is_plain(position, q, k):
            tables = self._for(position, start + tokens, dtype, q.device)
            if tables.waves is None:
                tables.waves = _waves(position, tables)
            return tables.waves.turn(q, k, start)
        if positions is None:
            positions = torch.arange(start, start + tokens, device=q.device)[None]
        rotation = position.rotation(Call(tokens, tokens, dtype=dtype, device=q.device, token_positions=positions))
        assert rotation is not None
        turned_q, turned_k = rotation.apply(q.to(dtype), k.to(dtype))
        return turned_q.to(q.dtype), turned_k.to(k.dtype)

    def running(self, position: Encoding | None, gates: Tensor | None, new: int) -> Running | None:
        """The running sums of an encoding, extended by the new tokens, or made again if earlier gates are not the same.

        For caches that are not ours, which may reorder and crop what they hold without saying so.

        Args:
            position: The encoding.
            gates: Of all tokens so far, (batch, heads, tokens, gate_size).
            new: How many of the tokens are new.

        Returns:
            The running sums of all tokens, or None if they cannot be kept.
        """
        before, self._running = self._running, None
        all_tokens = increments(position, gates) if new <= native.FEW else None
        if gates is None or all_tokens is None:
            return None
        tokens = gates.shape[2]
        if before is not None:
            before.crop(tokens - new)
            known = before.length
            shape = (*gates.shape[:2], *gates.shape[3:])
            same = shape == (*self._gates.shape[:2], *self._gates.shape[3:]) and tokens <= self._gates.shape[2]
            if same and tokens - known <= native.FEW and torch.equal(gates[:, :, :known], self._gates[:, :, :known]):
                self._gates[:, :, known:tokens] = gates[:, :, known:]
                step, weight = all_tokens
                later = (step[..., known:], None if weight is None else weight[..., known:])
                self._running = before if before.append(*later) else None
                return self._running
        room = tokens + max(LEAST_ROOM, tokens // 2)
        self._gates = gates.new_empty(*gates.shape[:2], room, gates.shape[3])
        self._gates[:, :, :tokens] = gates
        fresh = Running(*all_tokens, room)
        self._running = fresh if fresh.fits else None
        return self._running

    @torch.no_grad()
    def _for(self, position: Encoding, length: int, dtype: torch.dtype, device: torch.device) -> Tables:
        """The tables for at least `length` tokens, those at hand if they still hold."""
        tables = self._tables
        if (
            tables is None
            or tables.capacity < length
            or tables.dtype != dtype
            or tables.device != device
            or not tables.watch.unchanged(position)
        ):
            capacity = max(LEAST_CAPACITY, 1 << (length + length // 8 - 1).bit_length())
            tables = self._tables = Tables(Watch(position), capacity, dtype, device)
        return tables


@torch.no_grad()
def _ready(position: Encoding, tables: Tables) -> native.PackedBias | None:
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


class Waves:
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
def _waves(position: Encoding, tables: Tables) -> Waves:
    """The encoding's rotation."""
    rotation = position.rotation(Call(tables.capacity, tables.capacity, dtype=tables.dtype, device=tables.device))
    assert rotation is not None
    return Waves(rotation, position.head_dim)
