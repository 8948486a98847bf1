"""The backend "flex" by PyTorch's own Triton kernels, forward, backward and decoding, against the definition.

Triton's interpreter runs them on CPU tensors, in a process of its own: it knows no threads, so races, layouts and speed
are not tested, and its products of bfloat16 are wrong, so float32 and float16 are.
"""

import pytest
import torch
from kernel_cases import assert_close, documents, rotation

pytest.importorskip("triton", reason="Triton is for Linux")

from flex_in_interpreter import FORMS, Problem, compare, every_third
from triton_interpreter import triton_interpreter

pytestmark = pytest.mark.heavy
WAIT = 600  # seconds for one problem


@pytest.fixture(scope="module")
def interpreter():
    with triton_interpreter() as process:
        yield process


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


DOCUMENTS = torch.stack([documents(80, 90), documents(169, 1)])
HOLES = torch.arange(170).expand(2, -1) % torch.tensor([[3], [200]]) > 0
ONE, TWO, GROUPS = (1, 2, 2, 150, 170, 16, 16), (2, 2, 2, 150, 170, 16, 16), (2, 2, 1, 150, 170, 24, 40)
CALLS = {  # sizes and options
    "causal": (ONE, {}),
    "full blocks": ((1, 1, 1, 512, 512, 16, 16), {"window": (300, 0)}),
    "both directions": (ONE, {"causal": False, "start": 20}),
    "window": (ONE, {"window": (40, 0)}),
    "window, both directions": (ONE, {"window": (7, 30), "causal": False, "start": 20}),
    "documents": (TWO, {"documents": DOCUMENTS}),
    "padding": (TWO, {"padding": HOLES}),
    "grouped heads, odd dimensions": (GROUPS, {}),
    "queries that see nothing": (TWO, {"padding": torch.arange(170).expand(2, -1) > 40, "grad_lse": draw(2, 2, 150)}),
    "sinks": (ONE, {"sinks": draw(2)}),
    "sinks and log-sum-exp": (ONE, {"sinks": draw(2), "grad_lse": draw(1, 2, 150), "window": (9, 0)}),
    "softcap": (ONE, {"softcap": 1.5}),
    "rotation": (ONE, {"rotation": rotation(1, 150, 170, 8, "half")}),
    "mask per head": (ONE, {"mask": draw(2, 150, 170) > 0}),
    "mask function": (ONE, {"mask": every_third, "causal": False, "start": 20}),
    "positions with gaps": (ONE, {"token_positions": torch.arange(170)[None] * 3 // 2}),
    "beyond the keys": (ONE, {"causal": False, "start": 90, "window": (60, 5), "grad_lse": draw(1, 2, 150)}),
    "everything": (
        GROUPS,
        {
            "documents": DOCUMENTS,
            "padding": torch.arange(170).expand(2, -1) % 7 > 0,
            "mask": draw(2, 2, 150, 170) > -1,
            "window": (50, 3),
            "causal": False,
            "start": 11,
            "softcap": 3.0,
            "sinks": draw(2),
            "grad_lse": draw(2, 2, 150),
        },
    ),
    "one query": ((1, 2, 2, 1, 170, 16, 16), {}),
    "few queries": ((2, 4, 2, 5, 170, 24, 40), {"padding": HOLES, "window": (90, 0)}),
    "few queries, everything": (
        (2, 4, 1, 3, 170, 16, 16),
        {
            "documents": DOCUMENTS,
            "padding": HOLES,
            "softcap": 3.0,
            "sinks": draw(4),
            "grad_lse": draw(2, 4, 3),
            "rotation": rotation(2, 3, 170, 8, "interleaved"),
        },
    ),
}
QUICK = {
    ("none", "window"),
    ("toeplitz", "full blocks"),
    ("rank one, weighted", "both directions"),
    ("sum", "everything"),
    ("sum", "few queries, everything"),
    ("scaled", "documents"),
    ("scaled", "one query"),
}


def is_defined(family, call):
    """Whether the form is defined for the call: by direction, and running sums for queries among the keys."""
    if family.startswith("scaled") and (family == "scaled") != CALLS[call][1].get("causal", True):
        return False
    return call != "beyond the keys" or family in ("none", "toeplitz", "scaled, both directions")


CASES = [
    pytest.param(family, call, marks=[] if (family, call) in QUICK else pytest.mark.slow)
    for family in FORMS
    for call in CALLS
    if is_defined(family, call)
]


def check(report, problem):
    batch, heads, _, queries, _, _, value_dim = problem.sizes
    assert report.templates == {"decoding" if queries < 128 else "forward", "backward"}
    unit = 0.0 if problem.dtype == torch.float32 else torch.finfo(problem.dtype).eps / 2
    assert_close(report.compared, unit=unit, steps=batch * heads * queries * value_dim)


@pytest.mark.parametrize(("family", "call"), CASES)
def test_values_and_gradients_are_those_of_the_definition(interpreter, family, call):
    problem = Problem(family, *CALLS[call])
    (report,) = interpreter.submit(compare, [problem]).result(WAIT)
    check(report, problem)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["causal", "few queries"])
@pytest.mark.parametrize("family", ["none", "toeplitz", "sum", "scaled"])
def test_half_precision(interpreter, family, call):
    problem = Problem(family, *CALLS[call], dtype=torch.float16)
    (report,) = interpreter.submit(compare, [problem]).result(WAIT)
    check(report, problem)


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, None])
@pytest.mark.parametrize("family", ["toeplitz", "sum", "scaled"])
def test_kernels_for_any_length(interpreter, family, queries):
    """From the second length on, sizes are arguments of the kernels."""
    problems = [
        Problem(family, (1, 2, 2, queries or keys, keys, 16, 16), {"window": (99, 0)}) for keys in (150, 170, 256, 131)
    ]
    for report, problem in zip(interpreter.submit(compare, problems).result(WAIT), problems, strict=True):
        check(report, problem)
