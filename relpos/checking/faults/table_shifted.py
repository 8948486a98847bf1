"""The rows of the position table are off by a constant."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import Fault, NotPossibleError, position_tables, together
from relpos.checking.findings import Finding


@contextlib.contextmanager
def shifted(module: Any) -> Iterator[None]:
    """A table whose rows are read one later, or with an offset that is one less."""
    has_offset = hasattr(module, "offset")

    def enter(_: Any, arguments: Any) -> Any:
        if has_offset:
            module.offset -= 1
            return None
        if arguments and isinstance(arguments[0], Tensor) and not arguments[0].is_floating_point():
            return (arguments[0] + 1, *arguments[1:])
        return None

    def leave(*_: Any) -> None:
        if has_offset:
            module.offset += 1

    handles = [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    plain = [table for table in position_tables(subject) if type(table) is nn.Embedding or hasattr(table, "offset")]
    if not plain:
        raise NotPossibleError("its tables have code of their own")
    return together(*(shifted(table) for table in plain))


def claims(finding: Finding) -> bool:
    rows, expected = finding.evidence["rows"], finding.evidence["expected"]
    return len({row - right for row, right in zip(rows, expected, strict=True)}) == 1


FAULT = Fault(
    name="table shifted",
    title="the rows of the position table are off by a constant",
    tests=("table",),
    diagnosis=(
        "Tokens read rows of the position table that are off by a constant: an offset for padding (2 in OPT and "
        "BART, padding_idx + 1 in RoBERTa) is lost or added."
    ),
    remedy="Let the first token read the row that it had in training.",
    claims=claims,
    inject=inject,
    also=(),
    threads=(
        "https://github.com/EleutherAI/gpt-neox/pull/650",
        "https://github.com/huggingface/transformers/issues/20761",
    ),
)
