"""Draw any encoding, trained model or tensor: what `relpos draw` does."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast, get_args

from matplotlib.figure import Figure

from relpos.forms.bias import RankOne, Scaled, Toeplitz, terms
from relpos.maps.layer import Layer, Quantity
from relpos.maps.map import NUMBERS, PER_BLOCK, PIXELS, Map, compute_map, map_of_layer, offset_map
from relpos.maps.model_subject import open_view
from relpos.maps.subject import Request, TensorSubject, View, is_tensor, label_apart, three_heads, token_name
from relpos.pictures.captions import make_caption, untrained_line
from relpos.pictures.draw_options import (
    BY_DISTANCE,
    COLUMNS,
    MOST_LABELS,
    WIDTHS,
    DrawOptions,
    check_combination,
    check_heads,
    listed,
)
from relpos.pictures.encodings_page import gallery_picture
from relpos.pictures.map_figures import draw_maps, draw_sheet, draw_side_by_side, name_offsets
from relpos.pictures.mass_figures import mass_picture
from relpos.pictures.picture import Arrays, Picture, head_ticks, layer_arrays, map_arrays, map_numbers
from relpos.pictures.position_figures import scores_picture
from relpos.pictures.printed_page import Look
from relpos.pictures.profile_figures import draw_profiles, draw_together
from relpos.system.options import takes

PAGE = 2**25  # entries of maps that are computed in the time in which a page is drawn and written
WINDOWS = 4  # of held-out text, over which means are taken
SHEET_PIXELS = 128  # most cells per side of a small panel
NOT_OF_TENSORS = ("length", "causal", "text", "heads", "log", "head_dim", "options")


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
    what = options.what
    if is_tensor(what):
        return _tensor_picture(options)
    if options.tokens is not None:
        raise ValueError("tokens are the names of a tensor's tokens: leave them out, or add label_tokens=True.")
    several = listed(what)
    check_combination(several, options)
    if options.all:
        return gallery_picture(options)
    views = label_apart([_open_view(item, options) for item in several])
    check_directions(views, options.causal)
    first = views[0]
    if options.name:
        first.heading = f"{options.name} ({first.encoding}){first.heading.removeprefix(first.encoding)}"
    few = len(views) > 1 or (options.show == "profile" and options.layer == "all")
    heads = [_chosen_heads(options, view.heads, few) for view in views]
    labels, banner = _token_labels(first, options), untrained_line(views)
    look = replace(_look(options, heads[0]), banner=banner, labels=labels)
    return _view_picture(first, look, options) if len(views) == 1 else _several_picture(views, heads, look, options)


def _several_picture(views: list[View], heads: list[list[int]], look: Look, options: DrawOptions) -> Picture:
    """Several encodings or models: profiles in one panel per head, or heat maps side by side."""
    profile = options.show == "profile"
    maps = _compute_maps(views, options.show, options.progress, mixed=not profile)
    look = replace(look, caption=options.title + make_caption(views, maps, profile, heads))
    encodings, labels = [view.encoding for view in views], [view.label for view in views]
    labels = labels if len(set(encodings)) < len(views) else encodings  # of several runs of one encoding, their names
    by_label = dict(zip(labels, maps, strict=True))
    figure = (draw_together if profile else draw_side_by_side)(by_label, heads, look)
    numbers, arrays = [], Arrays()
    for view, (label, layer_map) in zip(views, by_label.items(), strict=True):
        numbers.append(map_numbers(view, [layer_map], {}, options.seed))
        arrays |= map_arrays([layer_map], label)
    return Picture(figure, maps, look.caption, {"profiles" if profile else "maps": numbers}, arrays)


def _view_picture(view: View, look: Look, options: DrawOptions) -> Picture:
    show = options.show
    if view.tables is not None and show in (None, "position"):
        return _offsets_picture(view, look, options)
    if show == "mass":
        return mass_picture(view, look, options)
    # The positional part of a model is its bias if it adds one; an encoding alone is its positional part.
    if show == "position" and view.kind == "model" and any(layer.form is None for layer in view.layers):
        picture = _term_picture if "embedding" in view.place else scores_picture
        return picture(view, look, options)
    profile = show in ("profile", "position")
    maps = _compute_maps([view], show, options.progress)
    look = replace(look, caption=options.title + make_caption([view], maps, profile))
    sheet = draw_sheet if options.layer == "all" else draw_maps
    return _maps_picture(view, maps, look, options, draw_profiles if profile else sheet)


def _open_view(item: Any, options: DrawOptions) -> View:
    same = ("length", "layer", "seed", "causal", "heads", "head_dim")
    request = Request(
        **{name: getattr(options, name) for name in same},
        options=options.options or {},
        text=None if options.text is None else (options.text, options.text_name),
        windows=WINDOWS if options.show in ("mass", "position") else 1,
        input_free=options.show not in ("scores", "weights", "mass"),
    )
    return open_view(item, request, options.bos)


def _look(options: DrawOptions, heads: Sequence[int]) -> Look:
    width = options.width or WIDTHS[COLUMNS]
    return Look(heads, captioned=options.caption, width=width, log=options.log, shared=options.shared_scale)


def _maps_picture(
    view: View,
    maps: list[Map],
    look: Look,
    options: DrawOptions,
    draw_figure: Callable[[Sequence[Map], Look], Figure] = draw_maps,
) -> Picture:
    figure = draw_figure(maps, look)
    numbers = map_numbers(view, maps, head_ticks(figure, look.chosen(maps[0].heads)), options.seed)
    return Picture(figure, maps, look.caption, numbers, map_arrays(maps))


def _tensor_picture(options: DrawOptions) -> Picture:
    """Heat maps of values that are there already."""
    for name in NOT_OF_TENSORS:
        value = getattr(options, name)
        if value not in (None, False) or (name == "causal" and value is not None):
            raise ValueError(f"{name} is not for a tensor, which is drawn as it is: leave {name} out.")
    tensor = TensorSubject(options.what, options.show, options.tokens)
    view = tensor.view(Request(layer=options.layer))
    look = _look(options, _chosen_heads(options, view.heads))
    maps = []
    for place, number in enumerate(view.numbers):
        pixels = SHEET_PIXELS if len(view.numbers) > 1 else PIXELS
        values = view.all_values(tensor.default_show, number)
        maps.append(compute_map(values, tensor.default_show, number, pixels=pixels))
        options.progress((place + 1) / len(view.numbers))
    look = replace(look, caption=options.title + make_caption([view], maps, False))
    if view.tokens is not None and view.length <= MOST_LABELS:
        look = replace(look, labels=[token_name(token) for token in view.tokens])
    return _maps_picture(view, maps, look, options)


def _term_picture(view: View, look: Look, options: DrawOptions) -> Picture:
    """The position–position term of learned or sinusoidal positions, as heat maps."""
    layers = view.equal()
    maps = []
    for place, layer in enumerate(layers):
        maps.append(map_of_layer(layer, "scores"))
        options.progress((place + 1) / len(layers))
    caption = (
        f"{options.title}{view.heading}: the position–position term δq·δk of the scores, for tokens that are all "
        f"the mean of the input and differ in their positions only; {layers[0].length:,} positions."
    )
    picture = _maps_picture(view, maps, replace(look, caption=caption), options)
    return replace(picture, numbers=picture.numbers | {"shows": "position"})


def _offsets_picture(view: View, look: Look, options: DrawOptions) -> Picture:
    """The bias of each head by the offset of two patches, as heat maps."""
    assert view.tables is not None
    tables = {layer.number: table for layer, table in zip(view.layers, view.tables, strict=True)}
    maps = [offset_map(number, table) for number, table in tables.items()]
    caption = (
        f"{options.title}{view.heading}: the additive bias by offset of two patches, rows (down) and columns "
        f"(across) of the query minus those of the key, {view.ending}"
    )
    picture = _maps_picture(view, maps, replace(look, caption=caption), options)
    if len(maps) == 1:
        name_offsets(picture.figure, maps[0].length)
    options.progress(1.0)
    arrays: Arrays = {}
    for number, table in tables.items():
        arrays |= layer_arrays(number, {"offset_bias": table.float()})
    return replace(picture, numbers=picture.numbers | {"shows": "offsets"}, arrays=arrays)


def _compute_maps(
    views: list[View], show: str | None, progress: Callable[[float], None], mixed: bool = False
) -> list[Map]:
    """The maps of all layers of all views: of one kind of values, or if `mixed` of the default kind of each view."""
    kinds = _quantities(views, show, mixed)
    jobs: list[tuple[Layer, Layer | None, Quantity]] = []
    for view, kind in zip(views, kinds, strict=True):
        others: Sequence[Layer | None] = view.others or [None] * len(view.layers)
        jobs += [(layer, other, kind) for layer, other in zip(view.layers, others, strict=True)]
    pixels = SHEET_PIXELS if len(jobs) > len(views) else PIXELS
    share = _computing_share(jobs, pixels)
    maps = []
    for place, (layer, other, kind) in enumerate(jobs):

        def done(part: float, before: int = place) -> None:
            progress(share * (before + part) / len(jobs))

        maps.append(map_of_layer(layer, kind, other, pixels, done))
    return maps


def _computing_share(jobs: Sequence[tuple[Layer, Layer | None, Quantity]], pixels: int) -> float:
    """The share of the time that computing some maps takes, of computing, drawing and writing them."""
    work = 0
    for layer, other, kind in jobs:
        forms = terms(layer.form)
        closed = bool(forms) and all(isinstance(form, Toeplitz | RankOne | Scaled) for form in forms)
        entries = layer.length**2 // (2 if layer.causal else 1)
        if kind == "bias" and layer.length > pixels and closed:  # from the form, not entry by entry
            entries = min(entries, PAGE // 2 // layer.heads)
        else:  # where all heads are computed together, in smaller blocks
            together = 1 if kind == "scores" and not layer.reads_scores else layer.heads
            entries += PER_BLOCK * together * layer.length**2 // NUMBERS
        work += layer.heads * entries * (2 if other else 1)
    return work / (work + PAGE)


def check_directions(views: list[View], causal: bool | None) -> None:
    """Refuse a direction that is not the model's own, and profiles of different directions in one panel."""
    directions = {view.label: view.causal for view in views}
    words = {True: "causal", False: "in both directions"}
    for label, trained in directions.items():
        if causal not in (None, trained):
            raise ValueError(f"{label} was trained with attention {words[trained]}: leave causal={causal} out.")
    if len(set(directions.values())) > 1:
        listed = ", ".join(f"{label} {words[direction]}" for label, direction in directions.items())
        raise ValueError(
            f"one profile shows one direction, and these have several ({listed}): draw them separately, or set causal= "
            "for the encodings without a model."
        )


