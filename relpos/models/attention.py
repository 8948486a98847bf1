"""The attention layer of every family: its projections around attention with an encoding."""

from torch import Tensor, nn

from relpos.attend import Cache, attention
from relpos.forms.encoding import Encoding
from relpos.models.context import Context


class SelfAttention(nn.Module):
    """Attention of one layer. A family subclasses it, creates its projections, and overrides `project` and `merge`."""

    def __init__(
        self,
        heads: int,
        key_heads: int,  # each serves heads / key_heads query heads
        head_dim: int,
        position: Encoding | None,  # the layer's own encoding, if it has one
        scale: float | None = None,  # of q·k; head_dim^−½ by default
        causal: bool = True,
        dropout: float = 0.0,  # of the attention weights, while training without a cache
    ) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim = heads, key_heads, head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.causal, self.dropout_of_weights = causal, float(dropout)
        self.position = position

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (batch, heads, length, head_dim), keys and values (batch, key_heads, length, head_dim), unrotated."""
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
        context: Context | None = None,
    ) -> Tensor:
        """Attention over the input x (batch, length, width), and over what the cache holds of earlier tokens.

        `shared` is the encoding that all layers share, in place of the layer's own. Documents and padding are those of
        all tokens so far, (batch, total); with a `context`, all tensors are of this process's slice.
        """
        position = self.position if shared is None else shared
        q, k, v = self.project(x)
        out = attention(
            q,
            k,
            v,
            position,
            gates=None if position is None else position.gates(x),
            causal=self.causal,
            documents=documents,
            padding=padding,
            dropout=self.dropout_of_weights if self.training and cache is None else 0.0,
            scale=self.scale,
            cache=cache,
            group=None if context is None else context.group,
            scheme=None if context is None else context.scheme,
        )
        return self.merge(out.transpose(1, 2).flatten(2))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, length, heads × head_dim) as (batch, heads, length, head_dim)."""
    batch, length, _ = x.shape
    return x.view(batch, length, heads, -1).transpose(1, 2)
