"""Checks of arguments: integers, positive numbers, booleans, shapes. Each refusal is one sentence."""

import torch
from torch import Tensor

Shape = tuple[int | str | tuple[int, ...], ...]  # sizes, names of axes of any size, or several sizes
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # of queries, keys and values


def integer_at_least(name: str, value: int, least: int = 1) -> int:
    """Check and return an integer argument."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}.")
    return value


def positive_number(name: str, value: float) -> float:
    """Check and return a positive, finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive number, not {value!r}.")
    return float(value)


def boolean(name: str, value: bool) -> bool:
    """Check and return a switch."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}.")
    return value


def check_shape(name: str, x: Tensor, expected: Shape, advice: str = "") -> None:
    """Check the shape of a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(x).__name__}.")
    sizes = tuple(x.shape)
    fits = len(sizes) == len(expected) and all(
        isinstance(axis, str) or (size in axis if isinstance(axis, tuple) else size == axis)
        for size, axis in zip(sizes, expected, strict=True)
    )
    if not fits:
        allowed = (dict.fromkeys(axis) if isinstance(axis, tuple) else [axis] for axis in expected)
        shape = ", ".join(" or ".join(map(str, sizes)) for sizes in allowed)
        raise ValueError(" ".join(filter(None, [f"{name} must be ({shape}), not {sizes}.", advice])))


def check_tensors(q: Tensor, k: Tensor, v: Tensor | None) -> None:
    """Check ranks, sizes and dtypes of queries, keys and values."""
    tensors = {"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v}
    for name, x in tensors.items():
        check_shape(name, x, ("batch", "heads", "length", "head_dim"))
        if x.dtype not in DTYPES:
            raise TypeError(
                f"{name} must have a floating-point dtype, not {x.dtype}: use float32, float64, float16 or bfloat16."
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, but q is {q.dtype} on {q.device}: they must agree.")
        if min(x.shape) == 0:
            raise ValueError(f"{name} is empty: {tuple(x.shape)}.")
    batch, heads, _, head_dim = q.shape
    if v is not None and v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v must have the batch, heads and length of k, {tuple(k.shape[:3])}, not {tuple(v.shape[:3])}; only its "
            "last dimension may differ."
        )
    if k.shape[0] != batch:
        raise ValueError(f"k has batch {k.shape[0]}, but q has batch {batch}.")
    if k.shape[3] != head_dim:
        raise ValueError(f"k has head_dim {k.shape[3]}, but q has head_dim {head_dim}.")
    if heads % k.shape[1]:
        raise ValueError(f"the {heads} heads of q are not a multiple of the {k.shape[1]} heads of k.")
