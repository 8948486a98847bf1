"""What every encoding is: a module that may act in three places, and does nothing where it does not."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from relpos.encodings.call import Call, check_documents, positions, products
from relpos.encodings.forms import Form


class Encoding(nn.Module):
    """A positional encoding. A subclass states its card and overrides the place where it acts."""

    place: ClassVar[str]  # "embedding", "query and key", "score" or "nowhere"
    form: ClassVar[str]  # "Toeplitz", "RankOne", "Scaled", "Scored", or "none"
    learns: ClassVar[str]  # learned values per head: a formula in options, d, H, width; then "; by default …"
    directions: ClassVar[str]  # "both", "causal", or "as its base"
    paper: ClassVar[str]
    formula: ClassVar[str]
    options: ClassVar[Mapping[str, str]] = {}  # keyword of __init__: its meaning
    tables: ClassVar[tuple[str, ...]] = ()  # parameters with an entry a distance, most of which get little gradient
    gate_size: int = 0  # numbers a token and head that `gates` computes from the layer's input

    def __init__(self, heads: int, head_dim: int, width: int | None = None) -> None:
        super().__init__()
        self.heads = whole("heads", heads)
        self.head_dim = whole("head_dim", head_dim)
        self.width = heads * head_dim if width is None else whole("width", width)

    @property
    def learned_per_head(self) -> float:
        """How many values this instance learns, divided by its heads (some are shared by the heads)."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad) / self.heads

    @property
    def bidirectional(self) -> bool:
        """Whether it is defined for keys after the query."""
        return self.directions == "both"

    @property
    def needs_hidden(self) -> bool:
        """Whether its bias is computed from the layer's input."""
        return self.gate_size > 0

    @property
    def needs_scores(self) -> bool:
        """Whether its bias is computed from the scores."""
        return False

    @property
    def depends_on_length(self) -> bool:
        """Whether a longer sequence changes what earlier tokens see (dynamic RoPE scalings)."""
        return False

    def embed(self, x: Tensor, start: int = 0, documents: Tensor | None = None) -> Tensor:
        """Add position to token embeddings x (batch, length, width).

        The first token stands at `start`; with `documents` (ids of all tokens so far, x the last of them) positions
        start anew in each document.
        """
        return x

    def rotate(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Put position into queries (batch, heads, queries, head_dim) and keys (batch, key_heads, keys, head_dim)."""
        return q, k

    def gates(self, hidden: Tensor) -> Tensor | None:
        """What the bias needs of each token, and a cache must keep: (batch, heads, length, gate_size)."""
        return None

    def bias(self, call: Call) -> Form | None:
        """The bias on the scores of this call."""
        return None

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
        """The additive bias written out, for looking at: (heads, length, length), −inf where a key is not seen.

        With `hidden` (batch, length, width), or with `q` and `k` (batch, heads, length, head_dim), one a batch entry:
        (batch, heads, length, length). The map is the `attn_mask` that makes PyTorch's own attention do the same.
        """
        name = type(self).__name__
        if self.place not in ("score", "nowhere"):
            raise ValueError(
                f"{name} enters at the {self.place} and adds no bias: relpos.scores(q, k, position=…) shows its effect."
            )
        if self.needs_hidden and hidden is None:
            raise ValueError(
                f"the bias of {name} comes from the layer's input: give hidden= (batch, length, {self.width})."
            )
        if self.needs_scores and (q is None or k is None):
            raise ValueError(
                f"the bias of {name} comes from the scores: give q=, k= (batch, {self.heads}, length, {self.head_dim})."
            )
        if hidden is not None and hidden.dim() != 3:
            raise ValueError(f"hidden must be (batch, length, {self.width}), not {tuple(hidden.shape)}.")
        for label, x in (("q", q), ("k", k)):
            if x is not None and (x.dim() != 4 or x.shape[1] != self.heads or x.shape[3] != self.head_dim):
                raise ValueError(
                    f"{label} must be (batch, {self.heads}, length, {self.head_dim}), not {tuple(x.shape)}."
                )
        if not causal and not self.bidirectional:
            raise ValueError(f"{name} is defined for causal attention only.")
        lengths = {x.shape[-2] for x in (hidden, q, k) if x is not None} | ({length} if length is not None else set())
        if len(lengths) != 1:
            raise ValueError(f"map needs one length; given: {sorted(lengths) or 'none'}.")
        tokens = whole("length", lengths.pop())
        sample = hidden if hidden is not None else q
        dtype = torch.float64 if sample is not None and sample.dtype == torch.float64 else torch.float32
        device = next((x.device for x in (sample, *self.parameters()) if x is not None), torch.device("cpu"))
        gates = self.gates(hidden) if hidden is not None else None
        scale = self.head_dim**-0.5
        q = q.to(dtype) if q is not None else None
        call = Call(tokens, tokens, causal=causal, gates=gates, q=q, scale=scale, dtype=dtype, device=device)
        visible = call.visible(call.i)
        scores = products(q, k.to(dtype)) * scale if q is not None and k is not None else None
        form = self.bias(call)
        bias = torch.zeros(1, self.heads, tokens, tokens, dtype=dtype, device=device)
        if form is not None:
            bias = form.block(call.i, call.j, scores, visible)
        bias = bias.masked_fill(~visible, -torch.inf)
        return bias[0] if sample is None else bias

    def standing(self, x: Tensor, start: int, documents: Tensor | None) -> Tensor:
        """Position of each token of x (batch, length, width): (1 or batch, length)."""
        if x.dim() != 3 or x.shape[-1] != self.width:
            raise ValueError(f"embed takes (batch, length, {self.width}), not {tuple(x.shape)}.")
        if documents is None:
            return positions(x.shape[1], None, x.device) + whole("start", start, least=0)
        check_documents(documents, x.shape[0], max(x.shape[1], documents.shape[-1]))
        return positions(documents.shape[1], documents, x.device)[:, -x.shape[1] :]

    def extra_repr(self) -> str:
        return f"heads={self.heads}, head_dim={self.head_dim}, learned_per_head={self.learned_per_head:g}"


def whole(name: str, value: int, least: int = 1) -> int:
    """`value`, if it is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}.")
    return value


def positive(name: str, value: float) -> float:
    """`value`, if it is a positive, finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive number, not {value!r}.")
    return float(value)
