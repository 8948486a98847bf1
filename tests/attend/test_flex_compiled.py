"""The backend "flex" and PyTorch's compiler: how often it compiles, and what it makes of the functions on a CPU.

The code compiled for a CPU has a forward only. Of the backward for CUDA, what FlexAttention asks of a trained tensor is
checked in the graph.
"""

import pytest
import torch
from flex_on_cpu import flex_on_cpu
from functorch.compile import nop
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.kernel.flex.flex_attention import validate_joint_graph

import relpos
from relpos.attend.flex import kernel

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
NAMES = [None, "alibi", "kerple_log", "cable", "fire", "rope"]


class Counter:
    """A backend of the compiler that runs graphs as they are, and counts them."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


def build(name, **options):
    if name == "fire":
        options["units"] = 4
    return None if name is None else relpos.encoding(name, heads=2, head_dim=8, **options)


def attend(position, queries, keys, backend="flex", **options):
    """Attention of random tensors and of the same with the definition."""
    q, k, v = torch.randn(1, 2, queries, 8), *torch.randn(2, 1, 2, keys, 8)
    if position is not None and position.needs_hidden:
        options["hidden"] = torch.randn(1, keys, 16)
    return [relpos.attention(q, k, v, position, backend=each, **options) for each in (backend, "reference")]


@pytest.mark.parametrize(
    ("name", "hidden"),
    [(None, False), ("cable", True), *(pytest.param(name, False, marks=pytest.mark.slow) for name in NAMES)],
)
def test_64_decoding_steps_compile_twice(monkeypatch, name, hidden):
    """Once for the first length, once for any length: over 2 layers, whose parameters differ."""
    flex_on_cpu(monkeypatch, counter := Counter())
    layers = [build(name), build(name)]
    graphs = []
    with torch.no_grad():
        for keys in range(100, 164):
            documents = torch.arange(keys)[None] // 70 if hidden else None
            padding = torch.arange(keys)[None] > 3 if hidden else None
            for position in layers:
                ours, exact = attend(position, 1, keys, documents=documents, padding=padding)
                torch.testing.assert_close(ours, exact, rtol=0.0, atol=2e-6)
            graphs.append(counter.graphs)
    assert graphs[0] == 1
    assert graphs[-1] == graphs[1] == 2


@pytest.mark.parametrize("name", ["alibi", "cable", "rope"])
def test_lengths_that_change_compile_twice(monkeypatch, name):
    flex_on_cpu(monkeypatch, counter := Counter())
    position = build(name)
    with torch.no_grad():
        for length in (300, 301, 170, 512, 257, 640, 1000):
            ours, exact = attend(position, length, length, window=100)
            torch.testing.assert_close(ours, exact, rtol=0.0, atol=2e-6)
    assert counter.graphs <= 3


def test_numbers_compile_nothing(monkeypatch):
    """Scale, softcap, window, start and where documents end are values of tensors."""
    flex_on_cpu(monkeypatch, counter := Counter())
    position = build("alibi")
    with torch.no_grad():
        for scale, softcap, window, start in ((0.1, 2.0, (9, 9), 3), (0.5, 3.0, (40, 7), 0), (1.0, 50.0, (150, 0), 40)):
            options = {"scale": scale, "softcap": softcap, "window": window, "start": start, "causal": False}
            documents = torch.arange(200)[None] // window[0]
            ours, exact = attend(position, 140, 200, documents=documents, **options)
            torch.testing.assert_close(ours, exact, rtol=0.0, atol=2e-6)
    assert counter.graphs == 1


@pytest.mark.parametrize("name", ["cable", *(pytest.param(name, marks=pytest.mark.slow) for name in ("alibi", "rope"))])
def test_a_compiled_model_decodes_64_steps_in_few_graphs(monkeypatch, name):
    """The user compiles: 2 layers in one graph, which is traced through all of relpos.attention."""
    flex_on_cpu(monkeypatch, counter := Counter())
    layers = [build(name), build(name)]

    def model(q, k, v, hidden, backend):
        for position in layers:
            own = hidden if position.needs_hidden else None
            q = relpos.attention(q, k, v, position, hidden=own, backend=backend)
        return q

    compiled, graphs = torch.compile(model, fullgraph=True), []
    with torch.no_grad():
        for keys in range(100, 164):
            q, k, v = torch.randn(1, 2, 1, 8), *torch.randn(2, 1, 2, keys, 8)
            hidden = torch.randn(1, keys, 16)
            exact = model(q, k, v, hidden, "reference")
            torch.testing.assert_close(compiled(q, k, v, hidden, "flex"), exact, rtol=0.0, atol=2e-6)
            graphs.append(counter.graphs)
    assert graphs[-1] == graphs[1] == 2


@pytest.mark.parametrize("name", ["kerple_log", "cable", "fire", "rope"])
def test_a_compiled_model_trains_as_the_definition(monkeypatch, name):
    """The graph is run as it is: with aot_eager, FlexAttention's dense backward forgets what the graph computes."""
    flex_on_cpu(monkeypatch, "eager")
    position = build(name)
    hidden = torch.randn(1, 140, 16, requires_grad=True)
    weight = torch.randn(140, 8)

    def loss(hidden, backend):
        q = hidden.view(1, 140, 2, 8).transpose(1, 2)
        own = hidden if position.needs_hidden else None
        return (relpos.attention(q, q, q, position, hidden=own, window=90, backend=backend) * weight).sum()

    wanted = [hidden, *position.parameters()]
    ours = torch.autograd.grad(torch.compile(loss, fullgraph=True)(hidden, "flex"), wanted)
    exact = torch.autograd.grad(loss(hidden, "reference"), wanted)
    for mine, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine, other, rtol=0.0, atol=2e-5 * max(1.0, float(other.abs().max())))


