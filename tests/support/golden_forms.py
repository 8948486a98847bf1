"""Comparisons of `tests/support/golden.py` for positions of other people's models, by their forms."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import relpos
from relpos.forms.bias import Form, Projected, Sum
from relpos.forms.call import Call
from relpos.models.attention_interface import ModelBias
from relpos.pretrained.families import deberta
from relpos.pretrained.families.position_tables import by_offset

Pairs = Iterator[tuple[Tensor, Tensor]]
Content = dict[str, Any]


def number(values: object) -> Tensor:
    """Numbers of a file, NaN for null."""

    def plain(value: object) -> object:
        return [plain(item) for item in value] if isinstance(value, list) else float("nan") if value is None else value

    return torch.tensor(plain(values), dtype=torch.float64)


def scores(q: Tensor, k: Tensor, bias: Callable[[Call], Form], scale: float) -> Tensor:
    """The scores of queries and keys (heads, length, head_dim) with a bias: (heads, length, length)."""
    position = ModelBias(len(q), q.shape[-1], (bias,))
    return relpos.scores(q[None], k[None], position, causal=False, scale=scale)[0]


def deberta_v2(content: Content) -> Pairs:
    sizes, inputs, outputs = (content[name] for name in ("parameters", "inputs", "outputs"))
    q, k = number(inputs["q"]), number(inputs["k"])
    heads, buckets = sizes["heads"], sizes["position_buckets"]
    scale = (3 * sizes["head_dim"]) ** -0.5
    layer = SimpleNamespace(position_buckets=buckets, max_relative_positions=sizes["max_relative_positions"])
    tables = [
        (number(sizes["rel_embeddings"]) @ number(sizes[f"{name}_weight"]).T + number(sizes[f"{name}_bias"]))
        .unflatten(1, (heads, -1))
        .transpose(0, 1)
        for name in ("pos_key", "pos_query")
    ]

    def bias(call: Call) -> Form:
        row = (deberta.bucketed(layer, call.distances.long()) + buckets).clamp(0, 2 * buckets - 1)
        of_queries = Projected(q[None], tables[0] * scale, call.zero, row)
        return Sum((of_queries, Projected(k[None], tables[1] * scale, call.zero, row, of_keys=True)))

    yield scores(q, k, bias, scale)[:, outputs["rows"]], number(outputs["logits"])
    yield scores(q * 0, k * 0, bias, scale)[:, outputs["rows"]], number(outputs["bias"])


def transformer_xl(content: Content) -> Pairs:
    """XLNet's: R has its sines before its cosines."""
    sizes, inputs, outputs = (content[name] for name in ("parameters", "inputs", "outputs"))
    q, k = number(inputs["q"]), number(inputs["k"])
    u, v = (number(sizes[name])[:, None] for name in ("r_w_bias", "r_r_bias"))
    angles = angles_of(sizes["length"], sizes["d_model"])
    embeddings = torch.cat([angles.sin(), angles.cos()], dim=1)
    table = torch.einsum("nw,whd->hnd", embeddings, number(sizes["r_weight"]))
    scale = sizes["head_dim"] ** -0.5

    def bias(call: Call) -> Form:
        return Projected((q + v)[None], table * scale, call.zero)

    yield scores(q * 0, k, bias, scale)[:, outputs["rows"]], number(outputs["position"])
    yield scores(q + u, k, bias, scale)[:, outputs["logits_rows"]], number(outputs["logits"])


def conformer_relative(content: Content) -> Pairs:
    """wav2vec2-conformer's: sines and cosines take turns."""
    sizes, inputs, outputs = (content[name] for name in ("parameters", "inputs", "outputs"))
    q, k = number(inputs["q"]), number(inputs["k"])
    u, v = (number(sizes[name])[:, None] for name in ("pos_bias_u", "pos_bias_v"))
    weight = number(sizes["linear_pos_weight"])
    angles = angles_of(sizes["length"], weight.shape[1])
    embeddings = torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)
    table = (embeddings @ weight.T).unflatten(1, (sizes["heads"], -1)).transpose(0, 1)
    scale = sizes["head_dim"] ** -0.5

    def bias(call: Call) -> Form:
        return Projected((q + v)[None], table * scale, call.zero)

    yield scores(q * 0, k, bias, scale)[:, outputs["rows"]], number(outputs["bias"])
    weights = scores(q + u, k, bias, scale).softmax(-1)
    yield weights[:, outputs["weights_rows"]], number(outputs["weights"])


def angles_of(length: int, width: int) -> Tensor:
    """Distance times frequency, from −(length − 1) to length − 1: (distances, width / 2)."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.arange(1 - length, length, dtype=torch.float64)[:, None] * frequencies


def swin(content: Content) -> Pairs:
    sizes, outputs = content["parameters"], content["outputs"]
    high, wide = sizes["window"]
    owner = SimpleNamespace(window_size=(high, wide), relative_position_bias_table=number(sizes["table"]))
    values = by_offset(owner, max(high, wide))  # (heads, 2 · high − 1, 2 · wide − 1)
    down, across = (x.flatten() for x in torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij"))
    full = values[:, down[:, None] - down + high - 1, across[:, None] - across + wide - 1]
    yield full[:, outputs["rows"]], number(outputs["bias"])
