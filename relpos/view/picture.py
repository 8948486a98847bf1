"""Draw any encoding or trained model: what `relpos draw` does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from matplotlib.figure import Figure

from relpos.encodings.encoding import Encoding
from relpos.encodings.registry import names
from relpos.errors import unknown
from relpos.view.captions import make_caption, untrained_line
from relpos.view.cells import PIXELS
from relpos.view.contact_sheet import draw_sheet
from relpos.view.defaults import COLUMNS, MOST_LABELS
from relpos.view.figures import WIDTHS, save, write
from relpos.view.heatmaps import draw_heads
from relpos.view.layers import Values
from relpos.view.maps import Map, compute_map
from relpos.view.picture_json import picture_numbers
from relpos.view.profiles import draw_profiles, draw_together
from relpos.view.subjects import Subject, encoding_subject, model_subject

if TYPE_CHECKING:
    from relpos.lab.runs.run import Run

    What = str | Path | Encoding | Run

Show = Literal["bias", "scores", "weights", "profile"]
SHOWS: tuple[Show, ...] = get_args(Show)
SHEET_PIXELS = 128  # most cells per side of a small panel


@dataclass(frozen=True)
class Picture:
    """A drawn figure and the numbers behind it. A notebook displays it."""

    figure: Figure
    maps: list[Map]  # one per layer, or one per encoding
    caption: str
    numbers: dict[str, Any]  # the JSON: what was drawn and measured

    def save(self, path: str | Path) -> Path:
        """Write the figure to a .png, .pdf or .svg file, creating its folder."""
        return save(self.figure, Path(path))

    def _repr_png_(self) -> bytes:
        return write(self.figure, ".png")


def draw(
    what: "What | Sequence[What]",
    *,
    show: Show | None = None,
    layer: int | Literal["last", "all"] = "last",
    head: Sequence[int] = (),
    length: int | None = None,
    causal: bool | None = None,
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
    """Draw what an encoding adds to attention, untrained or in a trained model.

    Args:
        what: An encoding's name or instance, the folder of a run or of a checkpoint, or an open `Run`. A sequence of
            them is drawn as profiles in one panel.
        show: "bias", "scores" (before the softmax), "weights" (after the softmax) or "profile" (value against
            distance). By default the bias, or the scores if the encoding adds no bias.
        layer: "last", "all" (a contact sheet), or a number; 1 is the first layer.
        head: Heads to draw; 1 is the first. All by default.
        length: Number of tokens. By default the trained length, or 512 for an encoding alone.
        causal: Whether a query sees only keys up to its own position. True by default for an encoding alone; False
            draws both directions. A trained model attends as it was trained, and another value is refused.
        text: Text for the model to read. By default a window of its held-out text.
        text_name: Name of the text in the caption.
        seed: Seed of the window of held-out text, or of the start values of an untrained encoding.
        label_tokens: Whether to label the axes with tokens; up to 64 tokens.
        shared_scale: Whether all panels share one colour scale.
        log: Whether a profile has a logarithmic distance axis.
        width: Width of the figure in inches. By default two columns of a printed page.
        heads: Number of heads of an encoding by name; 12 by default.
        head_dim: Size of a head of an encoding by name; 64 by default.
        options: Other options of an encoding by name.
        title: Text before the caption.
        progress: Called with the completed fraction.

    Returns:
        The picture, with its maps and numbers.

    Raises:
        ValueError: If an argument is unknown or out of range, or if arguments exclude each other.
        FileNotFoundError: If there is no such folder, or no finished model in it.

    Example:
        >>> picture = draw("alibi", heads=4, length=64, causal=False)
        >>> picture.maps[0].mean.shape
        (4, 64, 64)
        >>> picture.save("alibi.png")
        PosixPath('alibi.png')
    """
    if show not in (None, *SHOWS):
        raise unknown("kind of picture", str(show), SHOWS)
    several = list(what) if isinstance(what, Sequence) and not isinstance(what, str) else [what]
    _check(several, show, layer, shared_scale, log)
    request = (heads, head_dim, options or {}, length, seed, layer, None if text is None else (text, text_name))
    subjects = [
        encoding_subject(item, *request, causal=causal is not False)
        if isinstance(item, Encoding) or item in names()
        else model_subject(item, *request, input_free=show not in ("scores", "weights"))
        for item in several
    ]
    _check_directions(subjects, causal)
    values = _values(subjects, show)
    chosen = [_chosen(head, subject.layers[0].heads) for subject in subjects]
    labels = _labels(subjects[0], label_tokens, layer == "all" or show == "profile")
    maps = _compute_maps(subjects, values, progress)
    caption = title + make_caption(subjects, maps, show == "profile")
    banner = untrained_line(subjects)
    if len(subjects) > 1:
        by_label = dict(zip((subject.label for subject in subjects), maps, strict=True))
        figure = draw_together(by_label, [number - 1 for number in head] or None, caption, width, log, banner)
    elif show == "profile":
        figure = draw_profiles(maps, chosen[0], caption, width, log, banner)
    elif layer == "all":
        figure = draw_sheet(maps, chosen[0], caption, shared_scale, width, banner)
    else:
        figure = draw_heads(maps[0], chosen[0], caption, labels, shared_scale, width, banner)
    if len(subjects) == 1:
        return Picture(figure, maps, caption, picture_numbers(subjects[0], maps, figure, chosen[0], seed))
    numbers = [
        picture_numbers(subject, [layer_map], figure, its_heads, seed)
        for subject, layer_map, its_heads in zip(subjects, maps, chosen, strict=True)
    ]
    return Picture(figure, maps, caption, {"profiles": numbers})


def _check(several: Sequence[object], show: str | None, layer: str | int, shared_scale: bool, log: bool) -> None:
    """Refuse arguments that exclude each other."""
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
    for place, item in enumerate(several):
        if item in several[:place]:
            raise ValueError(f"{item} is given twice: give each encoding or folder once.")


def _check_directions(subjects: list[Subject], causal: bool | None) -> None:
    """Refuse a direction that is not the model's own, and profiles of different directions in one panel."""
    directions = {subject.label: subject.layers[0].causal for subject in subjects}
    words = {True: "causal", False: "in both directions"}
    for label, own in directions.items():
        if causal not in (None, own):
            raise ValueError(f"{label} was trained with attention {words[own]}: leave causal={causal} out.")
    if len(set(directions.values())) > 1:
        listed = ", ".join(f"{label} {words[own]}" for label, own in directions.items())
        raise ValueError(
            f"one profile shows one direction, and these have several ({listed}): draw them separately, or set causal= "
            "for the encodings without a model."
        )


