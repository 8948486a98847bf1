"""Cross-entropy of next tokens without a length × vocabulary tensor."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

LOGITS = 2**25  # numbers of logits that exist at a time: 128 MB in float32
IGNORED = -100  # the label that counts for nothing, as everywhere in transformers


class _ChunkedCrossEntropy(Function):
    """Loss and gradients in one pass over chunks of tokens.

    The gradient of a chunk's logits is at hand when its loss is, so it is used at once: the logits are computed once,
    as without chunks, and dropped. What waits for the backward has the sizes of hidden and weight.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, count: Tensor, rows: int) -> Tensor:
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if for_hidden else None  # (tokens, width)
        d_weight = torch.zeros_like(weight, dtype=hidden.dtype) if for_weight else None  # (vocabulary, width)
        used = weight.to(hidden.dtype)
        total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        for start in range(0, len(targets), rows):
            chunk = slice(start, start + rows)
            counts = (targets[chunk] != IGNORED)[:, None]  # (rows, 1)
            target = targets[chunk, None].masked_fill(~counts, 0)
            logits, normaliser = _logits(hidden[chunk], used, total.dtype)
            total += ((normaliser - logits.gather(1, target)) * counts).sum()
            if d_hidden is None and d_weight is None:
                continue
            slope = logits.sub_(normaliser).exp_()  # softmax − one-hot, in the memory of the logits
            slope.scatter_add_(1, target, -torch.ones_like(normaliser))
            slope = slope.mul_(counts / count).to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(slope, used, out=d_hidden[chunk])
            if d_weight is not None:
                d_weight.addmm_(slope.T, hidden[chunk])
        ctx.gradients = d_hidden, None if d_weight is None else d_weight.to(weight.dtype)
        return total / count

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the chunked cross-entropy can be differentiated once only: compute the loss again.")
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if x is None else x.mul_(slope) for x in gradients), None, None, None


def next_token_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, count: Tensor | int | None = None, rows: int | None = None
) -> Tensor:
    """Mean cross-entropy of each label given the hidden state before it.

    Args:
        hidden: (batch, length, width).
        weight: the output matrix, (vocabulary, width).
        labels: (batch, length), −100 where nothing is predicted; or (batch, length + 1), and the last hidden state
            predicts too.
        count: divides the sum; without it, the number of predicted labels does.
        rows: how many tokens have logits at a time.

    Returns:
        The loss, a scalar with gradients to hidden and weight.

    Raises:
        TypeError: the labels are not torch.int64.
        ValueError: the labels have another shape, or one is neither a token nor −100.
    """
    before, targets = _pairs(hidden, labels, len(weight))
    if count is None:
        count = (targets != IGNORED).sum().clamp(min=1)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    count = torch.as_tensor(count, dtype=dtype, device=hidden.device)
    rows = rows or max(1, LOGITS // len(weight))
    with torch.autocast(hidden.device.type, enabled=False):
        loss: Tensor = _ChunkedCrossEntropy.apply(before, weight, targets, count, rows)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor, rows: int | None = None) -> Tensor:
    """The cross-entropy of every label by itself: (batch, labels − 1), 0 where nothing is predicted. Without gradients.

    Arguments and errors as for `next_token_loss`. Only what is predicted costs anything.
    """
    before, targets = _pairs(hidden, labels, len(weight))
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    losses = torch.zeros(len(targets), dtype=dtype, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        used = weight.to(hidden.dtype)
        for chunk in torch.split((targets != IGNORED).nonzero()[:, 0], rows or max(1, LOGITS // len(weight))):
            logits, normaliser = _logits(before[chunk], used, dtype)
            losses[chunk] = (normaliser - logits.gather(1, targets[chunk, None]))[:, 0]
    return losses.view(len(labels), -1)


def _pairs(hidden: Tensor, labels: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Hidden states (tokens, width), and the label that each is to predict (tokens,)."""
    batch, length, width = hidden.shape
    if labels.dim() != 2 or len(labels) != batch or labels.shape[1] - length not in (0, 1):
        raise ValueError(
            f"labels must be (batch, length) = ({batch}, {length}), or one longer, not {tuple(labels.shape)}."
        )
    targets = labels[:, 1:].reshape(-1)
    check_labels(targets, vocabulary)
    return hidden[:, : labels.shape[1] - 1].reshape(-1, width), targets


def check_labels(targets: Tensor, vocabulary: int) -> None:
    """Refuse labels that are neither a token of the vocabulary nor −100.

    On an accelerator and in compiled code, where looking at values would stall or cannot be done, they are refused by
    the bounds check of the gather that reads the label's logit.

    Args:
        targets: (tokens,), whole numbers.
        vocabulary: how many tokens there are.

    Raises:
        TypeError: the labels are not whole numbers of 64 bits.
        ValueError: a label is out of range; it is named.
    """
    if targets.dtype != torch.int64:
        raise TypeError(f"labels must be torch.int64, not {targets.dtype}: use labels.long().")
    if torch.compiler.is_compiling() or targets.device.type != "cpu":
        return
    wrong = targets[((targets < 0) | (targets >= vocabulary)) & (targets != IGNORED)]
    if len(wrong):
        raise ValueError(
            f"the label {int(wrong[0])} is no token of a vocabulary of {vocabulary}: labels are 0 to {vocabulary - 1}, "
            f"or {IGNORED} where nothing is predicted."
        )


def _logits(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The logits of a chunk (rows, vocabulary), and the logarithm of the sum of their exponentials (rows, 1)."""
    logits = (hidden @ weight.T).to(dtype)
    return logits, logits.logsumexp(dim=-1, keepdim=True)
