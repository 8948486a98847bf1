"""Toeplitz: one entry of a table per score, by its distance."""

import torch
import triton
import triton.language as tl  # noqa: F401  (Triton's interpreter looks for it)
from torch.nn import functional as F

from relpos.attend.triton.tiles import LOG2E, load_entries

BIT = 1  # of the constant FORM
PAD = 512  # columns on both sides of a table, so that no entry of a tile needs a mask: at least BM + BN


@triton.jit
def toeplitz_bias(TABLE, column):
    """The bias of a tile in log2; TABLE is the head's, `column` = zero + i − j of each score."""
    return load_entries(TABLE + column)


def pack(inputs, arguments):
    """The table times log2(e), (heads, distances), padded."""
    largest = torch.finfo(torch.float32).max / 4
    table = F.pad((inputs.table.detach().float() * LOG2E).clamp(max=largest), (PAD, PAD)).contiguous()
    arguments.update(TABLE=table, zero=inputs.zero + PAD, table_h=table.shape[1])
