"""One picture of anything: an encoding by name, a run's folder, a checkpoint. What `relpos draw` does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.figure import Figure

from relpos.encodings.encoding import Encoding
from relpos.encodings.registry import card, encoding, names
from relpos.errors import unknown
from relpos.lab.versions import versions
from relpos.view import words
from relpos.view.cells import PIXELS
from relpos.view.figures import WIDTHS, bar_ticks, draw_heads, draw_profiles, draw_sheet, save, write
from relpos.view.layers import MAPS, Layer, encoding_layer, model_layers
from relpos.view.maps import Map, look

if TYPE_CHECKING:
    from relpos.lab.runs import Run
    from relpos.lab.samples import Sample

SHOWS = (*MAPS, "profile")
PACKAGES = ("torch", "numpy", "matplotlib")  # that draw
LENGTH, MOST_LABELS = 512, 64
SHEET_PIXELS = 128  # cells a side of a small panel


@dataclass(frozen=True)
class Picture:
    """A drawn page with the numbers behind it. In a notebook it shows itself."""

    figure: Figure
    maps: list[Map]  # one a layer
    caption: str
    numbers: dict[str, Any]  # what was measured, on what: as in the JSON beside a figure

    def save(self, path: str | Path) -> Path:
        """Write it to a .png, .pdf or .svg file."""
        return save(self.figure, Path(path))

    def _repr_png_(self) -> bytes:
        return write(self.figure, ".png")


@dataclass(frozen=True)
class Subject:
    """What is drawn: layers on an input, the same on another input, and what is known of them."""

    encoding: str
    place: str  # where the encoding enters
    layers: list[Layer]
    others: list[Layer] | None
    told: str  # in a caption, before what is shown
    ending: str  # and after it
    about: dict[str, Any]
    tokens: list[str] | None = None


def draw(
    what: "str | Path | Encoding | Run",
    *,
    show: str | None = None,
    layer: str | int = "last",
    head: Sequence[int] = (),
    length: int | None = None,
    text: str | None = None,
    text_name: str = "the text",
    seed: int = 0,
    tokens: bool = False,
    shared_scale: bool = False,
    width: float = WIDTHS[2],
    heads: int = 12,
    head_dim: int = 64,
    options: Mapping[str, Any] | None = None,
    title: str = "",
    progress: Callable[[float], None] = lambda done: None,
) -> Picture:
    """Draw an encoding by name (or one that was made), or a trained model: a run's folder, a checkpoint, an open `Run`.

    show          bias, scores (before the softmax), weights (after it) or profile (value against distance); bias where
                  the encoding adds one, else scores
    layer         last, all (a contact sheet), or a number; 1 is the first
    head          heads to draw; 1 is the first, all unless given
    length        tokens; the trained length or 512 unless given
    text          what the model reads; a window of its held-out text, chosen by `seed`, unless given
    tokens        name the tokens on the axes, up to 64
    shared_scale  one colour scale for all panels
    width         of the page in inches
    heads, head_dim, options   of an encoding by name
    title         put before the caption
    """
    if show not in (None, *SHOWS):
        raise unknown("kind of picture", show, SHOWS)
    given = None if text is None else (text, text_name)
    if isinstance(what, Encoding) or what in names():
        subject = _of_encoding(what, heads, head_dim, length, seed, options or {}, layer, given)
    else:
        if options:
            raise ValueError("the options of an encoding are given with its name; a trained model has its own.")
        subject = _of_model(what, length, seed, layer, given)
    kind = _kind(subject, show)
    chosen = _chosen(head, subject.layers[0].heads)
    labels = _labels(subject, tokens, layer == "all" or show == "profile")
    count = len(subject.layers)
    maps = [
        look(
            one,
            kind,
            None if subject.others is None else subject.others[place],
            SHEET_PIXELS if count > 1 else PIXELS,
            lambda done, place=place: progress((place + done) / count),  # type: ignore[misc]
        )
        for place, one in enumerate(subject.layers)
    ]
    caption = _caption(subject, maps, kind, show == "profile", title)
    if show == "profile":
        figure = draw_profiles(maps, chosen, caption, width)
    elif layer == "all":
        figure = draw_sheet(maps, chosen, caption, shared_scale, width)
    else:
        figure = draw_heads(maps[0], chosen, caption, labels, shared_scale, width)
    return Picture(figure, maps, caption, _numbers(subject, maps, kind, figure, chosen, seed))


def _of_encoding(
    what: str | Encoding,
    heads: int,
    head_dim: int,
    length: int | None,
    seed: int,
    options: Mapping[str, Any],
    layer: str | int,
    text: tuple[str, str] | None,
) -> Subject:
    """An encoding at its start, or as it was made."""
    if text is not None:
        raise ValueError("an encoding alone reads no text: give a run's folder, or leave the text out.")
    if layer not in ("last", "all", 1):
        raise ValueError(f"an encoding alone has one layer, and no layer {layer}.")
    torch.manual_seed(seed)
    made = what if isinstance(what, Encoding) else encoding(what, heads, head_dim, **options)
    name = what if isinstance(what, str) else type(made).__name__
    first, second = encoding_layer(made, length or LENGTH), encoding_layer(made, length or LENGTH)
    start = ", untrained" if isinstance(what, str) and any(True for _ in made.parameters()) else ""
    size = f"{made.heads} heads of {made.head_dim}" + "".join(f", {key}={value}" for key, value in options.items())
    reads = made.needs_hidden or made.needs_scores
    about = {"model": None, "heads": made.heads, "head_dim": made.head_dim, "options": dict(options), "input": None}
    ending = "for a random input" if reads else ""
    return Subject(name, made.place, [first], [second], f"{name}{start}", f"{ending} ({size})".strip(), about)


def _of_model(
    what: "str | Path | Run", length: int | None, seed: int, layer: str | int, text: tuple[str, str] | None
) -> Subject:
    """A trained model on one input."""
    run = _open(what)
    depth = len(run.model.transformer.h)
    numbers = _layer_numbers(layer, depth)
    shown, other = _inputs(run, length, seed, text)
    layers = model_layers(run.model, shown.ids, numbers)
    others = None if other is None else model_layers(run.model, other.ids, numbers)
    trained = words.training(run)
    preset = "" if run.settings is None else f" {run.settings.model.preset}"
    place = "all layers" if len(numbers) > 1 else f"layer {numbers[0]} of {depth}"
    start = f", from token {shown.offset}" if shown.offset else ""
    ending = f"on {len(shown.ids)} tokens of {shown.document}{start}. {words.training_sentence(trained)}"
    about = {
        "model": {
            "folder": str(run.folder),
            "preset": preset.strip() or None,
            "layers": depth,
            "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
            "position": dict(run.model.config.position),
        },
        "training": trained or None,
        "input": words.input_words(shown),
        "compared_with": None if other is None else words.input_words(other),
    }
    named = [_token_name(run.tokenizer.decode([int(one)])) for one in shown.ids[: MOST_LABELS + 1]]
    told = f"{run.encoding}, GPT-2{preset}, {place}"
    return Subject(run.encoding, card(run.encoding).place, layers, others, told, ending.strip(), about, named)


def _open(what: "str | Path | Run") -> "Run":
    if not isinstance(what, str | Path):
        return what
    if not Path(what).is_dir():
        if Path(what).exists():
            raise ValueError(f"{what} is a file: give the folder of a run or of a checkpoint.")
        if len(Path(what).parts) > 1:
            raise FileNotFoundError(f"there is no folder {what}.")
        raise unknown("encoding or folder", str(what), names())
    from relpos.lab.runs import open_run

    return open_run(what)


def _inputs(run: "Run", length: int | None, seed: int, text: tuple[str, str] | None) -> "tuple[Sample, Sample | None]":
    """What the model reads, and another input of the same length where there is one."""
    from relpos.lab.samples import heldout_samples, text_sample

    if text is None:
        shown, *others = heldout_samples(run, length or run.trained_length or LENGTH, seed)
        return shown, others[0] if others else None
    shown = text_sample(run, *text, length)
    try:
        return shown, heldout_samples(run, len(shown.ids), seed, 1)[0]
    except (ValueError, OSError):  # the text is longer than the held-out part, or the corpus is elsewhere
        return shown, None


def _layer_numbers(layer: str | int, depth: int) -> list[int]:
    if layer == "all":
        return list(range(1, depth + 1))
    if layer == "last":
        return [depth]
    if not str(layer).isdigit() or not 1 <= int(layer) <= depth:
        raise ValueError(f"there is no layer {layer}: give last, all, or a number from 1 to {depth}.")
    return [int(layer)]


def _kind(subject: Subject, show: str | None) -> str:
    """Which map is looked at: bias, scores or weights."""
    adds = subject.layers[0].form is not None
    if show == "bias" and not adds:
        raise ValueError(
            f"{subject.encoding} (enters at: {subject.place}) adds no bias: show the scores or the weights."
        )
    return show if show in MAPS else "bias" if adds and subject.place == "score" else "scores"


def _chosen(head: Sequence[int], heads: int) -> list[int]:
    """The heads to draw, 0 the first."""
    for one in head:
        if not 1 <= one <= heads:
            raise ValueError(f"there is no head {one}: give numbers from 1 to {heads}.")
    return [one - 1 for one in head] or list(range(heads))


def _labels(subject: Subject, tokens: bool, small: bool) -> list[str] | None:
    if not tokens:
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


def _token_name(token: str) -> str:
    """A token as it can be read on an axis: blanks and line ends made visible, long ones cut."""
    shown = token.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥").replace("\r", "⏎")
    return shown if len(shown) <= 12 else shown[:11] + "…"


def _caption(subject: Subject, maps: list[Map], kind: str, profile: bool, title: str) -> str:
    what = words.SHOWN[kind]
    equal = subject.tokens is None and kind != "bias" and not subject.layers[0].reads_scores
    shown = f"{what} against distance" if profile else what
    said = f"{subject.told}: {shown}{' of equal tokens' if equal else ''} {subject.ending}"
    said = said if said.endswith(".") else f"{said}."
    cells = f" A dot is the mean of {maps[0].cell} × {maps[0].cell}." if maps[0].cell > 1 and not profile else ""
    return f"{title}{said} {words.measured_sentence(maps)}{cells}"


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
        "layers": [words.measured(found, ticks) for found in maps],
    }
