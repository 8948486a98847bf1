"""Positions are rounded to bfloat16."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from relpos.checking.faults.fault import ROTATED, Fault, rotary_modules, together, wrong_rotations
from relpos.checking.report import Finding
from relpos.checking.subject import ModelSubject


@contextlib.contextmanager
def rounded(module: Any) -> Iterator[None]:
    """A module of frequencies that gets its positions in bfloat16."""

    def hook(_: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        if len(arguments) > 1:
            arguments = (arguments[0], arguments[1].bfloat16(), *arguments[2:])
        else:
            keywords = {**keywords, "position_ids": keywords["position_ids"].bfloat16()}
        return arguments, keywords

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    return together(*(rounded(module) for module in rotary_modules(subject)))


def claims(finding: Finding) -> bool:
    return all(
        rotation.explained(rotation.expected, rotation.expected, rotation.positions.to(torch.bfloat16))
        for rotation in wrong_rotations(finding)
    )


FAULT = Fault(
    name="bfloat16 positions",
    title="positions are rounded to bfloat16",
    tests=("rotation", "precision"),
    diagnosis=(
        "Positions are rounded to bfloat16, which has no odd integers beyond 256: neighbouring tokens get the "
        "same angle."
    ),
    remedy=("Keep positions as integers or float32 until cosines and sines are computed: position_ids.float()."),
    claims=claims,
    inject=inject,
    also=ROTATED,
    threads=(
        "https://github.com/nkalyanv99/UNI-D2/pull/6",
        "https://github.com/huggingface/diffusers/pull/13922",
    ),
)
