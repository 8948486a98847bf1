"""What docs/attention.md says of FlexAttention's kernels, read from their compiled code."""

import pytest

pytest.importorskip("triton", reason="Triton is for Linux")

from flex_kernels import by_hand, by_relpos
from gpu_static import flex_row
from triton_compiler import triton_compiler

FORMS = "none", "Toeplitz"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiler():
    with triton_compiler() as process:
        yield process


@pytest.mark.parametrize("attention", [by_hand, by_relpos])
def test_the_gradient_of_a_table_is_one_atomic_addition_per_score(compiler, attention):
    forms = "Toeplitz", "Toeplitz without gradient"
    trained, fixed = (compiler.submit(flex_row, attention, form, "backward", 64, "sm_80").result() for form in forms)
    assert (trained.atomics_per_score, fixed.atomics_per_score) == (1, 0)
    assert trained.per_score > fixed.per_score
    for loop in trained.loops:
        assert loop.atomics_per_score == (1 if loop.name == "q" else 0)
        assert loop.tensor == {"q": 3, "k, v": 4}[loop.name] * 64**3 / (16 * 8 * 16) / trained.num_warps


def test_the_forward_with_a_table_does_not_fit_into_an_h100_as_pytorch_configures_it(compiler):
    notes = [compiler.submit(flex_row, by_relpos, form, "forward", 64, "sm_90").result().note for form in FORMS]
    assert notes == ["", "242 KB with 3 stages"]
