"""Which way attention runs, and what is said when it cannot."""

import json
import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import relpos
from relpos.attend import backends, native
from relpos.attend.native import library
from relpos.cli import app
from relpos.forms.call import Call


def chosen(name, dtype=torch.float32):
    position = relpos.encoding(name, heads=2, head_dim=8)
    q = torch.randn(1, 2, 5, 8, dtype=dtype)
    call = Call(5, 5, gates=position.gates(torch.randn(1, 5, 16)), q=q, dtype=dtype)
    return backends.choose(None, q, q, position.bias(call), call).__name__.rsplit(".", 1)[1]


def test_on_a_cpu_the_kernel_runs_what_it_can_and_chunks_the_rest():
    kernel = {name for name in relpos.names() if chosen(name) == "native"}
    assert kernel == {name for name in relpos.names() if relpos.card(name).form != "Scored"}
    assert all(chosen(name) == "chunks" for name in relpos.names() if name not in kernel)


def test_float64_goes_to_the_reference():
    assert {chosen(name, torch.float64) for name in relpos.names()} == {"reference"}


@pytest.mark.parametrize(
    ("backend", "name", "dtype", "sentence"),
    [
        ("nativ", "alibi", torch.float32, "Did you mean 'native'?"),
        ("native", "alibi", torch.float64, "'native' cannot run this: .*float64"),
        ("native", "cope", torch.float32, "'native' cannot run this: .*Scored"),
        ("flex", "alibi", torch.float32, "'flex' cannot run this: .*CUDA only"),
    ],
)
def test_an_impossible_request_says_why(backend, name, dtype, sentence):
    q = torch.randn(1, 2, 5, 8, dtype=dtype)
    with pytest.raises(ValueError, match=sentence):
        relpos.attention(q, q, q, relpos.encoding(name, heads=2, head_dim=8), backend=backend)


def test_the_kernel_leaves_symmetric_fire_in_both_directions_to_chunks():
    position = relpos.encoding("fire", heads=2, head_dim=8, symmetric=True)
    q = torch.randn(1, 2, 5, 8)
    out = relpos.attention(q, q, q, position, causal=False)
    torch.testing.assert_close(out, relpos.attention(q, q, q, position, causal=False, backend="reference"))
    with pytest.raises(ValueError, match=r"'native' cannot run this: .*\bScaled\b"):
        relpos.attention(q, q, q, position, causal=False, backend="native")
    relpos.attention(q, q, q, position, backend="native")


def test_a_backend_is_added_by_one_entry(monkeypatch):
    class Mine:
        FASTEST_ON = ("cpu",)

        def refuses(self, q, v, form, call):
            return "it runs five queries only." if call.queries != 5 else None

        def attention(self, q, k, v, form, call):
            return torch.full_like(q, 7.0), None

    monkeypatch.setattr(backends, "BACKENDS", {"mine": Mine(), **backends.BACKENDS})
    five, six = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 6, 8)
    assert (relpos.attention(five, five, five) == 7).all()
    assert (relpos.attention(six, six, six) != 7).all()
    with pytest.raises(ValueError, match="'mine' cannot run this: it runs five queries only"):
        relpos.attention(six, six, six, backend="mine")


def test_the_library_is_built():
    assert native.available() == (True, "")


def test_without_a_compiled_library_torch_does_it_with_one_notice(monkeypatch):
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    position = relpos.encoding("alibi", heads=2, head_dim=8)
    exact = relpos.attention(q.double(), k.double(), v.double(), position)
    monkeypatch.setattr(library, "file", lambda: None)
    library.load.cache_clear()
    backends.notice_missing_kernel.cache_clear()
    try:
        with pytest.warns(UserWarning, match="plain torch, which is slower: the compiled kernel is missing") as notices:
            outs = [relpos.attention(q, k, v, position) for _ in range(3)]
        assert len(notices) == 1
        torch.testing.assert_close(outs[2].double(), exact, rtol=0, atol=1e-6)
        with pytest.raises(ValueError, match="'native' cannot run this: the compiled kernel is missing"):
            relpos.attention(q, k, v, position, backend="native")
    finally:
        library.load.cache_clear()


PEAK = """
import sys, torch, relpos
from pathlib import Path
torch.set_num_threads(1)
def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024
def run(length):
    q, k, v = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))
    position = relpos.encoding(sys.argv[1], heads=2, head_dim=8)
    relpos.attention(q, k, v, position, hidden=torch.randn(1, length, 16)).sum().backward()
run(64)
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
run(3072)
print(memory("VmHWM") - before)
"""


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own account of the peak")
@pytest.mark.parametrize(
    ("name", "maps"),
    [*(pytest.param(*case, marks=pytest.mark.slow) for case in (("cope", 5.0), ("kcable", 3.0))), ("fire", 0.1)],
)
def test_memory_forward_and_backward_does_not_grow_with_the_square(name, maps):
    """In units of one length × length map of the 2 heads, 75 MB. Written out, cope's gradient keeps over a dozen."""
    run = subprocess.run([sys.executable, "-c", PEAK, name], capture_output=True, text=True, check=True)
    assert int(run.stdout) < maps * 2 * 3072 * 3072 * 4


def test_info_prints_what_attention_runs_on():
    facts = json.loads(CliRunner().invoke(app, ["info", "--json"]).stdout)
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert (facts["cpu_backend"], facts["native_missing"]) == ("native", None)
    assert facts["instruction_set"] == native.isa()
    assert facts["instruction_sets"] == list(native.isas())
    assert all(re.fullmatch("[a-z_]+", key) for key in facts)
    printed = CliRunner().invoke(app, ["info"]).stdout
    assert f"instruction set  {native.isa()} " in printed
    assert f"threads          {torch.get_num_threads()}\n" in printed


@pytest.mark.parametrize("name", [None, "alibi"])
@pytest.mark.parametrize("queries", [3, 70])
def test_values_too_wide_for_the_kernel_run_without_being_told_where(name, queries):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, queries, 8), torch.randn(1, 2, 70, 8), torch.randn(1, 2, 70, 513)
    position = None if name is None else relpos.encoding(name, 2, 8)
    out = relpos.attention(q, k, v, position)
    expected = relpos.scores(q, k, position).softmax(-1) @ v
    torch.testing.assert_close(out, expected)
    with pytest.raises(ValueError, match="head_dim and value_dim up to 512, not 8 and 513"):
        relpos.attention(q, k, v, position, backend="native")
    cache = relpos.Cache()
    steps = [
        relpos.attention(x, y, z, position, cache=cache)
        for x, y, z in zip(*(t[:, :, -2:].split(1, 2) for t in (q, k, v)), strict=True)
    ]
    assert [step.shape for step in steps] == [(1, 2, 1, 513)] * 2
