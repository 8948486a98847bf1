"""The size of a tile, warps and stages of each kernel, by GPU, dtype, head_dim and form: chosen by compiling.

`benchmarks/gpu_static.py` prints registers, spills and shared memory of these choices. They follow from shapes alone,
never from timing, so that the order of additions, and with it every bit, is the same in each run.
"""

from typing import NamedTuple


class TileSize(NamedTuple):
    """Queries and keys of a tile, and how the compiler spreads and pipelines it."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int


def tile_size(kernel: str, target: str, dim: int, wide: bool, form: int) -> TileSize:
    """The tile of a kernel: "forward", "grad_q", "grad_kv", "distance" or "decoding".

    Args:
        kernel: Name of the kernel.
        target: "sm_80", …, "gfx942"; "interpreter".
        dim: The larger of head_dim and value_dim, a power of two.
        wide: Whether numbers have 4 bytes.
        form: The bits of the forms of the bias.
    """
    if target == "interpreter":
        return TileSize(*((16, 16) if kernel == "decoding" else (32, 32)), 4, 1)
    raise NotImplementedError
