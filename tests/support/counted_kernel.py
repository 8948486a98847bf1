"""A small kernel with a loop over tiles, to be compiled and counted in the process of `triton_compiler`."""

from typing import Any

import triton
import triton.language as tl
from gpu_counts import Counts, compile_for, compile_kernel


@triton.jit
def scores_times_values(Q, K, V, OUT, SUMS, length, BLOCK: tl.constexpr, D: tl.constexpr, ATOMIC: tl.constexpr):
    i, d = tl.arange(0, BLOCK), tl.arange(0, D)
    q = tl.load(Q + i[:, None] * D + d[None, :])
    total = tl.zeros([BLOCK, D], tl.float32)
    for first in range(0, length, BLOCK):
        at = (first + i)[:, None] * D + d[None, :]
        weights = tl.exp2(tl.dot(q, tl.trans(tl.load(K + at))))
        if ATOMIC:
            tl.atomic_add(SUMS + i[:, None] + i[None, :], weights, sem="relaxed")
        total += tl.dot(weights.to(tl.bfloat16), tl.load(V + at))
    tl.store(OUT + i[:, None] * D + d[None, :], total.to(tl.bfloat16))


SIGNATURE = {"Q": "*bf16", "K": "*bf16", "V": "*bf16", "OUT": "*bf16", "SUMS": "*fp32", "length": "i32:16"}


def counted(target: str, size: int, atomic: bool, **more: Any) -> Counts:
    """The kernel with tiles of size × size and head_dim = size; `more` constants."""
    constants = {"BLOCK": size, "D": size, "ATOMIC": atomic, **more}
    return compile_kernel(scores_times_values, SIGNATURE, constants, target, 4, 2)


def ptx(target: str, size: int, atomic: bool) -> str:
    """Its code in NVIDIA's intermediate language."""
    constants = {"BLOCK": size, "D": size, "ATOMIC": atomic}
    return compile_for(scores_times_values, SIGNATURE, constants, target, 4, 2).asm["ptx"]
