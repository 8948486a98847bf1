"""What do kernels of attention with a bias cost on GPUs? Counted in compiled code, without a GPU.

    python benchmarks/gpu_static.py [--targets sm_80,sm_90] [--head-dims 64,128] [--only relpos] [--no-file]

What is not counted anew stays in the file of results.

Causal attention in bfloat16. Each kernel is compiled ahead of time for each target; of its loops over tiles, the
instructions per score are those of one turn, times threads, divided by the scores of a tile. Loops over full tiles and
over tiles that need the mask are counted apart. Time depends on more: this counts what is issued.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from gpu_counts import SHARED, TARGETS, Counts, Loop, compile_kernel
from measure import made_by, option_parser, read, table, write

from relpos.attend.triton.tile_sizes import tile_size

FORMS = ("none", "Toeplitz without gradient", "Toeplitz", "RankOne")
HEAD_DIMS = (64, 128)
EXPLANATION = """
Causal attention in bfloat16. **full**: instructions per score in the loops over full tiles (in brackets those for q,
and those for k and v); **ratio**: to the same implementation without a bias; **masked**: in the loops over tiles that
need the mask; **tensor**: tensor-core instructions of the loops over full tiles, by a warp; **atomics**: atomic
instructions per score; **registers** and **spills** (bytes) per thread. **note**: what PyTorch's own configuration
would need of shared memory, where the device has less: PyTorch 2.13 then compiles without pipelining, which is counted.
""".strip()


@dataclass(frozen=True)
class Row:
    """One kernel of an implementation, for a form, a head_dim and a target."""

    implementation: str
    form: str  # one of FORMS
    part: str  # "forward", "backward", or the name of a kernel that computes a part of the backward
    head_dim: int
    target: str
    num_warps: int
    num_stages: int
    registers: int
    spills: int  # bytes per thread
    shared: int  # bytes per block
    fits: bool
    instructions: int  # of the kernel
    loops: tuple["LoopRow", ...]
    note: str = ""

    @property
    def per_score(self) -> float:
        """Instructions per score of full tiles, all loops together."""
        return sum(loop.per_score for loop in self.loops if not loop.masked)

    @property
    def atomics_per_score(self) -> float:
        """Atomic additions per score, as lanes of a warp count them."""
        return sum(loop.atomics_per_score for loop in self.loops if not loop.masked)


@dataclass(frozen=True)
class LoopRow:
    """One loop over tiles."""

    name: str  # what it computes: "out", "q", "k, v", "table"
    masked: bool
    tile: tuple[int, int]
    per_tile: int  # instructions of a warp
    per_score: float
    tensor: int
    loads: int
    shared: int
    atomics_per_score: float


def loop_row(loop: Loop, name: str, tile: tuple[int, int], masked: bool) -> LoopRow:
    """The row of a loop, whose turn has the instructions of its longest way."""
    turn, scores = loop.longest, tile[0] * tile[1] / loop.threads
    counts = loop.tensor, loop.loads, loop.shared
    return LoopRow(name, masked, tile, turn, turn / scores, *counts, loop.atomics / scores)


def row(
    counts: Counts, implementation: str, form: str, part: str, head_dim: int, loops: list[LoopRow], note: str = ""
) -> Row:
    """The row of a kernel."""
    resources = counts.registers, counts.spills, counts.shared, counts.fits
    sizes = counts.num_warps, counts.num_stages, *resources, counts.total.instructions
    return Row(implementation, form, part, head_dim, counts.target, *sizes, tuple(loops), note)


def flex_rows(target: str, head_dim: int) -> Iterator[Row]:
    """PyTorch's FlexAttention, with the shortest score functions that one would write, and with those of relpos."""
    from flex_kernels import by_hand, by_relpos

    for attention in (by_hand, by_relpos):
        for form in FORMS:
            for part in ("forward", "backward"):
                yield flex_row(attention, form, part, head_dim, target)


def flex_row(attention: Any, form: str, part: str, head_dim: int, target: str) -> Row:
    """One kernel of FlexAttention; `attention` is `flex_kernels.by_hand` or `flex_kernels.by_relpos`."""
    from flex_kernels import generate

    kernel = generate(attention, form, head_dim, TARGETS[target], torch.bfloat16)[part]
    counts, note = compile_as_inductor(kernel, target)
    name = {"by_hand": "FlexAttention, shortest", "by_relpos": "FlexAttention, relpos"}[attention.__name__]
    return row(counts, name, form, part, head_dim, flex_loops(counts, part, kernel.sizes), note)


def compile_as_inductor(kernel: Any, target: str) -> tuple[Counts, str]:
    """A kernel that Inductor wrote; PyTorch 2.13 leaves out the pipeline where shared memory is not enough for it."""
    arguments = kernel.function, kernel.signature, kernel.constants, target, kernel.num_warps
    counts = compile_kernel(*arguments, kernel.num_stages, **kernel.options)
    if counts.fits or kernel.num_stages == 1:
        return counts, ""
    without = compile_kernel(*arguments, 1, **kernel.options)
    return without, f"{counts.shared / 1024:.0f} KB with {kernel.num_stages} stages"


