"""Loads the compiled kernel and describes its C interface (native/src/api.h)."""

import ctypes
import functools
import os
import sys
from pathlib import Path

from torch import Tensor

INTERFACE = 2  # RELPOS_INTERFACE of the api.h that this file describes
NONE, TOEPLITZ, RANK_ONE, SUM, SCALED = range(5)  # the forms, as the kernel numbers them
TABLE_PAD = 128  # values before and after a table over distances
ROW_PAD = 64  # values after an array over positions
TILE = 64

Pointer = ctypes.c_void_p
Int = ctypes.c_int64
Flag = ctypes.c_int32


class Array(ctypes.Structure):
    """A (batch, heads, rows, head_dim) float array."""

    _fields_ = [("data", Pointer), ("batch", Int), ("head", Int), ("row", Int)]

    @classmethod
    def of(cls, x: Tensor) -> "Array":
        """The array of a tensor, whose last dimension must be contiguous."""
        return cls(x.data_ptr(), *x.stride()[:3])


class Problem(ctypes.Structure):
    """One call of the kernel: relpos_problem."""

    _fields_ = [
        *((name, Int) for name in ("batch", "heads", "key_heads", "queries", "keys", "head_dim")),
        *((name, Flag) for name in ("causal", "form", "threads", "skip")),
        ("scale", ctypes.c_float),
        *((name, Pointer) for name in ("first", "end", "padding")),
        *((name, Array) for name in ("q", "k", "v", "out")),
        ("lse", Pointer),
        ("table", Pointer),
        *((name, Int) for name in ("table_stride", "zero", "distances")),
        *((name, Pointer) for name in ("total_high", "total_low", "weight")),
        *((name, Flag) for name in ("symmetric", "weighted")),
        ("inverse", Pointer),
        *((name, Int) for name in ("inverse_stride", "knots")),
        *((name, Pointer) for name in ("knot", "base", "gain", "bend")),
        ("skipping", Pointer),
        *((name, Array) for name in ("grad_out", "grad_q", "grad_k", "grad_v")),
        *((name, Pointer) for name in ("grad_table", "grad_total", "grad_total_query", "grad_weight")),
        *((name, Pointer) for name in ("grad_inverse", "grad_scaled_sums")),
    ]


def file() -> Path | None:
    """Path of the compiled library: RELPOS_LIBRARY, beside this file, or where an editable install put it."""
    if named := os.environ.get("RELPOS_LIBRARY"):
        return Path(named)
    package = sys.modules[__package__ or "relpos.attend"]
    for folder in [Path(__file__).parent, *map(Path, package.__path__)]:
        for name in ("librelpos.so", "librelpos.dylib"):
            if (folder / name).is_file():
                return folder / name
    return None


@functools.cache
def load() -> ctypes.CDLL:
    """Load the library, and select the instruction set RELPOS_ISA if that is set.

    Raises:
        RuntimeError: The library is missing, cannot be loaded, or is of another version.
    """
    path = file()
    if path is None:
        raise RuntimeError("the compiled kernel is missing: install a C++ compiler, then relpos again (pip install .).")
    try:
        library = ctypes.CDLL(str(path))  # torch is imported before, so that both use torch's OpenMP
    except OSError as error:
        raise RuntimeError(f"the compiled kernel cannot be loaded: {error}.") from error
    for name in ("relpos_isa", "relpos_isas"):
        getattr(library, name).restype = ctypes.c_char_p
    library.relpos_slots.restype = Int
    # The first version has no relpos_interface, and cannot read today's structure.
    if not hasattr(library, "relpos_interface") or library.relpos_interface() != INTERFACE:
        raise RuntimeError("the compiled kernel is of another version of relpos: install relpos again.")
    chosen = os.environ.get("RELPOS_ISA")
    if chosen:
        _choose(library, chosen)
    return library


def _choose(library: ctypes.CDLL, isa: str) -> None:
    answer = library.relpos_use(isa.encode())
    if answer == 1:
        return
    built = library.relpos_isas().decode().split(",")
    usable = ", ".join(name for name in built if library.relpos_has(name.encode()) == 1)
    reason = "this CPU does not have it" if answer == 0 else "the kernel was not built for it"
    raise RuntimeError(f"the instruction set {isa!r} cannot be used, because {reason}. Allowed: {usable}.")


def use(isa: str) -> None:
    """Select the instruction set of all later calls: portable, avx2 or avx512."""
    _choose(load(), isa)


def isa() -> str:
    """The instruction set in use."""
    return str(load().relpos_isa().decode())


def isas() -> list[str]:
    """The instruction sets that were built and that this CPU has, best first."""
    library = load()
    built: list[str] = library.relpos_isas().decode().split(",")
    return [name for name in built if library.relpos_has(name.encode()) == 1]