def _values(subjects: list[Subject], show: Show | None) -> Values:
    """Which values are drawn: bias, scores or weights."""
    kinds: dict[str, Values] = {}
    for subject in subjects:
        without = [layer.number for layer in subject.layers if layer.form is None]
        if show == "bias" and without:
            some = len(without) < len(subject.layers)
            name = f"layer {without[0]} of {subject.label}" if some else f"{subject.encoding} (place: {subject.place})"
            raise ValueError(f"{name} adds no bias: show the scores or the weights.")
        default: Values = "bias" if not without and subject.place == "score" else "scores"
        kinds[subject.label] = show if show is not None and show != "profile" else default
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{kind} of {label}" for label, kind in kinds.items())
        raise ValueError(
            f"one profile shows one kind of value, and these have several ({listed}): draw them separately."
        )
    return next(iter(kinds.values()))


def _chosen(head: Sequence[int], heads: int) -> list[int]:
    """The heads to draw; 0 is the first."""
    for number in head:
        if not 1 <= number <= heads:
            raise ValueError(f"there is no head {number}: give numbers from 1 to {heads}.")
    return [number - 1 for number in head] or list(range(heads))


def _labels(subject: Subject, label_tokens: bool, small: bool) -> list[str] | None:
    """The names of the tokens, if the axes are labelled with them."""
    if not label_tokens:
        return None
    if subject.tokens is None:
        raise ValueError("an encoding without a model has no tokens to name: give a run's folder.")
    if small:
        raise ValueError(
            "tokens can be named on the heat maps of one layer only: leave --label-tokens out, or give a layer."
        )
    if subject.layers[0].length > MOST_LABELS:
        raise ValueError(
            f"{subject.layers[0].length} tokens are too many to be named on the axes: give a length of at most "
            f"{MOST_LABELS}."
        )
    return subject.tokens


def _compute_maps(subjects: list[Subject], values: Values, progress: Callable[[float], None]) -> list[Map]:
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
            compute_map(layer, values, other, pixels, lambda done, place=place: progress((place + done) / len(layers)))  # type: ignore[misc]
        )
    return maps
