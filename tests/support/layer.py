"""A small attention layer around any encoding, and its decoder: what the contracts are checked on."""

import torch
from torch import Tensor

import relpos
from relpos.forms.encoding import Encoding


class Layer:
    """embed → q, k, v by fixed projections → attention. The input of the projections is the encoding's hidden."""

    def __init__(self, position: Encoding, key_heads: int | None = None, seed: int = 0, **options: object) -> None:
        self.position = position
        self.heads, self.head_dim = position.heads, position.head_dim
        self.key_heads = key_heads or self.heads
        self.options = options
        generator = torch.Generator().manual_seed(seed)
        width = position.width

        def projection(heads: int) -> Tensor:
            return torch.randn(width, heads * self.head_dim, generator=generator, dtype=torch.float64) * width**-0.5

        self.to_q, self.to_k, self.to_v = projection(self.heads), projection(self.key_heads), projection(self.key_heads)

    def split(self, x: Tensor, projection: Tensor) -> Tensor:
        batch, length, _ = x.shape
        # In float32 at least: PyTorch's bfloat16 products stop some CPUs with an illegal instruction.
        dtype = torch.promote_types(x.dtype, torch.float32)
        projected = (x.to(dtype) @ projection.to(dtype)).to(x.dtype)
        return projected.view(batch, length, -1, self.head_dim).transpose(1, 2)

    def __call__(self, x: Tensor, documents: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        """All of the sequence at once: (batch, heads, length, head_dim)."""
        hidden = self.position.embed(x, documents=documents)
        q, k, v = (self.split(hidden, p) for p in (self.to_q, self.to_k, self.to_v))
        return relpos.attention(
            q, k, v, self.position, hidden=hidden, documents=documents, padding=padding, **self.options
        )

    def scores(self, x: Tensor) -> Tensor:
        """The scores before the softmax: (batch, heads, length, length)."""
        hidden = self.position.embed(x)
        q, k = self.split(hidden, self.to_q), self.split(hidden, self.to_k)
        return relpos.scores(q, k, self.position, hidden=hidden)

    def decode(self, x: Tensor, step: int = 1, documents: Tensor | None = None) -> Tensor:
        """The same, `step` tokens at a time, keeping keys, values and gates: (batch, heads, length, head_dim)."""
        ks, vs, gates, out = [], [], [], []
        for start in range(0, x.shape[1], step):
            new = x[:, start : start + step]
            seen = None if documents is None else documents[:, : start + new.shape[1]]
            hidden = self.position.embed(new, start=start, documents=seen)
            ks.append(self.split(hidden, self.to_k))
            vs.append(self.split(hidden, self.to_v))
            gates.append(self.position.gates(hidden))
            kept = torch.cat(gates, dim=2) if gates[0] is not None else None
            q, k, v = self.split(hidden, self.to_q), torch.cat(ks, dim=2), torch.cat(vs, dim=2)
            out.append(relpos.attention(q, k, v, self.position, gates=kept, documents=seen, **self.options))
        return torch.cat(out, dim=2)

    def decode_with_cache(
        self, x: Tensor, step: int = 1, documents: Tensor | None = None, padding: Tensor | None = None
    ) -> Tensor:
        """The same, by a `relpos.Cache`."""
        cache, out = relpos.Cache(), []
        for start in range(0, x.shape[1], step):
            new = x[:, start : start + step]
            end = start + new.shape[1]
            seen, there = (None if t is None else t[:, :end] for t in (documents, padding))
            hidden = self.position.embed(new, start=len(cache), documents=seen)
            q, k, v = (self.split(hidden, p) for p in (self.to_q, self.to_k, self.to_v))
            out.append(
                relpos.attention(
                    q, k, v, self.position, hidden=hidden, documents=seen, padding=there, cache=cache, **self.options
                )
            )
        return torch.cat(out, dim=2)
