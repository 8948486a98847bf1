"""The attention layers whose own code would materialise queries × keys values, one file per family: theirs, on ours.

`FORWARDS` names the functions that replace methods of a class's instances. The projections, caches and residuals are
the model's own; only what turns queries, keys, values and a bias into a result is ours.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from relpos.pretrained.forwards import bloom, conformer, deberta, falcon, mpnet, mpt

Methods = dict[str, Callable[..., Any]]  # by the name of the method
DEBERTA: Methods = {"get_attention_mask": deberta.get_attention_mask, "get_rel_pos": deberta.get_rel_pos}
FORWARDS: dict[str, Methods] = {  # by file and class: two families have a DisentangledSelfAttention
    "modeling_bloom.BloomAttention": {"forward": bloom.forward},
    "modeling_deberta.DebertaEncoder": DEBERTA,
    "modeling_deberta.DisentangledSelfAttention": {"forward": deberta.forward_v1},
    "modeling_deberta_v2.DebertaV2Encoder": DEBERTA,
    "modeling_deberta_v2.DisentangledSelfAttention": {"forward": deberta.forward_v2},
    "modeling_falcon.FalconAttention": {"forward": falcon.forward},
    "modeling_mpnet.MPNetEncoder": {"compute_position_bias": mpnet.compute_position_bias},
    "modeling_mpnet.MPNetSelfAttention": {"forward": mpnet.forward},
    "modeling_mpt.MptAttention": {"forward": mpt.forward},
    "modeling_parakeet.ParakeetEncoderAttention": {"forward": conformer.parakeet_forward},
    "modeling_seamless_m4t.SeamlessM4TConformerSelfAttention": {"forward": conformer.forward},
    "modeling_seamless_m4t_v2.SeamlessM4Tv2ConformerSelfAttention": {"forward": conformer.forward},
    "modeling_wav2vec2_bert.Wav2Vec2BertSelfAttention": {"forward": conformer.forward},
    "modeling_wav2vec2_conformer.Wav2Vec2ConformerSelfAttention": {"forward": conformer.forward},
}


def replacements(module: nn.Module) -> Methods:
    """Our functions for methods of a module; empty for one that keeps its code."""
    kind = type(module)
    return FORWARDS.get(f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}", {})
