"""The native kernel in its surroundings: repeats, threads, forks, modes, tracing, memory, and what it refuses."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import Tensor

import relpos
from relpos.attend import native
from relpos.attend.kernel_inputs import Inputs
from relpos.attend.native import library, operators
from relpos.attend.native.problem import Problem
from relpos.forms.bias import RankOne, Scaled, Scored, Sum, Toeplitz
from relpos.forms.call import Call

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not native.available()[0], reason=native.available()[1]),
    pytest.mark.usefixtures("two_threads"),
]


def run_once(heads: int = 1) -> list[Tensor]:
    """The output and all gradients of a call with a sum of forms, always of the same numbers."""
    random = torch.Generator().manual_seed(12)
    q, k, v, grad = (torch.randn(1, heads, 330, 32, generator=random).requires_grad_() for _ in range(4))
    table = (-0.3 * torch.arange(330.0).repeat(heads, 1)).requires_grad_()
    total = (0.1 * torch.rand(1, heads, 330, generator=random).double()).cumsum(-1).requires_grad_()
    weight = torch.rand(1, heads, 330, generator=random).requires_grad_()
    form = Sum((Toeplitz(table, 0), RankOne(total, weight, torch.float32)))
    out, _ = native.attention(q, k, v, form, Call(330, 330, scale=0.2))
    out.backward(grad.detach())
    return [out.detach(), *(x.grad for x in (q, k, v, total, weight, table))]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("heads", [1, 3, 9])
def test_repeats_give_the_same_bits(heads):
    first = run_once(heads)
    assert all(same(first, run_once(heads)) for _ in range(10))


def test_the_number_of_threads_changes_only_the_order_of_a_tables_gradient():
    several = run_once()
    torch.set_num_threads(1)
    one = run_once()
    assert same(several[:-1], one[:-1])
    torch.testing.assert_close(several[-1], one[-1], rtol=1e-5, atol=1e-6)


def test_two_threads_may_call_at_once():
    expected, results = run_once(), []

    def work() -> None:
        results.extend(same(expected, run_once()) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 40


def test_a_forked_process_computes_the_same():
    q, k, v = (torch.randn(1, 2, 200, 16) for _ in range(3))
    wanted, _ = native.attention(q, k, v, None, Call(200, 200))  # the threads exist now; the child has none of them
    child = os.fork()
    if child == 0:
        ok = torch.equal(native.attention(q, k, v, None, Call(200, 200))[0], wanted)
        os._exit(0 if ok else 1)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            break
        time.sleep(0.02)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the forked process hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(native.attention(q, k, v, None, Call(200, 200))[0], wanted)  # the parent still computes


def test_little_work_is_not_shared_out(monkeypatch):
    monkeypatch.undo()
    q = torch.randn(1, 2, 64, 16)
    assert Problem(Inputs(q, q, q)).fields.threads == 1
    long = q.expand(1, 2, 64, 16).repeat(1, 8, 16, 1)
    assert Problem(Inputs(long, long, long)).fields.threads == 2


def test_the_callers_denormal_mode_is_kept():
    tiny = torch.full((1 << 20,), 1e-40)
    try:
        for flush in (False, True):
            torch.set_flush_denormal(flush)
            run_once()
            assert bool((tiny[:8] * 1.0 == 0).all()) is flush
            if not flush:
                assert (tiny * 1.0 != 0).all()  # nor have the other threads changed
    finally:
        torch.set_flush_denormal(False)


def test_operators_are_well_formed():
    q, k, v = (torch.randn(1, 2, 70, 8, requires_grad=True) for _ in range(3))
    table = torch.randn(2, 70, requires_grad=True)
    torch.library.opcheck(operators.forward, Inputs(q, k, v, table, scale=0.3).values())


class Layer(torch.nn.Module):
    def __init__(self, **numbers: Tensor) -> None:
        super().__init__()
        self.numbers = torch.nn.ParameterDict(numbers)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        call = Call(q.shape[2], k.shape[2], scale=0.25)
        form = Scaled(**self.numbers) if "row" in self.numbers else Toeplitz(self.numbers["table"], 0)
        return native.attention(q, k, v, form, call)[0]


def scaled_layer() -> Layer:
    numbers = {"slope": (7,), "shift": (7,), "out": (2, 7), "offset": (2,)}
    row = torch.log1p(0.1 * torch.arange(90.0).clamp(min=20))[None]
    return Layer(
        table=torch.log1p(0.1 * torch.arange(90.0)), row=row, **{n: torch.randn(x) for n, x in numbers.items()}
    )


@pytest.mark.parametrize("layer", [Layer(table=torch.randn(2, 90)), scaled_layer()], ids=["toeplitz", "scaled"])
def test_compiled_and_exported_graphs_give_the_same(layer):
    inputs = [torch.randn(1, 2, 90, 16, requires_grad=True) for _ in range(3)]
    grad = torch.randn(1, 2, 90, 16)

    def run(module) -> list[Tensor]:
        out = module(*inputs)
        return [out.detach(), *torch.autograd.grad(out, [*inputs, *layer.parameters()], grad)]

    eager = run(layer)
    for a, b in zip(eager, run(torch.compile(layer, backend="aot_eager", fullgraph=True)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    detached = tuple(x.detach() for x in inputs)
    exported = torch.export.export(layer, detached).module()
    torch.testing.assert_close(exported(*detached), eager[0], rtol=1e-5, atol=1e-6)


MEMORY = """
import re, torch
from pathlib import Path
from relpos.attend import native
from relpos.forms.call import Call
from relpos.forms.bias import Toeplitz
torch.set_num_threads(2)
def peak():
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
def measure(work):
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = peak()
    work()
    return peak() - before
