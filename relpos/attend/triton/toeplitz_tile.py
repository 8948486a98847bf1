"""Toeplitz: one entry of a table per score, by its distance."""

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from relpos.attend.triton.tiles import LOG2E, load_entries

BIT = 1  # of the constant FORM
PAD = 512  # columns on both sides of a table, so that no entry of a tile needs a mask: at least BM + BN


@triton.jit
def load_distances(TABLE, i, j, ASSEMBLY: tl.constexpr):
    """table[i − j] of a tile. Query and key are added to the address one after the other, in 64 bits: the compiler then
    needs one address per row, and constant offsets from it."""
    return load_entries(TABLE + i.to(tl.int64) - j.to(tl.int64), ASSEMBLY)


def pack(inputs, arguments):
    """The table times log2(e), (heads, distances), padded."""
    largest = torch.finfo(torch.float32).max / 4
    table = F.pad((inputs.table.detach().float() * LOG2E).clamp(max=largest), (PAD, PAD)).contiguous()
    arguments.update(TABLE=table, zero=inputs.zero + PAD, table_h=table.shape[1])
