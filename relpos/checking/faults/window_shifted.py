"""The window is off by one."""

import copy
from contextlib import AbstractContextManager
from typing import Any

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import (
    MASKS,
    Fault,
    NotPossibleError,
    our_parts,
    replaced,
    together,
    with_function,
)
from relpos.checking.findings import Finding
from relpos.encodings.window import Window


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    if subject.window is None:
        raise NotPossibleError("it has no window")
    if subject.ours:
        return together(*(replaced(part, "size", part.size - 1) for part in our_parts(subject, Window)))

    def wrong(function: Any, config: Any, **keywords: Any) -> Any:
        config = copy.copy(config)
        config.sliding_window = config.sliding_window - 1
        return function(config, **keywords)

    return with_function(subject, tuple(MASKS), wrong)


def claims(finding: Finding) -> bool:
    steps = (1, 2) if not finding.evidence["causal"] else (1,)  # to each side
    return all(abs(reach.measured - reach.expected) in steps for reach in finding.evidence["wrong"])


FAULT = Fault(
    name="window shifted",
    title="the window is off by one",
    tests=("window",),
    diagnosis=(
        "A window has one key more or fewer than the configuration says: whether it counts the query itself, or < "
        "against <=. The loss does not show it."
    ),
    remedy="A window of n lets a query see itself and the n − 1 tokens before it.",
    claims=claims,
    inject=inject,
    also=("cache", "pieces", "crop", "static cache", "packing"),
    threads=(
        "https://github.com/huggingface/transformers/issues/39408",
        "https://github.com/ml-explore/mlx-lm/pull/390",
        "https://github.com/sgl-project/sglang/pull/26147",
    ),
)
