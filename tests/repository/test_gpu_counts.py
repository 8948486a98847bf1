"""Counting of GPU kernels: against code written by hand, and against what ptxas says."""

import re
import subprocess

import pytest

pytest.importorskip("triton", reason="Triton is for Linux")

import gpu_counts
from counted_kernel import counted, ptx
from gpu_counts import find_loops, parse_amd, parse_sass, tally
from triton_compiler import triton_compiler


@pytest.fixture(scope="module")
def compiler():
    with triton_compiler() as process:
        yield process


# A loop over tiles, 0x0020 to 0x00b0: a mask that a branch leaves out, a loop that waits, an exit in the middle.
SASS = """
        /*0000*/                   S2R R0, SR_TID.X ;            /* 0x0 */
        /*0010*/                   MOV R1, RZ ;
        /*0020*/              @!P0 BRA 0x50 ;
        /*0030*/                   FSEL R4, R4, R5, P1 ;
        /*0040*/                   FSEL R6, R6, R7, P1 ;
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0060*/                   BRA.DIV UR4, 0xe0 ;
        /*0070*/               @P2 BRA 0xc0 ;
        /*0080*/                   RED.E.ADD.F32.FTZ.RN.STRONG.GPU [R2.64], R4 ;
        /*0090*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P3, [R3], R2 ;
        /*00a0*/              @!P3 BRA 0x90 ;
        /*00b0*/                   BRA.U UP0, 0x20 ;
        /*00c0*/                   STL.64 [R1], R4 ;
        /*00d0*/                   EXIT ;
        /*00e0*/                   SHFL.BFLY PT, R4, R4, 0x1, 0x1f ;
        /*00f0*/                   BRA 0x70 ;
        /*0100*/                   BRA 0x100;
        /*0110*/                   NOP ;
"""
AMD = """
f:                                      ; @f
	s_load_dwordx2 s[2:3], s[0:1], 0x0
	s_cbranch_scc1 .LBB0_3
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
	v_mfma_f32_32x32x8_bf16 v[0:15], v[0:1], v[2:3], v[0:15]
	s_cbranch_vccnz .LBB0_2
	global_atomic_add_f32 v0, v1, s[2:3]
.LBB0_2:
	s_cbranch_scc0 .LBB0_1
.LBB0_3:
	s_endpgm
"""


def test_a_loop_is_its_body_with_the_ways_through_it():
    instructions = parse_sass(SASS)
    (loop,) = find_loops(instructions, threads=64)
    assert (loop.instructions, loop.longest) == (10, 10)
    assert (loop.tensor, loop.atomics) == (1, 1)
    assert loop.per_score(16, 8) == 10 * 64 / (16 * 8)
    assert tally(instructions).instructions == 17
    assert sum(gpu_counts.bytes_of(x) for x in instructions if x.opcode == "STL") == 8


def test_of_nested_loops_the_one_that_multiplies_counts():
    outer = SASS.replace("STL.64 [R1], R4", "BRA 0x10")
    loops = list(find_loops(parse_sass(outer), threads=32))
    assert [loop.instructions for loop in loops] == [10]


def test_of_two_ways_through_a_loop_the_longer_counts():
    follows = [(1,), (2, 4), (3,), (6,), (5,), (6,), (0, 7), ()]  # 1 leads to 2 and 3, or to 4 and 5, then to 6
    opcodes = ["MOV", "BRA", "NOP", "BRA", "HMMA", "FADD", "BRA", "EXIT"]
    instructions = [gpu_counts.Instruction(x, (), after) for x, after in zip(opcodes, follows, strict=True)]
    (loop,) = find_loops(instructions, threads=32)
    assert (loop.instructions, loop.longest) == (6, 5)


def test_a_loop_in_the_assembly_of_amd():
    (loop,) = find_loops(parse_amd(AMD), threads=64)
    assert (loop.instructions, loop.longest) == (4, 4)
    assert (loop.tensor, loop.atomics) == (1, 1)


@pytest.mark.parametrize("target", gpu_counts.TARGETS)
def test_a_kernel_is_compiled_and_counted(compiler, target):
    """By m16n8k16, two products of 64 × 64 × 64 over 4 warps are 64 tensor instructions; 32 exponentials."""
    counts = compiler.submit(counted, target, 64, atomic=False).result()
    (loop,) = counts.loops
    assert counts.fits
    assert counts.spills == 0
    assert 32 <= counts.registers <= 255
    assert loop.atomics == counts.total.atomics == 0
    assert loop.special >= 64 * 64 // loop.threads
    if target in ("sm_80", "sm_86", "sm_120"):
        assert (loop.tensor, loop.special) == (64, 32)
    adding = compiler.submit(counted, target, 64, atomic=True).result()
    assert adding.loops[0].atomics >= 64 * 64 // loop.threads / 4  # up to four numbers by one instruction
    assert adding.loops[0].per_score(64, 64) > loop.per_score(64, 64)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120"])
def test_registers_and_spills_are_those_that_ptxas_reports(compiler, target, tmp_path):
    counts, code = (compiler.submit(function, target, 128, atomic=True).result() for function in (counted, ptx))
    (tmp_path / "kernel.ptx").write_text(code)
    tool = "ptxas-blackwell" if target == "sm_120" else "ptxas"
    command = [gpu_counts.TOOLS / tool, "-v", "-lineinfo", "--regAllocOptLevel=2", "-o", tmp_path / "kernel.cubin"]
    command += ["--gpu-name", re.search(r"\.target (\w+)", code)[1], tmp_path / "kernel.ptx"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert counts.registers == int(re.search(r"Used (\d+) registers", said)[1])
    assert counts.spills == int(re.search(r"(\d+) bytes spill stores", said)[1]) > 0


def test_what_cannot_be_compiled_has_a_sentence(compiler):
    with pytest.raises(ValueError, match="SUMS: each argument of scores_times_values"):
        compiler.submit(counted, "sm_80", 64, atomic=False, SUMS=None).result()
    with pytest.raises(ValueError, match="'sm_70' is unknown: choose one of sm_80"):
        compiler.submit(counted, "sm_70", 64, atomic=False).result()
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 is set"):
        counted("sm_80", 64, atomic=False)
