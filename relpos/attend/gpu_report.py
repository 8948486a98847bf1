"""What `relpos gpu-report` measures: are the GPU kernels right on this machine, and how fast are they?

Without a GPU the kernels run in Triton's interpreter, in a process of their own (`python -m relpos.attend.gpu_report`),
since Triton is told of it before it is imported; it shows whether the arithmetic is right, and nothing of speed.
"""

import json
import math
import os
import platform
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch

from relpos.attend import triton
from relpos.attend.gpu_speed import CudaMeter, Progress, Speed, measure_speed, sizes
from relpos.attend.triton import first_use
from relpos.attend.triton.trial_problems import LIMITS, TrialProblem, difference, exact, one_line, results
from relpos.system.versions import versions


class Correctness(TypedDict):
    """One call, compared with the definition in float64."""

    case: str
    dtype: str
    difference: float | None  # the largest, relative to the largest entry of its tensor; None after an error
    tensor: str  # that has it
    limit: float
    same_bits: bool | None  # whether a second run gave the same bits; None if it was not run
    error: str  # empty, or the sentence of an exception
    passed: bool


class Report(TypedDict):
    """All of it. `speed` is empty without a GPU."""

    device: str
    interpreted: bool
    facts: dict[str, str]  # versions, driver
    correctness: list[Correctness]
    speed: list[Speed]
    seconds: float


def gpu_report(quick: bool = False, progress: Progress | None = None) -> Report:
    """Try the GPU kernels here: correctness of every form and argument, then, on a GPU, speed and memory.

    Args:
        quick: Whether to leave out float16, float32 and the larger sizes.
        progress: Called with the share of the work that is done.

    Returns:
        The numbers.

    Raises:
        ValueError: Triton is not installed.
    """
    installed, reason = triton.available()
    if not installed:
        raise ValueError(reason)
    started, show = time.perf_counter(), progress or (lambda share: None)
    on_gpu = torch.cuda.is_available() and not triton.INTERPRETED
    if on_gpu:
        device = torch.device("cuda", torch.cuda.current_device())
        todo = cases(quick)
        correctness = []
        for number, case in enumerate(todo):
            correctness.append(compare(case, device))
            show((number + 1) / (2 * len(todo)))
        speed = measure_speed(sizes(quick), device, CudaMeter(), lambda share: show(0.5 + share / 2))
    else:
        correctness, speed = interpreted_cases(quick, show), []
    show(1.0)
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "none",
        "interpreted": not on_gpu,
        "facts": facts(),
        "correctness": correctness,
        "speed": speed,
        "seconds": time.perf_counter() - started,
    }


