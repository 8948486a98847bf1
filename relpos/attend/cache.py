"""What a decoder keeps of one attention layer between its steps: keys, values, gates, the tables of its encoding."""

import copy
from functools import cached_property

import torch
from torch import Tensor

from relpos.attend import native
from relpos.attend.arguments import AttentionOptions, Position, check_finite, check_position, make_call, read_positions
from relpos.attend.backends import DecodingBackend, PackedBias, RunningTotals, attend, decoding_backend, runs_packed
from relpos.forms.call import Call, positions
from relpos.forms.checks import check_shape, integer_at_least
from relpos.forms.encoding import Encoding
from relpos.forms.rotation import Rotation, turn

LEAST_CAPACITY = 1024  # tokens of a table
LEAST_ROOM = 64  # tokens


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
        self._tables: DecodingTables | None = None
        self.reset()

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_tables": None}  # they belong to one encoding, and hold addresses

    def reset(self) -> None:
        """Forget all tokens."""
        self._length = 0
        self._memory: dict[str, Tensor] = {}  # k, v and gates: (batch, heads, room, size)
        self._writable = True  # whether no graph holds the memory
        self._rotated = False
        self._totals: RunningTotals | None = None
        self._totals_backend = ""  # its name

    @property
    def length(self) -> int:
        """Number of tokens so far: the `start` of `position.embed` for the next one."""
        return self._length

    def __len__(self) -> int:
        return self._length

    def tensor(self, name: str) -> Tensor | None:
        """The keys "k" (rotated if they are kept so), values "v" or "gates" so far: (batch, heads, length, size)."""
        return self._memory[name][:, :, : self._length] if name in self._memory else None

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
        self._length = tokens
        if tokens == 0:
            self.reset()  # an empty cache is a new one, also for other encodings

    def reorder(self, index: Tensor) -> None:
        """Choose rows of the batch, as beam search does; rows may be repeated or left out.

        Args:
            index: Numbers of the rows, (new batch,).

        Example:
            >>> cache.reorder(torch.tensor([0, 0, 2]))  # the first beam twice, the second dropped
        """
        self._memory = {name: x.index_select(0, index.to(x.device)) for name, x in self._memory.items()}
        self._totals = None

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, position: Position | None, backend: str | None, options: AttentionOptions
    ) -> tuple[Tensor, Tensor | None]:
        """Add the new tokens, and attend from them to all tokens so far; after an error the cache is what it was."""
        if not self.length:
            self.reset()  # a first step may have failed before
        batch, _, tokens, _ = q.shape
        if options["start"] is not None or options["cu_seqlens"] is not None:
            raise ValueError("with a cache the queries are the last tokens: leave start and cu_seqlens out.")
        if k.shape[2] != tokens:
            raise ValueError(f"with a cache, q and k are of the new tokens, but q has {tokens} and k has {k.shape[2]}.")
        total, documents, where = self.length + tokens, options["documents"], options["positions"]
        if documents is not None:
            check_shape("documents", documents, (batch, total))
        if where is not None:
            where = read_positions(where, batch, total, position)
        gates = check_position(q, tokens, position, options)
        encoding = position if isinstance(position, Encoding) else None
        rotated = encoding is not None and encoding.rotates_by_position
        new = {"k": k, "v": v} if gates is None else {"k": k, "v": v, "gates": gates}
        self._check(new, rotated)
        plain = _is_plain(encoding, q, options["sinks"], *new.values())
        if encoding is not None and rotated:
            if where is not None:
                where = where[:, -tokens:]
            elif documents is not None and tokens == 1:
                where = (documents == documents[:, -1:]).sum(1, keepdim=True) - 1  # documents are contiguous
            elif documents is not None:
                where = positions(total, documents, q.device)[:, -tokens:]
            q, new["k"] = self._rotate(q, k, encoding, where, plain)
        all_tokens = {name: self._extended(name, x, plain) for name, x in new.items()}
        k, v, gates = all_tokens["k"], all_tokens["v"], all_tokens.get("gates")
        self._writable = plain
        options = {**options, "hidden": None, "gates": gates, "start": self.length}
        call = make_call(q, k, position, **options)
        kernel = None
        if encoding is not None and plain and _has_lasting_bias(encoding, call):
            kernel = decoding_backend(backend, q, v, call)
        packed = None if encoding is None or kernel is None else self._packed_bias(encoding, call, kernel)
        if kernel is None or packed is None or not runs_packed(kernel, q, v, packed):
            result = attend(q, k, v, position, call, backend, rotated)
        else:
            result = kernel.attention(q, k, v, None, call, packed=packed)
        self._length, self._rotated = total, rotated
        return result

    def _check(self, new: dict[str, Tensor], rotated: bool) -> None:
        if not self.length:
            return
        if rotated != self._rotated or new.keys() != self._memory.keys():
            raise ValueError("the cache holds keys of another encoding: make a cache of its own for each layer.")
        for name, x in new.items():
            old = self._memory[name][:, :, : self.length]
            if (x.shape[:2], x.shape[3:], x.dtype, x.device) != (old.shape[:2], old.shape[3:], old.dtype, old.device):
                raise ValueError(
                    f"{name} of the new tokens is {tuple(x.shape)}, {x.dtype}, on {x.device}, but the cache holds "
                    f"{tuple(old.shape)}, {old.dtype}, on {old.device}: only the number of tokens may differ."
                )

    def _extended(self, name: str, new: Tensor, plain: bool) -> Tensor:
        """The tokens so far and the new ones, as a view of memory that is written in place unless a graph holds it."""
        before = self._memory[name][:, :, : self.length] if self.length else new[:, :, :0]
        if not plain:
            self._memory[name] = torch.cat([before, new], dim=2)
            return self._memory[name]
        end, memory = self.length + new.shape[2], self._memory.get(name) if self._writable else None
        if memory is None or end > memory.shape[2] or memory.is_inference() != torch.is_inference_mode_enabled():
            room = max(self._capacity, _with_room(end))
            memory = self._memory[name] = new.new_empty(*new.shape[:2], room, new.shape[3])
            memory[:, :, : self.length] = before.detach()
        memory[:, :, self.length : end] = new.detach()
        return memory[:, :, :end]

    def _rotate(
        self, q: Tensor, k: Tensor, position: Encoding, where: Tensor | None, plain: bool
    ) -> tuple[Tensor, Tensor]:
        """Rotate the queries and keys of new tokens, whose rotation depends on their positions alone."""
        tokens, dtype = q.shape[2], torch.promote_types(q.dtype, torch.float32)
        if where is None and tokens <= native.FEW and plain:
            return self._tables_of(position, self.length + tokens, dtype, q.device).rotate(q, k, self.length)
        if where is None:
            where = torch.arange(self.length, self.length + tokens, device=q.device)[None]
        rotation = position.rotation(Call(tokens, tokens, dtype=dtype, device=q.device, token_positions=where))
        assert rotation is not None
        turned_q, turned_k = rotation.apply(q.to(dtype), k.to(dtype))
        return turned_q.to(q.dtype), turned_k.to(k.dtype)

    def _packed_bias(
        self, position: Encoding, call: Call, kernel: DecodingBackend
    ) -> PackedBias | RunningTotals | None:
        """The bias in the kernel's layout, or None if that cannot serve this call."""
        if call.queries > kernel.FEW:
            return None
        if self._totals_backend != kernel.__name__:
            self._totals, self._totals_backend = None, kernel.__name__
        self._totals = _extended_totals(self._totals, kernel, position, call.gates, call.queries)
        if self._totals is not None:
            return self._totals
        if position.needs_hidden or position.needs_scores or position.depends_on_length:
            return None
        bias = self._tables_of(position, call.length, call.dtype, call.device).bias(kernel)
        # Where positions restart, there is not one factor per position.
        return None if bias is not None and bias.scaled and call.documents is not None else bias

    def _tables_of(self, position: Encoding, length: int, dtype: torch.dtype, device: torch.device) -> "DecodingTables":
        """Tables for at least `length` tokens: those at hand if they still hold."""
        tables = self._tables
        if tables is None or tables.capacity < length or not tables.holds(position, dtype, device):
            capacity = max(LEAST_CAPACITY, 1 << (length + length // 8 - 1).bit_length())
            tables = self._tables = DecodingTables(position, capacity, dtype, device)
        return tables


def _with_room(tokens: int) -> int:
    """The size of memory for these tokens and some more, so that all growth together copies each token a few times."""
    return tokens + max(LEAST_ROOM, tokens // 2)


def _is_plain(position: Encoding | None, *tensors: Tensor | None) -> bool:
    """Whether no gradient and no trace needs to see what is computed from the encoding and these tensors."""
    if native.needs_operator(tensors):
        return False
    return position is None or not torch.is_grad_enabled() or not any(p.requires_grad for p in position.parameters())


def _has_lasting_bias(position: Encoding, call: Call) -> bool:
    """Whether there is a bias that a later step may read too: a causal one, of tokens whose positions are indices."""
    places = position.places
    changes_queries = "query and key" in places and not position.rotates_by_position
    return call.causal and call.token_positions is None and "score" in places and not changes_queries


def _extended_totals(
    totals: RunningTotals | None, kernel: DecodingBackend, position: Encoding, gates: Tensor | None, new: int
) -> RunningTotals | None:
    """The running totals of all tokens, from those of earlier ones; None if the bias is not read from such totals."""
    if gates is None or gates.dtype != torch.float32:
        return None
    latest = position.increments(gates[:, :, -new:])
    if latest is None:
        return None
    tokens = gates.shape[2]
    if totals is not None:
        totals.crop(tokens - new)
        if totals.length == tokens - new and totals.append(*latest):
            return totals
    every = position.increments(gates)
    assert every is not None
    packed = kernel.running_totals(*every, _with_room(tokens))
    return packed if packed.fits else None


class TensorMark:
    """Detects changes to a tensor.

    By its values: a change through `.data` leaves no other trace. Reading values would stall an accelerator: there by
    its memory and its count of changes in place, and `parameter.data.mul_(2)` goes unnoticed.
    """

    def __init__(self, x: Tensor, by_value: bool | None = None) -> None:
        self._by_value = x.device.type == "cpu" if by_value is None else by_value
        self._by_value = self._by_value or x.is_inference()  # such a tensor does not count its changes
        self._before = x.detach().clone() if self._by_value else x.detach()  # alive, so that no other has its memory
        self._version = None if self._by_value else x._version

    def holds(self, now: Tensor | None) -> bool:
        """Whether this is the tensor as it was."""
        before = self._before
        if now is None or now.dtype != before.dtype or now.device != before.device:
            return False
        if self._by_value or now.is_inference():
            return torch.equal(now, before)
        same = now.data_ptr() == before.data_ptr() and (now.shape, now.stride()) == (before.shape, before.stride())
        return same and now._version == self._version


class DecodingTables:
    """The bias and the rotation of an encoding for all tokens below a capacity, and what they were made of."""

    def __init__(self, position: Encoding, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.position, self.capacity, self.dtype, self.device = position, capacity, dtype, device
        self._biases: dict[str, PackedBias | None] = {}  # by kernel
        modules = list(position.modules())
        owners = [owner for part in modules for owner in (part._parameters, part._buffers, vars(part))]
        self.tensors = [(o, name, TensorMark(x)) for o in owners for name, x in o.items() if isinstance(x, Tensor)]
        self.settings = [
            (vars(part), name, copy.deepcopy(value))
            for part in modules
            for name, value in vars(part).items()
            if name[0] != "_" and name not in ("training", "options") and not isinstance(value, Tensor)
        ]

    def holds(self, position: Encoding, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether these are the tables of this encoding, whose parameters, buffers and attributes have not changed."""
        if position is not self.position or dtype != self.dtype or device != self.device:
            return False
        if not all(mark.holds(owner.get(name)) for owner, name, mark in self.tensors):
            return False
        return all(owner.get(name) == before for owner, name, before in self.settings)

    @property
    def _call(self) -> Call:
        return Call(self.capacity, self.capacity, dtype=self.dtype, device=self.device)

    def bias(self, kernel: DecodingBackend) -> PackedBias | None:
        """The bias in a kernel's layout, or None if the kernel does not run it."""
        if kernel.__name__ not in self._biases:
            self._biases[kernel.__name__] = self._packed(kernel)
        return self._biases[kernel.__name__]

    @torch.no_grad()
    def _packed(self, kernel: DecodingBackend) -> PackedBias | None:
        form = self.position.bias(self._call)
        if form is None or kernel.refuses_call(form, self._call) is not None:
            return None
        for name, numbers in form.tensors():
            check_finite(name, numbers)
        return kernel.packed_bias(form, self.capacity)

    @cached_property
    @torch.no_grad()
    def _rotation(self) -> tuple[Rotation, tuple[Tensor, Tensor] | None]:
        rotation = self.position.rotation(self._call)
        assert rotation is not None
        cos, sin = rotation.k_cos[0], rotation.k_sin[0]  # (capacity, pairs)
        together = (
            rotation.layout == "half"
            and 2 * cos.shape[1] == self.position.head_dim
            and torch.equal(rotation.q_cos, rotation.k_cos)
            and torch.equal(rotation.q_sin, rotation.k_sin)
        )
        return rotation, (torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)) if together else None

    def rotate(self, q: Tensor, k: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys of the tokens from `start` on, in few operations.

        Where all dimensions are rotated in halves (a, b), a rotation is x · (cos, cos) + (b, a) · (−sin, sin).
        """
        r, halves = self._rotation
        rows, heads = slice(start, start + q.shape[2]), q.shape[1]
        if halves is None:
            turned_q = turn(q.to(self.dtype), r.q_cos[:, rows], r.q_sin[:, rows], r.layout)
            turned_k = turn(k.to(self.dtype), r.k_cos[:, rows], r.k_sin[:, rows], r.layout)
            return turned_q.to(q.dtype), turned_k.to(k.dtype)
        x = torch.cat([q, k], dim=1).to(self.dtype)
        turned = torch.addcmul(x * halves[0][rows], x.roll(x.shape[-1] // 2, -1), halves[1][rows]).to(q.dtype)
        return turned[:, :heads], turned[:, heads:]
