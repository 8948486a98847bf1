"""About how long reading will take, from a short measurement before it."""

import time
from collections.abc import Callable, Mapping

PROBE = 2048  # tokens that are read to measure the speed, at the shortest length and in one window
WORTH = 5  # the work must be this many times as long as the measurement


def reading_seconds(work: Mapping[int, int], read: Callable[[int, int], object], longest: int = PROBE) -> float | None:
    """About how many seconds a model needs to read texts.

    None if there is too little to measure it first, or if the encoding refuses even the shortest length.

    The time of a token grows with the length of its window by the time of attention alone, so that two lengths give
    the time at every length: a straight line.

    Args:
        work: Tokens to read, by the length of their windows.
        read: Called with a length and a number of windows, which it reads.
        longest: Tokens of the longer of the two windows that are measured.
    """
    lengths = [length for length, tokens in work.items() if tokens]
    if sum(work.values()) < 3 * WORTH * PROBE:
        return None
    short = min(*lengths, longest)
    try:
        read(short, 1)  # the first call loads libraries
    except ValueError:
        return None
    at_short = _seconds_per_token(read, short)
    try:
        growth = (_seconds_per_token(read, longest) - at_short) / max(1, longest - short)
    except ValueError:  # a length that the encoding refuses
        growth = 0.0
    return sum(tokens * (at_short + max(growth, 0.0) * max(0, length - short)) for length, tokens in work.items())


def _seconds_per_token(read: Callable[[int, int], object], length: int) -> float:
    count = max(1, PROBE // length)
    started = time.perf_counter()
    read(length, count)
    return (time.perf_counter() - started) / (count * length)
