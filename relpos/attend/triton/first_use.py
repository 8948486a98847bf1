"""At first use on a GPU, a small problem of each form runs against the definition: are the kernels right here?

The verdict is kept in memory, and in the cache folder for later processes with the same GPU, driver, versions and
kernels. Nothing runs while a graph is traced or captured: there, kernels without a verdict are taken to be right.
"""

import contextlib
import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from relpos import __version__
from relpos.attend import triton as backend
from relpos.forms.bias import Form, Projected, terms
from relpos.system.files import cache_folder, write_text
from relpos.system.seal import signed, undamaged

if TYPE_CHECKING:
    from relpos.attend.triton.trial_problems import TrialProblem

FOLDER = "triton-first-use"  # in the cache folder: one file per environment and subject
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
NO_BIAS = "no bias"
TOKENS = 200  # of the small problem: two tiles and a part of one
SKIPPED = {"Toeplitz", "RankOne"}  # terms of which far tiles may be skipped


@dataclass(frozen=True)
class Subject:
    """What a verdict is about: kernels are compiled for these."""

    form: str  # the terms of the bias, as in "RankOne + Toeplitz", or NO_BIAS
    dtype: str  # of q, as in "bfloat16"
    head_dim: int
    value_dim: int
    size: int = 0  # of the vectors of Projected terms; 0 without any
    decoding: bool = False  # the kernels for few queries, which have no backward of their own

    def __str__(self) -> str:
        value_dim = "" if self.value_dim == self.head_dim else f", value_dim {self.value_dim}"
        size = f", vectors of {self.size}" if self.size else ""
        return f"{self.form}, {self.dtype}, head_dim {self.head_dim}{value_dim}{size}{', decoding' * self.decoding}"


@dataclass(frozen=True)
class Verdict:
    """What the small problem showed."""

    difference: float  # the largest from the definition, relative to the largest entry; infinite after an error
    tensor: str  # that has it
    limit: float  # of the difference
    repeats: bool  # whether two runs gave the same bits
    error: str = ""  # of the compiler or the driver

    @property
    def passed(self) -> bool:
        return not self.error and self.difference <= self.limit and self.repeats

    def __str__(self) -> str:
        if self.error:
            return self.error
        if not self.difference <= self.limit:  # also if it is NaN
            return f"{self.tensor} differs from the definition by {self.difference:.1e} (allowed: {self.limit:.0e})"
        if not self.repeats:
            return "two runs gave different bits"
        return f"differs from the definition by at most {self.difference:.1e} (allowed: {self.limit:.0e})"


# -- Asking


def failure(q: Tensor, v: Tensor, form: Form | None) -> str | None:
    """Why the kernels must not run this call on this GPU, as a sentence; None if they may.

    The first call of a subject waits for the small problem; later ones look up its verdict.
    """
    names, size = [], 0
    for term in terms(form):
        if isinstance(term, Projected):
            size = int(term.vectors.shape[-1])
        names.append("Projected of keys" if isinstance(term, Projected) and term.of_keys else type(term).__name__)
    learned = form is not None and any(x.requires_grad for _, x in form.tensors())
    return failure_of(q, v, "+".join(names), size, learned)


def failure_of(q: Tensor, v: Tensor, names: str, size: int = 0, learned: bool = False) -> str | None:
    """The same for a bias whose terms have these names, joined by "+"; `learned` if it wants a gradient."""
    if backend.INTERPRETED:
        return None
    few = bool(q.shape[2] <= backend.FEW)
    subject = (names, str(q.dtype), int(q.shape[-1]), int(v.shape[-1]), size)
    graded = torch.is_grad_enabled() and (learned or q.requires_grad or v.requires_grad)
    for decoding in (True, False):  # few queries with a gradient run the kernels of both
        if (few if decoding else graded or not few) and (
            sentence := _sentence(str(q.device), *subject, decoding, torch.compiler.is_compiling())
        ):
            return sentence
    return None


def _sentence(
    device: str, names: str, dtype: str, head_dim: int, value_dim: int, size: int, decoding: bool, tracing: bool
) -> str | None:
    form = " + ".join(sorted(set(names.split("+")))) or NO_BIAS
    subject = Subject(form, dtype.removeprefix("torch."), head_dim, value_dim, size, decoding)
    verdict = verdict_of(torch.device(device), subject, tracing)
    if verdict is None or verdict.passed:
        return None
    return f"the Triton kernels failed their check at first use on this GPU ({subject}): {verdict}."


# A traced graph takes the answer and does not see how it is found. torch.compiler.assume_constant_result sets no more
# than this, but imports PyTorch's compiler, for a second or two.
_sentence._dynamo_marked_constant = True  # type: ignore[attr-defined]

_verdicts: dict[tuple[str, Subject], Verdict] = {}  # by environment and subject
_lock = threading.Lock()  # threads with a GPU each wait for the first of them
_thread = threading.local()


def verdict_of(device: torch.device, subject: Subject, tracing: bool = False) -> Verdict | None:
    """The verdict on a subject, which is checked if that is still to be done; None if it cannot be checked now."""
    if getattr(_thread, "checks", False):  # attention of the small problem itself
        return None
    key = (environment(device), subject)
    if key in _verdicts:
        return _verdicts[key]
    with _lock:
        if key in _verdicts:
            return _verdicts[key]
        verdict, runs = stored(*key), not tracing and can_run(device)
        if runs and (verdict is None or verdict.error):  # a C compiler that was missing may be there now
            # A thread of its own has gradients, and none of the caller's hooks, modes, autocast and streams: activation
            # checkpointing would count what the small problem saves.
            with ThreadPoolExecutor(1) as thread:
                verdict = thread.submit(_check_alone, device, subject).result()
            store(*key, verdict)
        if verdict is not None and (runs or not verdict.error):
            _verdicts[key] = verdict
        return verdict