def _quantities(views: list[View], show: str | None, mixed: bool) -> list[Quantity]:
    """Which values of each view are drawn: bias, scores or weights."""
    kinds: dict[str, Quantity] = {}
    for view in views:
        without = [layer.number for layer in view.layers if layer.form is None]
        if show == "bias" and without:
            some = len(without) < len(view.layers)
            name = f"layer {without[0]} of {view.label}" if some else f"{view.encoding} (place: {view.place})"
            raise ValueError(f"{name} adds no bias: show the scores or the weights.")
        default: Quantity = "bias" if not without and view.place == "score" else "scores"
        kinds[view.label] = cast(Quantity, show) if show in get_args(Quantity) else default
    if len(set(kinds.values())) > 1 and not mixed:
        words = ", ".join(f"{kind} of {label}" for label, kind in kinds.items())
        raise ValueError(
            f"one profile shows one kind of value, and these have several ({words}): draw them separately, or leave "
            "--show profile out."
        )
    return list(kinds.values())


def _chosen_heads(options: DrawOptions, heads: int, few: bool = False) -> list[int]:
    """The heads to draw; 0 is the first. Where only a few have room, three of them."""
    check_heads(options.head, heads)
    return [number - 1 for number in options.head] or (three_heads(heads) if few else list(range(heads)))


def _token_labels(view: View, options: DrawOptions) -> list[str] | None:
    """The names of the tokens, if the axes are labelled with them."""
    if not options.label_tokens:
        return None
    if view.kind == "encoding":
        raise ValueError("an encoding without a model has no tokens to name: give a run's folder.")
    if options.layer == "all" or options.show in BY_DISTANCE:
        raise ValueError(
            "tokens can be named on the heat maps of one layer only: leave --label-tokens out, or give a layer."
        )
    if view.length > MOST_LABELS:
        raise ValueError(
            f"{view.length} tokens are too many to be named on the axes: give a length of at most {MOST_LABELS}."
        )
    return [token_name(token) for token in view.tokens or []]
