"""CUDA and ROCm: attention by Triton kernels of our own, forward and backward, without floating-point atomics.

`gpu_problem` packs a call, `gpu_operators` runs it; a form is one file (`toeplitz_tile`, `rank_one_tile`, …): the bias
of a tile and the fold of its gradient. With TRITON_INTERPRET=1, set before Triton is imported, the kernels run on CPU
tensors. We have not run them on a GPU: docs/gpu.md says what is proven.
"""

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from torch import Tensor

from relpos.attend.kernel_inputs import TENSORS, make_inputs, refuses_tensors
from relpos.attend.kernel_operators import needs_operator
from relpos.forms.bias import Form, Projected, RankOne, Scaled, Scored, Toeplitz, terms
from relpos.forms.call import Call

if TYPE_CHECKING:
    from relpos.attend.triton.decoding_state import PackedBias, RunningTotals

FASTEST_ON: tuple[str, ...] = ("cuda",)  # after FlexAttention, until this has been measured on GPUs
# Keys from which on tiles are skipped: before, looking for them may cost what it saves. Judged, not measured.
SHORTEST = 2048
FEW = 8  # queries: programs divide the keys among them
WIDEST = 256  # head_dim or value_dim


INSTALLED = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter runs the kernels, on CPU tensors


def available() -> tuple[bool, str]:
    """Whether Triton is installed, and the reason if not."""
    return INSTALLED, "" if INSTALLED else "Triton is not installed: it comes with PyTorch for CUDA and ROCm on Linux."


def refuses(q: Tensor, v: Tensor, form: Form | None, call: Call) -> str | None:
    """Why the Triton kernels cannot run this call, as a sentence; None if they can."""
    if not INSTALLED:
        return available()[1]
    if q.device.type != ("cpu" if INTERPRETED else "cuda"):
        where = "on the CPU, in Triton's interpreter" if INTERPRETED else "on CUDA and ROCm"
        return f"the Triton kernels run {where}, and q is on {q.device.type}."
    return refuses_tensors("the Triton backend", q, v, WIDEST) or refuses_call(form, call)


def refuses_call(form: Form | None, call: Call) -> str | None:
    """Why the kernels cannot run a form, the masks or the positions of a call, as a sentence; None if they can."""
    parts = terms(form)
    vectors = [term for term in parts if isinstance(term, Projected)]
    by_distance = [term for term in parts if isinstance(term, Toeplitz | Scaled | Projected)]
    repeated = [kind.__name__ for kind in (RankOne, Scaled) if sum(isinstance(term, kind) for term in parts) > 1]
    outside = call.documents is not None and call.first + call.queries > call.documents.shape[1]
    reasons = [
        (
            any(isinstance(term, Scored) for term in parts),
            "a Scored bias is a function of rows of scores, and the Triton kernels see one tile at a time.",
        ),
        (bool(repeated), f"the Triton kernels run one {' and one '.join(repeated)} term in a sum."),
        (
            any(isinstance(term, Scaled) and term.column is not None for term in parts),
            "the Triton kernels run a Scaled bias that is scaled per query, and this one is scaled per key too.",
        ),
        (
            len({term.of_keys for term in vectors}) < len(vectors),
            "the Triton kernels run one Projected term of the queries and one of the keys in a sum.",
        ),
        (
            len({term.vectors.shape[-1] for term in vectors}) > 1,
            "the Triton kernels run two Projected terms only if their vectors have the same size.",
        ),
        (
            call.mask is not None,
            "the Triton kernels cannot run mask=: they run causal=, window=, documents= and padding=.",
        ),
        (call.first < 0, f"the Triton kernels count tokens from 0, and the first query has the index {call.first}."),
        (
            any(term.where is not None for term in by_distance) or (bool(by_distance) and not call.even),
            "the Triton kernels read a bias over distances by the difference of two indices, which may not be the "
            "distance of these positions=.",
        ),
        (outside, "documents= have one value per key, and the queries are not all among the keys."),
    ]
    return next((reason for holds, reason in reasons if holds), None)


def packed_bias(form: Form, capacity: int) -> "PackedBias | None":
    """A bias that does not depend on the input, packed for all tokens below a capacity; None if it has other forms."""
    from relpos.attend.triton.decoding_state import PackedBias

    return PackedBias(form, capacity) if all(isinstance(term, Toeplitz | Scaled) for term in terms(form)) else None


def running_totals(step: Tensor, weight: Tensor | None, capacity: int) -> "RunningTotals":
    """A RankOne bias that grows with every decoded token, from steps and weights (batch, heads, tokens)."""
    from relpos.attend.triton.decoding_state import RunningTotals

    return RunningTotals(step, weight, capacity)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    form: Form | None,
    call: Call,
    skip: bool = True,
    packed: "PackedBias | RunningTotals | None" = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention that `refuses` has not refused; gradients flow to q, k, v, the sinks and the form's tensors.

    For up to FEW queries without gradients, `packed` is the bias in place of `form`.

    Rotations are applied before, in float32: as tiles are loaded, each key would be rotated again for every block of
    queries, and the rotated pairs would need registers that the backward does not have.
    """
    from relpos.attend.triton import gpu_operators

    if call.rotation is not None:
        turned = call.rotated(q, k)
        q, k = turned[0].to(q.dtype), turned[1].to(k.dtype)
    inputs = make_inputs(q, k, v, form, call, skip)
    if packed is not None:
        out, lse, _, _ = gpu_operators.TritonKernel().run(inputs, packed)
    elif needs_operator(getattr(inputs, name) for name in TENSORS):
        out, lse, _, _ = gpu_operators.forward(*inputs.values())
    else:
        out, lse, _, _ = gpu_operators.TritonKernel().run(inputs)
    return out, lse if call.return_lse else None
