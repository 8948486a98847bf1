"""The check of the Triton kernels at their first use: what it notices, where its verdict is kept, when it must not run.

Most tests put plain torch in the kernels' place; the last ones run the kernels in Triton's interpreter, as they are and
with mistakes.
"""

import json
import math
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from relpos.attend import backends, chunks, triton
from relpos.attend.triton import first_use, trial_problems
from relpos.attend.triton.first_use import Subject, Verdict

CPU = torch.device("cpu")
TABLE = Subject("Toeplitz", "float32", 8, 8, 0)


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch, tmp_path):
    """A cache of its own, no verdicts, and plain torch in place of the kernels."""
    monkeypatch.setenv("RELPOS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(triton, "INTERPRETED", False)
    monkeypatch.setattr(first_use, "_verdicts", {})
    monkeypatch.setattr(first_use, "environment", lambda device: "this GPU")
    monkeypatch.setattr(triton, "refuses", lambda q, v, form, call: None)
    monkeypatch.setattr(triton, "attention", chunks.attention)


@pytest.fixture
def checks(monkeypatch):
    """The subjects that were checked; their verdict is the last entry of `checks.verdicts`."""

    class Checks(list):
        verdict = Verdict(1e-6, "out", 1e-5, True)

    done = Checks()
    monkeypatch.setattr(first_use, "check", lambda device, subject: done.append(subject) or done.verdict)
    return done


def forget():
    """What a new process does not know."""
    first_use._verdicts.clear()


# -- What it notices


def changed(monkeypatch, change):
    """Let the kernels' output go through a function."""

    def attention(q, k, v, form, call):
        out, lse = chunks.attention(q, k, v, form, call)
        return change(out), lse

    monkeypatch.setattr(triton, "attention", attention)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "form",
    [first_use.NO_BIAS, "Toeplitz", "RankOne", "Scaled", "Projected", "Projected of keys", "RankOne + Toeplitz"],
)
def test_plain_torch_passes(form, dtype):
    size = 16 if "Projected" in form else 0
    verdict = first_use.check(CPU, Subject(form, dtype, 16, 24, size))
    assert verdict.passed, str(verdict)
    assert verdict.repeats
    # The limit is a limit: no more than 200 units in the last place of products that are of the order of 1.
    assert verdict.limit <= 200 * torch.finfo(getattr(torch, dtype)).eps


@pytest.mark.parametrize("form", [first_use.NO_BIAS, "Toeplitz", "RankOne + Toeplitz"])
def test_for_decoding_few_queries_run_without_a_backward(monkeypatch, form):
    shapes = []

    def attention(q, k, v, form, call):
        shapes.append((q.shape[2], k.shape[2], torch.is_grad_enabled()))
        return chunks.attention(q, k, v, form, call)

    monkeypatch.setattr(triton, "attention", attention)
    verdict = first_use.check(CPU, Subject(form, "float32", 16, 16, decoding=True))
    assert verdict.passed, str(verdict)
    assert shapes == [(5, 200, False)] * 2
    changed(monkeypatch, lambda out: out * 1.01)
    assert not first_use.check(CPU, Subject(form, "float32", 16, 16, decoding=True)).passed


def test_a_number_that_is_off_is_named(monkeypatch):
    changed(monkeypatch, lambda out: out * 1.01)
    wrong = first_use.check(CPU, TABLE)
    assert not wrong.passed
    assert 0.009 < wrong.difference < 0.02
    assert str(wrong) == f"{wrong.tensor} differs from the definition by {wrong.difference:.1e} (allowed: 1e-05)"
    assert first_use.check(CPU, Subject("Toeplitz", "bfloat16", 8, 8, 0)).passed  # which is no finer than that


