"""A port of Llama in plain PyTorch, as a newcomer writes it, with one mistake at a time and the weights of a model."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MISTAKES = {  # what the author did: the fault that it is
    "neighbouring pairs": "layout",
    "another theta": "theta",
    "half of the dimensions": "fraction",
    "keys not rotated": "keys unrotated",
    "keys rotated backwards": "keys backwards",
    "no rotation": "rotation missing",
    "sees one more": "causal mask shifted",
}


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Block(nn.Module):
    def __init__(self, config, mistake: str) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.mistake, self.theta = mistake, config.rope_parameters["rope_theta"]
        width, inner = config.hidden_size, config.intermediate_size
        self.input_layernorm, self.post_attention_layernorm = Norm(width), Norm(width)
        self.q_proj = nn.Linear(width, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(width, self.key_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, self.key_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, width, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def rotate(self, x: Tensor, sign: float = 1.0) -> Tensor:
        size = self.size // 2 if self.mistake == "half of the dimensions" else self.size
        theta = 500_000.0 if self.mistake == "another theta" else self.theta
        angle = torch.arange(x.shape[2])[:, None] * theta ** -(torch.arange(0, size, 2) / size)
        cos, sin = angle.cos(), sign * angle.sin()
        if self.mistake == "neighbouring pairs":
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        a, b = x[..., :size].chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos, x[..., size:]], -1)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.mistake != "no rotation":
            q = self.rotate(q)
            if self.mistake != "keys not rotated":
                k = self.rotate(k, -1.0 if self.mistake == "keys rotated backwards" else 1.0)
        k, v = (y.repeat_interleave(self.heads // self.key_heads, 1) for y in (k, v))
        scores = q @ k.transpose(-1, -2) * self.size**-0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(2 if self.mistake == "sees one more" else 1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.input_layernorm(x))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class LlamaPort(nn.Module):
    def __init__(self, original, mistake: str = "") -> None:
        super().__init__()
        config = original.config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, mistake) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        names = {
            name: name.replace("model.", "").replace("self_attn.", "").replace("mlp.", "")
            for name in original.state_dict()
        }
        self.load_state_dict({names[name]: x for name, x in original.state_dict().items()})

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))
