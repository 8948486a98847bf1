"""The numbers of `relpos gpu-report`. There is no GPU here: plain torch and the native kernel take the GPU's place."""

import importlib.util
import json
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch

from relpos.attend import chunks, gpu_report, gpu_speed, triton
from relpos.attend.arguments import AttentionOptions
from relpos.attend.gpu_speed import PYTORCH, Size
from relpos.attend.triton.trial_problems import TERMS
from relpos.forms.bias import Projected, RankOne, Scaled, Scored, Toeplitz

CPU = torch.device("cpu")


@pytest.fixture
def plain_torch(monkeypatch):
    monkeypatch.setattr(triton, "refuses", lambda q, v, form, call: None)
    monkeypatch.setattr(triton, "attention", chunks.attention)


# -- Correctness


def test_every_form_and_every_argument_has_a_case():
    for small in (False, True):
        cases = gpu_report.cases(quick=False, small=small)
        problems = [case.problem for case in cases]
        assert {term for problem in problems for term in problem.terms} == set(TERMS)
        options = {name for problem in problems for name in problem.options} | {"return_lse"}  # which all have
        # hidden and gates make numbers of forms, cu_seqlens are documents; the kernels refuse mask=.
        assert options == set(AttentionOptions.__optional_keys__) - {"hidden", "gates", "cu_seqlens", "mask"}
        assert len({(case.name, case.dtype) for case in cases}) == len(cases)
        assert any(problem.value_dim != problem.head_dim for problem in problems)
        assert any(problem.head_dim == 256 for problem in problems)
        assert {problem.heads // problem.key_heads for problem in problems} == {1, 2}
    forms = {Toeplitz, RankOne, Scaled, Projected}
    numbers = gpu_report.SMALL
    made = set()
    for terms in gpu_report.FORMS:
        problem = type(numbers)(**{**vars(numbers), "terms": terms})
        position = problem.position(problem.numbers(torch.float32))
        made |= {type(term) for term in getattr(position, "terms", [position])}
    assert made == {*forms, type(None)}
    assert Scored not in made  # which the kernels do not run


def test_quick_is_a_part_of_all():
    for small in (False, True):
        every, few = (gpu_report.cases(quick, small) for quick in (False, True))
        assert {case.dtype for case in few} == {torch.float32 if small else torch.bfloat16}
        assert [case for case in every if case in few] == few
    assert {case.dtype for case in gpu_report.cases(False)} == {torch.bfloat16, torch.float16, torch.float32}
    assert set(gpu_speed.sizes(True)) != set(gpu_speed.sizes(False))
    assert len(gpu_speed.sizes(True)) < len(gpu_speed.sizes(False))


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize(
    "case", gpu_report.cases(quick=False, small=True), ids=lambda case: f"{case.name}-{case.dtype}"
)
def test_plain_torch_is_right_in_every_case(case):
    """So a case that fails says something of the kernels."""
    row = gpu_report.compare(case, CPU)
    assert row["passed"], row
    assert 0 < row["difference"] <= row["limit"]
    assert row["same_bits"] is (True if case.twice else None)


def test_what_goes_wrong_is_part_of_the_report(monkeypatch):
    case = gpu_report.cases(quick=True, small=True)[1]
    monkeypatch.setattr(triton, "refuses", lambda q, v, form, call: "not here.")
    assert gpu_report.compare(case, CPU)["error"] == "ValueError: not here"
    monkeypatch.setattr(triton, "refuses", lambda q, v, form, call: None)
    runs = iter(range(9))

    def attention(q, k, v, form, call):
        out, lse = chunks.attention(q, k, v, form, call)
        return change(out), lse

    monkeypatch.setattr(triton, "attention", attention)
    change = lambda out: out * 1.5  # noqa: E731
    row = gpu_report.compare(case, CPU)
    assert (row["passed"], row["same_bits"], row["error"]) == (False, True, "")
    assert row["difference"] > 0.1
    change = lambda out: out + torch.nan  # noqa: E731
    row = gpu_report.compare(case, CPU)
    assert (row["passed"], row["difference"], row["error"]) == (False, None, "out holds nan")
    change = lambda out: out * (1 + next(runs) * 2**-23)  # noqa: E731
    row = gpu_report.compare(case, CPU)
    assert (row["passed"], row["same_bits"]) == (False, False)


# -- Speed


class FakeMeter:
    """Runs everything, and says which run it was in place of a time."""

    def __init__(self):
        self.timed, self.peaks = [], []

    def seconds(self, run):
        run()
        self.timed.append((run.func.__name__, *run.args))
        return len(self.timed) / 1000

    def peak_bytes(self, run):
        run()
        self.peaks.append(run.args)
        return 3 * 2**20


@pytest.fixture
def _small(monkeypatch):
    monkeypatch.setattr(gpu_speed, "TOKENS", 64)
    monkeypatch.setattr(gpu_speed, "HEADS", 2)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("terms", gpu_speed.TIMED, ids="+".join)
def test_backends_are_timed_in_turns(terms):
    meter, shares = FakeMeter(), []
    rows = gpu_speed.measure_speed([Size(terms, 16, 32)], CPU, meter, shares.append, ("chunks", "reference"))
    names = [PYTORCH, "chunks", "reference"]
    forward = [("without_gradients", name) for name in names]
    assert meter.timed == forward * 5 + [("with_gradients", name) for name in names] * 5
    assert [(row["what"], row["backend"]) for row in rows] == [
        (what, name) for what in ("forward", "forward and backward") for name in names
    ]
    assert [row["milliseconds"] for row in rows] == [1, 2, 3, 16, 17, 18]  # the first is the best
    assert [row["ratio"] for row in rows[:3]] == [1, 2, 3]
    assert {row["megabytes"] for row in rows} == {3}
    assert [row["difference"] is None for row in rows] == [True, True, False] * 2
    assert all(row["difference"] < 1e-5 for row in rows[2::3])
    assert shares == [1.0]
    json.dumps(rows)


@pytest.mark.usefixtures("_small")
def test_decoding_is_one_query_without_a_backward():
    size = Size(("Toeplitz",), 16, 32, decoding=True)
    assert (size.problem().queries, size.problem().keys, size.problem().batch) == (1, 32, 4)
    rows = gpu_speed.measure_speed([size], CPU, FakeMeter(), lambda share: None, ("chunks", "reference"))
    assert {row["what"] for row in rows} == {"decoding"}
    assert rows[2]["difference"] < 1e-6


@pytest.mark.usefixtures("_small")
def test_a_backend_that_fails_leaves_the_others():
    rows = gpu_speed.measure_speed([Size((), 16, 32)], CPU, FakeMeter(), lambda share: None, ("flex", "chunks"))
    failed = [row for row in rows if row["backend"] == "flex"]
    assert all("FlexAttention has a backward on CUDA only" in row["error"] for row in failed)
    assert {row["milliseconds"] for row in failed} == {None}
    assert all(row["milliseconds"] and not row["error"] for row in rows if row["backend"] != "flex")
    assert {row["difference"] for row in rows} == {None}  # there is nothing to compare with


@pytest.mark.usefixtures("_small")
def test_pytorchs_attention_is_timed_on_the_same_problem():
    """Without a bias all compute the same, causal as ours."""
    size = Size((), 16, 32)
    torch.manual_seed(0)
    rows = gpu_speed.measure_size(size, CPU, FakeMeter(), (PYTORCH, "reference"))
    assert rows[-1]["difference"] < 1e-5


def test_cuda_events_are_read_as_pytorch_documents_them(monkeypatch):
    """elapsed_time is in milliseconds, between two recorded events, after the second has happened."""
    happened = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            happened.append(self)

        def synchronize(self):
            happened.append("synchronized")

        def elapsed_time(self, end):
            assert happened[-1] == "synchronized"
            assert happened.index(self) < happened.index("run")
            assert happened.index(end) > happened.index("run")
            return 1000.0 * happened.count("run")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("waited"))
    assert gpu_speed.CudaMeter().seconds(lambda: happened.append("run")) == 1.0
    assert happened.count("run") == gpu_speed.CudaMeter.calls
    allocated = {"now": 100, "most": 700}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: allocated.update(most=allocated["now"]))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocated["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: allocated["most"])
    assert gpu_speed.CudaMeter().peak_bytes(lambda: allocated.update(most=350)) == 250


# -- The report


@pytest.mark.usefixtures("plain_torch", "_small")
def test_on_a_gpu_the_report_has_correctness_then_speed(monkeypatch):
    """Every line of the way on a GPU, with a CPU in its place."""
    first = gpu_report.cases(quick=True, small=True)[:2]
    shares = []
    device = torch.device
    monkeypatch.setattr(triton, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A GPU 9000")
    properties = SimpleNamespace(total_memory=80 * 2**30, multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch, "device", lambda *_: device("cpu"))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.7", __spec__=ModuleSpec("triton", None)))
    monkeypatch.setattr(gpu_report, "cases", lambda quick: first)
    monkeypatch.setattr(gpu_report, "sizes", lambda quick: [Size((), 16, 32)])
    monkeypatch.setattr(gpu_report, "CudaMeter", FakeMeter)
    report = gpu_report.gpu_report(progress=shares.append)
    assert (report["device"], report["interpreted"]) == ("A GPU 9000", False)
    assert {"relpos", "torch", "triton", "driver", "memory"} <= set(report["facts"])
    assert report["facts"]["memory"] == "80 GB"
    assert [row["passed"] for row in report["correctness"]] == [True, True]
    assert {row["backend"] for row in report["speed"]} == {PYTORCH, "triton", "flex"}
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert json.loads(json.dumps(report)) == report


def test_without_triton_a_sentence_says_so(monkeypatch):
    monkeypatch.setattr(triton, "INSTALLED", False)
    with pytest.raises(ValueError, match="Triton is not installed: it comes with PyTorch"):
        gpu_report.gpu_report()


def test_an_interpreter_that_dies_is_noticed(monkeypatch):
    popen = subprocess.Popen
    died = [sys.executable, "-c", "raise SystemExit(3)"]
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen(died, **options))
    with pytest.raises(ChildProcessError, match="stopped after 0 of 34 cases"):
        gpu_report.interpreted_cases(quick=True, progress=lambda share: None)


@pytest.mark.heavy
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is for Linux")
def test_the_interpreter_is_a_process_of_its_own_that_ends_with_this_one():
    """Its first cases; `tests/cli/test_gpu_report_command.py` runs all of them, in make test-all."""
    shares = []

    def stop(share):
        shares.append(share)
        if len(shares) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gpu_report.interpreted_cases(quick=True, progress=stop)
    assert shares == [1 / 34, 2 / 34]
