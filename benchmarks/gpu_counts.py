"""Compile a Triton kernel ahead of time for a GPU that is not here, and count what the compiler made of it.

    from gpu_counts import compile_kernel
    counts = compile_kernel(kernel, {"q": "*bf16", "length": "i32", "scale": "fp32"}, {"BLOCK_M": 128}, "sm_90", 8, 3)
    counts.registers, counts.spills, counts.shared, counts.loops[0].per_score(128, 64)

Registers, spills and instructions are read from the machine code (cuobjdump's for NVIDIA, the assembly for AMD). They
say how much work is issued, not how long it takes: no clock, cache or conflict of banks is modelled.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    **{f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 86, 90, 100, 120)},
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED = {"sm_80": 163, "sm_86": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}  # KB per block
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
KINDS = {  # opcodes of NVIDIA and of AMD
    "tensor": r"[HIQOD]MMA|[HIQ]GMMA|UTC\w*MMA|v_mfma\w*",
    "loads": r"LDG|LDGSTS|LD|UTMALDG|(global|buffer|flat)_load\w*",
    "shared": r"LDS|STS|LDSM|STSM|ds_(?!bpermute|swizzle)\w+",
    "atomics": r"RED|REDG|ATOM|ATOMG|UTMAREDG|(global|buffer|flat)_atomic\w*",  # in global memory
    "special": r"MUFU|v_(exp|log|rcp|rsq|sqrt|sin|cos)_f\w+",
}
WIDTHS = {"64": 8, "128": 16, "U8": 1, "S8": 1, "U16": 2, "S16": 2}  # bytes of STL.64 and others; otherwise 4


class Instruction(NamedTuple):
    opcode: str  # without its modifiers
    modifiers: tuple[str, ...]
    follows: tuple[int, ...]  # indices of the instructions that may come next


@dataclass(frozen=True)
class Tally:
    """Instructions by kind, each counted once, as a warp issues them."""

    instructions: int
    tensor: int  # products of tiles on tensor cores
    loads: int  # from global memory
    shared: int  # to and from shared memory
    atomics: int  # on global memory
    special: int  # exponentials, reciprocals and the like


@dataclass(frozen=True)
class Loop(Tally):
    """A loop that multiplies tiles and contains no other such loop.

    A body with branches has several ways through it. The kinds are counted over all of the body.
    """

    threads: int
    longest: int  # instructions of the longest way through the body

    def per_score(self, block_m: int, block_n: int) -> float:
        """Instructions per score on the longest way, if one turn of the loop computes a tile of block_m × block_n."""
        return self.longest * self.threads / (block_m * block_n)


@dataclass(frozen=True)
class Counts:
    """What a kernel needs on a target."""

    kernel: str
    target: str
    num_warps: int
    num_stages: int
    registers: int  # per thread; AMD: vector registers with accumulators
    spills: int  # bytes per thread stored to local memory; NVIDIA: "spill stores" of ptxas, AMD: the size of the memory
    shared: int  # bytes per block
    total: Tally
    loops: tuple[Loop, ...]  # in the order of the code

    @property
    def fits(self) -> bool:
        """Whether a block of the device has this much shared memory."""
        return self.shared <= SHARED[self.target] * 1024

    def as_json(self) -> dict[str, Any]:
        """All numbers as a dictionary."""
        return asdict(self) | {"fits": self.fits}


def compile_kernel(
    function: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    target: str,
    num_warps: int,
    num_stages: int,
    **options: Any,
) -> Counts:
    """Compile a `triton.jit` function for a target, and count.

    Args:
        signature: Types of the arguments that are not constants, as Triton writes them: `*bf16`, `fp32`, `i32`.
            Pointers are taken to be multiples of 16 bytes, as those of tensors are; `i32:16` is an integer that is a
            multiple of 16, as most strides are.
        constants: Values of the `tl.constexpr` arguments, and of others that are known (None for a missing pointer).
        target: One of TARGETS.
        options: More options of the target's compiler, as `maxnreg=128`.

    Raises:
        ValueError: The arguments of the function are not those of signature and constants.
    """
    compiled = compile_for(function, signature, constants, target, num_warps, num_stages, **options)
    warp = TARGETS[target].warp_size
    if "cubin" in compiled.asm:
        usage = disassemble(compiled.asm["cubin"], "-res-usage")
        instructions = parse_sass(disassemble(compiled.asm["cubin"], "-sass"))
        registers = int(re.search(r"\bREG:(\d+)", usage)[1])
        spills = sum(bytes_of(x) for x in instructions if x.opcode == "STL")
    else:
        text = compiled.asm["amdgcn"]
        instructions = parse_amd(text)
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])
        spills = int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", text)[1])
    return Counts(
        function.__name__,
        target,
        num_warps,
        num_stages,
        registers,
        spills,
        compiled.metadata.shared,
        tally(instructions),
        tuple(find_loops(instructions, num_warps * warp)),
    )


def compile_for(
    function: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    target: str,
    num_warps: int,
    num_stages: int,
    **options: Any,
) -> Any:
    """Triton's compiled kernel, with its code in `asm`; arguments as in `compile_kernel`."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET=1 is set: kernels are interpreted. Unset it, and start a new process.")
    if target not in TARGETS:
        raise ValueError(f"The target {target!r} is unknown: choose one of {', '.join(TARGETS)}.")
    names = list(function.arg_names)
    if wrong := set(names) ^ (signature.keys() | constants.keys()) or signature.keys() & constants.keys():
        raise ValueError(
            f"{', '.join(sorted(wrong))}: each argument of {function.__name__} ({', '.join(names)}) must be either in "
            "the signature or among the constants."
        )
    types = {name: "constexpr" if name in constants else signature[name].split(":")[0] for name in names}
    aligned = [at for at, name in enumerate(names) if name in signature and is_aligned(signature[name])]
    source = ASTSource(
        fn=function,
        signature=types,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(at,): [["tt.divisibility", 16]] for at in aligned},
    )
    options |= {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=TARGETS[target], options=options)


