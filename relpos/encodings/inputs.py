"""Checks of the arguments of attention, and the call that encodings see."""

import math

import torch
from torch import Tensor

from relpos.encodings.call import Call, check_documents
from relpos.encodings.checks import check_shape, positive_number
from relpos.encodings.encoding import Encoding
from relpos.encodings.tracing import has_values


def check_tensors(q: Tensor, k: Tensor, v: Tensor | None) -> None:
    """Check ranks, sizes and dtypes of queries, keys and values.

    Args:
        q: Queries, (batch, heads, queries, head_dim).
        k: Keys, (batch, key_heads, keys, head_dim).
        v: Values, in the shape of k, or None.

    Raises:
        TypeError: An argument is no tensor, or has no floating-point dtype.
        ValueError: Shapes, dtypes or devices do not match.
    """
    tensors = {"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v}
    for name, x in tensors.items():
        check_shape(name, x, ("batch", "heads", "length", "head_dim"))
        if not x.is_floating_point():
            raise TypeError(f"{name} must have a floating-point dtype, not {x.dtype}.")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, but q is {q.dtype} on {q.device}: they must agree.")
    batch, heads, queries, head_dim = q.shape
    if v is not None and v.shape != k.shape:
        raise ValueError(f"v must have the shape of k, {tuple(k.shape)}, not {tuple(v.shape)}.")
    if k.shape[0] != batch:
        raise ValueError(f"k has batch {k.shape[0]}, but q has batch {batch}.")
    if k.shape[3] != head_dim:
        raise ValueError(f"k has head_dim {k.shape[3]}, but q has head_dim {head_dim}.")
    if k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(f"the {heads} heads of q are not a multiple of the {k.shape[1]} heads of k.")
    if min(q.shape) == 0:
        raise ValueError(f"q is empty: {tuple(q.shape)}.")
    if queries > k.shape[2]:
        raise ValueError(
            f"there are {queries} queries but {k.shape[2]} keys: give at least as many keys as queries, because the "
            "queries stand at the last positions of the keys."
        )


def make_call(
    q: Tensor,
    k: Tensor,
    position: Encoding | None,
    hidden: Tensor | None,
    gates: Tensor | None,
    causal: bool,
    documents: Tensor | None,
    padding: Tensor | None,
    scale: float | None,
) -> Call:
    """Check the arguments of `relpos.attention` and make the call that encodings see.

    The arguments have the meanings and shapes of `relpos.attention`; `check_tensors` has checked q and k.

    Returns:
        The call, with the gates that the encoding needs.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape or a value does not match.
    """
    batch, heads, queries, head_dim = q.shape
    keys = k.shape[2]
    if documents is not None:
        check_documents(documents, batch, keys)
    if padding is not None:
        check_shape("padding", padding, (batch, keys))
        if padding.dtype != torch.bool:
            raise TypeError(
                f"padding must be boolean, True for the keys that count, not {padding.dtype}: use padding.bool()."
            )
    if position is not None:
        gates = check_position(position, batch, heads, head_dim, keys, hidden, gates, causal)
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = head_dim**-0.5 if scale is None else positive_number("scale", scale)
    call_q = q.to(dtype) if position is not None and position.needs_scores else None
    return Call(queries, keys, causal, documents, padding, gates, call_q, scale, dtype, q.device)


def check_position(
    position: Encoding,
    batch: int,
    heads: int,
    head_dim: int,
    keys: int,
    hidden: Tensor | None,
    gates: Tensor | None,
    causal: bool,
) -> Tensor | None:
    """Check that the encoding fits q, and return the gates it needs, (batch, heads, keys, gate_size), or None."""
    if not isinstance(position, Encoding):
        raise TypeError(f"position must be an encoding (relpos.encoding(name, …)), not {position!r}.")
    name = type(position).__name__
    if position.heads != heads or position.head_dim != head_dim:
        raise ValueError(
            f"{name} was made for {position.heads} heads, head_dim {position.head_dim}, but q has {heads} heads, "
            f"head_dim {head_dim}."
        )
    if not causal and not position.bidirectional:
        raise ValueError(f"{name} is defined for causal attention only.")
    if not position.needs_hidden:
        return None
    if gates is None:
        if hidden is None:
            raise ValueError(
                f"{name} reads the layer's input: give hidden= of shape ({batch}, {keys}, {position.width}), or to "
                "attention the gates= computed from it."
            )
        advice = "While decoding, keep position.gates(hidden) of each token in the cache, and give gates=."
        check_shape("hidden", hidden, (batch, keys, position.width), advice)
        gates = position.gates(hidden)
    assert gates is not None
    check_shape(f"gates of {name}", gates, (batch, heads, keys, position.gate_size))
    return gates


def check_finite(name: str, numbers: Tensor) -> None:
    """Refuse NaN and +inf in a tensor of a bias; −inf is allowed, as a mask.

    Raises:
        ValueError: The tensor holds NaN or +inf.
    """
    if numbers.device.type != "cpu" or not has_values(numbers):
        return  # reading values would stall an accelerator
    # One reduction: the maximum is NaN if any entry is, and +inf if any is.
    top = float(numbers.detach().max())
    if math.isnan(top) or top == math.inf:
        raise ValueError(f"the {name} of the bias holds {top}: a parameter or an input of the encoding is broken.")
