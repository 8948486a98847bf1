"""A layer is rotated as layers of another type are."""

from contextlib import AbstractContextManager
from typing import Any

from relpos.checking.faults.fault import (
    ROTATED,
    Fault,
    NotPossibleError,
    replaced,
    rotary_modules,
    together,
    wrong_rotations,
)
from relpos.checking.report import Finding
from relpos.checking.subject import ModelSubject


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    contexts = []
    for module in rotary_modules(subject):
        names = [name for name, _ in module.named_buffers(recurse=False) if name.endswith("_inv_freq")]
        names = [name for name in names if not name.endswith("original_inv_freq")]
        if len(names) == 2:
            own: Any = module.forward
            swapped = {names[0][:-9]: names[1][:-9], names[1][:-9]: names[0][:-9]}

            def wrong(x: Any, position_ids: Any, layer_type: Any = None, own: Any = own, swapped: Any = swapped) -> Any:
                return own(x, position_ids, swapped.get(layer_type, layer_type))

            contexts.append(replaced(module, "forward", wrong))
    if not contexts:
        raise NotPossibleError("all its layers have one rotation")
    return together(*contexts)


def claims(finding: Finding) -> bool:
    others = [rotation.expected for rotation in finding.evidence["rotations"] if rotation.expected is not None]
    return all(
        rotation.expected is not None and any(rotation.explained(other, other) for other in others)
        for rotation in wrong_rotations(finding)
    )


FAULT = Fault(
    name="other layer",
    title="a layer is rotated as layers of another type are",
    tests=("rotation",),
    diagnosis=(
        "A layer has the theta or the scaling that the configuration gives to layers of another type, as global "
        "layers' for local ones."
    ),
    remedy="Choose the rotation by the type of the layer: rope_parameters[layer_types[i]].",
    claims=claims,
    inject=inject,
    also=ROTATED,
    threads=(
        "https://github.com/antonellof/ferrox/issues/39",
        "https://github.com/ollama/ollama/pull/13452",
    ),
)