def is_aligned(kind: str) -> bool:
    """Whether an argument of this type is a multiple of 16."""
    return kind.startswith("*") or kind.endswith(":16")


def disassemble(cubin: bytes, option: str) -> str:
    """What cuobjdump prints."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), option, file.name]
        # cuobjdump starts nvdisasm, which lies beside it.
        environment = {**os.environ, "PATH": f"{TOOLS}{os.pathsep}{os.environ.get('PATH', '')}"}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def parse_sass(text: str) -> list[Instruction]:
    """The instructions of NVIDIA's machine code, with where each one may go."""
    line = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z]\S*)\s*([^;]*);", re.M)
    lines = [(int(m[1], 16), m[2], m[3].split("."), m[4].strip()) for m in line.finditer(text)]
    index = {address: at for at, (address, *_) in enumerate(lines)}
    instructions, joins = [], {}  # where the branches of a warp meet again, by barrier
    for at, (_, predicate, (opcode, *modifiers), operands) in enumerate(lines):
        goal = re.search(r"0x[0-9a-f]+$", operands)
        target = index.get(int(goal[0], 16)) if goal else None
        follows = {at + 1}
        if opcode == "BSSY":
            joins[operands.split(",")[0]] = target
        elif opcode == "BSYNC":
            follows = {joins.get(operands, at + 1)}
        elif opcode in ("BRA", "JMP", "CALL") and "DIV" not in modifiers:  # BRA.DIV leads to a slow path for lone lanes
            # A condition is a predicate before the opcode, or an operand before the address. A call comes back.
            certain = opcode != "CALL" and predicate is None and operands == goal[0]
            follows = {target} if certain else {at + 1, target}
        elif opcode in ("EXIT", "RET", "BRX", "JMX", "KILL") and predicate is None:
            follows = set()
        following = tuple(sorted(x for x in follows if x is not None and x < len(lines)))
        instructions.append(Instruction(opcode, tuple(modifiers), following))
    return instructions


