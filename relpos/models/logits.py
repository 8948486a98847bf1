"""Logits of few tokens: the product with the output matrix, which is most of what a decoding step reads."""

import torch
from torch import Tensor, nn

from relpos.forms.tracing import autocasts

FEW = 8  # rows


def logits_of(head: nn.Module, hidden: Tensor) -> Tensor:
    """The output layer's values for some hidden states.

    For few rows in float32 on a CPU, the matrix is multiplied in as many parts as there are threads: PyTorch computes
    such a product with one thread, and several threads read memory faster than one.

    Args:
        head: The output layer, of weight (vocabulary, width).
        hidden: (batch, tokens, width).

    Returns:
        (batch, tokens, vocabulary).
    """
    parts = torch.get_num_threads()
    rows = hidden.shape[0] * hidden.shape[1]
    if parts == 1 or not 0 < rows <= FEW or not _is_plain(head, hidden):
        out: Tensor = head(hidden)
        return out
    weight = head.weight
    assert isinstance(weight, Tensor)
    vocabulary, width = weight.shape
    each = vocabulary // parts
    columns = hidden.reshape(rows, width).t()  # (width, rows)
    divided = torch.bmm(weight[: parts * each].view(parts, each, width), columns.expand(parts, width, rows))
    rest = weight[parts * each :] @ columns  # (fewer rows than threads, rows)
    return torch.cat([divided.flatten(0, 1), rest]).t().reshape(*hidden.shape[:2], vocabulary)


def _is_plain(head: nn.Module, hidden: Tensor) -> bool:
    """Whether the layer is nothing but a matrix in float32 on a CPU, and no gradient or trace needs to see the product.

    A hook, or a forward of the instance's own (as accelerate's offloading has), must run.
    """
    if type(head) is not nn.Linear or head.bias is not None or "forward" in vars(head):
        return False
    weight = head.weight
    if head._forward_hooks or head._forward_pre_hooks or not weight.is_contiguous() or weight.device.type != "cpu":
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or autocasts(weight.device):
        return False
    return type(weight) is nn.Parameter and weight.dtype == hidden.dtype == torch.float32
