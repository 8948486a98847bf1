"""Windows on the wrong layers."""

from contextlib import AbstractContextManager

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import Fault, with_exchanged_masks
from relpos.checking.findings import Finding


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    return with_exchanged_masks(subject, sliding=True, full=True)


def claims(finding: Finding) -> bool:
    reaches = finding.evidence["reaches"]
    limited = [reach for reach in reaches if reach.limited]
    full = [reach for reach in reaches if not reach.limited]
    return bool(limited and full) and all(
        [reach.measured > reach.expected for reach in limited] + [reach.measured < reach.expected for reach in full]
    )


FAULT = Fault(
    name="window layers",
    title="windows on the wrong layers",
    tests=("window",),
    diagnosis=(
        "The layers with a window see everything and those without one have it: the pattern of layer types is "
        "inverted or shifted."
    ),
    remedy=("Read the type of each layer from layer_types; mind whether the pattern counts layers from 0 or from 1."),
    claims=claims,
    inject=inject,
    also=("cache", "pieces", "crop", "static cache", "packing"),
    threads=("https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4875",),
)