def parse_amd(text: str) -> list[Instruction]:
    """The instructions of AMD's assembly, with where each one may go."""
    lines: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in text.split("s_endpgm_end", maxsplit=1)[0].splitlines():
        if label := re.match(r"(\.?\w+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\t([a-z]\w*)\s*([^;]*)", line):
            lines.append((instruction[1], instruction[2].strip()))
    instructions = []
    for at, (opcode, operands) in enumerate(lines):
        follows = {at + 1}
        if opcode.startswith("s_cbranch"):
            follows = {at + 1, labels[operands]}
        elif opcode == "s_branch":
            follows = {labels[operands]}
        elif opcode in ("s_endpgm", "s_setpc_b64"):
            follows = set()
        instructions.append(Instruction(opcode, (), tuple(sorted(x for x in follows if x < len(lines)))))
    return instructions


def bytes_of(instruction: Instruction) -> int:
    """Bytes per thread that a load or store moves."""
    return next((WIDTHS[x] for x in instruction.modifiers if x in WIDTHS), 4)


def tally(instructions: Iterable[Instruction]) -> Tally:
    """Instructions by kind."""
    opcodes = [x.opcode for x in instructions if x.opcode != "NOP"]
    return Tally(len(opcodes), **{kind: sum(is_kind(x, kind) for x in opcodes) for kind in KINDS})


def is_kind(opcode: str, kind: str) -> bool:
    """Whether an opcode is of this kind."""
    return re.fullmatch(KINDS[kind], opcode) is not None


def find_loops(instructions: list[Instruction], threads: int) -> Iterator[Loop]:
    """The innermost loops among those that multiply tiles; in a kernel without tensor cores, all innermost loops."""
    flow = nx.DiGraph((at, goal) for at, x in enumerate(instructions) for goal in x.follows)
    flow = flow.subgraph({0} | nx.descendants(flow, 0))  # without slow paths of BRA.DIV
    wanted = {at for at in flow if is_kind(instructions[at].opcode, "tensor")} or set(flow)
    for body, entries in sorted(innermost(flow, wanted), key=lambda loop: min(loop[0])):
        counts = tally(instructions[at] for at in body)
        yield Loop(**asdict(counts), threads=threads, longest=longest_way(flow.subgraph(body), entries, instructions))


def innermost(flow: nx.DiGraph, wanted: set[int]) -> Iterator[tuple[set[int], set[int]]]:
    """Bodies and entries of the loops with a wanted instruction that contain no other such loop."""
    for body in nx.strongly_connected_components(flow):
        if not body & wanted or (len(body) == 1 and not any(flow.has_edge(at, at) for at in body)):
            continue
        # A loop is entered where something outside leads, and goes round where its body leads there.
        entries = {at for at in body if any(before not in body for before in flow.predecessors(at))} or {min(body)}
        inside = nx.DiGraph(flow.subgraph(body))
        inside.remove_edges_from([(before, at) for at in entries for before in list(inside.predecessors(at))])
        inner = list(innermost(inside, wanted))
        yield from inner or [(body, entries)]


def longest_way(body: nx.DiGraph, entries: set[int], instructions: list[Instruction]) -> int:
    """Instructions of the longest way round. Loops inside, as those that wait, count once."""
    last = {before for at in entries for before in body.predecessors(at)}
    once = nx.DiGraph(body)
    once.remove_edges_from([(before, at) for at in entries for before in list(once.predecessors(at))])
    parts = nx.condensation(once)
    most: dict[int, int] = {}
    for part in nx.topological_sort(parts):
        members = parts.nodes[part]["members"]
        before = [most[x] for x in parts.predecessors(part) if x in most]
        if before or members & entries:
            size = sum(instructions[at].opcode != "NOP" for at in members)
            most[part] = size + (0 if members & entries else max(before))
    return max((most[part] for part in most if parts.nodes[part]["members"] & last), default=0)
