"""GPT-2 with any positional encoding: a transformers model like any other.

Its arithmetic and the names of its weights are GPT-2's own: with learned positions the two open each other's folders.
"""

from collections.abc import Iterable
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, initialization
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from relpos.attend import Cache
from relpos.forms.encoding import Encoding
from relpos.model_catalogue import Preset
from relpos.models.attention import SelfAttention
from relpos.models.decoder import CausalLM, Decoder
from relpos.models.family import Family, PositionedConfig
from relpos.models.plan import PositionEntry


@strict
class RelposGPT2Config(PositionedConfig, GPT2Config):
    """GPT-2's configuration with a positional encoding.

    Args:
        position: {"name": "kerple_log", …options}, see `relpos.models.plan`. Default: that of GPT-2, learned
            positions up to n_positions.
        share_position: One encoding for all layers instead of one per layer.

    Example:
        >>> config = RelposGPT2Config.preset("nano", position="cable", vocab_size=4096)
    """

    model_type, table = "relpos_gpt2", "n_positions"

    n_positions: int = 1024  # of learned positions; no other encoding has a limit
    position: PositionEntry | str | None = None
    share_position: bool = False
    # The paper trains without dropout.
    resid_pdrop: float | int = 0.0
    embd_pdrop: float | int = 0.0
    attn_pdrop: float | int = 0.0
    bos_token_id: int | None = None  # set from the tokenizer
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.n_embd % self.n_head:
            raise ValueError(f"the width {self.n_embd} (n_embd) is not a multiple of the {self.n_head} heads (n_head).")
        if self.add_cross_attention:
            raise ValueError("this GPT-2 has no cross-attention: leave add_cross_attention at False.")

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return int(self.n_embd) // int(self.n_head)


class Attention(SelfAttention):
    """GPT-2's projections."""

    def __init__(self, config: RelposGPT2Config, layer: int, position: Encoding | None) -> None:
        scale = config.size_of_head**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scale /= layer + 1
        heads = config.n_head
        super().__init__(heads, heads, config.size_of_head, position, scale, dropout=config.attn_pdrop)
        self.c_attn = Conv1D(3 * config.n_embd, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)
        self.drop = nn.Dropout(config.resid_pdrop)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x.shape
        q, k, v = self.c_attn(x).view(batch, length, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        return q, k, v

    def merge(self, out: Tensor) -> Tensor:
        dropped: Tensor = self.drop(self.c_proj(out))
        return dropped


class MLP(nn.Module):
    """Linear, GELU (the tanh formula), linear."""

    def __init__(self, config: RelposGPT2Config) -> None:
        super().__init__()
        if config.activation_function not in ("gelu_new", "gelu_pytorch_tanh"):
            raise ValueError(
                f"activation_function is {config.activation_function!r}, but GPT-2 has gelu_new (GELU by tanh) only."
            )
        inner = config.n_inner or 4 * config.n_embd
        self.c_fc = Conv1D(inner, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, inner)
        self.drop = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))
        return out


class Block(GradientCheckpointingLayer):
    """Pre-norm attention and MLP, each added to the stream."""

    def __init__(self, config: RelposGPT2Config, layer: int, position: Encoding | None) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config, layer, position)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, past_key_values: Cache | None = None, **call: Any) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache=past_key_values, **call)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class _Weights:
    """What the models with and without the head share."""

    config_class = RelposGPT2Config
    base_model_prefix = "transformer"
    _input_embed_layer = "wte"
    _no_split_modules = ["Block"]
    _keys_to_ignore_on_load_unexpected = [r"\.attn\.(masked_)?bias$"]  # masks in old GPT-2 files

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[misc]
        config: RelposGPT2Config = self.config  # type: ignore[attr-defined]
        if isinstance(module, Conv1D):
            initialization.normal_(module.weight, std=config.initializer_range)
            initialization.zeros_(module.bias)
        if isinstance(module, Attention | MLP):
            initialization.normal_(module.c_proj.weight, std=config.initializer_range * (2 * config.n_layer) ** -0.5)


class RelposGPT2Model(_Weights, Decoder):
    """Token ids to hidden states."""

    embedding_position, embedding_dropout, blocks, final_norm = "wpe", "drop", "h", "ln_f"
    _keys_to_ignore_on_load_unexpected = [
        *_Weights._keys_to_ignore_on_load_unexpected,
        r"^lm_head\.weight$",  # of the language model's folder: this model is the part without it
    ]

    def __init__(self, config: RelposGPT2Config) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        positions = config.make_positions()
        self.wpe = positions.embedding  # under GPT-2's name
        self.position = positions.shared
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList([Block(config, layer, own) for layer, own in enumerate(positions.layers)])
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.gradient_checkpointing = False
        self.post_init()


class RelposGPT2ForCausalLM(_Weights, CausalLM):
    """The language model."""

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, config: RelposGPT2Config) -> None:
        super().__init__(config)
        self.transformer = RelposGPT2Model(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()


class GPT2(Family):
    """The family GPT-2."""

    name = "gpt2"
    config_class = RelposGPT2Config
    model_class = RelposGPT2ForCausalLM
    tokenizer = "gpt2"

    def sizes(self, preset: Preset) -> dict[str, int]:
        return {"n_layer": preset.layers, "n_head": preset.heads, "n_embd": preset.width}

    def dropout(self, share: float) -> dict[str, float]:
        return {"resid_pdrop": share, "embd_pdrop": share}

    def attentions(self, base: Any) -> Iterable[SelfAttention]:
        return (block.attn for block in base.h)


FAMILY = GPT2()
