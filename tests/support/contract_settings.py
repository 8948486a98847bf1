"""How contracts are checked: settings, the encoding under test, its input, and what a backend runs of it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from relpos.attend.backends import BACKENDS
from relpos.forms.call import Call
from relpos.forms.encoding import Encoding

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
}
EVERY_ARGUMENT = ("reference", "chunks", "native")  # backends that take every argument of attention


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
