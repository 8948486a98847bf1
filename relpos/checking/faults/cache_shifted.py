"""Positions after the cache are off by one."""

from contextlib import AbstractContextManager

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import Fault, measured_pieces, with_cached_positions
from relpos.checking.findings import Finding


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    return with_cached_positions(subject, lambda seen: seen + 1)


def claims(finding: Finding) -> bool:
    _, *later = measured_pieces(finding) or [(0, [])]
    return bool(later) and any(
        all(positions == list(range(start + by, start + by + len(positions))) for start, positions in later)
        for by in (1, -1)
    )


FAULT = Fault(
    name="cache shifted",
    title="positions after the cache are off by one",
    tests=("cache", "pieces"),
    diagnosis=(
        "Tokens that are read with a cache have positions that are one too large (or too small): right at the "
        "first call, off by one afterwards. The loss does not show it."
    ),
    remedy="The first new token has the position that equals the number of tokens in the cache.",
    claims=claims,
    inject=inject,
    also=("pieces", "crop", "static cache"),
    threads=("https://github.com/skyzh/tiny-llm/pull/46",),
)