class Inspected:
    """Backward graphs of FlexAttention: of its score functions, which CUDA's lowering takes under conditions."""

    def __init__(self):
        self.joint_graphs = []
        self.backend = aot_autograd(fw_compiler=nop, bw_compiler=self.look)

    def look(self, graph, inputs):
        for node in graph.graph.nodes:
            if node.target is torch.ops.higher_order.flex_attention_backward:
                self.joint_graphs.append(graph.get_submodule(node.args[8].target).graph)
        return nop(graph, inputs)


@pytest.mark.parametrize("name", ["kerple_log", "t5", "cable", "fire", "forgetting", "sum"])
@pytest.mark.parametrize("queries", [pytest.param(3, marks=pytest.mark.slow), 140])
def test_every_trained_tensor_is_one_that_the_cuda_backward_takes(monkeypatch, name, queries):
    """Indexed once, so that its gradient is one scatter: by FlexAttention's own check and by its graph."""
    inspected = Inspected()
    flex_on_cpu(monkeypatch, inspected.backend)
    position = build(name) if name != "sum" else build("sum", parts=("kerple_log", "cable", "fire"))
    hidden = torch.randn(1, 140, 16, requires_grad=True)
    q, k, v = torch.randn(1, 2, queries, 8), *torch.randn(2, 1, 2, 140, 8)
    sinks = torch.zeros(2, requires_grad=True)
    out = relpos.attention(q, k, v, position, hidden=hidden, sinks=sinks, softcap=9.0, backend="flex")
    out.sum().backward()
    assert inspected.joint_graphs
    for graph in inspected.joint_graphs:
        graph.eliminate_dead_code()
        validate_joint_graph(graph)
        (output,) = (node for node in graph.nodes if node.op == "output")
        of_captured = [node for node in output.args[0][5:] if node is not None]
        assert of_captured
        assert {node.target for node in of_captured} == {torch.ops.flex_lib.zeros_and_scatter.default}


def test_the_check_of_trained_tensors_notices_two_indices(monkeypatch):
    inspected = Inspected()
    flex_on_cpu(monkeypatch, inspected.backend)
    table = torch.zeros(9, requires_grad=True)
    q = torch.randn(1, 1, 9, 16)

    def twice(score, b, h, i, j):
        return score + table[i] + table[j]

    kernel.compiled("twice")(q, q, q, None, None, twice, None, None, False)[0].sum().backward()
    with pytest.raises(NotImplementedError, match="multiple indexing operations"):
        validate_joint_graph(inspected.joint_graphs[0])


MASKS = {"window": 40, "documents": torch.arange(200)[None] // 70, "padding": torch.arange(200)[None] % 9 > 0}
COMPILED = [  # encoding, queries, options
    ("kerple_log", 150, {}),
    ("rope", 150, {}),
    ("fire", 150, {}),
    ("cable", 150, MASKS),
    *((name, 1, {"padding": torch.arange(200)[None] > 9}) for name in ("cable", "fire")),
    ("alibi", 150, {"softcap": 2.0, "scale": 1.0, "mask": torch.arange(60_000).view(2, 150, 200) % 7 > 1}),
    ("alibi", 150, {"mask": lambda b, h, i, j: (i + j + h) % 3 != 0, "causal": False, "start": 11}),
    ("alibi", 150, {"positions": torch.arange(200)[None] * 2, "causal": False, "start": 50}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "queries", "options"), COMPILED)
def test_the_code_compiled_for_a_cpu_gives_the_definition(monkeypatch, name, queries, options):
    flex_on_cpu(monkeypatch, "inductor")
    with torch.no_grad():
        ours, exact = attend(build(name), queries, 200, **options)
        torch.testing.assert_close(ours, exact, rtol=0.0, atol=2e-6)
        for keys in range(100, 106) if name == "kerple_log" else ():  # one kernel for all lengths of a decoding
            ours, exact = attend(build(name), 1, keys, window=60)
            torch.testing.assert_close(ours, exact, rtol=0.0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_code_compiled_for_a_cpu_in_half_precision(monkeypatch, dtype):
    flex_on_cpu(monkeypatch, "inductor")
    q, k, v = torch.randn(3, 1, 2, 150, 32).to(dtype).unbind()
    position = relpos.encoding("rope", heads=2, head_dim=32)
    with torch.no_grad():
        ours, exact = (relpos.attention(q, k, v, position, backend=name) for name in ("flex", "reference"))
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, exact, rtol=0.0, atol=0.02)
