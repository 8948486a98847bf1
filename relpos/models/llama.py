"""Llama with any positional encoding: RMSNorm, SwiGLU, grouped key heads, no biases.

Its arithmetic and the names of its weights are Llama's own: with rope the two open each other's folders.
"""

from collections.abc import Iterable
from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from relpos.attend import Cache
from relpos.forms.encoding import Encoding
from relpos.model_catalogue import Preset
from relpos.models.attention import SelfAttention, split_heads
from relpos.models.decoder import CausalLM, Decoder
from relpos.models.family import Family, PositionedConfig
from relpos.models.plan import PositionEntry


@strict
class RelposLlamaConfig(PositionedConfig, LlamaConfig):
    """Llama's configuration with a positional encoding.

    Args:
        position: {"name": "kerple_log", …options}, see `relpos.models.plan`. Default: that of Llama, rope with the
            configuration's rope_parameters.
        share_position: One encoding for all layers instead of one per layer.

    Example:
        >>> config = RelposLlamaConfig.preset("nano", position="cable", vocab_size=4096)
    """

    model_type = "relpos_llama"

    position: PositionEntry | str | None = None
    share_position: bool = False
    bos_token_id: int | None = None  # set from the tokenizer
    eos_token_id: int | list[int] | None = None

    def own_position(self) -> PositionEntry:
        rope = {"max_position_embeddings": self.max_position_embeddings, **(self.rope_parameters or {})}
        return {"name": "rope", "rope_parameters": rope}

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}."
            )


class Attention(SelfAttention):
    """Llama's projections; a key head serves several query heads."""

    def __init__(self, config: RelposLlamaConfig, position: Encoding | None) -> None:
        heads, key_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.size_of_head
        super().__init__(heads, key_heads, head_dim, position, dropout=config.attention_dropout)
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width, key_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(width, key_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (
            split_heads(self.q_proj(x), self.heads),
            split_heads(self.k_proj(x), self.key_heads),
            split_heads(self.v_proj(x), self.key_heads),
        )

    def merge(self, out: Tensor) -> Tensor:
        merged: Tensor = self.o_proj(out)
        return merged


class MLP(nn.Module):
    """SwiGLU: a gate of SiLU times a linear map, then linear."""

    def __init__(self, config: RelposLlamaConfig) -> None:
        super().__init__()
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act is {config.hidden_act!r}, but Llama has silu only.")
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(GradientCheckpointingLayer):
    """Pre-norm attention and MLP, each added to the stream."""

    def __init__(self, config: RelposLlamaConfig, position: Encoding | None) -> None:
        super().__init__()
        self.self_attn = Attention(config, position)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, past_key_values: Cache | None = None, **call: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cache=past_key_values, **call)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Weights:
    """What the models with and without the head share."""

    config_class = RelposLlamaConfig
    base_model_prefix = "model"
    _no_split_modules = ["Block"]


class RelposLlamaModel(_Weights, Decoder):
    """Token ids to hidden states."""

    embedding_position, blocks, final_norm = "embedding", "layers", "norm"
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.weight$"]  # of the language model's folder

    def __init__(self, config: RelposLlamaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        positions = config.make_positions()
        self.embedding = positions.embedding
        self.position = positions.shared
        self.layers = nn.ModuleList([Block(config, own) for own in positions.layers])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()


class RelposLlamaForCausalLM(_Weights, CausalLM):
    """The language model."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # where the configuration ties them

    def __init__(self, config: RelposLlamaConfig) -> None:
        super().__init__(config)
        self.model = RelposLlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class Llama(Family):
    """The family Llama."""

    name = "llama"
    config_class = RelposLlamaConfig
    model_class = RelposLlamaForCausalLM

    def sizes(self, preset: Preset) -> dict[str, int]:
        """A key head per three or four heads, and an inner width of 8/3 of the outer one, rounded up to 32."""
        return {
            "num_hidden_layers": preset.layers,
            "num_attention_heads": preset.heads,
            "num_key_value_heads": preset.heads // (3 if preset.heads % 3 == 0 else 4),
            "hidden_size": preset.width,
            "intermediate_size": -(-8 * preset.width // 3 // 32) * 32,
        }

    def attentions(self, base: Any) -> Iterable[SelfAttention]:
        return (block.self_attn for block in base.layers)


FAMILY = Llama()
