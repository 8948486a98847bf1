"""Draw any encoding or trained model: what `relpos draw` does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from relpos.encodings.registry import names
from relpos.forms.encoding import Encoding
from relpos.maps.heads.head_classes import HeadClass
from relpos.maps.heads.mass_profiles import MassProfile
from relpos.maps.layer import Quantity
from relpos.maps.map import PIXELS, Map, compute_map, map_of_layer
from relpos.maps.tensors import TensorLayers, is_tensor, open_tensor
from relpos.pictures.attention_pictures import WINDOWS, Drawn, Request, mass_picture, position_picture
from relpos.pictures.captions import make_caption, untrained_line
from relpos.pictures.contact_sheet import draw_sheet
from relpos.pictures.figures import WIDTHS, save, write
from relpos.pictures.heatmaps import draw_heads
from relpos.pictures.offset_tables import offsets_picture
from relpos.pictures.options import COLUMNS, MOST_LABELS, DrawOptions
from relpos.pictures.picture_arrays import ARRAY_FORMATS, Arrays, describe_arrays, map_arrays, save_arrays
from relpos.pictures.picture_checks import (
    BY_DISTANCE,
    check_arguments,
    check_directions,
    check_files,
    check_tensor_arguments,
    chosen_heads,
    token_labels,
    values_shown,
)
from relpos.pictures.picture_json import picture_numbers, save_json
from relpos.pictures.profiles import draw_profiles, draw_together
from relpos.pictures.subjects import (
    Subject,
    encoding_subject,
    label_apart,
    layer_numbers,
    model_subject,
    token_name,
)
from relpos.system.options import takes

SHEET_PIXELS = 128  # most cells per side of a small panel


@dataclass(frozen=True)
class Picture:
    """A drawn figure and the numbers behind it. A notebook displays it.

    Attributes:
        figure: The matplotlib figure.
        maps: One per layer, or one per encoding: `mean`, minimum and maximum of each cell, (heads, cells, cells).
        caption: The text below the figure.
        numbers: What was drawn and measured, as in the JSON file.
        arrays: Every array behind the figure by name, as in the .npz file: "layer1.mean" of a heat map, (heads,
            queries, keys); "layer1.mass", (heads, distances). docs/figures.md lists names, shapes and units.
        profiles: One per layer, if the mass is drawn.
        classes: The class of each head, if the mass is drawn.
    """

    figure: Figure
    maps: list[Map]  # one per layer, or one per encoding
    caption: str
    numbers: dict[str, Any]  # the JSON: what was drawn and measured
    arrays: Arrays
    profiles: list[MassProfile] = field(default_factory=list)  # one per layer, if the mass is drawn
    classes: list[list[HeadClass]] = field(default_factory=list)  # likewise, one per head

    def save(self, path: str | Path) -> Path:
        """Write the figure or its numbers to a file, creating its folder.

        Args:
            path: A .png, .pdf or .svg file for the figure. A .json file for the numbers, with the names and shapes of
                the arrays and the values of small ones; a .npz or .safetensors file for all arrays.

        Returns:
            The path.

        Raises:
            ValueError: The name has another ending.
        """
        file = Path(path)
        check_files(file)
        if file.suffix.lower() == ".json":
            return save_json(file, {**self.numbers, "arrays": describe_arrays(self.arrays)})
        if file.suffix.lower() in ARRAY_FORMATS:
            return save_arrays(file, self.arrays, self.numbers)
        return save(self.figure, file)

    def _repr_png_(self) -> bytes:
        return write(self.figure, ".png")


@takes(DrawOptions)
def draw(options: DrawOptions) -> Picture:
    """Draw what an encoding adds to attention, untrained or in a trained model.

    Returns:
        The picture, with its maps, arrays and numbers.

    Raises:
        ValueError: If an argument is unknown or out of range, or if arguments exclude each other.
        FileNotFoundError: If there is no such folder, or no finished model in it.

    Example:
        >>> picture = draw("alibi", heads=4, length=64, causal=False)
        >>> picture.arrays["layer1.mean"].shape
        (4, 64, 64)
        >>> picture.save("alibi.png"), picture.save("alibi.npz")
        (PosixPath('alibi.png'), PosixPath('alibi.npz'))
    """
    what, show, layer, head, length, causal = (
        *(options.what, options.show, options.layer, options.head),
        *(options.length, options.causal),
    )
    seed, log, shared_scale, title, progress = (
        *(options.seed, options.log, options.shared_scale),
        *(options.title, options.progress),
    )
    width = options.width or WIDTHS[COLUMNS]
    text = None if options.text is None else (options.text, options.text_name)
    if is_tensor(what):
        others = {"length": length, "causal": causal, "text": text, "heads": options.heads, "log": log}
        check_tensor_arguments(others | {"head_dim": options.head_dim, "options": options.options})
        values = open_tensor(what, show, options.tokens)
        return _tensor_picture(values, layer, head, shared_scale, width, title, seed, progress)
    if options.tokens is not None:
        raise ValueError("tokens are the names of a tensor's tokens: leave them out, or add label_tokens=True.")
    several: list[Any] = list(what) if isinstance(what, Sequence) and not isinstance(what, str) else [what]
    check_arguments(several, show, layer, shared_scale, log)
    request = (options.heads, options.head_dim, options.options or {}, length, seed, layer, text)
    subjects = [
        encoding_subject(item, *request, causal=causal is not False)
        if isinstance(item, Encoding) or item in names()
        else model_subject(
            item,
            *request,
            input_free=show not in ("scores", "weights", "mass"),
            windows=WINDOWS if show in ("mass", "position") else 1,
            bos=options.bos,
        )
        for item in several
    ]
    subjects = label_apart(subjects)
    check_directions(subjects, causal)
    chosen = [chosen_heads(head, subject.layers[0].heads) for subject in subjects]
    labels = token_labels(subjects[0], options.label_tokens, layer == "all" or show in BY_DISTANCE)
    how = Request(chosen[0], width, log, untrained_line(subjects), title, seed, progress, shared_scale)
    if subjects[0].tables is not None and show in (None, "position"):
        return _picture(offsets_picture(subjects[0], how))
    if show == "mass" or (show == "position" and _has_no_bias(subjects[0])):
        return _picture((mass_picture if show == "mass" else position_picture)(subjects[0], how))
    show = "profile" if show == "position" else show
    maps = _compute_maps(subjects, values_shown(subjects, show), progress)
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
        numbers = picture_numbers(subjects[0], maps, figure, chosen[0], seed)
        return Picture(figure, maps, caption, numbers, map_arrays(maps))
    profiles = [
        picture_numbers(subject, [layer_map], figure, its_heads, seed)
        for subject, layer_map, its_heads in zip(subjects, maps, chosen, strict=True)
    ]
    arrays: Arrays = {}
    for subject, layer_map in zip(subjects, maps, strict=True):
        arrays |= map_arrays([layer_map], subject.label)
    return Picture(figure, maps, caption, {"profiles": profiles}, arrays)


def _tensor_picture(
    tensor: TensorLayers,
    layer: int | str,
    head: Sequence[int],
    shared_scale: bool,
    width: float,
    title: str,
    seed: int,
    progress: Callable[[float], None],
) -> Picture:
    """Draw values that are there already: heat maps of one layer, or a contact sheet of all."""
    depth, heads = len(tensor.layers), len(tensor.layers[0])
    numbers = layer_numbers(layer, depth)
    chosen = chosen_heads(head, heads)
    maps = []
    for place, number in enumerate(numbers):
        pixels = SHEET_PIXELS if len(numbers) > 1 else PIXELS
        maps.append(compute_map(tensor.layers[number - 1], tensor.show, number, pixels=pixels))
        progress((place + 1) / len(numbers))
    which = "all layers" if len(numbers) > 1 else f"layer {numbers[0]} of {depth}"
    about = {"model": None, "heads": heads, "tokens": tensor.tokens, "input": None}
    subject = Subject(
        "tensor", "score", [], None, "tensor", f"Tensor, {which}", f"of {tensor.length:,} tokens", about, []
    )
    caption = title + make_caption([subject], maps, False)
    if len(maps) > 1:
        figure = draw_sheet(maps, chosen, caption, shared_scale, width)
    else:
        labels = tensor.tokens if tensor.length <= MOST_LABELS else None
        labels = None if labels is None else [token_name(token) for token in labels]
        figure = draw_heads(maps[0], chosen, caption, labels, shared_scale, width)
    return Picture(figure, maps, caption, picture_numbers(subject, maps, figure, chosen, seed), map_arrays(maps))


def _has_no_bias(subject: Subject) -> bool:
    """Whether the positional part of a model is not its bias. An encoding alone is its positional part."""
    return subject.tokens is not None and any(layer.form is None for layer in subject.layers)


def _picture(drawn: Drawn) -> Picture:
    profiles, classes = list(drawn.profiles), [list(heads) for heads in drawn.classes]
    return Picture(drawn.figure, list(drawn.maps), drawn.caption, drawn.numbers, drawn.arrays, profiles, classes)


def _compute_maps(subjects: list[Subject], values: Quantity, progress: Callable[[float], None]) -> list[Map]:
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
            map_of_layer(layer, values, other, pixels, lambda done, place=place: progress((place + done) / len(layers)))  # type: ignore[misc]
        )
    return maps
