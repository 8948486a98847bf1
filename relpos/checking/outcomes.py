"""Tests and their outcomes: two ways to the same numbers are compared, and again with other inputs if they differ."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from relpos.checking.report import FAILED, NOT_TESTED, PASSED, Finding
from relpos.checking.subject import NotApplicableError, NotTestableError, Subject
from relpos.pretrained.source import one_line

TOLERANCE = 1e-3  # relative to the spread of the outputs
LARGEST = 1e9  # difference that is reported: outputs may be infinite
ATTEMPTS = 3  # inputs: a choice of experts or of top-k may flip by rounding, and not for other inputs


@dataclass(frozen=True)
class Outcome:
    """What a test measured."""

    wrong: bool
    amount: float | None = None
    words: str = ""
    begins: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    diagnosis: str = ""  # in place of the test's own


@dataclass(frozen=True)
class Test:
    """One test, and what it means if no known fault explains its failure."""

    name: str
    title: str
    run: Callable[[Any], Outcome]
    diagnosis: str
    remedy: str = ""
    part: int = 1  # of the check: 1 fingerprints, 2 configuration, 3 trained, 4 ports, 5 lengths

    def finding(self, subject: Subject) -> Finding | None:
        """Make the test; None if the subject has nothing of the kind. What a model's own code raises is a finding."""
        try:
            outcome = self.run(subject)
        except NotApplicableError:
            return None
        except NotTestableError as reason:
            return Finding(self.name, self.title, NOT_TESTED, words=str(reason))
        except Exception as error:  # a model's own code may raise anything
            words = f"{type(error).__name__}: {one_line(error)[:200]}"
            return Finding(self.name, self.title, NOT_TESTED, words=f"its code failed: {words}")
        status = FAILED if outcome.wrong else PASSED
        texts = (outcome.diagnosis or self.diagnosis, self.remedy) if outcome.wrong else ("", "")
        gaps = outcome.evidence.get("gaps")
        return Finding(
            self.name,
            self.title,
            status,
            outcome.amount,
            outcome.words,
            outcome.begins,
            diagnosis=texts[0],
            remedy=texts[1],
            differences=() if gaps is None else tuple(gaps.clamp(max=LARGEST).tolist()),
            losses=tuple(outcome.evidence.get("losses", ())),
            evidence=outcome.evidence,
        )


def difference(computed: Tensor, expected: Tensor) -> Tensor:
    """How far outputs (length, width) are from the expected ones at each position, relative to their spread."""
    expected, computed = expected.double(), computed.double()
    finite = expected.isfinite()
    if not bool(finite.any()):
        raise NotTestableError("the outputs are not finite")
    clean = torch.where(finite, expected, 0.0)
    spread = float((clean - clean.mean(-1, keepdim=True)).pow(2).mean().sqrt()) or 1.0
    gap = torch.where(finite, (computed - expected).abs(), 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return gap.amax(-1) / spread


def compared(
    pairs: Callable[[int], Sequence[tuple[Tensor, Tensor, int]]],
    tolerance: float = TOLERANCE,
    what: str = "position",
    **evidence: Any,
) -> Outcome:
    """Compare outputs that must be equal, on up to `ATTEMPTS` inputs; the closest counts.

    Args:
        pairs: For a seed, the outputs computed, those expected (length, width), and the position of their first token.
        tolerance: Relative to the spread of the outputs.
        what: What the positions are called.
        evidence: What faults are told by.
    """
    best: tuple[float, Tensor, int] | None = None
    for seed in range(ATTEMPTS):
        worst: tuple[float, Tensor, int] | None = None
        for computed, expected, first in pairs(seed):
            gaps = difference(computed, expected)
            if worst is None or float(gaps.max()) > worst[0]:
                worst = (float(gaps.max()), gaps, first)
        assert worst is not None
        if best is None or worst[0] < best[0]:
            best = worst
        if best[0] <= tolerance:
            return Outcome(False, best[0], f"{best[0]:.1g}")
    assert best is not None
    amount, gaps, first = best
    begins = int((gaps > tolerance).nonzero()[0])
    return Outcome(
        True, amount, f"off by {amount:.2g}", f"{what} {begins + first}", {"gaps": gaps, "first": first, **evidence}
    )
