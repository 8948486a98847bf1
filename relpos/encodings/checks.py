"""Checks of single arguments: integers, positive numbers, booleans, shapes. Each refusal is one sentence."""

from torch import Tensor

MOST_SEED = 2**32 - 1  # the largest seed, as numpy takes it


def integer_at_least(name: str, value: int, least: int = 1, most: int | None = None) -> int:
    """Check an integer argument.

    Args:
        name: The argument's name, for the message.
        value: Its value.
        least: The smallest value allowed.
        most: The largest value allowed; None for any.

    Returns:
        The value.

    Raises:
        ValueError: The value is not an integer (bools are rejected), is below `least`, or is above `most`.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        limit = "" if most is None else f" and at most {most:,}"
        raise ValueError(f"{name} must be an integer of at least {least}{limit}, not {value!r}.")
    return value


def positive_number(name: str, value: float) -> float:
    """Check a positive, finite number.

    Args:
        name: The argument's name, for the message.
        value: Its value.

    Returns:
        The value as a float.

    Raises:
        ValueError: The value is no number (a bool is none), is not positive, or is infinite or NaN.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive number, not {value!r}.")
    return float(value)


def boolean(name: str, value: bool) -> bool:
    """Check a switch.

    Args:
        name: The argument's name, for the message.
        value: Its value.

    Returns:
        The value.

    Raises:
        TypeError: The value is not True or False. A text such as "no" would count as True.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}.")
    return value


def check_shape(name: str, x: Tensor, expected: tuple[int | str, ...], advice: str = "") -> None:
    """Check the shape of a tensor.

    Args:
        name: The argument's name, for the message.
        x: The tensor.
        expected: One entry per axis: a size, or the name of an axis that may have any size.
        advice: A sentence to end the message with.

    Raises:
        TypeError: `x` is no tensor.
        ValueError: The shape is another.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(x).__name__}.")
    sizes = tuple(x.shape)
    fits = len(sizes) == len(expected) and all(
        isinstance(axis, str) or size == axis for size, axis in zip(sizes, expected, strict=True)
    )
    if not fits:
        shape = ", ".join(str(axis) for axis in expected)
        raise ValueError(" ".join(filter(None, [f"{name} must be ({shape}), not {sizes}.", advice])))
