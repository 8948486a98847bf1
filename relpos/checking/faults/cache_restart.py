"""Positions begin again with every cached step."""

from contextlib import AbstractContextManager

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import Fault, measured_pieces, with_cached_positions
from relpos.checking.findings import Finding


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    return with_cached_positions(subject, lambda seen: 0)


def claims(finding: Finding) -> bool:
    pieces = measured_pieces(finding)
    if pieces is None:
        return bool(finding.evidence["uncounted"])  # right, if it is told the positions
    return all(positions == list(range(len(positions))) for _, positions in pieces)


FAULT = Fault(
    name="cache restart",
    title="positions begin again with every cached step",
    tests=("cache", "pieces"),
    diagnosis="Positions are counted from 0 in every call: the number of tokens in the cache is not added.",
    remedy="Start the positions of new tokens at the length of the cache.",
    claims=claims,
    inject=inject,
    also=("pieces", "crop", "static cache"),
    threads=("https://github.com/huggingface/transformers/pull/15751",),
)
