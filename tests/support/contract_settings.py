"""How contracts are checked: settings, the encoding under test, a small layer around it, what a backend runs of it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import relpos
from relpos.attend.backends import BACKENDS
from relpos.forms.call import Call
from relpos.forms.encoding import Encoding
from relpos.forms.parameters import ClampedParameter

HEADS, HEAD_DIM = 4, 8
WIDTH = HEADS * HEAD_DIM
Make = Callable[[], Encoding]


@dataclass(frozen=True)
class Setting:
    """How a contract is checked. Values here are of order 1, so the tolerance is absolute."""

    backend: str
    dtype: torch.dtype
    atol: float  # of values
    grad_atol: float  # of gradients, sums over a dozen tokens of values of order 1

    def close(self, actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=self.atol)


SETTINGS = {
    "reference": Setting("reference", torch.float64, 1e-11, 1e-10),
    "chunks": Setting("chunks", torch.float64, 1e-11, 1e-10),
    # float32, rounding 6e-8: logits up to 30 carry errors up to 2e-6, which the softmax passes on; gradients sum them.
    "native": Setting("native", torch.float32, 1e-5, 3e-5),
    # The same in Triton's interpreter.
    "triton": Setting("triton", torch.float32, 1e-5, 3e-5),
}
EVERY_ARGUMENT = ("reference", "chunks", "native", "triton")  # backends that take every argument of attention


def tokens(length: int, setting: Setting, batch: int = 2) -> Tensor:
    drawn = torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return drawn.to(setting.dtype)


def build(make: Make, setting: Setting) -> Encoding:
    """The encoding, its parameters moved off their start (some start at 0, where nothing can be seen)."""
    torch.manual_seed(3)
    position = make().to(setting.dtype)
    with torch.no_grad():
        for parameter in position.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for module in position.modules():
            if isinstance(module, ClampedParameter):  # at the ends of its range there is no derivative
                module.raw.clamp_(module.low + 0.1, module.high - 0.1)
    return position


def runs(position: Encoding, setting: Setting, causal: bool = True) -> bool:
    """Whether the setting's backend runs the encoding's form."""
    q = torch.zeros(1, HEADS, 3, HEAD_DIM, dtype=setting.dtype)
    gates = position.gates(torch.zeros(1, 3, position.width, dtype=setting.dtype))
    call = Call(3, 3, causal=causal, gates=gates, q=q, dtype=setting.dtype)
    return BACKENDS[setting.backend].refuses(q, q, position.bias(call), call) is None


def directions(position: Encoding, setting: Setting) -> tuple[bool, ...]:
    """The values of `causal` that the encoding is defined for and the setting's backend runs."""
    both = position.bidirectional and runs(position.to(setting.dtype), setting, causal=False)
    return (True, False) if both else (True,)


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

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        q, k, v = (self.split(hidden, projection) for projection in (self.to_q, self.to_k, self.to_v))
        return q, k, v

    def __call__(self, x: Tensor, documents: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        """All of the sequence at once: (batch, heads, length, head_dim)."""
        hidden = self.position.embed(x, documents=documents)
        masks = {"documents": documents, "padding": padding}
        return relpos.attention(*self.project(hidden), self.position, hidden=hidden, **masks, **self.options)

    def scores(self, x: Tensor) -> Tensor:
        """The scores before the softmax: (batch, heads, length, length)."""
        hidden = self.position.embed(x)
        return relpos.scores(*self.project(hidden)[:2], self.position, hidden=hidden)

    def decode(self, x: Tensor, step: int = 1, documents: Tensor | None = None) -> Tensor:
        """The same, `step` tokens at a time, keeping keys, values and gates: (batch, heads, length, head_dim)."""
        ks, vs, gates, out = [], [], [], []
        for start in range(0, x.shape[1], step):
            new = x[:, start : start + step]
            seen = None if documents is None else documents[:, : start + new.shape[1]]
            hidden = self.position.embed(new, start=start, documents=seen)
            q, k, v = self.project(hidden)
            ks.append(k)
            vs.append(v)
            gates.append(self.position.gates(hidden))
            kept = torch.cat(gates, dim=2) if gates[0] is not None else None
            k, v = torch.cat(ks, dim=2), torch.cat(vs, dim=2)
            out.append(relpos.attention(q, k, v, self.position, gates=kept, documents=seen, **self.options))
        return torch.cat(out, dim=2)

    def step(self, x: Tensor, cache: relpos.Cache, documents: Tensor | None = None, **options: object) -> Tensor:
        """One step with the tokens x, by a `relpos.Cache`: (batch, heads, tokens, head_dim)."""
        hidden = self.position.embed(x, start=len(cache), documents=documents)
        options = {"documents": documents, **self.options, **options}
        return relpos.attention(*self.project(hidden), self.position, hidden=hidden, cache=cache, **options)

    def decode_with_cache(
        self, x: Tensor, step: int = 1, documents: Tensor | None = None, padding: Tensor | None = None
    ) -> Tensor:
        """All of the sequence, `step` tokens at a time."""
        cache, out = relpos.Cache(), []
        for end in range(step, x.shape[1] + step, step):
            seen, there = (None if t is None else t[:, :end] for t in (documents, padding))
            out.append(self.step(x[:, end - step : end], cache, seen, padding=there))
        return torch.cat(out, dim=2)
