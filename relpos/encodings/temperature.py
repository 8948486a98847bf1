from typing import Literal

import torch
from torch import Tensor

from relpos.forms.call import Call
from relpos.forms.checks import integer_at_least, positive_number
from relpos.forms.encoding import Encoding

LENGTHS = {"llama4": 8192, "ministral3": 16384, "inkling": 8192}  # as in the configurations; inkling's has none


class Temperature(Encoding):
    """Temperature: queries scaled by a factor that grows slowly with their position.

    It distinguishes no two keys, so it is mostly a part of `sum`, with rope (Ministral-3). Llama-4 has it in its layers
    without rope.

    Args:
        rule: Formula of the factor at position i = 0, 1, 2, …, as three families of transformers have it. "llama4":
            1 + a·log(1 + ⌊(i + 1) / L⌋); "ministral3": 1 + a·log(1 + ⌊i / L⌋), also of Mistral-4; "inkling":
            1 + a·log(max((i + 1) / L, 1)), which that model applies to its bias as well: here, to queries only.
        strength: a in the formula: `attn_scale`, `llama_4_scaling_beta` or `log_scaling_alpha` in a configuration.
        length: L in the formula, up to which the factor is about 1: `floor_scale`, `original_max_position_embeddings`
            or `log_scaling_n_floor`. If None, 8192 for llama4 and 16384 for ministral3, as in their configurations;
            and 8192 for inkling, whose configuration has no default.
    """

    paper = "as in Llama-4; after Nakanishi 2025, arXiv 2501.19399"
    formula = "q_i ← τ(i)·q_i,  τ(i) = 1 + a·log(1 + ⌊(i + 1) / L⌋)"

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        rule: Literal["llama4", "ministral3", "inkling"] = "llama4",
        strength: float = 0.1,
        length: int | None = None,
    ) -> None:
        super().__init__(heads, head_dim)
        self.rule, self.strength = rule, positive_number("strength", strength)
        self.length = LENGTHS[rule] if length is None else integer_at_least("length", length)

    def query_factor(self, call: Call) -> Tensor:
        position = call.query_positions[:, None, :, None]  # (1 or batch, 1, queries, 1)
        if self.rule == "inkling":
            grown = ((position + 1).to(call.dtype) / self.length).clamp(min=1.0).log()
        else:
            full = (position + 1 if self.rule == "llama4" else position) // self.length
            grown = torch.log1p(full.to(call.dtype))
        return 1 + self.strength * grown
