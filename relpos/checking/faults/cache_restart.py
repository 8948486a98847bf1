"""Positions begin again with every cached step."""

import itertools
from contextlib import AbstractContextManager
from typing import Any

import torch

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import Fault, NotPossibleError, seen_before, with_inputs
from relpos.checking.findings import Finding


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    reads = subject.kinds & {"rotary", "learned", "sinusoidal"}
    if not subject.cache or not subject.positions or subject.two_stacks or not reads:
        raise NotPossibleError("it takes no positions with a cache, or does not read them")

    def change(keywords: dict[str, Any]) -> None:
        seen, length = seen_before(keywords), keywords["input_ids"].shape[1]
        if seen:
            keywords["position_ids"] = (torch.arange(length))[None]

    return with_inputs(subject.model, change)


def claims(finding: Finding) -> bool:
    measured, pieces = finding.evidence.get("positions"), finding.evidence["pieces"]
    if measured is None or len(measured) != sum(pieces):
        return bool(finding.evidence["uncounted"])  # right, if it is told the positions
    starts = [0, *itertools.accumulate(pieces)][:-1]
    return all(measured[start + i] == i for start, piece in zip(starts, pieces, strict=True) for i in range(piece))


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