def _check_alone(device: torch.device, subject: Subject) -> Verdict:
    _thread.checks = True
    return check(device, subject)


def can_run(device: torch.device) -> bool:
    """Whether a problem can run now: not while a graph is traced, a CUDA graph captured, or tensors have no values."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def check(device: torch.device, subject: Subject, tokens: int = TOKENS) -> Verdict:
    """Run the small problem, forward and backward, twice; and a long one, of which most tiles are skipped.

    For decoding there are 5 queries, and no backward.
    """
    from relpos.attend.triton.trial_problems import LIMITS, difference, exact, one_line, results

    dtype = getattr(torch, subject.dtype)
    largest, tensor, repeats = 0.0, "out", True
    for problem in problems_of(subject, tokens):
        numbers = problem.numbers(dtype)
        try:
            expected = exact(problem, numbers, not subject.decoding)
            ours, again = (results(problem, backend, dtype, device, numbers, not subject.decoding) for _ in range(2))
        except torch.OutOfMemoryError:  # says nothing of the kernels
            raise
        except Exception as error:  # of Triton, of LLVM and ptxas, of the driver: they share no class
            return Verdict(torch.inf, "", LIMITS[dtype], False, one_line(error))
        found = difference(ours, expected)
        if not found[0] <= largest:  # also if it is NaN
            largest, tensor = found
        repeats = repeats and all(torch.equal(ours[name], again[name]) for name in ours)
        if not largest <= LIMITS[dtype]:
            break
    return Verdict(largest, tensor, LIMITS[dtype], repeats)


def problems_of(subject: Subject, tokens: int) -> "list[TrialProblem]":
    """The problems of a check.

    Two packed documents, a window, two heads per key head; and one so long that tiles of it are skipped, which the
    interpreter would run for minutes.
    """
    from relpos.attend.triton.trial_problems import TrialProblem

    problem = TrialProblem(
        terms=() if subject.form == NO_BIAS else tuple(subject.form.split(" + ")),
        queries=5 if subject.decoding else tokens,
        keys=tokens,
        head_dim=subject.head_dim,
        value_dim=subject.value_dim,
        size=subject.size,
        options={"window": tokens * 3 // 4, "documents": True},
    )
    if backend.INTERPRETED or subject.decoding or not problem.terms or not SKIPPED.issuperset(problem.terms):
        return [problem]
    return [problem, long_problem(problem, backend.SHORTEST)]


def long_problem(problem: "TrialProblem", tokens: int) -> "TrialProblem":
    """One head of a problem, so steep that most of its tiles do not matter."""
    changes: dict[str, Any] = {
        "batch": 1,
        "heads": 1,
        "key_heads": 1,
        "queries": tokens,
        "keys": tokens,
        "steep": 0.1,
        "options": {},
    }
    return replace(problem, **changes)


# -- What a verdict depends on, and where it is kept


@cache
def environment(device: torch.device) -> str:
    """What verdicts depend on besides their subject: GPU, driver, versions and the text of the kernels, as JSON."""
    import triton

    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    facts = {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "driver": driver(),
        "triton": triton.__version__,
        "torch": torch.__version__,
        "relpos": __version__,
        "kernels": digest.hexdigest()[:16],
    }
    return json.dumps(facts)


@cache
def driver() -> str:
    """The version of the GPU's driver, as the system says it; empty if it does not."""
    for file in DRIVERS:
        with contextlib.suppress(OSError):
            return file.read_text(encoding="utf-8", errors="replace").splitlines()[0].strip()
    return ""


def file_of(environment: str, subject: Subject) -> Path:
    """The file of a verdict."""
    name = hashlib.sha256(f"{environment} {subject}".encode()).hexdigest()[:32]
    return cache_folder() / FOLDER / f"{name}.json"


def store(environment: str, subject: Subject, verdict: Verdict) -> None:
    """Write a verdict; a folder that cannot be written does not matter."""
    file = file_of(environment, subject)
    entry = {"environment": environment, "subject": asdict(subject), "verdict": asdict(verdict)}
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(signed(entry)) + "\n")


def stored(environment: str, subject: Subject) -> Verdict | None:
    """The verdict of an earlier process; None if there is none, or its file is damaged."""
    entry = _read(file_of(environment, subject))
    return entry[2] if entry is not None and entry[:2] == (environment, subject) else None


def known_verdicts() -> list[tuple[Subject, Verdict]]:
    """All verdicts of this and earlier processes on the current GPU, in the order of their names."""
    here = environment(torch.device("cuda", torch.cuda.current_device()))
    entries = [_read(file) for file in (cache_folder() / FOLDER).glob("*.json")]
    known = {entry[1]: entry[2] for entry in entries if entry is not None and entry[0] == here}
    known |= {subject: verdict for (environment, subject), verdict in _verdicts.items() if environment == here}
    return sorted(known.items(), key=lambda item: str(item[0]))


def _read(file: Path) -> tuple[str, Subject, Verdict] | None:
    with contextlib.suppress(OSError, TypeError, KeyError):
        entry = undamaged(file.read_bytes())
        if entry is not None:
            return entry["environment"], Subject(**entry["subject"]), Verdict(**entry["verdict"])
    return None
