"""CUDA: PyTorch's FlexAttention, compiled, with the form as its score function and what a query sees as its mask.

`scores` has the score and mask functions, `kernel` the compiled call and the blocks of its mask. Numbers that change
from call to call (the index of the first query, a length) reach the functions as tensors, so that no call compiles
anything anew. We have not run it on a GPU: docs/attention.md says what is tested.
"""

import torch
from torch import Tensor

from relpos.attend.flex import scores
from relpos.forms.bias import Form, Scored, terms
from relpos.forms.call import Call

FASTEST_ON: tuple[str, ...] = ("cuda",)
WIDEST = 256  # head_dim or value_dim; above it FlexAttention's tiles do not fit into the shared memory of most GPUs


def refuses(q: Tensor, v: Tensor, form: Form | None, call: Call) -> str | None:
    """Why FlexAttention cannot run this call, or None."""
    kinds = {type(term) for term in terms(form)}
    strangers = sorted(kind.__name__ for kind in kinds - set(scores.SCORES) - {Scored})
    reasons = [
        (q.device.type != "cuda", f"FlexAttention has a backward on CUDA only, and q is on {q.device.type}."),
        (q.dtype == torch.float64, "FlexAttention computes in float32: for float64 use the reference."),
        (
            Scored in kinds,
            "a Scored bias is a function of rows of scores, and FlexAttention passes one score at a time.",
        ),
        (bool(strangers), f"it has no score function for a bias of the form {', '.join(strangers)}."),
        (call.dropout > 0, "FlexAttention has no dropout of the weights: its functions see scores before the softmax."),
        (q.shape[-1] > WIDEST, f"head_dim {q.shape[-1]} > {WIDEST} needs more shared memory than most GPUs have."),
        (v.shape[-1] > WIDEST, f"value_dim {v.shape[-1]} > {WIDEST} needs more shared memory than most GPUs have."),
    ]
    return next((reason for holds, reason in reasons if holds), None)


def attention(q: Tensor, k: Tensor, v: Tensor, form: Form | None, call: Call) -> tuple[Tensor, Tensor | None]:
    """Attention by compiled FlexAttention: (batch, heads, queries, value_dim), and the log-sum-exp."""
    # Imported here: FlexAttention is slow to import, and only CUDA needs it.
    from relpos.attend.flex import kernel  # noqa: PLC0415

    score = scores.score_function(form, call)
    block_mask = None
    if scores.hides(call):
        seen = kernel.sight(call)
        mask = scores.mask_function(call, seen.lowest, seen.highest)
        if seen.blocks is None:
            score = scores.masked(score, mask)
        else:
            block_mask = kernel.block_mask(seen.blocks, mask, call)
    name = "_".join(type(term).__name__ for term in terms(form)) or "no_bias"
    run = kernel.attend if torch.compiler.is_compiling() else kernel.compiled(name)
    return run(q, k, v, call.padding, call.rotation, score, block_mask, call.sinks, call.return_lse)
