"""The text of a picture: its caption, and the line above it that says what is untrained."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from relpos.maps.diagonals import Share
from relpos.maps.map import Map
from relpos.pictures.head_notes import count_notes, head_note

if TYPE_CHECKING:
    from relpos.pictures.subjects import Subject
    from relpos.runs.run import ModelInput

NO_NUMBER = "–"  # in place of a ratio where nothing varies
SHOWN = {"bias": "the additive bias", "scores": "the attention scores", "weights": "the attention weights"}


def make_caption(subjects: Sequence["Subject"], maps: Sequence[Map], profile: bool) -> str:
    """The caption of a picture.

    Args:
        subjects: What is drawn.
        maps: One map per layer of a single subject, or one per subject.
        profile: Whether values are drawn against distance.

    Returns:
        Sentences: the subject, the values shown, the input and the training, and what was measured.
    """
    first, layer_map = subjects[0], maps[0]
    shown = SHOWN[layer_map.show]
    if profile:
        shown += " against distance"
    if first.tokens is None and layer_map.show != "bias" and not first.layers[0].reads_scores:
        shown += " of equal tokens"
    if not all(drawn.causal for drawn in maps):
        shown += " in both directions"
    if len(subjects) > 1:
        names = "; ".join(subject.heading for subject in subjects)
        start = untrained_line(subjects)
        sentence = f"{names}: {shown}, {layer_map.length} tokens."
        return f"{sentence} {start[0].upper()}{start[1:]}." if start else sentence
    start = f" ({first.untrained})" if first.untrained else ""
    sentence = f"{first.heading}{start}: {shown} {first.ending}"
    sentence = sentence if sentence.endswith(".") else f"{sentence}."
    notes = count_notes([head_note(drawn, head) for drawn in maps for head in range(drawn.heads)])
    size = layer_map.cell
    cells = f"Each cell is the mean of {size} × {size} entries." if size > 1 and not profile else ""
    return " ".join(part for part in (sentence, measures_sentence(maps), notes, cells) if part)


def untrained_line(subjects: Sequence["Subject"]) -> str:
    """The line above a picture that says which of its parameters are untrained; empty if none are."""
    starts = sorted({subject.untrained for subject in subjects if subject.untrained})
    if len(subjects) == 1:
        return next(iter(starts), "")
    named = [", ".join(subject.label for subject in subjects if subject.untrained == start) for start in starts]
    return "; ".join(f"{start} ({labels})" for start, labels in zip(starts, named, strict=True))


def training_sentence(training: dict[str, Any]) -> str:
    """How long a model was trained, from the entries of `Run.training`; empty if unknown."""
    if training.get("steps") is None:
        return ""
    tokens = training["tokens"]
    amount = f"{tokens / 1e6:,.1f} M" if tokens >= 1e6 else f"{tokens:,}"
    loss = f"; held-out loss {training['heldout']:.2f}" if training.get("heldout") is not None else ""
    # The seconds are left out, since they differ from run to run: the same model has the same picture, byte for byte.
    return f"Trained {training['steps']:,} steps, {amount} tokens{loss}."


def input_sentence(sample: "ModelInput", windows: int) -> str:
    """The end of a sentence: on which text."""
    special = f" {sample.framing.sentence}" if len(sample.framing) else ""
    if windows > 1:
        return f"on {windows} windows of {len(sample.ids):,} tokens of held-out text.{special}"
    start = f", from token {sample.offset}" if sample.offset else ""
    return f"on {len(sample.ids)} tokens of {sample.document}{start}.{special}"


def input_words(sample: "ModelInput") -> dict[str, Any]:
    """Where an input comes from, and its first words."""
    return {
        "document": sample.document,
        "offset": sample.offset,
        "tokens": len(sample.ids),
        "first_words": sample.words,
        **({"special_tokens": sample.framing.as_json()} if len(sample.framing) else {}),
    }


def measures_sentence(maps: Sequence[Map]) -> str:
    """Uniformity and context dependence, as a range over the layers where they differ."""
    uniform = _range_words([drawn.uniformity for drawn in maps])
    context = _range_words([drawn.context for drawn in maps if drawn.context is not None])
    if uniform is None and context is None:
        return "The map is constant: uniformity along diagonals and context dependence are not defined."
    sentence = f"Uniformity along diagonals {uniform or NO_NUMBER}"
    return f"{sentence}, context dependence {context}." if context is not None else f"{sentence}."


def _range_words(shares: list[Share]) -> str | None:
    values = [share.overall for share in shares if share.overall is not None]
    if not values:
        return None
    low, high = _number(min(values)), _number(max(values))
    return low if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    """Three decimals, but none for exactly 0 and exactly 1."""
    return f"{value:.0f}" if value in (0.0, 1.0) else f"{value:.3f}"