def facts() -> dict[str, str]:
    """The versions and the driver that the numbers depend on."""
    import triton as compiler  # noqa: PLC0415

    known = {**versions(("torch",)), "triton": compiler.__version__, "system": platform.platform()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        known["driver"] = first_use.driver() or "unknown"
        known["cuda or hip"] = torch.version.cuda or torch.version.hip or "unknown"
        known["memory"] = f"{properties.total_memory / 2**30:.0f} GB"
        known["multiprocessors"] = str(properties.multi_processor_count)
    return known


# -- Correctness


@dataclass(frozen=True)
class Case:
    """A problem with a name, in a dtype."""

    name: str
    problem: TrialProblem
    dtype: torch.dtype
    twice: bool  # whether a second run must give the same bits


FORMS: tuple[tuple[str, ...], ...] = (
    (),
    ("Toeplitz",),
    ("Toeplitz with ends",),
    ("RankOne",),
    ("RankOne without weights",),
    ("Scaled",),
    ("Projected",),
    ("Projected of keys",),
    ("Toeplitz", "RankOne"),
    ("Scaled", "RankOne"),
    ("Projected", "Projected of keys"),
)
# In the interpreter a problem of 200 tokens takes half a minute.
SMALL = TrialProblem(batch=1, heads=2, key_heads=1, queries=50, keys=50, head_dim=16, value_dim=16, size=16)


def argument_cases(base: TrialProblem) -> dict[str, TrialProblem]:
    """A problem for each argument of attention, by name; `base` has the sizes, and two heads per key head."""
    both, near = {"causal": False}, base.keys * 3 // 5
    changes: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "both directions": (("Toeplitz", "RankOne"), {"options": both}),
        "both directions of vectors": (("Projected", "Projected of keys"), {"options": both}),
        "window": (("Toeplitz",), {"options": {"window": near}}),
        "window in both directions": (("Toeplitz",), {"options": {"window": (7, near // 2), **both}}),
        "documents": (("Toeplitz",), {"options": {"documents": True}}),
        "documents and a window": (("Scaled",), {"options": {"documents": True, "window": near // 2}}),
        "padding": (("RankOne",), {"options": {"padding": True}}),
        "start": (("Toeplitz",), {"queries": base.keys // 2, "options": {"start": 13}}),
        "cross attention": (("Projected",), {"queries": 30, "options": {"start": base.keys - 10, **both}}),
        "queries that see nothing": ((), {"queries": 30, "options": {"start": base.keys - 10, "window": 5, **both}}),
        "a key head for each head": (("Toeplitz",), {"key_heads": base.heads}),
        "head_dim 40 and value_dim 24": (("RankOne",), {"head_dim": 40, "value_dim": 24}),
        "heads between tokens in memory": (("Toeplitz",), {"strided": True}),
        "sinks": (("Toeplitz",), {"options": {"sinks": True}}),
        "softcap": (("Toeplitz",), {"options": {"softcap": 2.0}}),
        "scale": ((), {"options": {"scale": 0.5}}),
        "dropout": (("Toeplitz",), {"options": {"dropout": 0.3, "seed": 5}}),
        "rotation": (("rope",), {}),
        "positions with gaps": (("rope",), {"options": {"positions": True}}),
        "one query": (("Toeplitz",), {"queries": 1}),
        "five queries and a window": (("RankOne",), {"queries": 5, "options": {"window": near}}),
        "head_dim 128": (("Toeplitz",), {"head_dim": 128, "value_dim": 128}),
        "head_dim 256": ((), {"head_dim": 256, "value_dim": 256}),
    }
    return {
        f"{name} ({' + '.join(terms) or first_use.NO_BIAS})": replace(base, terms=terms, **more)
        for name, (terms, more) in changes.items()
    }


def cases(quick: bool, small: bool = False) -> list[Case]:
    """Every form and every argument in bfloat16, and, unless `quick`, every form in float16 and float32.

    `small` problems are for the interpreter, which gets bfloat16 products wrong: float32 takes its place there. Nothing
    runs at the same time there, so that few of them are run twice.
    """
    base = SMALL if small else TrialProblem()
    main, *others = [torch.float32, torch.float16] if small else [torch.bfloat16, torch.float16, torch.float32]
    found = [
        Case(" + ".join(terms) or first_use.NO_BIAS, replace(base, terms=terms), dtype, dtype == main)
        for dtype in [main, *([] if quick else others)]
        for terms in FORMS
    ]
    found += [Case(name, problem, main, not small) for name, problem in argument_cases(base).items()]
    if not small:
        for terms in (("Toeplitz",), ("RankOne",)):
            problem = first_use.long_problem(replace(base, terms=terms), triton.SHORTEST)
            found.append(Case(f"far tiles skipped ({terms[0]})", problem, main, True))
    return found


def compare(case: Case, device: torch.device) -> Correctness:
    """Run a case by the Triton kernels, and compare it with the definition. Exceptions become part of the report."""
    numbers = case.problem.numbers(case.dtype)
    expected = exact(case.problem, numbers)
    row: Correctness = {
        "case": case.name,
        "dtype": str(case.dtype).removeprefix("torch."),
        "difference": None,
        "tensor": "",
        "limit": LIMITS[case.dtype],
        "same_bits": None,
        "error": "",
        "passed": False,
    }
    try:
        ours = results(case.problem, triton, case.dtype, device, numbers)
        again = results(case.problem, triton, case.dtype, device, numbers) if case.twice else None
    except Exception as error:  # of Triton, of its compilers, of the driver: they share no class
        row["error"] = one_line(error)
        return row
    largest, row["tensor"] = difference(ours, expected)
    if math.isfinite(largest):
        row["difference"] = largest
    else:
        row["error"] = f"{row['tensor']} holds {largest}"
    if again is not None:
        row["same_bits"] = all(torch.equal(ours[name], again[name]) for name in ours)
    row["passed"] = largest <= row["limit"] and row["same_bits"] is not False
    return row


def interpreted_cases(quick: bool, progress: Progress) -> list[Correctness]:
    """The cases in Triton's interpreter, in a process of their own, which prints one line of JSON for each."""
    number, rows = len(cases(quick, small=True)), []
    command = [sys.executable, "-m", "relpos.attend.gpu_report", *(["--quick"] if quick else [])]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, encoding="utf-8") as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                rows.append(json.loads(line))
                progress(len(rows) / number)
        except BaseException:  # Ctrl-C
            child.kill()
            raise
    if child.returncode or len(rows) != number:
        raise ChildProcessError(f"Triton's interpreter stopped after {len(rows)} of {number} cases (see above).")
    return rows


if __name__ == "__main__":  # in Triton's interpreter
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of log2(0), which is meant
    for case in cases("--quick" in sys.argv, small=True):
        print(json.dumps(compare(case, torch.device("cpu"))), flush=True)
