"""Compile relpos' Triton kernels ahead of time, as `relpos.attend.triton` would launch them on a GPU.

    python benchmarks/own_kernels.py [--targets sm_80,sm_90] [--head-dims 64,128] [--forms none,Toeplitz] [--dtype fp32]

prints one line of JSON per kernel: its registers, spills, shared memory and atomics. --rows: of decoding, the heads of
a group times the queries. `benchmarks/gpu_static.py` counts instructions.
"""

import json

from gpu_counts import TARGETS, Counts, compile_kernel
from measure import option_parser

from relpos.attend.triton import (
    backward_kernels,
    decoding_kernel,
    distance_kernel,
    forward_kernel,
    skipped_tiles,
    tile_bounds,
)
from relpos.attend.triton.gpu_problem import PROJECTED, names
from relpos.attend.triton.tile_sizes import TileSize, tile_size
from relpos.attend.triton.tiles import CHANGING

KERNELS = {
    "forward": forward_kernel.forward_kernel,
    "grad_q": backward_kernels.grad_q_kernel,
    "grad_kv": backward_kernels.grad_kv_kernel,
    "distance": distance_kernel.distance_kernel,
    "decoding": decoding_kernel.decoding_kernel,
}
SKIPPING = {  # for Toeplitz, RankOne and their sum
    "bias_bounds": tile_bounds.bias_bounds_kernel,
    "key_bounds": tile_bounds.key_bounds_kernel,
    "kept_keys": skipped_tiles.kept_keys_kernel,
    "row_factors": skipped_tiles.row_factors_kernel,
    "kept_rows": skipped_tiles.kept_rows_kernel,
    "kept_diagonals": skipped_tiles.kept_diagonals_kernel,
}
FORMS = {"none": 0, "Toeplitz": 1, "RankOne": 2, "Toeplitz + RankOne": 3, "Scaled": 4, "Projected": 8, "of keys": 16}
KINDS = dict.fromkeys(("FIRST", "END", "RANKS", "RANGES", "ROW_KEYS", "KEPT_KEYS", "KEPT_ROWS", "DIAGONALS"), "i32")
KINDS |= {"PADDING": "i8", "TOKEN_TOTALS": "fp64"}
HALVES = {  # pointers in the dtype of q; all others are float32
    "Q", "K", "V", "OUT", "GRAD", "GRAD_Q", "GRAD_K", "GRAD_V",
    "QUERY_VECTORS", "QUERY_RELATIVE", "KEY_VECTORS", "KEY_RELATIVE",
}  # fmt: skip
FLOATS = {"scale", "softcap", "kept_factor", "allowed"}


def may_skip(form: int) -> bool:
    """Whether tiles of a form may be skipped."""
    return 0 < form <= 3


def by_distance(form: int) -> list[int]:
    """The bits of a form whose gradients are sums per distance."""
    return [bit for bit in (1, 4, 8, 16) if form & bit]


def compile_own(
    kernel: str,
    target: str,
    head_dim: int,
    form: int,
    dtype: str = "bf16",
    size: TileSize | None = None,
    rows: int = 16,
    **changes: object,
) -> Counts:
    """A kernel for bfloat16 ("bf16") or float32 ("fp32"), with the tile that `tile_size` chooses.

    Gradients of the form are wanted; `changes` replaces constants, such as WEIGHTED or CAPPED.
    """
    function, single = (KERNELS | SKIPPING)[kernel], dtype == "fp32"
    size = size or tile_size("skipping" if kernel in SKIPPING else kernel, target, head_dim, single, form, rows)
    nvidia = target.startswith("sm_")
    constants = {
        "D": head_dim, "E": head_dim, "R": head_dim, "BD": head_dim, "BE": head_dim,
        "BR": head_dim if form & PROJECTED else 16, "BM": size.BM, "BN": size.BN, "KNOTS": 64 if form & 4 else 1,
        "FORM": form, "LEARNED": form, "OF": (by_distance(form) or [1])[0], "WEIGHTED": True, "SYMMETRIC": False,
        "CAPPED": False, "PADDED": False, "HAS_SINKS": False, "DROPS": False, "HAS_ENDS": False, "SKIPS": False,
        "NARROWED": may_skip(form), "GAINS": True,
        "ASSEMBLY": nvidia, "PRECISION": "tf32" if not single else "tf32x3" if nvidia else "ieee",
    } | changes  # fmt: skip
    signature = {}
    for name in names(function):
        if name in constants:
            continue
        if name.isupper():
            signature[name] = f"*{dtype if name in HALVES else KINDS.get(name, 'fp32')}"
        elif name in CHANGING:
            signature[name] = "fp32" if name in FLOATS else "i32"
        else:
            signature[name] = "i32:16"  # a stride
    own = {name: value for name, value in constants.items() if name in names(function)}
    return compile_kernel(function, signature, own, target, size.num_warps, size.num_stages)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--head-dims", default="64,128")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--kernels", default=",".join(KERNELS | SKIPPING))
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--rows", default=16, type=int)
    given = parser.parse_args()
    for target in given.targets.split(","):
        for head_dim in map(int, given.head_dims.split(",")):
            for kernel in given.kernels.split(","):
                for name in given.forms.split(","):
                    form = FORMS[name]
                    if (kernel == "distance" and not by_distance(form)) or (kernel in SKIPPING and not may_skip(form)):
                        continue
                    counts = compile_own(kernel, target, head_dim, form, given.dtype, rows=given.rows)
                    facts = {"target": target, "head_dim": head_dim, "kernel": kernel, "form": name}
                    facts |= {"registers": counts.registers, "spills": counts.spills, "shared": counts.shared}
                    print(json.dumps(facts | {"fits": counts.fits, "atomics": counts.total.atomics}), flush=True)


if __name__ == "__main__":
    main()
