"""What a decoder keeps of one layer between its steps."""

import torch
from torch import Tensor

from relpos.attend import native
from relpos.attend.arguments import AttentionOptions, Position, check_position, make_call, read_positions
from relpos.attend.checked import attend
from relpos.attend.kept import Kept, increments
from relpos.attend.native import RunningTotals as Running
from relpos.forms.call import positions
from relpos.forms.checks import check_shape, integer_at_least
from relpos.forms.encoding import Encoding

LEAST_ROOM = 64  # tokens


class Cache:
    """Keys, values and gates of the tokens so far, of one attention layer: `relpos.attention(…, cache=cache)`.

    A step takes q, k, v (and hidden) of the new tokens alone; their keys and values are added here, and attention runs
    over all tokens so far. Memory grows by doubling, so a step copies nothing but the new tokens. Keys are kept rotated
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
        self.kept = Kept()
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        self._tensors: dict[str, Tensor] = {}  # k, v and gates: (batch, heads, room, size)
        self._length = 0
        self._rotated = False
        self._running: Running | None = None

    @property
    def length(self) -> int:
        """Number of tokens so far: the `start` of `position.embed` for the next one."""
        return self._length

    def __len__(self) -> int:
        return self._length

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
        kept = length if length >= 0 else self._length + length
        if not 0 <= kept <= self._length:
            raise ValueError(f"the cache holds {self._length} tokens: it cannot be cropped to {length}.")
        if kept == 0:
            self.reset()  # an empty cache is a new one, also for other encodings
            return
        self._length = kept
        if self._running is not None:
            self._running.crop(kept)

    def reorder(self, index: Tensor) -> None:
        """Choose rows of the batch, as beam search does; rows may be repeated or left out.

        Args:
            index: Numbers of the rows, (new batch,).

        Example:
            >>> cache.reorder(torch.tensor([0, 0, 2]))  # the first beam twice, the second dropped
        """
        self._tensors = {name: x.index_select(0, index.to(x.device)) for name, x in self._tensors.items()}
        self._running = None

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
        before, total = self._length, self._length + tokens
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
            return attend(q, k, v, position, call, backend, self.kept, self._running, self._rotated)
        except BaseException:
            self.crop(min(before, self._length))
            raise

    def append(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, position: Encoding | None, where: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Add the new tokens.

        Args:
            q: Their queries, (batch, heads, tokens, head_dim).
            k: Their keys, (batch, key_heads, tokens, head_dim).
            v: Their values, (batch, key_heads, tokens, value_dim).
            gates: (batch, heads, tokens, gate_size), or None.
            position: The encoding.
            where: Their positions, (1 or batch, tokens), or None if they are their numbers.

        Returns:
            The queries, rotated if the keys are; keys, values and gates of all tokens so far.

        Raises:
            ValueError: Shapes, dtypes or the kind of encoding differ from those of the tokens before.
        """
        rotated = position is not None and position.rotates_by_position
        if self._length and rotated != self._rotated:
            raise ValueError("the cache holds keys of another encoding: make a cache of its own for each layer.")
        self._rotated = rotated
        new = {"k": k, "v": v} if gates is None else {"k": k, "v": v, "gates": gates}
        self._check(new)
        if rotated:
            assert position is not None
            q, new["k"] = self.kept.rotate(q, k, position, self._length, where)
        end = self._length + k.shape[2]
        for name, x in new.items():
            self._write(name, x, end)
        self._extend(gates, position)
        self._length = end
        seen = [self._tensors[name][:, :, :end] for name in new]
        return q, seen[0], seen[1], seen[2] if gates is not None else None

    def _check(self, new: dict[str, Tensor]) -> None:
        if not self._length:
            return
        if new.keys() != self._tensors.keys():
            raise ValueError("the cache holds keys of another encoding: make a cache of its own for each layer.")
        for name, x in new.items():
            old = self._tensors[name]
            if (x.shape[:2], x.shape[3:], x.dtype, x.device) != (old.shape[:2], old.shape[3:], old.dtype, old.device):
                raise ValueError(
                    f"{name} of the new tokens is {tuple(x.shape)}, {x.dtype}, on {x.device}, but the cache holds "
                    f"{(*old.shape[:2], self._length, *old.shape[3:])}, {old.dtype}, on {old.device}: "
                    "only the number of tokens may differ."
                )

    def _write(self, name: str, x: Tensor, end: int) -> None:
        old = self._tensors.get(name) if self._length else None
        if torch.is_grad_enabled() and (x.requires_grad or (old is not None and old.requires_grad)):
            # Gradients flow through a copy, not through memory that is written again.
            self._tensors[name] = x if old is None else torch.cat([old[:, :, : self._length], x], dim=2)
            return
        writable = old is not None and not old.requires_grad and old.is_inference() == torch.is_inference_mode_enabled()
        if old is None or not writable or old.shape[2] < end:
            room = max(self._capacity, end + min(end, max(LEAST_ROOM, end // 2)))
            larger = x.new_empty(x.shape[0], x.shape[1], room, x.shape[3])
            if old is not None:
                larger[:, :, : self._length] = old[:, :, : self._length].detach()
            self._tensors[name] = old = larger
        old[:, :, self._length : end] = x.detach()

    def _extend(self, gates: Tensor | None, position: Encoding | None) -> None:
        """Extend the running sums, or give them up where they cannot be kept."""
        before, self._running = self._running, None
        new = increments(position, gates)
        if gates is None or new is None:
            return
        end = self._length + gates.shape[2]
        if before is not None and before.length == self._length and before.append(*new):
            self._running = before
        elif gates.shape[2] <= native.FEW:  # it begins with the first step after the prompt
            of_all = increments(position, self._tensors["gates"][:, :, :end])
            assert of_all is not None
            fresh = Running(*of_all, end + max(LEAST_ROOM, end // 2))
            self._running = fresh if fresh.fits else None


def new_positions(
    tokens: int, total: int, documents: Tensor | None, given: Tensor | None, device: torch.device
) -> Tensor | None:
    """Positions of the last tokens, (1 or batch, tokens), or None if they are their numbers."""
    if given is not None:
        return given[:, -tokens:]
    return None if documents is None else positions(total, documents, device)[:, -tokens:]
