"""The attention layer of every family: its projections around attention with an encoding."""

import torch
from torch import Tensor, nn
from transformers import Cache

from relpos.attend import attention
from relpos.attend.cache import DecodingTables, attend_step
from relpos.forms.call import Call
from relpos.forms.encoding import Encoding
from relpos.forms.tracing import without_autocast
from relpos.models.cache import remember
from relpos.models.context import Context


class SelfAttention(nn.Module):
    """Attention of one layer, with the layer's own encoding or with one that all layers share.

    A family subclasses it, creates its projections, and overrides `project` and `merge`.

    Args:
        heads: Number of query heads.
        key_heads: Number of key and value heads; each serves heads / key_heads query heads.
        head_dim: Size of a head.
        layer: Number of the layer, 0 is the first.
        position: The layer's own encoding, if it has one.
        scale: Factor of q·k; head_dim^−½ by default.
        causal: Whether a token sees only those up to its own position.
        dropout: Dropout of the attention weights while training without a cache.
    """

    def __init__(
        self,
        heads: int,
        key_heads: int,
        head_dim: int,
        layer: int,
        position: Encoding | None,
        scale: float | None = None,
        causal: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim, self.layer = heads, key_heads, head_dim, layer
        self.scale = head_dim**-0.5 if scale is None else scale
        self.causal, self.dropout_of_weights = causal, float(dropout)
        self.position = position
        self.tables = DecodingTables()  # of the encoding, between the steps of a decoder

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (batch, heads, length, head_dim), keys and values (batch, key_heads, length, head_dim), unrotated.

        Args:
            x: The layer's input (batch, length, width), as the projections read it.
        """
        raise NotImplementedError

    def merge(self, out: Tensor) -> Tensor:
        """The output projection of the heads' results (batch, length, heads × head_dim): (batch, length, width)."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        shared: Encoding | None = None,
        cache: Cache | None = None,
        documents: Tensor | None = None,
        padding: Tensor | None = None,
        total: int | None = None,
        positions: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """Attention over the input x (batch, length, width), and over what the cache holds of earlier tokens.

        Args:
            x: The layer's input.
            shared: The encoding that all layers share; the layer's own is used where it is None.
            cache: Keys, values and gates of earlier tokens; keys rotated where that depends on their position alone.
            documents: (batch, total), ids of packed documents.
            padding: (batch, total), False for keys that must not be seen.
            total: Number of tokens so far, those in the cache included.
            positions: Positions of the new tokens, (1 or batch, length), or None if they are counted.
            context: The processes among which the sequence is divided, if x, documents and padding are of a slice.

        Returns:
            (batch, length, width).
        """
        position = self.position if shared is None else shared
        q, k, v = self.project(x)
        gates = None if position is None else position.gates(x)
        if cache is not None:
            total = x.shape[1] if total is None else total
            out = self.decode(q, k, v, gates, position, cache, documents, padding, total, positions)
        else:
            out = attention(
                q,
                k,
                v,
                position,
                gates=gates,
                causal=self.causal,
                documents=documents,
                padding=padding,
                dropout=self.dropout_of_weights if self.training else 0.0,
                scale=self.scale,
                group=None if context is None else context.group,
                scheme=None if context is None else context.scheme,
            )
        return self.merge(out.transpose(1, 2).flatten(2))

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Tensor | None,
        position: Encoding | None,
        cache: Cache,
        documents: Tensor | None,
        padding: Tensor | None,
        total: int,
        positions: Tensor | None,
    ) -> Tensor:
        """Attention over the new tokens and those in the cache. The model has checked its arguments for all layers."""
        batch, heads, tokens, _ = q.shape
        rotated = position is not None and position.rotates_by_position
        with without_autocast(q.device):
            if rotated:
                assert position is not None
                q, k = self.tables.rotate(q, k, position, total - tokens, positions)
            k, v, gates = remember(cache, self.layer, k, v, gates, total)
            dtype = torch.promote_types(q.dtype, torch.float32)
            call = Call(
                tokens,
                total,
                causal=self.causal,
                documents=documents,
                padding=padding,
                gates=gates,
                q=q.to(dtype) if position is not None and position.needs_scores else None,
                scale=self.scale,
                dtype=dtype,
                device=q.device,
                batch=batch,
                heads=heads,
            )
            totals = self.tables.totals(position, gates, tokens)
            return attend_step(q, k, v, position, call, None, self.tables, totals, rotated)[0]


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, length, heads × head_dim) as (batch, heads, length, head_dim)."""
    batch, length, _ = x.shape
    return x.view(batch, length, heads, -1).transpose(1, 2)
