"""Compile relpos' Triton kernels ahead of time, as `relpos.attend.triton` would launch them on a GPU.

    python benchmarks/own_kernels.py [--targets sm_80,sm_90] [--head-dims 64,128] [--forms none,Toeplitz] [--dtype fp32]

prints one line of JSON per kernel: its registers, spills, shared memory and atomics. `benchmarks/gpu_static.py` counts
instructions.
"""

import json

from gpu_counts import TARGETS, Counts, compile_kernel
from measure import option_parser

from relpos.attend.triton import backward_kernels, decoding_kernel, distance_kernel, forward_kernel
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
FORMS = {"none": 0, "Toeplitz": 1, "RankOne": 2, "Toeplitz + RankOne": 3, "Scaled": 4, "Projected": 8, "of keys": 16}
INTEGERS = {"FIRST", "END", "RANGES", "ROW_KEYS", "KEPT_KEYS", "KEPT_ROWS"}
HALVES = {  # pointers in the dtype of q; all others are float32
    "Q", "K", "V", "OUT", "GRAD", "GRAD_Q", "GRAD_K", "GRAD_V",
    "QUERY_VECTORS", "QUERY_RELATIVE", "KEY_VECTORS", "KEY_RELATIVE",
}  # fmt: skip
FLOATS = {"scale", "softcap", "kept_factor"}


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
    **changes: object,
) -> Counts:
    """A kernel for bfloat16 ("bf16") or float32 ("fp32"), with the tile that `tile_size` chooses.

    Gradients of the form are wanted; `changes` replaces constants, such as WEIGHTED or CAPPED.
    """
    function, single = KERNELS[kernel], dtype == "fp32"
    size = size or tile_size(kernel, target, head_dim, single, form)
    nvidia = target.startswith("sm_")
    constants = {
        "D": head_dim, "E": head_dim, "R": head_dim, "BD": head_dim, "BE": head_dim,
        "BR": head_dim if form & PROJECTED else 16, "BM": size.BM, "BN": size.BN, "KNOTS": 64 if form & 4 else 1,
        "FORM": form, "LEARNED": form, "OF": (by_distance(form) or [1])[0], "WEIGHTED": True, "SYMMETRIC": False,
        "CAPPED": False, "PADDED": False, "HAS_SINKS": False, "DROPS": False, "HAS_ENDS": False, "SKIPS": False,
        "NARROWED": form in (1, 2, 3),  # these leave out tiles
        "ASSEMBLY": nvidia, "PRECISION": "tf32" if not single else "tf32x3" if nvidia else "ieee",
    } | changes  # fmt: skip
    signature = {}
    for name in names(function):
        if name in constants:
            continue
        if name.isupper():
            kind = "i32" if name in INTEGERS else "i8" if name == "PADDING" else dtype if name in HALVES else "fp32"
            signature[name] = f"*{kind}"
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
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    given = parser.parse_args()
    for target in given.targets.split(","):
        for head_dim in map(int, given.head_dims.split(",")):
            for kernel in given.kernels.split(","):
                for name in given.forms.split(","):
                    if kernel == "distance" and not by_distance(FORMS[name]):
                        continue
                    counts = compile_own(kernel, target, head_dim, FORMS[name], given.dtype)
                    facts = {"target": target, "head_dim": head_dim, "kernel": kernel, "form": name}
                    facts |= {"registers": counts.registers, "spills": counts.spills, "shared": counts.shared}
                    print(json.dumps(facts | {"fits": counts.fits, "atomics": counts.total.atomics}), flush=True)


if __name__ == "__main__":
    main()
