"""One picture of anything: an encoding by name, a run's folder, a checkpoint. What `relpos draw` does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from relpos.encodings.encoding import Encoding
from relpos.encodings.registry import names
from relpos.errors import unknown
from relpos.system.versions import versions
from relpos.view import captions
from relpos.view.cells import PIXELS
from relpos.view.defaults import COLUMNS, MOST_LABELS
from relpos.view.figures import WIDTHS, save, write
from relpos.view.heatmaps import bar_ticks, draw_heads, draw_sheet
from relpos.view.layers import MAPS
from relpos.view.maps import Map, look
from relpos.view.profiles import draw_profiles, draw_together
from relpos.view.subjects import Subject, encoding_subject, model_subject

if TYPE_CHECKING:
    from relpos.lab.runs.run import Run

    What = str | Path | Encoding | Run

SHOWS = (*MAPS, "profile")
PACKAGES = ("torch", "numpy", "matplotlib")  # that draw
SHEET_PIXELS = 128  # cells a side of a small panel


@dataclass(frozen=True)
class Picture:
    """A drawn page with the numbers behind it. In a notebook it shows itself."""

    figure: Figure
    maps: list[Map]  # one per layer, or per encoding
    caption: str
    numbers: dict[str, Any]  # what was measured, on what: as in the JSON beside a figure

    def save(self, path: str | Path) -> Path:
        """Write it to a .png, .pdf or .svg file."""
        return save(self.figure, Path(path))

    def _repr_png_(self) -> bytes:
        return write(self.figure, ".png")


def draw(
    what: "What | Sequence[What]",
    *,
    show: str | None = None,
    layer: str | int = "last",
    head: Sequence[int] = (),
    length: int | None = None,
    text: str | None = None,
    text_name: str = "the text",
    seed: int = 0,
    label_tokens: bool = False,
    shared_scale: bool = False,
    log: bool = False,
    width: float = WIDTHS[COLUMNS],
    heads: int | None = None,
    head_dim: int | None = None,
    options: Mapping[str, Any] | None = None,
    title: str = "",
    progress: Callable[[float], None] = lambda done: None,
) -> Picture:
    """Draw an encoding by name (or one that was made), or a trained model: a run's folder, a checkpoint, an open `Run`.

    Args:
        what: What to draw; several are drawn as profiles in one panel.
        show: bias, scores (before the softmax), weights (after it) or profile (value against distance); bias where the
            encoding adds one, else scores, unless given.
        layer: last, all (a contact sheet), or a number; 1 is the first.
        head: Heads to draw; 1 is the first, all unless given.
        length: Number of tokens; the trained length or 512 unless given.
        text: What the model reads; a window of its held-out text, chosen by `seed`, unless given.
        text_name: What the caption calls the text.
        seed: Of the window of held-out text; of the start values of an untrained encoding.
        label_tokens: Name the tokens on the axes, up to 64.
        shared_scale: One colour scale for all panels.
        log: A logarithmic distance axis in a profile.
        width: Of the page in inches.
        heads: Number of heads of an encoding by name; 12 unless given.
        head_dim: Size of its heads; 64 unless given.
        options: Other options of an encoding by name.
        title: Put before the caption.
        progress: Called with the share that is done.

    Returns:
        The picture, with its maps and numbers.

    Raises:
        ValueError: If what is asked for does not exist or does not go together.
    """
    if show not in (None, *SHOWS):
        raise unknown("kind of picture", show, SHOWS)
    several = list(what) if isinstance(what, Sequence) and not isinstance(what, str) else [what]
    _check(several, show, layer, shared_scale, log)
    made = (heads, head_dim, options or {}, length, seed, layer, None if text is None else (text, text_name))
    subjects = [
        encoding_subject(one, *made)
        if isinstance(one, Encoding) or one in names()
        else model_subject(one, *made, input_free=show not in ("scores", "weights"))
        for one in several
    ]
    kind = _kind(subjects, show)
    chosen = [_chosen(head, subject.layers[0].heads) for subject in subjects]
    labels = _labels(subjects[0], label_tokens, layer == "all" or show == "profile")
    maps = _look(subjects, kind, progress)
    caption = title + _caption(subjects, maps, kind, show == "profile")
    banner = _banner(subjects)
    if len(subjects) > 1:
        named = dict(zip((subject.label for subject in subjects), maps, strict=True))
        figure = draw_together(named, [one - 1 for one in head] or None, caption, width, log, banner)
    elif show == "profile":
        figure = draw_profiles(maps, chosen[0], caption, width, log, banner)
    elif layer == "all":
        figure = draw_sheet(maps, chosen[0], caption, shared_scale, width, banner)
    else:
        figure = draw_heads(maps[0], chosen[0], caption, labels, shared_scale, width, banner)
    if len(subjects) == 1:
        return Picture(figure, maps, caption, _numbers(subjects[0], maps, kind, figure, chosen[0], seed))
    found = [
        _numbers(one, [its], kind, figure, all_, seed) for one, its, all_ in zip(subjects, maps, chosen, strict=True)
    ]
    return Picture(figure, maps, caption, {"profiles": found})


def _check(several: Sequence[object], show: str | None, layer: str | int, shared_scale: bool, log: bool) -> None:
    """What goes together."""
    if not several:
        raise ValueError("nothing to draw: give an encoding's name or a folder.")
    if show == "profile" and shared_scale:
        raise ValueError("a profile has no colours to share: leave --shared-scale out.")
    if show != "profile" and log:
        raise ValueError("--log is for the distances of a profile: add --show profile, or leave it out.")
    if len(several) == 1:
        return
    if show != "profile":
        raise ValueError(f"{len(several)} encodings can be drawn together as profiles only: add --show profile.")
    if layer == "all":
        raise ValueError("several encodings are drawn in one panel: give one layer, not all.")
    for place, one in enumerate(several):
        if one in several[:place]:
            raise ValueError(f"{one} is given twice: give each encoding or folder once.")


def _kind(subjects: list[Subject], show: str | None) -> str:
    """Which map is looked at: bias, scores or weights."""
    kinds = {}
    for subject in subjects:
        adds = subject.layers[0].form is not None
        if show == "bias" and not adds:
            raise ValueError(
                f"{subject.encoding} (enters at: {subject.place}) adds no bias: show the scores or the weights."
            )
        kinds[subject.label] = show if show in MAPS else "bias" if adds and subject.place == "score" else "scores"
    if len(set(kinds.values())) > 1:
        told = ", ".join(f"{kind} of {label}" for label, kind in kinds.items())
        raise ValueError(f"one profile shows one kind of value, and these have several ({told}): draw them separately.")
    return next(iter(kinds.values()))


def _chosen(head: Sequence[int], heads: int) -> list[int]:
    """The heads to draw, 0 the first."""
    for one in head:
        if not 1 <= one <= heads:
            raise ValueError(f"there is no head {one}: give numbers from 1 to {heads}.")
    return [one - 1 for one in head] or list(range(heads))


def _labels(subject: Subject, label_tokens: bool, small: bool) -> list[str] | None:
    if not label_tokens:
        return None
    if subject.tokens is None:
        raise ValueError("an encoding alone reads no tokens that could be named: give a run's folder.")
    if small:
        raise ValueError("tokens can be named on the heat maps of one layer only.")
    if subject.layers[0].length > MOST_LABELS:
        raise ValueError(
            f"{subject.layers[0].length} tokens are too many to be named on the axes: give a length of at most "
            f"{MOST_LABELS}."
        )
    return subject.tokens


def _look(subjects: list[Subject], kind: str, progress: Callable[[float], None]) -> list[Map]:
    """The maps of all layers of all subjects."""
    layers = [
        (layer, None if subject.others is None else subject.others[place])
        for subject in subjects
        for place, layer in enumerate(subject.layers)
    ]
    pixels = SHEET_PIXELS if len(layers) > 1 else PIXELS
    maps = []
    for place, (layer, other) in enumerate(layers):
        maps.append(
            look(layer, kind, other, pixels, lambda done, place=place: progress((place + done) / len(layers)))  # type: ignore[misc]
        )
    return maps


def _banner(subjects: list[Subject]) -> str:
    """What stands above the picture: which of its numbers nobody has trained."""
    starts = sorted({subject.untrained for subject in subjects if subject.untrained})
    if len(subjects) == 1:
        return next(iter(starts), "")
    named = [", ".join(subject.label for subject in subjects if subject.untrained == start) for start in starts]
    return "; ".join(f"{start} ({labels})" for start, labels in zip(starts, named, strict=True))


def _caption(subjects: list[Subject], maps: list[Map], kind: str, profile: bool) -> str:
    what = captions.SHOWN[kind]
    first = subjects[0]
    equal = first.tokens is None and kind != "bias" and not first.layers[0].reads_scores
    shown = f"{what}{' against distance' if profile else ''}{' of equal tokens' if equal else ''}"
    if len(subjects) > 1:
        start = _banner(subjects)
        together = f"{'; '.join(subject.told for subject in subjects)}: {shown}, {maps[0].length} tokens."
        return f"{together} {start[0].upper()}{start[1:]}." if start else together
    start = f" ({first.untrained})" if first.untrained else ""
    said = f"{first.told}{start}: {shown} {first.ending}"
    said = said if said.endswith(".") else f"{said}."
    notes = captions.notes_sentence([captions.note(found, head) for found in maps for head in range(found.heads)])
    size = maps[0].cell
    cells = f"Each cell is the mean of {size} × {size} entries." if size > 1 and not profile else ""
    return " ".join(part for part in (said, captions.measured_sentence(maps), notes, cells) if part)


def _numbers(
    subject: Subject, maps: list[Map], kind: str, figure: Figure, chosen: list[int], seed: int
) -> dict[str, Any]:
    """What stands in the JSON."""
    bars = bar_ticks(figure)
    ticks = dict(zip(chosen, bars if len(bars) > 1 else bars * len(chosen), strict=False))
    return {
        "encoding": subject.encoding,
        "shows": kind,
        "length": maps[0].length,
        "cell": maps[0].cell,
        **subject.about,
        "seed": seed,
        "versions": versions(PACKAGES),
        "layers": [captions.measured(found, ticks) for found in maps],
    }
