"""Keys and values of all processes gathered: each process computes complete rows of its own queries, with all heads.

It runs everything, also encodings that mix heads or read complete rows; keys and values of the whole sequence must fit
into the memory of each process.
"""

from dataclasses import replace

from torch import Tensor

from relpos.attend.backends import attend
from relpos.attend.parallel.exchange import gather_tokens
from relpos.attend.parallel.inputs import Inputs


def refuses(inputs: Inputs) -> str | None:
    """It runs every call."""
    return None


def attention(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Attention over the slices: output (batch, heads, length, value_dim), and the log-sum-exp if asked for."""
    tensors = [inputs.k, inputs.v] if inputs.gates is None else [inputs.k, inputs.v, inputs.gates]
    k, v, *gates = gather_tokens(inputs.slices, tensors)
    call = replace(inputs.call(all_queries=False), gates=gates[0] if gates else None)
    return attend(inputs.q, k, v, inputs.position, call, inputs.backend)
