"""The backend "flex" on the CPU: FlexAttention's own dense implementation of our functions, against the definition.

PyTorch's compiler runs with a backend that executes the graph as it is, forward and backward; FlexAttention then
materialises the scores. What the compiler makes of the functions on a CPU is in test_flex_compiled.py, the Triton
kernels in test_flex_interpreted.py.
"""

import pytest
import torch
from flex_on_cpu import flex_on_cpu

import relpos
from relpos.attend import flex, reference
from relpos.attend.flex import kernel, scores
from relpos.forms.bias import Scaled, Toeplitz
from relpos.forms.call import Call

# PyTorch's compiler looks at .grad of what a function captures.
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
HEADS, HEAD_DIM, KEYS = 4, 8, 21
NAMES = [name for name in relpos.names() if relpos.card(name).form in ("Toeplitz", "RankOne", "Scaled")]


def build(name, queries=KEYS, causal=True, batch=2):
    torch.manual_seed(2)
    position = relpos.encoding(name, heads=HEADS, head_dim=HEAD_DIM, **({"length": 9} if name == "fire" else {}))
    gates = position.gates(torch.randn(batch, KEYS, HEADS * HEAD_DIM))
    call = Call(queries, KEYS, causal=causal, gates=gates, batch=batch, heads=HEADS)
    return position, call, position.bias(call)


def written_out(form, call):
    """The score function for every (b, h, query, key), as FlexAttention's eager mode evaluates it."""
    function = scores.score_function(form, call)
    for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=(0, *axes))
    index = (torch.arange(2), torch.arange(HEADS), torch.arange(call.queries), torch.arange(call.keys))
    return function(torch.zeros(2, HEADS, call.queries, call.keys), *index)


@pytest.mark.parametrize("queries", [KEYS, 5])
@pytest.mark.parametrize("name", NAMES)
def test_the_score_function_is_the_bias_with_its_gradients(name, queries):
    position, call, form = build(name, queries)
    visible = call.visible(call.i).expand(2, HEADS, -1, -1)
    weights = torch.randn(2, HEADS, queries, KEYS) * visible
    results = []
    for bias in (form.block(call.i, call.j).expand(2, HEADS, -1, -1), written_out(form, call)):
        wanted = list(position.parameters())
        grads = torch.autograd.grad((bias * weights).sum(), wanted, retain_graph=True) if wanted else []
        results.append([bias.masked_fill(~visible, 0.0), *grads])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.detach().abs().max()))


@pytest.mark.parametrize("name", [name for name in NAMES if relpos.card(name).directions == "both"])
def test_the_score_function_is_the_bias_in_both_directions(name):
    _, call, form = build(name, causal=False)
    torch.testing.assert_close(written_out(form, call), form.block(call.i, call.j).expand(2, HEADS, -1, -1))


def test_a_long_sum_keeps_its_differences():
    """The split into two float32 numbers; a plain float32 sum is off by more than 1 here."""
    position = relpos.encoding("forgetting", heads=1, head_dim=4)
    gates = torch.full((1, 1, 70000, 1), -1000.25) - torch.rand(1, 1, 70000, 1)
    call = Call(3, 70000, gates=gates)
    form = position.bias(call)
    function = scores.score_function(form, call)
    far = function(
        torch.zeros(3), torch.zeros(3).long(), torch.zeros(3).long(), torch.arange(3), torch.arange(3) + 69990
    )
    exact = form.block(call.i, call.j)[0, 0, torch.arange(3), torch.arange(3) + 69990]
    torch.testing.assert_close(far, exact, rtol=1e-6, atol=0.0)
    plain = form.total.float()[0, 0]
    assert ((plain[69990] - plain[69997]) - exact[0]).abs() > 1


@pytest.mark.parametrize("kind", ["ordinary", "steep", "flat", "one unit"])
@pytest.mark.parametrize("column", [False, True])
def test_the_pieces_of_a_network_are_the_network(kind, column):
    """Also with units that never bend, bend far outside the range of x, or are 0."""
    torch.manual_seed(3)
    units = 1 if kind == "one unit" else 6
    slope = {"steep": 1e4, "flat": 1e-12}.get(kind, 1.0) * torch.randn(units)
    if kind == "flat":
        slope[:3] = torch.tensor([0.0, 1e-42, -1e-42])
    inner = [slope, torch.randn(units), torch.randn(HEADS, units), torch.randn(HEADS)]
    table, row, other = torch.rand(KEYS).sort().values, torch.rand(2, KEYS) + 0.5, torch.rand(1, KEYS) + 0.5
    leaves = [x.requires_grad_() for x in (table, row, *inner, other)]
    form = Scaled(*leaves[:-1], column=leaves[-1] if column else None)
    call = Call(KEYS, KEYS, causal=not column, batch=2, heads=HEADS)
    visible = call.visible(call.i).expand(2, HEADS, -1, -1)
    weights = torch.randn(2, HEADS, KEYS, KEYS) * visible
    results = []
    for bias in (form.block(call.i, call.j), written_out(form, call)):
        grads = torch.autograd.grad((bias * weights).sum(), leaves, allow_unused=True)
        results.append([bias * visible, *(g for g in grads if g is not None)])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=2e-5 * float(theirs.detach().abs().max()))


