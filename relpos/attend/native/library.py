"""Loads the compiled kernel, and builds its C interface (native/src/api.h) from the library's own description of it."""

import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

INTERFACE = 5  # the meaning of fields and buffers that this package knows, with which INTERFACE of api.h must agree
BUILD_IT = (
    "To have it, install a C++ compiler (Debian: g++; macOS: xcode-select --install; Windows: clang-cl, of Visual "
    "Studio's build tools), then relpos again (pip install --force-reinstall --no-deps .)."
)


class Array(ctypes.Structure):
    """A (batch, heads, rows, head_dim) array: relpos_array."""

    _fields_ = [("data", ctypes.c_void_p), ("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("row", ctypes.c_int64)]

    @classmethod
    def of(cls, x: Tensor) -> "Array":
        """The array of a tensor, whose last dimension must be contiguous."""
        return cls(x.data_ptr(), *x.stride()[:3])


class Totals(ctypes.Structure):
    """Running totals of a RankOne bias: relpos_totals."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("batch", "heads", "tokens")],
        ("threads", ctypes.c_int32),
        *[(name, ctypes.c_void_p) for name in ("total", "step", "weight")],
        *[(name, ctypes.c_int64 * 3) for name in ("step_strides", "weight_strides")],
        ("rows", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("plane_stride", "row_stride")],
        ("unit", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("keys", "queries", "start")],
        *[(name, ctypes.c_void_p) for name in ("grad_keys", "grad_queries", "grad_weights")],
        *[(name, ctypes.c_void_p) for name in ("grad_total", "grad_step", "grad_weight")],
    ]


class Entry(ctypes.Structure):
    """One line of the library's description: relpos_entry."""

    _fields_ = [("kind", ctypes.c_char_p), ("name", ctypes.c_char_p), ("value", ctypes.c_int64)]


STRUCTS = {"relpos_array": ctypes.sizeof(Array), "relpos_totals": ctypes.sizeof(Totals)}
TYPES = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "float": ctypes.c_float,
    "relpos_array": Array,
}  # and pointers


class Interface:
    """What the library says about itself."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.constants: dict[str, int] = {}  # by name, as in api.h without the prefix
        sizes: dict[str, int] = {}
        fields: list[tuple[str, Any]] = []
        offsets: dict[str, int] = {}
        library.relpos_describe.restype = ctypes.POINTER(Entry)
        for entry in library.relpos_describe():
            if entry.kind is None:
                break
            kind, name = entry.kind.decode(), entry.name.decode()
            if kind == "constant":
                self.constants[name] = entry.value
            elif kind == "size":
                sizes[name] = entry.value
            else:
                fields.append((name, ctypes.c_void_p if kind.endswith("*") else TYPES[kind]))
                offsets[name] = entry.value
        # The structure of one call, relpos_problem. A name that it does not have cannot be set.
        self.problem: type[ctypes.Structure] = type(
            "Problem", (ctypes.Structure,), {"_fields_": fields, "__slots__": ()}
        )
        self.fits = (
            all(getattr(self.problem, name).offset == offset for name, offset in offsets.items())
            and sizes == {"relpos_problem": ctypes.sizeof(self.problem)} | STRUCTS
            and self.constants["INTERFACE"] == INTERFACE
        )


def file() -> Path | None:
    """The library's file: RELPOS_LIBRARY if set, otherwise in the folder of this file or of an editable install."""
    if named := os.environ.get("RELPOS_LIBRARY"):
        return Path(named)
    return _beside_this_file("librelpos.so", "librelpos.dylib", "librelpos.dll")


def why_missing() -> str:
    """Why there is no library: what the build has left in its place (native/CMakeLists.txt), and what to do."""
    reason = _beside_this_file("missing.txt")
    because = reason.read_text(encoding="utf-8").strip() if reason else "this relpos was not built."
    return f"the compiled kernel is missing: {because} {BUILD_IT}"


def _beside_this_file(*names: str) -> Path | None:
    package = sys.modules[__package__ or "relpos.attend.native"]
    for folder in [Path(__file__).parent, *map(Path, package.__path__)]:
        for name in names:
            if (folder / name).is_file():
                return folder / name
    return None


@functools.cache
def load() -> ctypes.CDLL:
    """Load the library, and select the instruction set RELPOS_ISA if that is set."""
    path = file()
    if path is None:
        raise RuntimeError(why_missing())
    try:
        library = ctypes.CDLL(str(path))  # torch is imported before, so that both use torch's OpenMP
    except OSError as error:
        raise RuntimeError(f"the compiled kernel cannot be loaded: {error}.") from error
    check(library)
    for name in ("relpos_isa", "relpos_isas"):
        getattr(library, name).restype = ctypes.c_char_p
    library.relpos_slots.restype = ctypes.c_int64
    for name in ("relpos_pack_totals", "relpos_unpack_gradients"):
        getattr(library, name).argtypes = (ctypes.POINTER(Totals),)
    library.relpos_append_totals.argtypes = (ctypes.POINTER(Totals), ctypes.c_int64)
    chosen = os.environ.get("RELPOS_ISA")
    if chosen:
        _choose(library, chosen)
    return library


def check(library: ctypes.CDLL) -> None:
    """Refuse a library whose structure or meaning is not the one that this package knows."""
    try:
        fits = Interface(library).fits
    except (AttributeError, KeyError):  # it does not describe itself, or in other words
        fits = False
    if not fits:
        raise RuntimeError("the compiled kernel is of another version of relpos: install relpos again.")


@functools.cache
def interface() -> Interface:
    """The interface of the loaded library."""
    return Interface(load())


def constant(name: str) -> int:
    """A constant of the kernel, by its name in api.h without the prefix."""
    return interface().constants[name]


def _limit(name: str, otherwise: int) -> int:
    """A constant of the kernel, or a number where the library is missing: a call can be traced there, not run."""
    try:
        return constant(name)
    except RuntimeError:
        return otherwise


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


MAX_DIM = _limit("MAX_DIM", sys.maxsize)  # the largest head_dim and value_dim
FEW = _limit("FEW", 0)  # queries up to which the kernel reads keys and values faster than it computes with them
