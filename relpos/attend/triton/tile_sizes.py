"""The size of a tile, warps and stages of each kernel, by GPU, dtype, head_dim and form: chosen by compiling.

`benchmarks/gpu_static.py` prints registers, spills and shared memory of these choices. They follow from shapes alone,
never from timing, so that the order of additions, and with it every bit, is the same in each run.
"""

from typing import NamedTuple

from relpos.attend.triton import projected_tile, rank_one_tile, scaled_tile, toeplitz_tile

TOEPLITZ, RANK_ONE, SCALED = toeplitz_tile.BIT, rank_one_tile.BIT, scaled_tile.BIT
QUERIES, KEYS = projected_tile.QUERY_BIT, projected_tile.KEY_BIT
TABLES, EACH, VECTORS = TOEPLITZ | RANK_ONE, TOEPLITZ | RANK_ONE | SCALED, QUERIES | KEYS


class TileSize(NamedTuple):
    """Queries and keys of a tile, and how the compiler spreads and pipelines it."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int


def tile_size(kernel: str, target: str, dim: int, wide: bool, form: int, rows: int = 16) -> TileSize:
    """The tile of a kernel: "forward", "grad_q", "grad_kv", "distance", "skipping", "decoding" or "combining".

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
    if kernel == "skipping":
        return TileSize(64, 64, 4 if target.startswith("gfx") else 8, 1)  # AMD's warps have 64 threads
    if kernel == "combining":
        return TileSize(16, 1, 4, 1)
    if target == "interpreter":
        return TileSize(32, 32, 4, 1)
    sizes = SIZES[f"{kernel} {family(target)}"]
    if wide:
        by_form = sizes["float32" if dim <= 64 else "wide float32"]
    else:
        by_form = sizes["wide" if dim > 128 else max(dim, 64)]
    return next((TileSize(*size) for forms, size in by_form if not form & ~forms), SMALLEST)


def family(target: str) -> str:
    """The target whose sizes a GPU takes: one with the same instructions and no more shared memory."""
    if target.startswith("gfx"):
        return "gfx942"
    known = {"sm_90": "sm_90", "sm_100": "sm_100", "sm_103": "sm_100"}
    return known.get(target, "sm_80")  # sm_86, sm_89 and sm_120 multiply as sm_80 does, with less shared memory


