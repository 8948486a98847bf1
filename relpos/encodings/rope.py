from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from relpos.forms.call import Call
from relpos.forms.encoding import Encoding
from relpos.forms.rotation import Rotation, Scaling, SectionOrder, read_parameters


class Rope(Encoding):
    """RoPE: queries and keys rotated by their position, with the scalings for longer inputs.

    Args:
        base: Base of the wavelengths, `rope_theta` in transformers; 10000 in the paper.
        layout: Which dimensions form a pair. "half": k and k + d/2 (Llama, NeoX); "interleaved": 2k and 2k + 1 (paper,
            GPT-J, CABLE).
        fraction: Share of the head's dimensions that are rotated.
        scaling: Scaling of the frequencies, named as in transformers.
        factor: Factor of the scaling; if None, 1, or for yarn and longrope the length over the original length.
        length: Trained length, for the scalings that depend on it.
        sections: Number of pairs that each axis of the positions rotates, for positions (batch, keys, axes): M-RoPE,
            with time, height and width in Qwen's models. Positions with one axis, or none, are those of text.
        section_order: Which pairs are an axis's. "blocks": one axis after the other (Qwen2-VL); "interleaved": the axes
            take turns (Qwen3-VL).
        position_dtype: The dtype in which positions are counted. "bfloat16" rounds them to 8 significant bits, as code
            does that counts them in the model's dtype: 1,024 tokens then have 513 distinct positions. Angles are
            computed in float32 either way.
        rope_parameters: The dictionary of a transformers configuration; its entries override all of the above.
    """

    paper = "Su et al. 2021, arXiv 2104.09864"
    formula = "pair k of q_i and of k_i rotated by the angle i·θ_k,  θ_k = base^(−2k/d)"

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        base: float = 10000.0,
        layout: Literal["half", "interleaved"] = "half",
        fraction: float = 1.0,
        scaling: Scaling = "default",
        factor: float | None = None,
        length: int = 2048,
        sections: Sequence[int] | None = None,
        section_order: SectionOrder = "blocks",
        position_dtype: Literal["float32", "bfloat16"] = "float32",
        rope_parameters: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(heads, head_dim)
        self.layout, self.position_dtype = layout, position_dtype
        numbers = {  # not `self.options`: a subclass may have other ones
            "base": base,
            "fraction": fraction,
            "scaling": scaling,
            "factor": factor,
            "length": length,
            "sections": sections,
            "section_order": section_order,
        }
        self.rope = read_parameters(head_dim, numbers, rope_parameters)
        self.axes = self.rope.axes
        self.depends_on_length = self.rope.scaling in ("dynamic", "longrope")
        self.rotates_by_position = not self.depends_on_length

    def rotation(self, call: Call) -> Rotation:
        k_cos, k_sin = self.waves(call.key_positions, call.key_lengths, call)
        if call.among_keys:
            queries = slice(call.first, call.first + call.queries)
            q_cos, q_sin = k_cos[:, queries], k_sin[:, queries]
        else:
            q_cos, q_sin = self.waves(call.query_positions, call.query_lengths, call)
        return Rotation(q_cos, q_sin, k_cos, k_sin, self.layout)

    def waves(self, positions: Tensor, lengths: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles of tokens at these positions, in documents of these lengths."""
        if self.position_dtype == "bfloat16":
            positions = positions.to(torch.bfloat16)
        of_pairs = positions[..., None] if positions.dim() == 2 else positions[..., self.rope.axis_of_pair]
        angle = of_pairs.to(call.dtype) * self.rope.frequencies(lengths, call.dtype)  # (1 or batch, tokens, pairs)
        return angle.cos() * self.rope.amplitude, angle.sin() * self.rope.amplitude
