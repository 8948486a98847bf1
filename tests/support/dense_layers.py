"""Layers on random queries and keys, and their maps in one piece, computed in float64 and reduced by numpy."""

import numpy as np
import torch

import relpos
from relpos.attend.arguments import LayerCall
from relpos.maps.layer import open_layer


class DenseLayer:
    """A layer, and what it was opened with, in float64."""

    def __init__(self, position, length, key_heads=None, dtype=torch.float32, **arguments):
        heads, head_dim = position.heads, position.head_dim
        self.position = position.to(dtype)
        q, k = (torch.randn(1, n, length, head_dim, dtype=dtype) for n in (heads, key_heads or heads))
        hidden = torch.randn(1, length, position.width, dtype=dtype) if position.needs_hidden else None
        self.layer = open_layer(1, LayerCall(q, k, self.position, {"hidden": hidden, **arguments}))
        self.position, self.q, self.k = self.position.double(), q.double(), k.double()
        self.arguments = {"hidden": None if hidden is None else hidden.double(), **arguments}

    @torch.no_grad()
    def dense(self, show):
        """The maps of all heads (heads, length, length), NaN where a key is not seen; with numpy's own softmax."""
        scores = relpos.scores(self.q, self.k, self.position, **self.arguments)[0].numpy()
        plain = relpos.scores(self.q, self.k, **(self.arguments | {"hidden": None}))[0].numpy()
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        with np.errstate(invalid="ignore"):
            values = {"bias": scores - plain, "scores": scores, "weights": powers / powers.sum(-1, keepdims=True)}
        return np.where(np.isfinite(scores), values[show], np.nan)


def reduce_cells(values, size):
    """Minimum, mean and maximum of every cell of a map (…, length, length), NaN where none is seen: (3, …)."""
    starts = np.arange(0, values.shape[-1], size)
    seen = np.isfinite(values)
    low, total, high, count = (
        function.reduceat(function.reduceat(x, starts, axis=-2), starts, axis=-1)
        for function, x in (
            (np.minimum, np.where(seen, values, np.inf)),
            (np.add, np.where(seen, values, 0.0)),
            (np.maximum, np.where(seen, values, -np.inf)),
            (np.add, seen.astype(float)),
        )
    )
    return np.where(count > 0, np.stack([low, total / np.maximum(count, 1), high]), np.nan)
