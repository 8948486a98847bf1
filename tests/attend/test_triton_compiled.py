"""The Triton kernels compile for GPUs that are not here, fit into their memory, and use no atomics.

Registers and spills are those of NVIDIA's and AMD's own compilers. Races and missing barriers do not show.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from relpos.attend import triton

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not triton.available()[0], reason=triton.available()[1]),
]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Bytes of spilled registers per thread that are allowed, by form and by target and head_dim; the larger of the two.
SPILLS = {"Projected": 352, "of keys": 544}
SPILLS_ON = {("sm_80", "64"): 64, ("sm_80", "128"): 64, ("sm_90", "64"): 136, ("sm_90", "128"): 160}
SPILLS_ON |= {("sm_100", "64"): 208, ("sm_100", "128"): 400, ("sm_80", "256"): 64, ("sm_90", "256"): 64}
SPILLS_ON |= {(target, head_dim): 192 for target in ("sm_86", "sm_120") for head_dim in ("64", "128")}  # sm_80's tiles
# Small kernels, in which ptxas stores one or two numbers although it has registers.
SMALL = {"bias_bounds", "key_bounds", "row_factors", "kept_rows", "kept_diagonals"}
SHARE = [
    ("sm_90", "64", "Toeplitz,RankOne", "bf16"),
    ("gfx942", "128", "Toeplitz", "bf16"),
    ("sm_80", "64", "Toeplitz", "fp32"),
]
TARGETS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942")
EVERY_TARGET = [
    *((target, dim, "", "bf16") for target in TARGETS for dim in ("64", "128")),
    *((target, dim, "Toeplitz,RankOne", "fp32") for target in ("sm_80", "sm_90", "gfx942") for dim in ("64", "128")),
    *((target, "256", "Toeplitz,RankOne", "bf16") for target in ("sm_80", "sm_90")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("target", "head_dim", "forms", "dtype"),
    [*SHARE, *(pytest.param(*case, marks=pytest.mark.slow) for case in EVERY_TARGET)],
)
def test_every_kernel_compiles_and_fits(target, head_dim, forms, dtype):
    command = [sys.executable, "own_kernels.py", "--targets", target, "--head-dims", head_dim, "--dtype", dtype]
    if forms:
        command += ["--forms", forms]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command, cwd=BENCHMARKS, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(kernels) >= 4
    for kernel in kernels:
        form, place = SPILLS.get(kernel["form"], 0), SPILLS_ON.get((target, head_dim), 0)
        place = max(place, 320 if dtype == "fp32" else 0)  # a float32 takes twice the registers
        assert kernel["spills"] <= (8 if kernel["kernel"] in SMALL else max(form, place)), kernel
        # A compiler that gives up takes few registers and spills the rest.
        assert kernel["registers"] > 32 or not kernel["spills"], kernel
        assert kernel["fits"], kernel
        assert kernel["atomics"] == 0, kernel