def flex_loops(counts: Counts, part: str, sizes: dict[str, int]) -> list[LoopRow]:
    """The loops of FlexAttention's kernels: each over full tiles, and over tiles with a mask, which is longer."""
    names = {"forward": {"out": ""}, "backward": {"q": "2", "k, v": "1"}}[part]
    if len(counts.loops) != 2 * len(names):
        raise RuntimeError(
            f"{part} for {counts.target} has {len(counts.loops)} loops over tiles, and should have {2 * len(names)}."
        )
    # The loop for q has 3 products per tile, that for k and v 4, and their tiles are of one area.
    loops = sorted(counts.loops, key=lambda loop: loop.tensor)
    rows = []
    for at, (name, number) in enumerate(names.items()):
        full, masked = sorted(loops[2 * at : 2 * at + 2], key=lambda loop: loop.longest)
        tile = sizes[f"BLOCK_M{number}"], sizes[f"BLOCK_N{number}"]
        rows += [loop_row(full, name, tile, masked=False), loop_row(masked, name, tile, masked=True)]
    return rows


def own_rows(target: str, head_dim: int) -> Iterator[Row]:
    """Our own kernels. Those with a loop over full tiles and one over the others have two; the distances have one."""
    from own_kernels import compile_own

    computes = {"forward": "out", "grad_q": "q", "grad_kv": "k, v", "distance": "table"}
    changes: dict[str, dict[str, object]] = {
        "Toeplitz without gradient": {"LEARNED": 0},
        "RankOne without weights": {"WEIGHTED": False},
    }
    for form in (*FORMS, "RankOne without weights"):
        bits = next(bits for name, bits in {"none": 0, "Toeplitz": 1, "RankOne": 2}.items() if form.startswith(name))
        for kernel, result in computes.items():
            if kernel == "distance" and form != "Toeplitz":
                continue
            counts = compile_own(kernel, target, head_dim, bits, **changes.get(form, {}))
            size = tile_size(kernel, target, head_dim, False, bits)
            tile = size.BM, size.BN
            found = sorted(counts.loops, key=lambda loop: loop.longest)
            if len(found) != (1 if kernel == "distance" else 2):
                raise RuntimeError(f"{kernel} for {target} has {len(found)} loops over tiles.")
            loops = [loop_row(found[0], result, tile, masked=False), loop_row(found[-1], result, tile, masked=True)]
            yield row(counts, "relpos", form, kernel, head_dim, loops)


IMPLEMENTATIONS: dict[str, Callable[[str, int], Iterator[Row]]] = {"flex": flex_rows, "relpos": own_rows}


def report(rows: list[Row]) -> list[str]:
    """A table for each target and head_dim."""
    blocks = []
    for target, head_dim in dict.fromkeys((each.target, each.head_dim) for each in rows):
        here = [each for each in rows if (each.target, each.head_dim) == (target, head_dim)]
        header = ["", "form", "kernel", "tile", "full", "ratio", "masked", "tensor", "atomics"]
        header += ["registers", "spills", "shared KB", "note"]
        lines = [line(each, here) for each in here]
        blocks += [f"## {target}, head_dim {head_dim}", table(header, lines)]
    return blocks


def line(each: Row, rows: list[Row]) -> list[str]:
    """The cells of a kernel."""
    same = (each.implementation, each.part, "none")
    base = next((x.per_score for x in rows if (x.implementation, x.part, x.form) == same), None)
    full = [loop for loop in each.loops if not loop.masked]
    masked = [loop for loop in each.loops if loop.masked]
    by_loop = f" ({' + '.join(f'{loop.per_score:.1f}' for loop in full)})" if len(full) > 1 else ""
    return [
        each.implementation,
        each.form,
        each.part,
        ", ".join(dict.fromkeys(f"{loop.tile[0]}×{loop.tile[1]}" for loop in full)) + f", {each.num_warps} warps",
        f"{each.per_score:.1f}{by_loop}",
        "" if base is None else f"{each.per_score / base:.2f}",
        f"{sum(loop.per_score for loop in masked):.1f}" if masked else "",
        str(sum(loop.tensor for loop in full)),
        f"{each.atomics_per_score:.2f}",
        str(each.registers),
        str(each.spills),
        f"{each.shared / 1024:.0f}" + ("" if each.fits else f" of {SHARED[each.target]}"),
        each.note,
    ]


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--head-dims", default=",".join(map(str, HEAD_DIMS)))
    parser.add_argument("--only", choices=IMPLEMENTATIONS)
    given = parser.parse_args()
    chosen = [IMPLEMENTATIONS[given.only]] if given.only else IMPLEMENTATIONS.values()
    rows: list[Row] = []
    for target in given.targets.split(","):
        for head_dim in map(int, given.head_dims.split(",")):
            rows += [each for make in chosen for each in make(target, head_dim)]
            print("\n\n".join(report(rows)[-2:]), flush=True)
    if not given.no_file:
        rows = [*kept_rows(rows), *rows]
        rows.sort(key=lambda each: (list(TARGETS).index(each.target), each.head_dim))
        facts = {"torch": torch.__version__, "triton": triton.__version__}
        title = "# Kernels counted without a GPU"
        numbers = [as_json(each) for each in rows]
        write("gpu_static", numbers, title, EXPLANATION, *report(rows), made_by("gpu_static", facts))


def kept_rows(rows: list[Row]) -> Iterator[Row]:
    """Rows of the file for implementations, targets and sizes that were not counted now."""
    counted = {(each.implementation, each.target, each.head_dim) for each in rows}
    for numbers in read("gpu_static") or []:
        loops = [LoopRow(**loop | {"tile": tuple(loop["tile"])}) for loop in numbers["loops"]]
        each = Row(**numbers | {"loops": tuple(loops)})
        if (each.implementation, each.target, each.head_dim) not in counted:
            yield each


def as_json(each: Row) -> dict[str, Any]:
    """The numbers of a row, without more digits than they mean."""
    return {
        name: [{key: round(x, 3) if isinstance(x, float) else x for key, x in loop.items()} for loop in value]
        if name == "loops"
        else value
        for name, value in asdict(each).items()
    }


if __name__ == "__main__":
    main()
