"""The text of a picture: its caption, also for LaTeX, the line above it on untrained parameters, and notes on heads."""

import re
from collections.abc import Sequence

from relpos.maps.diagonals import Share
from relpos.maps.map import FLAT_RANGE, Map
from relpos.maps.subject import View

ZERO, FLAT = "bias exactly 0", "practically constant"  # notes on heads whose bias does nothing, or nearly nothing
NO_NUMBER = "–"  # in place of a ratio where nothing varies
LATEX = {  # what LaTeX would read otherwise, or does not print with every font
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "−": "$-$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "δ": r"$\delta$",
    "–": "--",
    "“": "``",
    "”": "''",
    "…": r"\ldots{}",
    " %": r"\,\%",
}
SHOWN = {"bias": "the additive bias", "scores": "the attention scores", "weights": "the attention weights"}


def make_caption(views: Sequence[View], maps: Sequence[Map], profile: bool, heads: Sequence[Sequence[int]] = ()) -> str:
    """The caption of a picture: the subject, the values shown, the input and the training, and what was measured.

    There is one map per layer of a single view, or one per view, of which `heads` (0 is the first) are drawn. A profile
    shows values against distance.
    """
    first, layer_map = views[0], maps[0]
    if len(views) > 1:
        return _several_caption(views, maps, profile, heads)
    start = f" ({first.untrained})" if first.untrained else ""
    sentence = f"{first.heading}{start}: {_shown(first, maps, profile)} {first.ending}"
    sentence = sentence if sentence.endswith(".") else f"{sentence}."
    notes = count_notes([head_note(drawn, head) for drawn in maps for head in range(drawn.heads)])
    size = layer_map.cell
    cells = f"Each cell is the mean of {size} × {size} entries." if size > 1 and not profile else ""
    return " ".join(part for part in (sentence, measures_sentence(maps), notes, cells) if part)


def _shown(view: View, maps: Sequence[Map], profile: bool) -> str:
    """What is shown of a view, in words."""
    shown = SHOWN[maps[0].show]
    if profile:
        shown += " against distance"
    if view.kind == "encoding" and maps[0].show != "bias" and not view.layers[0].reads_scores:
        shown += " of equal tokens"
    return shown if all(drawn.causal for drawn in maps) else f"{shown} in both directions"


def _several_caption(views: Sequence[View], maps: Sequence[Map], profile: bool, heads: Sequence[Sequence[int]]) -> str:
    """The caption of several views: those that show the same are named together."""
    names: dict[str, list[str]] = {}
    for view, layer_map in zip(views, maps, strict=True):
        names.setdefault(_shown(view, [layer_map], profile), []).append(view.heading)
    subjects = ". ".join(f"{'; '.join(headings)}: {shown}" for shown, headings in names.items())
    lengths = sorted({layer_map.length for layer_map in maps})
    tokens = f"{lengths[0]:,} tokens" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,} tokens"
    drawn = {tuple(chosen) for chosen in heads}
    some = f", {_heads_words(min(drawn))}" if len(drawn) == 1 and len(min(drawn)) < maps[0].heads else ""
    start = untrained_line(views)
    return f"{subjects}. {tokens}{some}." + (f" {start[0].upper()}{start[1:]}." if start else "")


def _heads_words(heads: Sequence[int]) -> str:
    """Some heads in words; 0 is the first."""
    *before, last = [str(head + 1) for head in heads]
    return f"heads {', '.join(before)} and {last}" if before else f"head {last}"


def latex(caption: str) -> str:
    """A caption as the text of \\caption{…}.

    Example:
        >>> print(latex("kerple_log: 2 × 2 entries, −3 to 95 %"))
        kerple\\_log: 2 $\\times$ 2 entries, $-$3 to 95\\,\\%
    """
    return re.sub(
        "|".join(map(re.escape, sorted(LATEX, key=len, reverse=True))), lambda found: LATEX[found[0]], caption
    )


def untrained_line(views: Sequence[View]) -> str:
    """The line above a picture that says which of its parameters are untrained; empty if none are."""
    starts = sorted({view.untrained for view in views if view.untrained})
    if len(views) == 1:
        return next(iter(starts), "")
    named = [", ".join(view.label for view in views if view.untrained == start) for start in starts]
    return "; ".join(f"{start} ({labels})" for start, labels in zip(starts, named, strict=True))


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


def head_note(layer_map: Map, head: int) -> str | None:
    """The note on a head (0 is the first); None for most heads."""
    low, high = layer_map.range(head)
    if layer_map.show == "bias" and low == high == 0:
        return ZERO
    return FLAT if layer_map.show != "weights" and high - low < FLAT_RANGE else None


def count_notes(notes: Sequence[str | None]) -> str:
    """A sentence that counts the heads with each note; empty if there are none.

    It does not begin with a number: the sentence before it ends with one.
    """
    meanings = {ZERO: ZERO, FLAT: f"{FLAT} (values span less than {FLAT_RANGE})"}
    counts = {name: sum(note == name for note in notes) for name in meanings}
    return " ".join(
        f"{words[0].upper()}{words[1:]}: {counts[name]} of {len(notes)} heads."
        for name, words in meanings.items()
        if counts[name]
    )
