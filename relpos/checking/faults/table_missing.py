"""Absolute positions are not added."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import Fault, NotPossibleError, together
from relpos.checking.findings import Finding
from relpos.pretrained.layer_position import TABLES


@contextlib.contextmanager
def zeroed(module: Any) -> Iterator[None]:
    """A table whose rows arrive as zeros."""

    def leave(_: Any, arguments: Any, output: Tensor) -> Tensor:
        return output * 0

    handle = module.register_forward_hook(leave)
    try:
        yield
    finally:
        handle.remove()


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    tables = [
        module
        for name, module in subject.model.named_modules()
        if name.rpartition(".")[2] in TABLES and isinstance(module, nn.Embedding)
    ]
    if not tables or not subject.kinds & {"learned", "sinusoidal"} or not subject.positions:
        raise NotPossibleError("it has no table of positions")
    return together(*(zeroed(table) for table in tables))


def claims(finding: Finding) -> bool:
    return bool(finding.evidence.get("absolute"))


FAULT = Fault(
    name="table missing",
    title="absolute positions are not added",
    tests=("shift",),
    diagnosis=(
        "The model has a table of positions, and its outputs do not depend on it: the rows are not added to the "
        "embeddings."
    ),
    remedy="Add the rows of the table to the token embeddings before the first layer.",
    claims=claims,
    inject=inject,
    also=(),
    threads=("https://github.com/ariannamethod/molequla/pull/30",),
)
