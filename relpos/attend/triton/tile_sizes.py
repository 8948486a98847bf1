"""The size of a tile, warps and stages of each kernel, by GPU, dtype, head_dim and form: chosen by compiling.

`benchmarks/gpu_static.py` prints registers, spills and shared memory of these choices. They follow from shapes alone,
never from timing, so that the order of additions, and with it every bit, is the same in each run.
"""

from typing import NamedTuple

from relpos.attend.triton.projected_tile import KEY_BIT, QUERY_BIT


class TileSize(NamedTuple):
    """Queries and keys of a tile, and how the compiler spreads and pipelines it."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int


def tile_size(kernel: str, target: str, dim: int, wide: bool, form: int, rows: int = 16) -> TileSize:
    """The tile of a kernel: "forward", "grad_q", "grad_kv", "distance", "decoding" or "combining".

    To combine, BM is the number of parts that are loaded together.

    Args:
        kernel: Name of the kernel.
        target: "sm_80", …, "gfx942"; "interpreter".
        dim: The larger of head_dim and value_dim, a power of two.
        wide: Whether numbers have 4 bytes.
        form: The bits of the forms of the bias.
        rows: For decoding: the heads of a group times the queries.
    """
    if kernel == "decoding":
        return decoding_size(target, dim, wide, form, rows)
    if kernel == "combining":
        return TileSize(16, 1, 4, 1)
    if target == "interpreter":
        return TileSize(32, 32, 4, 1)
    raise NotImplementedError


def decoding_size(target: str, dim: int, wide: bool, form: int, rows: int) -> TileSize:
    """All rows in one tile up to a limit, so that keys are read once; smaller where registers would spill."""
    most = 16 if wide else 32 if dim > 128 else 64
    BM = min(most, max(16, 1 << (rows - 1).bit_length()))
    if target == "interpreter":
        return TileSize(BM, 16, 4, 1)
    narrow = BM > 16 or wide or dim > 128 or form & (QUERY_BIT | KEY_BIT)
    large = dim * (2 if wide else 1) > 128
    warps = 8 if BM == 64 or (wide and dim > 128) else 4
    return TileSize(BM, 32 if narrow else 64, warps, (2 if large else 3) - target.startswith("gfx"))
