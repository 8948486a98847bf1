"""How fast attention is on a GPU: each backend with a bias beside PyTorch's own attention without any."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypedDict

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.attend.operation import attention
from relpos.attend.triton.first_use import NO_BIAS
from relpos.attend.triton.trial_problems import Numbers, TrialProblem, difference, make_leaves, one_line

Run = Callable[[], object]
Progress = Callable[[float], object]  # receives the share of the work that is done


class Speed(TypedDict):
    """One way to compute attention, at one size."""

    what: str  # "forward", "forward and backward" or "decoding"
    form: str
    head_dim: int
    length: int
    backend: str
    milliseconds: float | None
    ratio: float | None  # to the time of PyTorch's own attention without a bias
    megabytes: float | None  # peak of memory beyond the inputs
    difference: float | None  # of output and gradients from those of the Triton kernels, relative to the largest entry
    error: str


class Meter(Protocol):
    """Measures a function that queues work on a device."""

    def seconds(self, run: Run) -> float:
        """The time of one call."""

    def peak_bytes(self, run: Run) -> int:
        """The most memory that a call has, beyond what stood before."""


class CudaMeter:
    """Times by CUDA events, over several calls, so that launching one overlaps with the one before."""

    calls = 5

    def seconds(self, run: Run) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        start.record()
        for _ in range(self.calls):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000 / self.calls

    def peak_bytes(self, run: Run) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


@dataclass(frozen=True)
class Size:
    """A problem to time."""

    terms: tuple[str, ...]
    head_dim: int
    length: int
    decoding: bool = False  # one query per sequence, forward only

    def problem(self) -> TrialProblem:
        tokens = 2 * TOKENS if self.decoding else TOKENS
        return TrialProblem(
            terms=self.terms,
            batch=max(1, tokens // self.length),
            heads=HEADS,
            key_heads=HEADS,
            queries=1 if self.decoding else self.length,
            keys=self.length,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            size=self.head_dim,
        )


TOKENS, HEADS, ROUNDS = 16384, 16, 5
PYTORCH = "SDPA, no bias"
BACKENDS = ("triton", "flex")
TIMED = ((), ("Toeplitz",), ("RankOne",), ("Scaled",), ("Projected",))


def sizes(quick: bool) -> list[Size]:
    """Few, since FlexAttention compiles for each."""
    shapes = [(64, 4096)] if quick else [(64, 2048), (128, 8192)]
    found = [Size(terms, head_dim, length) for head_dim, length in shapes for terms in TIMED]
    return found + [Size(terms, 128, 4096, decoding=True) for terms in (TIMED[:2] if quick else TIMED[:4])]


def measure_speed(
    todo: list[Size], device: torch.device, meter: Meter, progress: Progress, backends: tuple[str, ...] = BACKENDS
) -> list[Speed]:
    """Time and memory of each backend with the bias, and of PyTorch's own attention without any, in bfloat16."""
    rows = []
    for number, size in enumerate(todo):
        rows += measure_size(size, device, meter, backends)
        progress((number + 1) / len(todo))
    return rows


def measure_size(size: Size, device: torch.device, meter: Meter, backends: tuple[str, ...]) -> list[Speed]:
    """The rows of one size."""
    problem = size.problem()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # a test runs on a CPU
    leaves = make_leaves(problem.numbers(dtype), dtype, device)
    q, k, v, learned = leaves["q"], leaves["k"], leaves["v"], [x for x in leaves.values() if x.requires_grad]

    def forward(backend: str) -> Tensor:
        if backend == PYTORCH:
            return F.scaled_dot_product_attention(q, k, v, is_causal=not size.decoding)
        return attention(q, k, v, problem.position(leaves), backend=backend)  # type: ignore[no-any-return]

    def without_gradients(backend: str) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (forward(backend),)

    def with_gradients(backend: str) -> tuple[Tensor | None, ...]:
        out = forward(backend)
        return out, *torch.autograd.grad(out, learned, leaves["gradient"], allow_unused=True)

    kinds: dict[str, Callable[[str], tuple[Tensor | None, ...]]] = {"decoding": without_gradients}
    if not size.decoding:
        kinds = {"forward": without_gradients, "forward and backward": with_gradients}
    first: dict[tuple[str, str], Numbers] = {}  # results of the first runs, which compile
    errors: dict[str, str] = {}
    for backend in (PYTORCH, *backends):
        try:
            for what, kind in kinds.items():
                numbers = enumerate(kind(backend))
                first[what, backend] = {str(n): x.detach().float() for n, x in numbers if x is not None}
        except Exception as error:  # of compilers and the driver: they share no class
            errors[backend] = one_line(error)
    rows: list[Speed] = []
    for what, kind in kinds.items():
        runs = {backend: partial(kind, backend) for backend in (PYTORCH, *backends) if backend not in errors}
        times = [{backend: meter.seconds(run) for backend, run in runs.items()} for _ in range(ROUNDS)]  # in turns
        best = {backend: min(time[backend] for time in times) for backend in runs}
        for backend in (PYTORCH, *backends):
            row: Speed = {
                "what": what,
                "form": " + ".join(size.terms) or NO_BIAS,
                "head_dim": size.head_dim,
                "length": size.length,
                "backend": backend,
                "milliseconds": None,
                "ratio": None,
                "megabytes": None,
                "difference": None,
                "error": errors.get(backend, ""),
            }
            if backend in runs:
                row["milliseconds"] = 1000 * best[backend]
                row["megabytes"] = meter.peak_bytes(runs[backend]) / 2**20
                row["ratio"] = best[backend] / best[PYTORCH] if PYTORCH in best else None
                if backend in backends[1:] and backends[0] in runs:
                    row["difference"] = difference(first[what, backend], first[what, backends[0]])[0]
            rows.append(row)
    return rows
