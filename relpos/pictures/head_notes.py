"""Notes on heads whose bias does nothing, or nearly nothing: what a reader should know before looking at colours."""

from collections.abc import Sequence

from relpos.maps.map import FLAT_RANGE, Map

ZERO, FLAT = "bias exactly 0", "practically constant"


def head_note(layer_map: Map, head: int) -> str | None:
    """The note on a head (0 is the first); None for most heads."""
    low, high = layer_map.range(head)
    if layer_map.show == "bias" and low == high == 0:
        return ZERO
    return FLAT if layer_map.show != "weights" and high - low < FLAT_RANGE else None


def count_notes(notes: Sequence[str | None]) -> str:
    """A sentence that counts the heads with each note; empty if there are none."""
    meanings = {ZERO: ZERO, FLAT: f"{FLAT} (values span less than {FLAT_RANGE})"}
    counts = {name: sum(note == name for note in notes) for name in meanings}
    return " ".join(
        f"{counts[name]} of {len(notes)} heads: {words}." for name, words in meanings.items() if counts[name]
    )