def test_a_single_wrong_gradient_is_named(monkeypatch):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, table):
            return table.clone()

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            grad[0, 0] = 0.0
            return grad

    def attention(q, k, v, form, call):
        return chunks.attention(q, k, v, type(form)(Broken.apply(form.table), form.zero), call)

    monkeypatch.setattr(triton, "attention", attention)
    verdict = first_use.check(CPU, TABLE)
    assert (verdict.passed, verdict.tensor) == (False, "gradient of table")


def test_nan_does_not_pass(monkeypatch):
    changed(monkeypatch, lambda out: out + torch.nan)
    verdict = first_use.check(CPU, TABLE)
    assert not verdict.passed
    assert "differs from the definition by nan" in str(verdict)
    assert not Verdict(math.nan, "out", 1e-5, repeats=True).passed  # by itself: NaN is not equal to NaN either


def test_bits_that_change_from_run_to_run_do_not_pass(monkeypatch):
    number = iter(range(10))
    changed(monkeypatch, lambda out: out * (1 + next(number) * 2**-23))
    verdict = first_use.check(CPU, TABLE)
    assert verdict.difference < verdict.limit
    assert (verdict.passed, str(verdict)) == (False, "two runs gave different bits")


def test_an_error_of_the_compiler_is_a_verdict_in_one_line(monkeypatch):
    class OutOfResources(Exception):  # noqa: N818  (Triton's name)
        pass

    def attention(*_):
        raise OutOfResources("out of resource: shared memory,\n  Required: 200000, Hardware limit: 101376.")

    monkeypatch.setattr(triton, "attention", attention)
    verdict = first_use.check(CPU, TABLE)
    assert not verdict.passed
    expected = "OutOfResources: out of resource: shared memory, Required: 200000, Hardware limit: 101376"
    assert str(verdict) == expected


def test_a_full_gpu_says_nothing_of_the_kernels(monkeypatch):
    def attention(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(triton, "attention", attention)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            first_use.verdict_of(CPU, TABLE)
    monkeypatch.setattr(triton, "attention", chunks.attention)
    assert first_use.verdict_of(CPU, TABLE).passed


# -- Where the verdict is kept


def test_a_subject_is_checked_once_per_process_and_machine(checks):
    other = Subject("Toeplitz", "float32", 16, 16, 0)
    for _ in range(3):
        assert first_use.verdict_of(CPU, TABLE) == first_use.verdict_of(CPU, other) == checks.verdict
    assert checks == [TABLE, other]
    forget()
    assert first_use.verdict_of(CPU, TABLE) == checks.verdict
    assert len(checks) == 2


def test_another_gpu_driver_or_version_is_checked_again(checks, monkeypatch):
    first_use.verdict_of(CPU, TABLE)
    monkeypatch.setattr(first_use, "environment", lambda device: "another GPU")
    first_use.verdict_of(CPU, TABLE)
    assert checks == [TABLE, TABLE]


def test_wrong_numbers_are_kept_and_errors_tried_again(checks):
    checks.verdict = Verdict(0.5, "out", 1e-5, True)
    for _ in range(2):
        forget()
        assert first_use.verdict_of(CPU, TABLE) == checks.verdict
    assert len(checks) == 1
    other = Subject("RankOne", "float32", 8, 8, 0)
    checks.verdict = Verdict(torch.inf, "", 1e-5, False, "RuntimeError: Failed to find C compiler")
    assert [first_use.verdict_of(CPU, other).passed for _ in range(2)] == [False, False]
    assert len(checks) == 2  # once per process
    forget()
    checks.verdict = Verdict(1e-6, "out", 1e-5, True)
    assert first_use.verdict_of(CPU, other).passed
    forget()
    assert first_use.verdict_of(CPU, other).passed
    assert len(checks) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_text(""),
        lambda file: file.write_text(file.read_text()[:40]),
        lambda file: file.write_text("[1, 2]"),
        lambda file: file.write_text(json.dumps({"verdict": 1})),
        lambda file: file.write_bytes(b"\xff\xfe\x00"),
        lambda file: file.write_text(file.read_text().replace("0.5", "0.0")),
        lambda file: (file.unlink(), file.mkdir()),
    ],
    ids=["empty", "cut", "a list", "other entries", "not text", "a changed digit", "a folder"],
)
def test_a_damaged_file_is_checked_again(checks, damage):
    checks.verdict = Verdict(0.5, "out", 1e-5, True)
    first_use.verdict_of(CPU, TABLE)
    forget()
    damage(first_use.file_of("this GPU", TABLE))
    assert first_use.verdict_of(CPU, TABLE) == checks.verdict
    assert len(checks) == 2


