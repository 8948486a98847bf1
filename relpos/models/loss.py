"""Cross-entropy of predicted tokens without a length × vocabulary tensor."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

LOGITS = 2**25  # logits materialised at a time: 128 MB in float32
IGNORED = -100  # the label of a token without a loss, as in transformers


class _ChunkedCrossEntropy(Function):
    """Loss and gradients in one pass over chunks of tokens.

    The gradient of a chunk's logits is computed together with its loss, so that the logits are computed only once and
    then freed. Only the gradients of hidden, weight and bias are kept for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, count: Tensor, rows: int
    ) -> Tensor:
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if for_hidden else None  # (tokens, width)
        d_weight = torch.zeros_like(weight, dtype=hidden.dtype) if for_weight else None  # (vocabulary, width)
        d_bias = torch.zeros_like(bias, dtype=hidden.dtype) if for_bias and bias is not None else None  # (vocabulary,)
        used, used_bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        for start in range(0, len(targets), rows):
            chunk = slice(start, start + rows)
            counts = (targets[chunk] != IGNORED)[:, None]  # (rows, 1)
            target = targets[chunk, None].masked_fill(~counts, 0)
            logits, normaliser = _logits(hidden[chunk], used, used_bias, total.dtype)
            total += ((normaliser - logits.gather(1, target)) * counts).sum()
            if d_hidden is None and d_weight is None and d_bias is None:
                continue
            slope = logits.sub_(normaliser).exp_()  # softmax − one-hot, in the memory of the logits
            slope.scatter_add_(1, target, -torch.ones_like(normaliser))
            slope = slope.mul_(counts / count).to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(slope, used, out=d_hidden[chunk])
            if d_weight is not None:
                d_weight.addmm_(slope.T, hidden[chunk])
            if d_bias is not None:
                d_bias += slope.sum(dim=0)
        ctx.gradients = (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None or bias is None else d_bias.to(bias.dtype),
        )
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
    """Mean cross-entropy of each label (batch, length) given the hidden state (batch, length, width) before it.

    Nothing is predicted where a label is −100. With one label more than hidden states, the last one predicts too.
    `weight` is the output matrix, (vocabulary, width); `count` divides the sum, by default the number of predicted
    labels; `rows` is how many tokens have logits at a time.
    """
    batch, length, width = hidden.shape
    if labels.dim() != 2 or len(labels) != batch or labels.shape[1] - length not in (0, 1):
        raise ValueError(
            f"labels must be (batch, length) = ({batch}, {length}), or one longer, not {tuple(labels.shape)}."
        )
    targets = labels[:, 1:].reshape(-1)
    check_labels(targets, len(weight))
    before = hidden[:, : labels.shape[1] - 1].reshape(-1, width)
    return _mean_loss(before, targets, weight, None, count, rows)


def masked_token_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    count: Tensor | int | None = None,
    rows: int | None = None,
) -> Tensor:
    """Mean cross-entropy of each label given the hidden state at its own place, as `next_token_loss`.

    Logits are computed for the predicted tokens only: a masked model predicts few of its tokens.
    """
    if labels.shape != hidden.shape[:2]:
        raise ValueError(f"labels must be (batch, length) = {tuple(hidden.shape[:2])}, not {tuple(labels.shape)}.")
    targets = labels.reshape(-1)
    check_labels(targets, len(weight))
    predicted = (targets != IGNORED).nonzero()[:, 0]
    return _mean_loss(hidden.reshape(-1, hidden.shape[-1])[predicted], targets[predicted], weight, bias, count, rows)


def _mean_loss(
    hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None, count: Tensor | int | None, rows: int | None
) -> Tensor:
    if count is None:
        count = (targets != IGNORED).sum().clamp(min=1)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    count = torch.as_tensor(count, dtype=dtype, device=hidden.device)
    rows = rows or max(1, LOGITS // len(weight))
    with torch.autocast(hidden.device.type, enabled=False):
        loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, count, rows)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def token_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    rows: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The cross-entropy of every target by itself, (batch, length), without gradients, 0 where the target is −100.

    Targets (batch, length) are what each state predicts: of a causal model the token after it. Only what is predicted
    costs anything.
    """
    if targets.shape != hidden.shape[:2]:
        raise ValueError(f"targets must be (batch, length) = {tuple(hidden.shape[:2])}, not {tuple(targets.shape)}.")
    wanted, states = targets.reshape(-1), hidden.reshape(-1, hidden.shape[-1])
    check_labels(wanted, len(weight))
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    losses = torch.zeros(len(wanted), dtype=dtype, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        used, used_bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        for chunk in torch.split((wanted != IGNORED).nonzero()[:, 0], rows or max(1, LOGITS // len(weight))):
            logits, normaliser = _logits(states[chunk], used, used_bias, dtype, softcap)
            losses[chunk] = (normaliser - logits.gather(1, wanted[chunk, None]))[:, 0]
    return losses.view(targets.shape)


def check_labels(targets: Tensor, vocabulary: int) -> None:
    """Refuse labels (tokens,) that are neither a token of the vocabulary nor −100.

    On an accelerator and in compiled code, reading values would stall or is not possible. There they are refused by the
    bounds check of the gather that reads the label's logit.
    """
    if targets.dtype != torch.int64:
        raise TypeError(f"labels must be torch.int64, not {targets.dtype}: use labels.long().")
    if torch.compiler.is_compiling() or targets.device.type != "cpu":
        return
    wrong = targets[((targets < 0) | (targets >= vocabulary)) & (targets != IGNORED)]
    if len(wrong):
        raise ValueError(
            f"the label {int(wrong[0])} is not in the vocabulary of {vocabulary} tokens: labels are 0 to "
            f"{vocabulary - 1}, or {IGNORED} where nothing is predicted."
        )


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The logits of a chunk (rows, vocabulary), and the logarithm of the sum of their exponentials (rows, 1)."""
    logits = hidden @ weight.T if bias is None else torch.addmm(bias, hidden, weight.T)
    logits = logits.to(dtype)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits, logits.logsumexp(dim=-1, keepdim=True)
