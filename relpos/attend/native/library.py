"""Loads the compiled kernel, and builds its C interface (native/src/api.h) from the library's own description of it."""

import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

INTERFACE = 4  # the meaning of fields and buffers that this package knows: INTERFACE of api.h
MAX_DIM = 512  # the largest head_dim and value_dim, for those who must not load the library (a traced call)
BUILD_IT = (
    "To have it, install a C++ compiler (Debian: g++; macOS: xcode-select --install; Windows: clang-cl, of Visual "
    "Studio's build tools), then relpos again (pip install --force-reinstall --no-deps .)."
)
# The fields that this package sets. A library with others is of another version.
FIELDS = """
    batch heads key_heads queries keys head_dim value_dim start form dtype threads skip scale causal window_left
    window_right first end padding softcap dropout seed sinks q k v out lse q_cos q_sin k_cos k_sin q_rotation_stride
    k_rotation_stride pairs interleaved table table_stride zero distances total_high total_low weight total_stride
    symmetric weighted inverse inverse_stride knots knot base gain bend skipping grad_out grad_q grad_k grad_v grad_lse
    grad_table grad_total grad_total_query grad_weight grad_inverse grad_scaled_sums mass mass_first mass_rows
"""


class Array(ctypes.Structure):
    """A (batch, heads, rows, head_dim) array: relpos_array."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
    ]

    @classmethod
    def of(cls, x: Tensor) -> "Array":
        """The array of a tensor, whose last dimension must be contiguous."""
        return cls(x.data_ptr(), *x.stride()[:3])


class Totals(ctypes.Structure):
    """Running totals to which tokens are added: relpos_running."""

    _fields_ = [
        ("heads", ctypes.c_int64),
        ("units", ctypes.c_void_p),
        ("weigh", ctypes.c_void_p),
        ("sum", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("plane_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
    ]


class Entry(ctypes.Structure):
    """One line of the library's description: relpos_entry."""

    _fields_ = [("kind", ctypes.c_char_p), ("name", ctypes.c_char_p), ("value", ctypes.c_int64)]


STRUCTS = {"relpos_array": ctypes.sizeof(Array), "relpos_running": ctypes.sizeof(Totals)}
TYPES = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "float": ctypes.c_float,
    "relpos_array": Array,
}  # and pointers


class Interface:
    """What the library says about itself.

    Attributes:
        constants: Values by name, as in api.h without the prefix.
        problem: The structure of one call, relpos_problem. A name that it does not have cannot be set.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.constants: dict[str, int] = {}
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
        self.problem: type[ctypes.Structure] = type(
            "Problem", (ctypes.Structure,), {"_fields_": fields, "__slots__": ()}
        )
        self.fits = (
            offsets.keys() == set(FIELDS.split())
            and all(getattr(self.problem, name).offset == offset for name, offset in offsets.items())
            and sizes == {"relpos_problem": ctypes.sizeof(self.problem)} | STRUCTS
            and self.constants["INTERFACE"] == INTERFACE
            and self.constants["MAX_DIM"] == MAX_DIM
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
    """Load the library, and select the instruction set RELPOS_ISA if that is set.

    Raises:
        RuntimeError: The library is missing, cannot be loaded, or is of another version.
    """
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
    for name in ("relpos_slots", "relpos_skipping_words"):
        getattr(library, name).restype = ctypes.c_int64
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.relpos_append.argtypes = (ctypes.POINTER(Totals), pointer, pointer, number, number, number, number)
    chosen = os.environ.get("RELPOS_ISA")
    if chosen:
        _choose(library, chosen)
    return library


def check(library: ctypes.CDLL) -> None:
    """Refuse a library whose structure or meaning is not the one that this package knows.

    Raises:
        RuntimeError: It is of another version.
    """
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
