"""The base class of every encoding: a module that may act in three places and does nothing where it does not."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from relpos.forms.bias import Form, locate, terms
from relpos.forms.call import Call, check_documents, positions, products
from relpos.forms.cards import check_choices, options_of, signature
from relpos.forms.checks import check_shape, check_tensors, integer_at_least
from relpos.forms.rotation import Rotation

PLACES = ("embedding", "query and key", "score")


class Encoding(nn.Module):
    """A positional encoding for attention with `heads` heads of size `head_dim`.

    A subclass states its paper and its formula, documents its options in the section Args of its docstring, and
    overrides the method of the place where it acts: `embed`; `rotation`, `query_factor` or `rotate`; `bias`. Everything
    else that relpos reports about it (its places, the form of its bias, its learned values) is derived from these.

    Args:
        heads: Number of attention heads.
        head_dim: Size of a head.
        width: Size of the layer's input and of the token embedding; heads × head_dim if None.

    Attributes:
        options: The options of this instance by name, as passed or by default.
        paper: Where the encoding was published.
        formula: What it computes, in one line.
        tables: Names of parameters with one entry per distance. Most entries get little gradient, so training may
            give them a learning rate of their own.
        gate_size: Values per token and head that `gates` computes from the layer's input.
        needs_scores: Whether its bias is computed from the scores.
        bidirectional: Whether it is defined for keys after the query.
        alternatives: Of an encoding that is causal only: encodings for both directions in its place, as in
            ("rope", "fire with symmetric=True").
        axes: Axes of the positions it reads: 1, or more for rotations in several dimensions.
        depends_on_length: Whether a longer sequence changes what earlier tokens see (dynamic RoPE scalings).
        rotates_by_position: Whether `rotation` of a token depends on its position alone, so that a cache may keep keys
            rotated.

    Example:
        >>> class Linear(relpos.Encoding):
        ...     '''A penalty that grows with distance.'''
        ...     paper, formula = "none", "B_ij = −|i − j|"
        ...     def bias(self, call):
        ...         table = -call.distances.abs().expand(self.heads, -1)  # (heads, distances)
        ...         return Toeplitz(table, call.zero)
    """

    paper: ClassVar[str]
    formula: ClassVar[str]
    tables: ClassVar[tuple[str, ...]] = ()
    gate_size: int = 0
    needs_scores: bool = False
    bidirectional: bool = True
    alternatives: tuple[str, ...] = ()
    axes: int = 1
    depends_on_length: bool = False
    rotates_by_position: bool = False
    options: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # The arguments are checked and kept here, before any `__init__`, so that no subclass has to repeat it.
        self = super().__new__(cls)
        try:
            arguments = signature(cls).bind(*args, **kwargs)
        except TypeError:  # wrong arguments, which `__init__` will refuse; or none, while copying or unpickling
            return self
        arguments.apply_defaults()
        options = {name: arguments.arguments[name] for name in options_of(cls)}
        check_choices(cls, options)
        object.__setattr__(self, "options", options)  # nn.Module's own needs its `__init__` first
        return self

    def __init__(self, heads: int, head_dim: int, width: int | None = None) -> None:
        super().__init__()
        self.heads = integer_at_least("heads", heads)
        self.head_dim = integer_at_least("head_dim", head_dim)
        self.width = heads * head_dim if width is None else integer_at_least("width", width)

    @classmethod
    def options_for_length(cls, options: Mapping[str, Any], length: int) -> dict[str, Any]:
        """The options with the trained length filled in, if this class has an option for it that was not set."""
        return {"length": length, **options} if "length" in options_of(cls) else dict(options)

    @property
    def places(self) -> tuple[str, ...]:
        """Where it acts: any of "embedding", "query and key" and "score", in this order."""
        turns = self.overrides("rotation") or self.overrides("rotate") or self.overrides("query_factor")
        acts = (self.overrides("embed"), turns, self.overrides("bias"))
        return tuple(place for place, does in zip(PLACES, acts, strict=True) if does)

    @property
    def place(self) -> str:
        """Where it acts, as text: "score", "query and key, score", or "nowhere"."""
        return ", ".join(self.places) or "nowhere"

    def overrides(self, method: str) -> bool:
        """Whether its class overrides a method of `Encoding`."""
        return getattr(type(self), method) is not getattr(Encoding, method)

    @property
    def form(self) -> str:
        """The form of its bias, as text: "Toeplitz", "Toeplitz + RankOne" for a sum, or "none"."""
        device = next((parameter.device for parameter in self.parameters()), torch.device("cpu"))
        with torch.no_grad():
            gates = self.gates(torch.zeros(1, 2, self.width, device=device))
            q = torch.zeros(1, self.heads, 2, self.head_dim, device=device)
            form = self.bias(Call(2, 2, gates=gates, q=q, device=device))
        return " + ".join(type(term).__name__ for term in terms(form)) or "none"

    @property
    def learned_per_head(self) -> float:
        """How many values this instance learns, divided by its heads (some values are shared by the heads)."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad) / self.heads

    @property
    def needs_hidden(self) -> bool:
        """Whether its bias is computed from the layer's input."""
        return self.gate_size > 0

    @property
    def static_bias(self) -> bool:
        """Whether it acts by a bias that is the same for every input."""
        return self.place == "score" and not self.needs_hidden and not self.needs_scores

    @property
    def advice_for_both_directions(self) -> str:
        """What to use in both directions in place of an encoding that is causal only, as a sentence."""
        if not self.alternatives:
            return "In both directions, use an encoding whose directions in `relpos ls` are both."
        *others, last = self.alternatives
        return f"In both directions, use {' or '.join(filter(None, [', '.join(others), last]))}."

    def embed(self, x: Tensor, start: int = 0, documents: Tensor | None = None) -> Tensor:
        """Add position to token embeddings.

        Args:
            x: Token embeddings, (batch, length, width).
            start: Position of the first token.
            documents: Ids of packed documents, (batch, tokens so far), of which x holds the last tokens. Positions
                restart at 0 in each document.

        Returns:
            (batch, length, width); x itself if the encoding does not act on the embedding.

        Example:
            >>> x = position.embed(x)  # the prompt, positions 0, 1, …
            >>> x = position.embed(x, start=cache.length)  # while decoding: the tokens so far
        """
        return x

    def positions_of(self, x: Tensor, start: int, documents: Tensor | None) -> Tensor:
        """The position of each token, for `embed`: (1 or batch, length)."""
        check_shape("the input of embed", x, ("batch", "length", self.width))
        if documents is None:
            return positions(x.shape[1], None, x.device) + integer_at_least("start", start, least=0)
        check_documents(documents, x.shape[0], max(x.shape[1], documents.shape[-1]))
        return positions(documents.shape[1], documents, x.device)[:, -x.shape[1] :]

    def rotation(self, call: Call) -> Rotation | None:
        """The rotation of queries and keys as tables, which the native kernel applies while it reads them.

        Example:
            >>> def rotation(self, call):
            ...     angle = call.key_positions[..., None] * self.frequencies  # (1 or batch, keys, pairs)
            ...     first = call.first  # as many queries as keys, or the last of them
            ...     cos, sin = angle.cos(), angle.sin()
            ...     return Rotation(cos[:, first:], sin[:, first:], cos, sin, "half")
        """
        return None

    def query_factor(self, call: Call) -> Tensor | None:
        """The factor of each query, (1 or batch, 1 or heads, queries, 1)."""
        return None

    def rotate(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Put position into queries (batch, heads, queries, head_dim) and keys (batch, key_heads, keys, head_dim).

        An encoding that rotates them overrides `rotation` instead, one that scales queries `query_factor`.
        """
        rotation, factor = self.rotation(call), self.query_factor(call)
        if factor is not None:
            q = q * factor
        return (q, k) if rotation is None else rotation.apply(q, k)

    def gates(self, hidden: Tensor) -> Tensor | None:
        """Compute what the bias needs of each token, and what a cache must keep while decoding.

        Args:
            hidden: The layer's normalised input, (batch, length, width).

        Returns:
            (batch, heads, length, gate_size), or None if the bias does not read the input.

        Example:
            >>> gates = relpos.encoding("cable", heads=12, head_dim=64).gates(hidden)  # (batch, 12, length, 2)
            >>> out = relpos.attention(q, k, v, position, gates=gates)  # the same as with hidden=
        """
        return None

    def read_gates(
        self, batch: int, keys: int, causal: bool, hidden: Tensor | None, gates: Tensor | None = None
    ) -> Tensor | None:
        """The gates of a call of attention, checked, and computed from the layer's input if they were not passed."""
        if not causal and not self.bidirectional:
            raise ValueError(
                f"{type(self).__name__} is defined for causal attention only. {self.advice_for_both_directions}"
            )
        if not self.needs_hidden:
            return None
        if gates is None:
            if hidden is None:
                raise ValueError(
                    f"{type(self).__name__} reads the layer's input: give hidden= of shape ({batch}, {keys}, "
                    f"{self.width}), or to attention the gates= computed from it."
                )
            advice = "While decoding, keep position.gates(hidden) of each token in the cache, and give gates=."
            check_shape("hidden", hidden, (batch, keys, self.width), advice)
            gates = self.gates(hidden)
        assert gates is not None
        check_shape(f"gates of {type(self).__name__}", gates, (batch, self.heads, keys, self.gate_size))
        return gates

    def increments(self, gates: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """How each token extends a RankOne bias, so that a cache need not sum up all tokens at every step.

        The step by which it raises the running total, and its weight (None means 1), (batch, heads, tokens) each; None
        if the bias has another form. `gates` are those of some tokens, (batch, heads, tokens, gate_size).
        """
        return None

    def bias(self, call: Call) -> Form | None:
        """The bias on the scores of a call of attention: `Toeplitz`, `RankOne`, `Scaled`, `Projected` or `Scored`.

        Where processes divide the heads, `call.gates` and `call.q` have some of the heads; tables are made for all.
        """
        return None

    def located_bias(self, call: Call) -> Form | None:
        """The bias, which knows the distances of tokens also where given positions have gaps."""
        form = self.bias(call)
        return None if form is None else locate(form, call)

    @torch.no_grad()
    def map(
        self,
        length: int | None = None,
        *,
        hidden: Tensor | None = None,
        q: Tensor | None = None,
        k: Tensor | None = None,
        causal: bool = True,
    ) -> Tensor:
        """Materialise the additive bias, to look at it or to use it as a mask.

        If the encoding acts on the scores only, the map is the `attn_mask` with which PyTorch's own attention gives
        the same result.

        Args:
            length: Number of tokens; may be left out if another argument shows it.
            hidden: The layer's input, (batch, length, width), for an encoding that reads it.
            q: Queries, (batch, heads, length, head_dim), for an encoding that reads the scores.
            k: Keys, (batch, key_heads, length, head_dim).
            causal: Whether a query sees only keys up to its own position.

        Returns:
            (heads, length, length), −inf where a key is not seen; (1 or batch, heads, length, length) if hidden, or
            q and k, were passed.

        Example:
            >>> relpos.encoding("alibi", heads=8, head_dim=64).map(512).shape
            torch.Size([8, 512, 512])
        """
        if self.places and "score" not in self.places:
            raise ValueError(
                f"{type(self).__name__} acts on the {self.place} and adds no bias: relpos.scores(q, k, position=…) "
                "shows its effect."
            )
        if self.needs_scores and (q is None or k is None):
            raise ValueError(
                f"the bias of {type(self).__name__} is computed from the scores: give q= and k= of shape (batch, "
                f"{self.heads}, length, {self.head_dim})."
            )
        if (q is None) != (k is None):
            raise ValueError("map takes q and k together: give both or neither.")
        sample = hidden if q is None else q
        if hidden is not None:
            check_shape("hidden", hidden, ("batch", "length", self.width))
        if q is not None and k is not None:
            check_shape("q", q, ("batch", self.heads, "length", self.head_dim))
            check_shape("k", k, ("batch", "key_heads", "length", self.head_dim))
        lengths = {x.shape[-2] for x in (hidden, q, k) if x is not None} | ({length} if length is not None else set())
        if len(lengths) != 1:
            raise ValueError(f"map needs one length, not {sorted(lengths) or 'none'}.")
        tokens = integer_at_least("length", lengths.pop())
        if q is None or k is None:
            device = next((x.device for x in (sample, *self.parameters()) if x is not None), torch.device("cpu"))
            zero = torch.zeros(1, dtype=torch.float32 if sample is None else sample.dtype, device=device)
            q = k = zero.expand(1 if sample is None else len(sample), self.heads, tokens, self.head_dim)
        check_tensors(q, k, None)
        dtype = torch.promote_types(q.dtype, torch.float32)
        q, k = q.to(dtype), k.to(dtype)
        call = Call(
            queries=tokens,
            keys=tokens,
            causal=causal,
            gates=self.read_gates(len(q), tokens, causal, hidden),
            q=q if self.needs_scores else None,
            scale=self.head_dim**-0.5,
            dtype=dtype,
            device=q.device,
            batch=len(q),
            heads=self.heads,
        )
        visible = call.visible(call.i)
        form = self.located_bias(call)
        if form is None:
            bias = torch.zeros(1, self.heads, tokens, tokens, dtype=dtype, device=q.device)
        else:
            bias = form.block(call.i, call.j, products(q, k) * call.scale if self.needs_scores else None, visible)
        bias = bias.masked_fill(~visible, -torch.inf)
        return bias[0] if sample is None else bias

    def extra_repr(self) -> str:
        sizes = {"heads": self.heads, "head_dim": self.head_dim}
        arguments = ", ".join(f"{name}={value!r}" for name, value in {**sizes, **self.options}.items())
        return f"{arguments}, learned_per_head={self.learned_per_head:g}"
