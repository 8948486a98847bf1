"""What the bootstrap draws: documents, or blocks where the text is one document."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relpos.lab.data.tokens import Tokens

BLOCKS = 100  # that one document is cut into at most
BLOCK = 256  # tokens of a block at least: neighbouring tokens are not independent
KEPT = 500  # units that are kept in a file at most; of more, neighbours are put together
FEW = 10  # units: an interval over fewer is too narrow, and nothing is tested on them


@dataclass(frozen=True)
class Units:
    """Stretches of a text that are taken to be independent of each other."""

    starts: NDArray[np.int64]  # (units,), where each begins
    block: int | None  # tokens of a block; None where the units are documents

    @property
    def name(self) -> str:
        """What they are."""
        return "documents" if self.block is None else "blocks"

    def of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of the unit that each place of the text belongs to."""
        found: NDArray[np.int64] = np.searchsorted(self.starts, places, side="right") - 1
        return found


def units_of(text: Tokens, longest: int) -> Units:
    """Documents; of a single document, blocks that hold at least one window of the longest length."""
    if len(text.starts) > 1:
        return Units(np.asarray(text.starts, dtype=np.int64), None)
    least = max(BLOCK, -(-len(text) // BLOCKS))
    block = longest * -(-least // longest)  # a multiple: the tokens of one window belong together
    return Units(np.arange(0, len(text), block, dtype=np.int64), block)


def warnings(units: Units, counts: list[int]) -> list[str]:
    """What a reader of the intervals must know; `counts` are the units scored at each length that has a number."""
    if not counts:
        return []
    found, least = [], min(counts)
    if units.block is not None and least > 1:
        found.append(
            f"The text is one document: the 95 % intervals are over its blocks of {units.block:,} tokens ({least} at "
            "least), and say how the numbers would move within this text, not with another."
        )
    if 1 < least < FEW:
        found.append(
            f"The 95 % intervals rest on {least} {units.name}: over fewer than {FEW} they are too narrow to be trusted."
        )
    return found


def unit_sums(
    units: Units, numbers: NDArray[np.int64], sums: NDArray[np.float64], counts: NDArray[np.int64]
) -> dict[str, list[Any]]:
    """Loss (a sum) and tokens of each unit, as they are kept for comparing models on the same text."""
    total = len(units.starts)
    groups, place = np.unique(numbers if total <= KEPT else numbers * KEPT // total, return_inverse=True)
    return {
        "number": groups.tolist(),
        "loss": np.bincount(place, weights=sums).round(6).tolist(),
        "tokens": np.bincount(place, weights=counts).astype(np.int64).tolist(),
    }