SMALLEST = TileSize(32, 32, 4, 1)  # for sums that are not listed
# Chosen for the fewest instructions per score; a few registers may spill (tests/attend/test_triton_compiled.py).
# By kernel and GPU, then head_dim (64; 128; "wide" beyond; "float32" to 64, "wide float32" beyond): the first entry
# that has all forms of the bias. The order is from cheap forms to expensive ones; tiles are square where vectors per
# distance are multiplied. On gfx942 a warp has 32 queries, or 32 keys in grad_kv: with 16 its products take twice the
# instructions.
SIZES: dict[str, dict[int | str, list[tuple[int, tuple[int, int, int, int]]]]] = {
    "forward sm_80": {
        64: [(TABLES, (128, 64, 8, 3)), (SCALED, (128, 32, 8, 2)), (VECTORS, (32, 32, 4, 2))],
        128: [(TABLES, (128, 32, 8, 2)), (SCALED, (64, 32, 4, 2)), (VECTORS, (32, 32, 4, 1))],
        "wide": [(TOEPLITZ, (64, 64, 8, 2)), (TABLES, (64, 32, 8, 2))],
        "float32": [(TABLES, (64, 32, 4, 2))],
        "wide float32": [(TABLES, (32, 32, 8, 1))],
    },
    "forward sm_90": {
        64: [(TABLES, (128, 128, 8, 3)), (SCALED, (128, 32, 8, 2)), (VECTORS, (64, 64, 8, 2))],
        128: [(TABLES, (128, 128, 8, 2)), (SCALED, (128, 32, 8, 2)), (QUERIES, (64, 64, 8, 2)), (KEYS, (64, 64, 8, 2))],
        "wide": [(TABLES, (64, 64, 8, 2))],
        "float32": [(TABLES, (64, 32, 4, 2))],
        "wide float32": [(TABLES, (32, 32, 8, 1))],
    },
    "forward sm_100": {
        64: [
            (TOEPLITZ, (128, 128, 8, 2)),
            (RANK_ONE, (128, 128, 8, 2)),
            (EACH, (128, 64, 8, 3)),
            (QUERIES, (64, 64, 8, 2)),
            (KEYS, (64, 64, 8, 2)),
        ],
        128: [(RANK_ONE, (128, 128, 8, 2)), (EACH, (128, 64, 8, 2)), (QUERIES, (64, 64, 8, 2)), (KEYS, (64, 64, 8, 2))],
        "wide": [(TABLES, (64, 64, 8, 2))],
        "float32": [(TABLES, (64, 32, 4, 2))],
        "wide float32": [(TABLES, (32, 32, 8, 1))],
    },
    "forward gfx942": {
        64: [(EACH, (128, 64, 4, 1)), (QUERIES, (64, 64, 4, 2)), (KEYS, (64, 64, 8, 2))],
        128: [(EACH, (128, 64, 4, 1)), (VECTORS, (64, 64, 4, 2))],
        "wide": [(TABLES, (64, 32, 8, 1))],
        "float32": [(TABLES, (64, 32, 4, 1))],
        "wide float32": [(TABLES, (64, 32, 4, 1))],
    },
    "grad_q sm_80": {
        64: [(TABLES, (128, 64, 8, 2)), (SCALED, (128, 32, 8, 2)), (VECTORS, (32, 32, 4, 2))],
        128: [(TABLES, (128, 32, 8, 2)), (SCALED, (64, 32, 8, 2)), (VECTORS, (32, 32, 4, 1))],
        "wide": [(TOEPLITZ, (64, 32, 8, 2)), (TABLES, (32, 32, 8, 2))],
        "float32": [(TABLES, (32, 32, 4, 2))],
        "wide float32": [(TABLES, (32, 32, 8, 1))],
    },
    "grad_q sm_90": {
        64: [
            (TOEPLITZ, (128, 128, 8, 2)),
            (RANK_ONE, (128, 128, 8, 2)),
            (TABLES, (128, 64, 8, 2)),
            (SCALED, (128, 32, 8, 2)),
            (QUERIES, (64, 64, 8, 2)),
            (KEYS, (64, 64, 8, 2)),
        ],
        128: [(TABLES, (128, 64, 8, 2)), (SCALED, (32, 32, 4, 2)), (KEYS, (64, 64, 8, 2)), (QUERIES, (32, 32, 4, 1))],
        "wide": [(TABLES, (64, 32, 8, 2))],
        "float32": [(TABLES, (32, 32, 4, 2))],
        "wide float32": [(TABLES, (32, 32, 8, 1))],
    },
    "grad_q sm_100": {
        64: [
            (TOEPLITZ, (128, 128, 8, 2)),
            (RANK_ONE, (128, 128, 8, 2)),
            (TABLES, (128, 64, 8, 2)),
            (SCALED, (32, 32, 4, 2)),
            (QUERIES, (64, 64, 8, 2)),
            (KEYS, (64, 64, 8, 2)),
        ],
        128: [(TABLES, (128, 64, 8, 2)), (SCALED, (32, 32, 4, 2)), (QUERIES, (64, 64, 8, 2)), (KEYS, (64, 64, 8, 2))],
        "wide": [(TABLES, (64, 32, 8, 2))],
        "float32": [(TABLES, (32, 32, 4, 2))],
        "wide float32": [(TABLES, (32, 32, 8, 1))],
    },
    "grad_q gfx942": {
        64: [(EACH, (128, 64, 4, 1)), (QUERIES, (64, 64, 4, 1)), (KEYS, (64, 64, 8, 1))],
        128: [(EACH, (128, 32, 4, 1)), (KEYS, (64, 64, 4, 1)), (QUERIES, (32, 32, 4, 1))],
        "wide": [(TABLES, (32, 32, 4, 1))],
        "float32": [(TABLES, (32, 32, 4, 1))],
        "wide float32": [(TABLES, (32, 32, 4, 1))],
    },
    "grad_kv sm_80": {
        64: [(TABLES, (32, 128, 8, 2)), (SCALED, (32, 128, 8, 2)), (VECTORS, (32, 32, 4, 2))],
        128: [
            (RANK_ONE, (32, 128, 8, 2)),
            (TABLES, (64, 64, 8, 2)),
            (SCALED, (64, 64, 8, 2)),
            (VECTORS, (32, 32, 8, 1)),
        ],
        "wide": [(TABLES, (32, 32, 8, 2))],
        "float32": [(TABLES, (32, 32, 4, 2))],
        "wide float32": [(TABLES, (32, 32, 8, 1))],
    },
    "grad_kv sm_90": {
        64: [(TABLES, (64, 128, 8, 2)), (SCALED, (64, 64, 8, 2)), (QUERIES, (64, 64, 8, 2)), (KEYS, (32, 32, 4, 2))],
        128: [
            (TABLES, (32, 128, 8, 2)),
            (SCALED, (32, 128, 8, 2)),
            (VECTORS, (32, 32, 8, 2)),
        ],
        "wide": [(TABLES, (32, 32, 8, 2))],
        "float32": [(TABLES, (32, 32, 4, 2))],
        "wide float32": [(TABLES, (32, 32, 8, 1))],
    },
    "grad_kv sm_100": {
        64: [
            (RANK_ONE, (32, 128, 4, 2)),
            (TABLES, (64, 128, 8, 2)),
            (SCALED, (64, 64, 8, 2)),
            (QUERIES, (64, 64, 8, 1)),
            (KEYS, (32, 32, 4, 1)),
        ],
        128: [
            (TOEPLITZ, (32, 128, 8, 2)),
            (RANK_ONE, (32, 128, 8, 2)),
            (TABLES, (32, 128, 8, 1)),
            (SCALED, (64, 64, 8, 2)),
            (VECTORS, (32, 32, 8, 2)),
        ],
        "wide": [(TABLES, (32, 32, 8, 2))],
        "float32": [(TABLES, (32, 32, 4, 2))],
        "wide float32": [(TABLES, (32, 32, 8, 1))],
    },
    "grad_kv gfx942": {
        64: [
            (TABLES, (64, 128, 4, 1)),
            (SCALED, (64, 128, 4, 1)),
            (EACH, (32, 128, 4, 1)),
            (QUERIES, (64, 64, 4, 1)),
            (KEYS, (64, 64, 4, 1)),
        ],
        128: [
            (EACH, (32, 128, 4, 1)),
            (QUERIES, (64, 64, 4, 1)),
            (KEYS, (32, 32, 4, 1)),
        ],
        "wide": [(TABLES, (32, 32, 4, 1))],
        "float32": [(TABLES, (32, 32, 4, 1))],
        "wide float32": [(TABLES, (32, 32, 4, 1))],
    },
    "distance sm_80": {
        64: [(TOEPLITZ, (128, 64, 8, 2)), (TABLES, (128, 32, 8, 2)), (EACH, (64, 32, 4, 2))],
        128: [(TABLES, (128, 32, 8, 2)), (EACH, (64, 32, 4, 2))],
        "wide": [(TABLES, (64, 32, 8, 2))],
        "float32": [(TABLES, (32, 32, 4, 2))],
        "wide float32": [(TABLES, (64, 16, 4, 1))],
    },
    "distance sm_90": {
        64: [(TABLES, (128, 64, 8, 2)), (EACH, (64, 64, 8, 2))],
        128: [(TABLES, (128, 64, 8, 2)), (EACH, (64, 64, 8, 2))],
        "wide": [(TABLES, (64, 32, 8, 2))],
        "float32": [(TABLES, (32, 32, 4, 2))],
        "wide float32": [(TABLES, (64, 32, 8, 1))],
    },
    "distance sm_100": {
        64: [(TABLES, (128, 64, 8, 2)), (EACH, (64, 32, 4, 2))],
        128: [(TABLES, (128, 64, 8, 2)), (EACH, (64, 32, 4, 2))],
        "wide": [(TABLES, (64, 32, 8, 2))],
        "float32": [(TABLES, (32, 32, 4, 2))],
        "wide float32": [(TABLES, (64, 16, 4, 1))],
    },
    "distance gfx942": {
        64: [(EACH, (128, 64, 4, 1)), (VECTORS, (64, 64, 4, 1))],
        128: [(EACH, (128, 64, 4, 1)), (VECTORS, (64, 64, 4, 1))],
        "wide": [(TABLES, (64, 32, 8, 1))],
        "float32": [(TABLES, (32, 32, 4, 1))],
        "wide float32": [(TABLES, (32, 32, 4, 1))],
    },
}


def decoding_size(target: str, dim: int, wide: bool, form: int, rows: int) -> TileSize:
    """All rows in one tile up to a limit, so that keys are read once; smaller where registers would spill."""
    most = 16 if wide else 32 if dim > 128 else 64
    BM = min(most, max(16, 1 << (rows - 1).bit_length()))
    if target == "interpreter":
        return TileSize(BM, 16, 4, 1)
    narrow = BM > 16 or wide or dim > 128 or form & VECTORS
    large = dim * (2 if wide else 1) > 128
    warps = 8 if BM == 64 or (wide and dim > 128) else 4
    return TileSize(BM, 32 if narrow else 64, warps, (2 if large else 3) - target.startswith("gfx"))