def run(length, head_dim):
    qkv = torch.randn(1, length, 3, 4, head_dim)
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in qkv.unbind(2))
    table, grad = (-torch.arange(float(length)).repeat(4, 1)).requires_grad_(), torch.randn(q.shape)
    call = Call(length, length, scale=0.125)
    attention = measure(lambda: native.attention(q, k, v, Toeplitz(table, 0), call)[0].backward(grad))
    q, k = torch.randn(2, 1, 1, length, 8)
    return attention / (4 * length * head_dim * 4), measure(lambda: native.mass(q, k, None, call)) / length
run(256, {0})
print(*run(16384, {0}))
"""


@pytest.mark.parametrize("head_dim", [64, pytest.param(50, marks=pytest.mark.slow)])
def test_memory_is_linear_in_the_length(head_dim):
    code = MEMORY.format(head_dim)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    times_q, bytes_per_token = map(float, done.stdout.split())
    # Three gradients and the output are four times q by themselves; length² would be 1000 times q.
    assert 3 < times_q < 10
    assert bytes_per_token < 200  # of the mass; weights would be 65,536


# -- What is refused, and with which words


@pytest.fixture
def unloaded(monkeypatch):
    """The library is loaded anew in the test, and after it."""
    chosen = library.isa()
    library.load.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    library.load.cache_clear()
    library.use(chosen)


def test_the_environment_chooses_the_instruction_set(unloaded):
    unloaded.setenv("RELPOS_ISA", "portable")
    assert library.isa() == "portable"
    with pytest.raises(RuntimeError, match=r"'mmx' cannot be used, because the kernel was not built for it. .*port"):
        library.use("mmx")
    unloaded.setenv("RELPOS_ISA", "mmx")
    library.load.cache_clear()
    assert native.available()[1].startswith("the instruction set 'mmx' cannot be used")


@pytest.mark.skipif(
    not native.available()[0] or library.load().relpos_has(b"avx512") != 0, reason="this CPU has AVX-512, or is no x86"
)
def test_an_instruction_set_the_cpu_lacks_is_refused():
    with pytest.raises(RuntimeError, match="'avx512' cannot be used, because this CPU does not have it"):
        library.use("avx512")


def test_a_missing_library_only_makes_it_unavailable(unloaded):
    unloaded.setattr(library, "file", lambda: None)
    here, why = native.available()
    assert not here
    assert "compiled kernel is missing" in why
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(RuntimeError, match="compiled kernel is missing"):
        native.attention(q, q, q, None, Call(4, 4))


Q, WIDE, GAPS = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 513), torch.tensor([[0, 2, 3, 4]])


@pytest.mark.parametrize(
    ("q", "v", "form", "call", "sentence"),
    [
        (Q, Q, Scored(lambda *_: Q), Call(4, 4), "cannot run the form Scored"),
        (Q.double(), Q, None, Call(4, 4), "computes in float32, but q is torch.float64"),
        (WIDE, WIDE, None, Call(4, 4), "head_dim and value_dim up to 512, not 513 and 513"),
        (Q, WIDE, None, Call(4, 4), "head_dim and value_dim up to 512, not 8 and 513"),
        (Q, Q, None, Call(4, 4, mask=torch.ones(4, 4).bool()), "cannot run mask=: it runs causal=, window="),
        (Q, Q, Toeplitz(torch.zeros(1, 5)), Call(4, 4, token_positions=GAPS), "difference of two indices"),
        (
            Q,
            Q,
            RankOne(torch.zeros(1, 1, 4).double()),
            Call(4, 4, causal=False, start=1),
            "1 to 4, are not all among 4",
        ),
        (Q, Q, None, Call(4, 3), "counts tokens from 0, and the first query has the index -1"),
    ],
)
def test_what_the_kernel_cannot_run_is_refused(q, v, form, call, sentence):
    assert sentence in native.refuses(q, v, form, call)
    assert native.refuses(Q, Q, None, Call(4, 4, token_positions=GAPS)) is None


def test_a_call_asks_once_whether_the_kernel_can_run_it(monkeypatch):
    asked, refuses = [], native.refuses
    monkeypatch.setattr(native, "refuses", lambda *arguments: asked.append(1) or refuses(*arguments))
    relpos.attention(Q, Q, Q, Toeplitz(torch.zeros(1, 4)))
    assert asked == [1]


def test_a_form_or_dtype_that_the_kernel_does_not_know_is_an_error():
    q = torch.randn(1, 1, 4, 8)
    for field, number in (("form", 5), ("form", -1), ("dtype", 3), ("head_dim", 0), ("start", -1)):
        problem = Problem(Inputs(q, q, q))
        setattr(problem.fields, field, number)
        for function in ("relpos_forward", "relpos_backward", "relpos_mass"):
            with pytest.raises(RuntimeError, match="the native attention kernel refused its input: form"):
                problem.run(function)


def test_a_library_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(library, "INTERFACE", library.INTERFACE + 1)
    with pytest.raises(RuntimeError, match="the compiled kernel is of another version of relpos: install relpos again"):
        library.check(library.load())


def test_a_field_that_the_library_does_not_have_cannot_be_set():
    problem = library.interface().problem()
    problem.batch = 3
    with pytest.raises(AttributeError):
        problem.bach = 3


def test_a_call_without_gradients_does_not_go_through_the_operator(monkeypatch):
    called = []
    run = operators.run
    monkeypatch.setattr(operators, "run", lambda inputs: called.append(inputs) or run(inputs))
    monkeypatch.setattr(operators, "forward", None)
    q = torch.randn(1, 1, 4, 8)
    native.attention(q, q, q, None, Call(4, 4))
    with torch.no_grad():
        native.attention(q.clone().requires_grad_(), q, q, None, Call(4, 4))
    assert len(called) == 2
    with pytest.raises(TypeError):
        native.attention(q, q, q.clone().requires_grad_(), None, Call(4, 4))


def test_the_output_may_be_changed_in_place_where_nothing_is_differentiated():
    q = torch.randn(1, 2, 4, 8)
    out = relpos.attention(q, q, q)
    assert out.transpose(1, 2).is_contiguous()  # merging the heads copies nothing
    assert out._base is None
    before = out.clone()
    out += 1.0
    torch.testing.assert_close(out, before + 1.0)


def test_the_backward_says_what_was_changed_in_place():
    q, k, v = torch.randn(3, 1, 2, 4, 8, requires_grad=True).unbind()
    out = relpos.attention(q, k, v, backend="native")
    out += 1.0
    with pytest.raises(RuntimeError, match=r"the backward of attention reads .* the output, .* write out = out \+ x"):
        out.sum().backward()
