"""How long one request may compute: loops over long maps ask whether their time is up."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ends: ContextVar[float | None] = ContextVar("ends", default=None)  # by time.monotonic; None: no limit


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Limit what is computed inside."""
    token = _ends.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _ends.reset(token)


def check_time() -> None:
    """Stop if the time is up.

    Raises:
        TimeoutError: It is.
    """
    ends = _ends.get()
    if ends is not None and time.monotonic() > ends:
        raise TimeoutError("this takes too long to compute: give a smaller length.")
