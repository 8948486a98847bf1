"""Frequencies are rounded to bfloat16."""

from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import ROTATED, Fault, rotaries_of, with_frequencies, wrong_rotations
from relpos.checking.findings import Finding


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    rotaries_of(subject, pairs=2)  # the first frequency is 1, which bfloat16 has
    return with_frequencies(subject, lambda frequencies, module, name: frequencies.bfloat16().float())


def claims(finding: Finding) -> bool:
    for rotation in wrong_rotations(finding):
        expected = rotation.expected
        if expected is None:
            return False
        low = [expected.frequencies.float().to(dtype).double() for dtype in (torch.bfloat16, torch.float16)]
        if not any(rotation.explained(rounded, rounded) for rounded in (replace(expected, frequencies=x) for x in low)):
            return False
    return True


FAULT = Fault(
    name="bfloat16 frequencies",
    title="frequencies are rounded to bfloat16",
    tests=("rotation", "precision"),
    diagnosis=(
        "The frequencies of the rotation are rounded to 16 bits, as model.to(torch.bfloat16) does with buffers: "
        "angles drift with the position."
    ),
    remedy="Compute inv_freq in float32 after the model is cast, or keep it out of the cast.",
    claims=claims,
    inject=inject,
    also=ROTATED,
    threads=(
        "https://github.com/huggingface/transformers/issues/25681",
        "https://github.com/huggingface/transformers/issues/29496",
        "https://github.com/EleutherAI/gpt-neox/issues/1003",
    ),
)
