"""A layer without positions is rotated."""

from contextlib import AbstractContextManager
from typing import Any

from relpos.checking.faults.fault import ROTATED, Fault, NotPossibleError, during, wrong_rotations
from relpos.checking.report import Finding
from relpos.checking.subject import ModelSubject


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    layers = [
        layer.module
        for layer in subject.layers
        if subject.known[layer.name].kind == "none" and hasattr(layer.module, "use_rope")
    ]
    if not layers or subject.model.config.model_type == "llama4_text":
        raise NotPossibleError("it has no such layers")

    def rotate(module: Any) -> Any:
        before, module.use_rope = module.use_rope, 1
        return before

    return during(layers, rotate, lambda module, before: setattr(module, "use_rope", before))


def claims(finding: Finding) -> bool:
    others = [rotation.expected for rotation in finding.evidence["rotations"] if rotation.expected is not None]
    return all(
        rotation.expected is None and any(rotation.explained(other, other) for other in others)
        for rotation in wrong_rotations(finding)
    )


FAULT = Fault(
    name="nope rotated",
    title="a layer without positions is rotated",
    tests=("rotation",),
    diagnosis="A layer that the configuration leaves without positions (NoPE) is rotated like the others.",
    remedy=("Skip the rotation in the layers that no_rope_layers names; mind that 0 there means no rotation."),
    claims=claims,
    inject=inject,
    also=ROTATED,
    threads=(
        "https://github.com/timtoole02/Camelid/pull/535",
        "https://github.com/airockchip/rknn-llm/issues/501",
    ),
)