DOCUMENTS = torch.tensor([[0] * 80 + [1] * 90, [3] * 169 + [2]])
OPTIONS = {
    "nothing": {},
    "both directions": {"causal": False},
    "window": {"window": 20},
    "window, both directions": {"window": (7, 30), "causal": False},
    "documents": {"documents": DOCUMENTS},
    "padding": {"padding": torch.arange(170).expand(2, -1) % torch.tensor([[3], [200]]) > 0},
    "a query that sees nothing": {"padding": torch.arange(170).expand(2, -1) > 40, "return_lse": True},
    "all hidden by padding, with sinks": {"padding": torch.zeros(2, 170).bool(), "sinks": True, "return_lse": True},
    "mask": {"mask": torch.rand(2, 1, 1, 170, generator=torch.Generator().manual_seed(0)) > 0.3},
    "mask per head": {"mask": torch.rand(4, 150, 170, generator=torch.Generator().manual_seed(0)) > 0.3},
    "mask function": {"mask": lambda b, h, i, j: (i + j + h) % 3 != b, "causal": False, "start": 20},
    "softcap": {"softcap": 1.5, "scale": 2.0},
    "sinks": {"sinks": True},
    "log-sum-exp": {"return_lse": True},
    "sinks and log-sum-exp": {"sinks": True, "return_lse": True, "window": 9, "documents": DOCUMENTS},
    "positions": {"positions": torch.arange(170)[None] * 3 // 2},
    "positions per row": {"positions": torch.stack([torch.arange(170), torch.arange(170) // 2]), "causal": False},
    "positions, both directions": {"positions": torch.arange(170)[None].flip(1) * 2, "causal": False, "start": 3},
    "cross attention beyond the keys": {"causal": False, "start": 90, "window": (60, 5), "return_lse": True},
    "everything": {
        "documents": DOCUMENTS,
        "padding": torch.arange(170).expand(2, -1) % 7 > 0,
        "mask": torch.rand(2, 4, 150, 170, generator=torch.Generator().manual_seed(0)) > 0.2,
        "window": (50, 3),
        "causal": False,
        "start": 11,
        "softcap": 3.0,
        "sinks": True,
        "return_lse": True,
    },
}


def results(backend, name, queries, options, dtype=torch.float32, head_dim=8, value_dim=5):
    """Output, log-sum-exp and gradients of everything, at 170 keys, 4 heads and 2 key heads."""
    torch.manual_seed(4)
    options = dict(options)
    position = None
    if name is not None:
        extra = {"length": 9, "units": 5} if name == "fire" else {}
        position = relpos.encoding(name, heads=4, head_dim=head_dim, **extra)
    shapes = (2, 4, queries, head_dim), (2, 2, 170, head_dim), (2, 2, 170, value_dim), (2, 170, 4 * head_dim)
    leaves = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    # Views, as projections of a model are: a captured view once lost its gradient.
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in leaves[:3])
    hidden = leaves.pop()
    sinks = torch.randn(4).requires_grad_()
    if options.get("sinks"):
        options["sinks"] = sinks
        leaves.append(sinks)
    if position is not None and position.needs_hidden:
        options["hidden"] = hidden
        leaves.append(hidden)
    if position is not None:
        leaves.extend(position.parameters())
    out = relpos.attention(q, k, v, position, backend=backend, **options)
    outs = list(out) if options.get("return_lse") else [out]
    loss = sum((x.masked_fill(x == -torch.inf, 0.0) * torch.randn(x.shape)).sum() for x in outs)
    return outs, torch.autograd.grad(loss, leaves, allow_unused=True)


def assert_same(ours, theirs, atol=2e-5):
    for mine, other in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
        if other is None or mine is None:
            assert all(x is None or not x.any() for x in (mine, other))
            continue
        assert mine.dtype == other.dtype
        size = other.detach().masked_fill(other.isinf(), 0.0).abs().max()
        torch.testing.assert_close(mine, other, rtol=0.0, atol=atol * max(1.0, float(size)))


QUICK = ("nothing", "both directions", "documents", "mask function", "sinks and log-sum-exp", "everything")
FEW = ("nothing", "window", "documents", "padding", "mask", "sinks", "everything")
CALLS = [  # encoding, queries, options, whether it is in the default run
    *((name, 150, what, name == "kerple_log" or what in QUICK) for name in ("kerple_log", "cable", "fire", "rope")
      for what in OPTIONS),
    *((name, 3, what, what in ("window", "documents", "everything")) for name in (None, "alibi", "forgetting", "xpos")
      for what in FEW),
]  # fmt: skip


def fits(name, queries, what):
    """Whether the encoding is defined there, and the shapes fit."""
    position, options = relpos.encoding(name or "alibi", heads=4, head_dim=8), OPTIONS[what]
    start = options.get("start", 170 - queries if options.get("causal", True) else 20)
    among = start + queries <= 170
    return (options.get("causal", True) or position.bidirectional) and (among or not position.needs_hidden)


@pytest.mark.parametrize(
    ("name", "queries", "what"),
    [pytest.param(*case, marks=[] if quick else pytest.mark.slow) for *case, quick in CALLS if fits(*case)],
)
def test_values_and_gradients_are_those_of_the_definition(monkeypatch, name, queries, what):
    options = dict(OPTIONS[what])
    if queries == 150 and not options.get("causal", True):
        options.setdefault("start", 20)
    flex_on_cpu(monkeypatch, "aot_eager")
    if queries == 3:
        if what == "everything":
            options["mask"] = options["mask"][:, :, :3]
        monkeypatch.setattr("relpos.attend.flex.kernel.make_blocks", lambda *_: pytest.fail("few queries need none"))
    assert_same(results("flex", name, queries, options), results("reference", name, queries, options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rotated_in_float32_and_attended_in_half_precision(monkeypatch, dtype):
    flex_on_cpu(monkeypatch, "aot_eager")
    seen = []
    whole = kernel.flex.flex_attention
    monkeypatch.setattr(
        kernel.flex, "flex_attention", lambda q, k, v, **more: seen.append((q.dtype, k.dtype)) or whole(q, k, v, **more)
    )
    ours = results("flex", "rope", 150, {"sinks": True}, dtype, head_dim=32, value_dim=32)
    theirs = results("reference", "rope", 150, {"sinks": True}, dtype, head_dim=32, value_dim=32)
    assert set(seen) == {(dtype, dtype)}
    assert_same(ours, theirs, atol=0.02)


@pytest.mark.parametrize("view", [lambda x: x[:1].expand(4, -1), lambda x: x.T.contiguous().T, lambda x: x[None][0]])
def test_a_table_that_is_a_view_gets_its_gradient(monkeypatch, view):
    flex_on_cpu(monkeypatch, "aot_eager")
    q, grads = torch.randn(1, 4, 140, 8), []
    for backend in (flex, reference):
        leaf = torch.linspace(0, 1, 4 * 140).view(4, 140).requires_grad_()
        call = Call(140, 140, batch=1, heads=4)
        out, _ = backend.attention(q, q, q, Toeplitz(view(leaf * 1), 0), call)
        grads.extend(torch.autograd.grad((out * q.cumsum(2)).sum(), leaf))
    torch.testing.assert_close(*grads, rtol=0.0, atol=2e-5 * float(grads[1].abs().max()))


def test_the_sum_of_forms_is_the_sum_of_their_functions(monkeypatch):
    flex_on_cpu(monkeypatch, "aot_eager")
    position = relpos.encoding("sum", heads=4, head_dim=8, parts=("kerple_log", "cable", "rope"))
    q, k, v = torch.randn(3, 1, 4, 140, 8).unbind()
    hidden = torch.randn(1, 140, 32)
    ours, theirs = (
        relpos.attention(q, k, v, position, hidden=hidden, backend=backend) for backend in ("flex", "reference")
    )
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"device": "cpu"}, "FlexAttention has a backward on CUDA only, and q is on cpu"),
        ({"dtype": torch.float64}, "for float64 use the reference"),
        ({"dropout": 0.1}, "FlexAttention has no dropout of the weights"),
        ({"head_dim": 320}, "head_dim 320 > 256"),
        ({"name": "cope"}, "a Scored bias is a function of rows of scores"),
    ],
)
def test_what_it_cannot_run_has_a_sentence(changes, sentence):
    head_dim, name = changes.get("head_dim", 8), changes.get("name", "alibi")
    position = relpos.encoding(name, heads=2, head_dim=head_dim)
    call = Call(3, 3, q=torch.zeros(1, 2, 3, head_dim), dropout=changes.get("dropout", 0.0))
    form = position.bias(call)
    q = torch.empty(1, 2, 3, head_dim, device=changes.get("device", "meta"), dtype=changes.get("dtype", torch.float32))
    if q.device.type == "meta":  # where values do not matter, a tensor that says it is on CUDA
        q = type("OnCuda", (), {"device": torch.device("cuda"), "dtype": q.dtype, "shape": q.shape})()
    assert sentence in flex.refuses(q, q, form, call)
    ordinary = type("OnCuda", (), {"device": torch.device("cuda"), "dtype": torch.float32, "shape": (1, 2, 3, 8)})()
    form = relpos.encoding("alibi", heads=2, head_dim=8).bias(Call(3, 3))
    assert flex.refuses(ordinary, ordinary, form, Call(3, 3)) is None
    wide = torch.empty(1, 2, 3, 320)
    assert "value_dim 320 > 256" in flex.refuses(ordinary, wide, form, Call(3, 3))


def test_asking_for_flex_on_a_cpu_says_why_not():
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="'flex' cannot run this: FlexAttention has a backward on CUDA only"):
        relpos.attention(q, q, q, backend="flex")