def test_a_cache_that_cannot_be_written_does_not_matter(checks, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RELPOS_CACHE", str(tmp_path / "file"))
    assert first_use.verdict_of(CPU, TABLE) is first_use.verdict_of(CPU, TABLE) is checks.verdict
    assert len(checks) == 1


def test_the_verdicts_of_this_gpu_are_listed(checks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    subjects = [TABLE, Subject("RankOne", "float32", 8, 8, 0)]
    for subject in subjects:
        first_use.verdict_of(CPU, subject)
    forget()  # from the files
    monkeypatch.setattr(first_use, "environment", lambda device: "another GPU")
    first_use.verdict_of(CPU, TABLE)
    monkeypatch.setattr(first_use, "environment", lambda device: "this GPU")
    assert [subject for subject, _ in first_use.known_verdicts()] == subjects[::-1]


# -- When it must not run


def test_it_does_not_run_while_something_is_traced_or_captured(checks, monkeypatch):
    assert first_use.verdict_of(CPU, TABLE, tracing=True) is None
    with FakeTensorMode():
        assert first_use.verdict_of(CPU, TABLE) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert first_use.verdict_of(torch.device("cuda", 0), TABLE) is None
    assert not checks
    checks.verdict = Verdict(torch.inf, "", 1e-5, False, "an error")
    first_use.verdict_of(CPU, TABLE)
    forget()
    assert first_use.verdict_of(CPU, TABLE, tracing=True) == checks.verdict  # rather the next backend than an error
    assert len(checks) == 1


def test_the_callers_state_does_not_reach_it_and_it_leaves_none():
    """Without gradients, in inference mode, in autocast, under hooks, and with another default dtype."""
    random = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)

    def refuse(x):
        raise AssertionError("a tensor of the small problem went through the caller's hook")

    try:
        with (
            torch.inference_mode(),
            torch.autocast("cpu", torch.bfloat16),
            torch.autograd.graph.saved_tensors_hooks(refuse, refuse),
        ):
            verdict = first_use.verdict_of(CPU, TABLE)
    finally:
        torch.set_default_dtype(torch.float32)
    assert verdict.passed, str(verdict)
    assert verdict.difference > 0
    assert torch.equal(random, torch.get_rng_state())


def test_it_runs_inside_activation_checkpointing():
    """Which counts the tensors that a function saves: the first run has the small problem, the second has not."""
    seen = []

    def function(x):
        seen.append(first_use.verdict_of(CPU, TABLE))
        return (x * x).sum()

    x = torch.ones(3, requires_grad=True)
    checkpoint(function, x, use_reentrant=False).backward()
    assert len(seen) == 2
    assert seen[0] is seen[1]
    assert seen[0].passed


def test_it_does_not_check_itself(monkeypatch):
    inner = []

    def attention(q, k, v, form, call):
        inner.append(first_use.failure(q, v, form))
        return chunks.attention(q, k, v, form, call)

    monkeypatch.setattr(triton, "attention", attention)
    assert first_use.verdict_of(CPU, TABLE).passed
    assert inner == [None] * 4  # two runs of the small problem, and of the long one


def test_threads_wait_for_the_first(checks, monkeypatch):
    arrived = threading.Barrier(3)
    verdicts = []

    def ask():
        arrived.wait()
        verdicts.append(first_use.verdict_of(CPU, TABLE))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == [checks.verdict] * 3
    assert checks == [TABLE]


def test_it_is_skipped_in_the_interpreter(checks, monkeypatch):
    monkeypatch.setattr(triton, "INTERPRETED", True)
    q = torch.zeros(1, 2, 5, 8)
    assert backends.choose("triton", q, q, None, None) is triton
    assert not checks


def test_the_problem_has_every_number_in_its_gradients():
    problem = trial_problems.TrialProblem(terms=("Scaled", "RankOne"), queries=40, keys=40, options={"sinks": True})
    expected = trial_problems.exact(problem, problem.numbers(torch.float32))
    learned = {name.removeprefix("gradient of ") for name in expected if name.startswith("gradient of ")}
    assert learned == {
        *("q", "k", "v", "sinks", "total", "weight", "curve", "row", "slope", "shift", "network", "offset")
    }
    assert all(expected[f"gradient of {name}"].abs().max() > 1e-3 for name in learned)


# -- The kernels themselves

KERNELS = triton.attention
run_the_kernels = pytest.mark.skipif(not triton.available()[0], reason=triton.available()[1])


@pytest.fixture
def table_kernels(monkeypatch):
    """The verdict on the kernels for a table, in Triton's interpreter."""
    monkeypatch.setattr(triton, "attention", KERNELS)
    return lambda tokens=32: first_use.check(CPU, Subject("Toeplitz", "float32", 16, 16, 0), tokens)


@run_the_kernels
@pytest.mark.heavy
@pytest.mark.parametrize("shortest", [320, pytest.param(triton.SHORTEST, marks=pytest.mark.slow)])
def test_the_kernels_pass(table_kernels, monkeypatch, shortest):
    """Also on a problem of `shortest` tokens, long enough for tiles to be skipped."""
    from relpos.attend.triton import skipped_tiles

    monkeypatch.setattr(triton, "SHORTEST", shortest)
    monkeypatch.setattr(skipped_tiles, "SHORTEST", shortest)
    verdict = table_kernels(40)  # more than one tile
    assert verdict.passed, str(verdict)


@run_the_kernels
@pytest.mark.heavy
def test_the_kernels_of_decoding_pass(monkeypatch):
    monkeypatch.setattr(triton, "attention", KERNELS)
    verdict = first_use.check(CPU, Subject("RankOne", "float32", 16, 16, decoding=True), 40)
    assert verdict.passed, str(verdict)


@run_the_kernels
@pytest.mark.heavy
def test_a_table_that_is_read_one_column_too_far_is_noticed(table_kernels, monkeypatch):
    from relpos.attend.triton import toeplitz_tile

    pack = toeplitz_tile.pack

    def one_column_further(inputs, arguments):
        pack(inputs, arguments)
        arguments["zero"] += 1

    monkeypatch.setattr(toeplitz_tile, "pack", one_column_further)
    assert "differs from the definition by" in str(table_kernels())


@run_the_kernels
@pytest.mark.heavy
def test_a_diagonal_that_is_left_out_is_noticed(table_kernels, monkeypatch):
    from relpos.attend.triton.gpu_problem import GpuProblem

    launch = GpuProblem.launch

    def one_less(self, kernel, grid, size, **more):
        if "PARTS" in more:
            more["PARTS"].zero_()
            grid = (grid[0] - 1, *grid[1:])
        launch(self, kernel, grid, size, **more)

    monkeypatch.setattr(GpuProblem, "launch", one_less)
    assert str(table_kernels()).startswith("gradient of table differs from the definition by")


@run_the_kernels
@pytest.mark.heavy
def test_a_kernel_that_does_not_compile_is_noticed(table_kernels, monkeypatch):
    from relpos.attend.triton.gpu_problem import GpuProblem

    def fail(self, kernel, grid, size, **more):
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(GpuProblem, "launch", fail)
    assert str(table_kernels()) == "RuntimeError: PassManager::run failed"
