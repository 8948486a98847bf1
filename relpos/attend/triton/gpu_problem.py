"""A problem for the Triton kernels: every argument by its name, so that a kernel takes those that it has."""

import inspect
import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from relpos.attend.kernel_inputs import Inputs
from relpos.attend.key_intervals import Recent, intervals
from relpos.attend.reference import mix
from relpos.attend.triton import projected_tile, rank_one_tile, scaled_tile, tile_sizes, toeplitz_tile
from relpos.attend.triton.tiles import INTERPRETED
from relpos.forms.call import Call

PROJECTED = projected_tile.QUERY_BIT | projected_tile.KEY_BIT
RECENT: Recent[tuple[Tensor, Tensor]] = Recent(8)  # the layers of a model have few geometries
# What a kernel without the form, or without a gradient of it, receives in place of these.
ABSENT_POINTERS = (
    "TABLE", "TOTALS", "QUERY_GROWTH", "QUERY_BASES", "KEY_GROWTH", "KEY_BASES", "WEIGHTS", "RANKS", "CURVE",
    "INVERSE",
    "HINGES", "QUERY_VECTORS", "QUERY_RELATIVE", "KEY_VECTORS", "KEY_RELATIVE", "ROW_SUMS", "ROW_GROWTH",
    "ROW_INVERSE", "KNOT_SUMS", "FAR_SUMS", "GRAD_QUERY_VECTORS", "GRAD_KEY_VECTORS", "KEY_SUMS", "SINKS", "PADDING",
    "ROW_KEYS", "KEPT_KEYS", "KEPT_ROWS", "DIAGONALS",
)  # fmt: skip
ABSENT_NUMBERS = {
    "zero": 0, "table_h": 0, "query_width": 0, "key_width": 0, "tokens": 1, "WEIGHTED": False, "curve_zero": 0,
    "inverse_b": 0, "inverse_start": 0, "relative_zero": 0, "query_relative_h": 0, "key_relative_h": 0, "KNOTS": 1,
    "R": 1, "BR": 16, "SYMMETRIC": False, "seed_high": 0, "seed_low": 0, "threshold": 0, "kept_factor": 1.0,
    "range_b": 0, "NARROWED": False,
}  # fmt: skip


@cache
def names(kernel: Any) -> tuple[str, ...]:
    """The names of a kernel's arguments."""
    return tuple(inspect.signature(kernel.fn).parameters)


def form_bits(inputs: Inputs) -> int:
    """The constant FORM: one bit per form that the inputs have."""
    present = {
        toeplitz_tile.BIT: inputs.table,
        rank_one_tile.BIT: inputs.total if inputs.step is None else inputs.step,
        scaled_tile.BIT: inputs.knot,
        projected_tile.QUERY_BIT: inputs.query_vectors,
        projected_tile.KEY_BIT: inputs.key_vectors,
    }
    return sum(bit for bit, x in present.items() if x is not None)


def pack_forms(inputs: Inputs, form: int) -> dict[str, Any]:
    """The arguments of the forms with these bits."""
    arguments: dict[str, Any] = {}
    for bit, module in FORMS.items():
        if form & bit:
            module.pack(inputs, arguments)
    return arguments


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which kernels run on the tensor's GPU."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def padded_dim(size: int) -> int:
    """The width of a tile with this many columns: tensor cores multiply powers of two from 16 on."""
    return max(16, 1 << (size - 1).bit_length())


@cache
def target(device: torch.device) -> str:
    """The kind of a device: "sm_90", "gfx942", or "interpreter"."""
    if INTERPRETED or device.type == "cpu":
        return "interpreter"
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def processors(device: torch.device) -> int:
    """Number of streaming multiprocessors, or compute units."""
    return 4 if target(device) == "interpreter" else torch.cuda.get_device_properties(device).multi_processor_count


