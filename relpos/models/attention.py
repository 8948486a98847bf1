"""The attention layer of every family: its projections around attention with an encoding."""

from torch import Tensor, nn
from transformers import Cache

from relpos.attend import attention
from relpos.encodings.encoding import Encoding
from relpos.models.cache import remember


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
        dropout: Dropout of the attention weights. They are never materialised, so training refuses values other than 0.
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
    ) -> Tensor:
        """Attention over the input x (batch, length, width), and over what the cache holds of earlier tokens.

        Args:
            x: The layer's input.
            shared: The encoding that all layers share; the layer's own is used where it is None.
            cache: Keys, values and gates of earlier tokens.
            documents: (batch, total), ids of packed documents.
            padding: (batch, total), False for keys that must not be seen.
            total: Number of tokens so far, those in the cache included.

        Returns:
            (batch, length, width).
        """
        if self.training and self.dropout_of_weights:
            raise ValueError(
                "attention weights are never materialised, so they cannot have a dropout of "
                f"{self.dropout_of_weights}: set it to 0 in the configuration to train."
            )
        position = self.position if shared is None else shared
        q, k, v = self.project(x)
        gates = None if position is None else position.gates(x)
        if cache is not None:
            k, v, gates = remember(cache, self.layer, k, v, gates, x.shape[1] if total is None else total)
        out = attention(
            q, k, v, position, gates=gates, causal=self.causal, documents=documents, padding=padding, scale=self.scale
        )
        return self.merge(out.transpose(1, 2).flatten(2))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, length, heads × head_dim) as (batch, heads, length, head_dim)."""
    batch, length, _ = x.shape
    return x.view(batch, length, heads, -1).transpose(1, 2)
