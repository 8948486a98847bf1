"""What docs/attention.md says of FlexAttention's kernels, read from their compiled code."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")

from flex_kernels import by_hand, by_relpos, generate
from gpu_counts import TARGETS
from gpu_static import compile_as_inductor, flex_loops, row

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def flex_row(attention, form, part, target="sm_80", head_dim=64):
    kernel = generate(attention, form, head_dim, TARGETS[target], torch.bfloat16)[part]
    counts, note = compile_as_inductor(kernel, target)
    return row(counts, attention.__name__, form, part, head_dim, flex_loops(counts, part, kernel.sizes), note)


@pytest.mark.parametrize("attention", [by_hand, by_relpos])
def test_the_gradient_of_a_table_is_one_atomic_addition_per_score(attention):
    trained, fixed = (flex_row(attention, form, "backward") for form in ("Toeplitz", "Toeplitz without gradient"))
    assert (trained.atomics_per_score, fixed.atomics_per_score) == (1, 0)
    assert trained.per_score > fixed.per_score
    for loop in trained.loops:
        assert loop.atomics_per_score == (1 if loop.name == "q" else 0)
        assert loop.tensor == {"q": 3, "k, v": 4}[loop.name] * 64**3 / (16 * 8 * 16) / trained.num_warps


def test_the_forward_with_a_table_does_not_fit_into_an_h100_as_pytorch_configures_it():
    assert flex_row(by_relpos, "Toeplitz", "forward", "sm_90").note == "242 KB with 3 stages"
    assert flex_row(by_relpos, "none", "forward", "sm_90").note == ""