def seen_intervals(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """First key and one past the last key of each query, (1 or batch, queries), int32. Neither ever falls."""
    q, keys, documents = inputs.q, inputs.k.shape[2], inputs.documents
    limited = inputs.window_left >= 0 or inputs.window_right >= 0
    window = (inputs.window_left, inputs.window_right) if limited else None

    def compute() -> tuple[Tensor, Tensor]:
        places = {"causal": inputs.causal, "window": window, "documents": documents, "start": inputs.start}
        lowest, highest = intervals(Call(q.shape[2], keys, device=q.device, batch=q.shape[0], **places))  # type: ignore[arg-type]
        return lowest.contiguous(), (highest + 1).contiguous()

    geometry = (q.shape[2], keys, inputs.start, inputs.causal, window, str(q.device))
    return RECENT.find(geometry, (documents,), compute)


class GpuProblem:
    """The arguments of all kernels for some inputs, by name."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (inputs.q, inputs.k, inputs.v))
        batch, heads, queries, dim = q.shape
        first, end = seen_intervals(inputs)
        self.form = form_bits(inputs)
        self.target = target(q.device)
        nvidia = self.target.startswith("sm_")
        nothing = q.new_empty(1, dtype=torch.float32)
        self.arguments: dict[str, Any] = dict.fromkeys(ABSENT_POINTERS, nothing) | ABSENT_NUMBERS
        self.arguments |= {
            "Q": q, "K": k, "V": v, "FIRST": first, "END": end,
            "batch": batch, "heads": heads, "group": heads // k.shape[1], "queries": queries, "keys": k.shape[2],
            "start": inputs.start, "interval_b": first.shape[1] if len(first) > 1 else 0,
            "scale": float(inputs.scale), "softcap": float(inputs.softcap or 1.0),
            "D": dim, "E": v.shape[3], "BD": padded_dim(dim), "BE": padded_dim(v.shape[3]),
            "FORM": self.form, "CAPPED": inputs.softcap > 0, "PADDED": inputs.padding is not None,
            "HAS_SINKS": inputs.sinks is not None, "DROPS": inputs.dropout > 0,
            # Three TF32 products are as exact as float32, on tensor cores; other GPUs multiply float32 as it is.
            "ASSEMBLY": nvidia,
            "PRECISION": "tf32" if q.dtype != torch.float32 else "tf32x3" if nvidia else "ieee",
        }  # fmt: skip
        for prefix, x in (("q", q), ("k", k), ("v", v)):
            self.set_strides(prefix, x)
        if inputs.padding is not None:
            self.arguments["PADDING"] = inputs.padding.to(torch.int8).contiguous()
        if inputs.sinks is not None:
            self.arguments["SINKS"] = inputs.sinks.detach().contiguous()
        if inputs.dropout > 0:
            self.set_dropout(inputs)
        self.arguments |= pack_forms(inputs, self.form)

    def set_strides(self, prefix: str, x: Tensor) -> None:
        """Strides of batch, heads and rows."""
        row = "n" if prefix in "kv" else "m"
        for axis, stride in zip(("b", "h", row), x.stride(), strict=False):
            self.arguments[f"{prefix}_{axis}"] = stride

    def set_dropout(self, inputs: Inputs) -> None:
        """The hash of the seed, in two halves, and the share to drop, of 24 bits as the generator compares them."""
        assert inputs.seed is not None
        seed = inputs.seed.to("cpu")
        hashed = int(mix(mix(seed) + (seed >> 32)))
        threshold = round(inputs.dropout * 2**24)
        self.arguments |= {
            "seed_high": hashed >> 16, "seed_low": hashed & 0xFFFF, "threshold": threshold,
            "kept_factor": 1.0 / (1.0 - threshold / 2**24),
        }  # fmt: skip

    def size(self, kernel: str, rows: int = 16) -> tile_sizes.TileSize:
        """The tile of a kernel; square where vectors per distance are multiplied."""
        a = self.arguments
        dim = max(a["BD"], a["BE"], a["BR"] if self.form & PROJECTED else 16)
        return tile_sizes.tile_size(kernel, self.target, dim, a["Q"].element_size() == 4, self.form, rows)

    def by_blocks(self, size: tile_sizes.TileSize) -> dict[str, Any]:
        """The arguments that depend on the size of a tile: running totals by blocks."""
        if not self.form & rank_one_tile.BIT:
            return {}
        values = rank_one_tile.by_blocks(self.arguments, size.BM, size.BN)
        return values | {"query_width": values["QUERY_GROWTH"].shape[1], "key_width": values["KEY_GROWTH"].shape[1]}

    def launch(self, kernel: Any, grid: tuple[int, ...], size: tile_sizes.TileSize, **more: Any) -> None:
        """Run a kernel with the arguments that it has, on a grid of blocks, heads and perhaps parts."""
        totals = self.by_blocks(size) if "QUERY_GROWTH" in names(kernel) else {}
        arguments = self.arguments | totals | more | {"BM": size.BM, "BN": size.BN, "blocks": grid[0]}
        with on_device(self.arguments["Q"]):
            kernel[(math.prod(grid[:2]), *grid[2:])](  # `block_and_head` takes them apart
                **{name: arguments[name] for name in names(kernel)},
                num_warps=size.num_warps,
                num_stages=size.num_stages,
            )


FORMS: dict[int, Any] = {
    toeplitz_tile.BIT: toeplitz_tile,
    rank_one_tile.BIT: rank_one_tile,
    scaled_tile.BIT: scaled_tile,
    PROJECTED: projected_tile,
}
