"""What is said of a picture: how the model was trained, what it read, what was measured."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from relpos.view.maps import Map
from relpos.view.numbers import Share

if TYPE_CHECKING:
    from relpos.lab.runs.inputs import ModelInput

NO_NUMBER = "–"  # in place of a ratio where nothing varies
ZERO, FLAT = "bias exactly 0", "practically constant"  # what is noted of a head that does nothing, or nearly
# A head whose values differ by less is practically constant: a constant cancels in the softmax, and between two keys so
# small a difference changes the ratio of the weights by a factor of less than e^0.05, 5 %.
SPAN_OF_FLAT = 0.05
SHOWN = {"bias": "the additive bias", "scores": "the attention scores", "weights": "the attention weights"}


def training_sentence(told: dict[str, Any]) -> str:
    """The same in words."""
    if told.get("steps") is None:
        return ""
    tokens = told["tokens"]
    many = f"{tokens / 1e6:,.1f} M" if tokens >= 1e6 else f"{tokens:,}"
    loss = f"; held-out loss {told['heldout']:.2f}" if told.get("heldout") is not None else ""
    # Without the seconds, which are other ones every time: the same model has the same picture, byte for byte.
    return f"Trained {told['steps']:,} steps, {many} tokens{loss}."


def input_words(sample: "ModelInput") -> dict[str, Any]:
    """What was read."""
    return {
        "document": sample.document,
        "offset": sample.offset,
        "tokens": len(sample.ids),
        "first_words": sample.words,
    }


def measured(found: Map, ticks: dict[int, list[float]]) -> dict[str, Any]:
    """The numbers of one layer: of each head, and overall. `ticks` are those of the heads' colour bars."""
    heads = []
    for head in range(found.heads):
        low, high = found.range(head)
        entry: dict[str, Any] = {"head": head + 1, "minimum": low + 0.0, "maximum": high + 0.0}  # no −0
        if head in ticks:
            entry["ticks"] = [tick + 0.0 for tick in ticks[head]]
        entry["uniformity"] = found.uniformity.heads[head]
        entry["context_dependence"] = None if found.context is None else found.context.heads[head]
        entry["note"] = note(found, head)
        heads.append(entry)
    return {
        "layer": found.layer,
        "uniformity": found.uniformity.overall,
        "context_dependence": None if found.context is None else found.context.overall,
        "heads": heads,
    }


def note(found: Map, head: int) -> str | None:
    """What a reader should know of a head (0 is the first) before looking at its colours: nothing, for most."""
    low, high = found.range(head)
    if found.show == "bias" and low == high == 0:
        return ZERO
    return FLAT if found.show != "weights" and high - low < SPAN_OF_FLAT else None


def notes_sentence(notes: Sequence[str | None]) -> str:
    """How many heads do nothing, or nearly, in words; empty if none."""
    meaning = {ZERO: ZERO, FLAT: f"{FLAT} (values span less than {SPAN_OF_FLAT})"}
    counts = {name: sum(one == name for one in notes) for name in meaning}
    return " ".join(
        f"{counts[name]} of {len(notes)} heads: {words}." for name, words in meaning.items() if counts[name]
    )


def measured_sentence(maps: list[Map]) -> str:
    """Uniformity and context dependence in words, from the smallest to the largest of the layers."""
    uniform = _span([found.uniformity for found in maps])
    context = _span([found.context for found in maps if found.context is not None])
    if uniform is None and context is None:
        return "The map is constant: uniformity along diagonals and context dependence are not defined."
    said = f"Uniformity along diagonals {uniform or NO_NUMBER}"
    return f"{said}, context dependence {context}." if context is not None else f"{said}."


def _span(shares: list[Share]) -> str | None:
    values = [share.overall for share in shares if share.overall is not None]
    if not values:
        return None
    low, high = _number(min(values)), _number(max(values))
    return low if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    """Three places; what is exactly 0 or 1 has none."""
    return f"{value:.0f}" if value in (0.0, 1.0) else f"{value:.3f}"
