"""The subject of a picture: an encoding by name, or a trained model, as layers on an input."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from relpos.encodings.registry import encoding, names
from relpos.forms.encoding import Encoding
from relpos.maps.heads.positional_part import equal_tokens
from relpos.maps.layer import Layer, encoding_layer, layers_without_input, model_layers, open_layer
from relpos.maps.map import PIXELS
from relpos.pictures import captions
from relpos.pictures.options import HEAD_DIM, HEADS, LENGTH, MOST_LABELS
from relpos.system.errors import unknown
from relpos.system.memory import check_memory

if TYPE_CHECKING:
    from relpos.runs.run import ModelInput, Run


@dataclass(frozen=True)
class Subject:
    """Layers on an input, the same layers on another input, and how a picture describes them."""

    encoding: str
    place: str  # where the encoding acts
    layers: list[Layer]
    others: list[Layer] | None  # on another input, for the context dependence
    label: str  # its name in a legend
    heading: str  # the beginning of its caption
    ending: str  # and what follows the name of the values shown
    about: dict[str, Any]  # its part of the picture's JSON
    tokens: list[str] | None = None  # names of the first tokens, of a model
    untrained: str = ""  # description of its parameters if they are untrained
    mean_ending: str = ""  # the ending for a mean over all windows; the same if empty
    more: tuple[Callable[[], list[Layer]], ...] = ()  # the layers on further windows of text, for means over text
    equal: Callable[[], list[Layer]] | None = None  # the layers of a model for tokens that differ in position only
    tables: list[torch.Tensor] | None = None  # one per layer: the bias over 2-D offsets, (heads, rows, columns)

    def windows(self) -> Iterator[list[Layer]]:
        """The layers on each window of text, one window at a time."""
        yield self.layers
        for compute in self.more:
            yield compute()


def label_apart(subjects: list[Subject]) -> list[Subject]:
    """Number the labels that several subjects share, as runs of the same name in different folders do."""
    labels = [subject.label for subject in subjects]
    return [
        replace(subject, label=f"{subject.label} ({labels[: place + 1].count(subject.label)})")
        if labels.count(subject.label) > 1
        else subject
        for place, subject in enumerate(subjects)
    ]


def encoding_subject(
    what: str | Encoding,
    heads: int | None,
    head_dim: int | None,
    options: Mapping[str, Any],
    length: int | None,
    seed: int,
    layer: str | int,
    text: tuple[str, str] | None,
    causal: bool = True,
) -> Subject:
    """An encoding without a model: by name, with its start values, or an instance as it is."""
    if text is not None:
        raise ValueError("an encoding without a model reads no text: give a run's folder, or leave the text out.")
    if layer not in ("last", "all", 1):
        raise ValueError(f"an encoding without a model has one layer, not layer {layer}: leave the layer out.")
    torch.manual_seed(seed)
    if isinstance(what, Encoding):
        _refuse_sizes(type(what).__name__, what.heads, heads, head_dim, options)
        position, name, untrained = what, type(what).__name__, ""
    else:
        position, name = encoding(what, heads or HEADS, head_dim or HEAD_DIM, **options), what
        with torch.random.fork_rng(devices=[]):
            second = encoding(what, position.heads, position.head_dim, **options)
        untrained = _start_values(position, second)
    _check_memory(position.heads, length or LENGTH)
    if not causal and not position.bidirectional:
        advice = position.advice_for_both_directions
        raise ValueError(f"{name} is defined for causal attention only: leave causal=False out. {advice}")
    layers, others = ([encoding_layer(position, length or LENGTH, causal)] for _ in range(2))
    size = f"{position.heads} heads, head_dim {position.head_dim}" + "".join(
        f", {key}={value}" for key, value in options.items()
    )
    reads = position.needs_hidden or position.needs_scores
    about = {
        "model": None,
        "heads": position.heads,
        "head_dim": position.head_dim,
        "options": dict(options),
        "input": None,
    }
    ending = f"{'for a random input ' if reads else ''}({size})"
    return Subject(name, position.place, layers, others, name, name, ending, about, untrained=untrained)


def _check_memory(heads: int, length: int) -> None:
    """Refuse a picture whose sums by distance and cells alone are larger than the memory."""
    by_distance, cells = 4 * 8 * heads * length, 3 * 8 * heads * min(length, PIXELS) ** 2
    check_memory(f"a picture of {heads:,} heads and {length:,} tokens", by_distance + cells, "give fewer of them")


def _start_values(position: Encoding, second: Encoding) -> str:
    """Describe the parameters of a new encoding; empty if it has none. `second` is another new instance."""
    pairs = list(zip(position.parameters(), second.parameters(), strict=True))
    if not pairs:
        return ""
    random = any(not torch.equal(ours, theirs) for ours, theirs in pairs)
    return "untrained: random start values" if random else "untrained: start values"


def model_subject(
    what: "str | Path | Run",
    heads: int | None,
    head_dim: int | None,
    options: Mapping[str, Any],
    length: int | None,
    seed: int,
    layer: str | int,
    text: tuple[str, str] | None,
    input_free: bool,
    windows: int = 1,
    bos: bool = True,
) -> Subject:
    """A trained model on an input.

    `input_free` if only values that do not depend on the input are drawn; `windows` of held-out text, for means.
    """
    if input_free and text is None and isinstance(what, str):
        fetched = _fetched_subject(what, length or LENGTH, layer)
        if fetched is not None:
            _refuse_sizes(what, fetched.layers[0].heads, heads, head_dim, options)
            return fetched
    run = _open(what).reading(bos)
    images = _image_subject(run, heads, head_dim, options, layer, input_free and text is None)
    if images is not None:
        return images
    model, family = run.model, run.family
    _refuse_sizes(str(run.folder), family.heads(model), heads, head_dim, options)
    depth = family.depth(model)
    numbers = layer_numbers(layer, depth)
    shown, *rest = _inputs(run, length, seed, text, windows)
    other = rest[0] if rest else None
    static = layers_without_input(family, model, len(shown.ids), numbers) if input_free else None
    if static is not None:
        layers, others = static, None if other is None else static
    else:
        layers = model_layers(family, model, shown.ids, numbers)
        others = None if other is None else model_layers(family, model, other.ids, numbers)
    trained = run.training()
    preset = "" if run.settings is None or run.settings.model.preset is None else f" {run.settings.model.preset}"
    which = "all layers" if len(numbers) > 1 else f"layer {numbers[0]} of {depth}"
    averaged = [] if text is not None else rest[: windows - 1]
    ending, mean_ending = (
        f"{captions.input_sentence(shown, count)} {captions.training_sentence(trained)}".strip()
        for count in (1, 1 + len(averaged))
    )

    def run_on(ids: torch.Tensor) -> Callable[[], list[Layer]]:
        return lambda: model_layers(family, model, ids, numbers)

    more = [(lambda: others or []) if sample is other else run_on(sample.ids) for sample in averaged]
    about = {
        "model": {
            "folder": str(run.folder),
            "preset": preset.strip() or None,
            "layers": depth,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "position": family.position_entry(model),
        },
        "training": trained or None,
        "input": captions.input_words(shown),
        "compared_with": None if other is None else captions.input_words(other),
        **({"averaged_with": [captions.input_words(sample) for sample in averaged]} if windows > 1 else {}),
    }
    named = [token_name(run.tokenizer.decode([int(token)])) for token in shown.ids[: MOST_LABELS + 1]]
    name, place = family.position_titles(model, numbers)
    whose = f"{family.title}{preset}" if run.settings is not None else f"{family.title} ({run.folder.name})"
    heading = f"{name}, {whose}, {which}"
    return Subject(
        name,
        place,
        layers,
        others,
        run.folder.name,
        heading,
        ending,
        about,
        named,
        mean_ending=mean_ending,
        more=tuple(more),
        equal=lambda: equal_tokens(run.model, run_on(shown.ids)),
    )


def _image_subject(
    run: "Run", heads: int | None, head_dim: int | None, options: Mapping[str, Any], layer: str | int, input_free: bool
) -> Subject | None:
    """The 2-D tables of a model that reads images; None for all others."""
    from relpos.pictures.offset_tables import table_positions, tables_subject  # it imports this module

    positions = table_positions(run)
    if positions is None:
        return None
    if not input_free:
        kind = type(run.model).__name__
        raise ValueError(f"{kind} reads {run.model.main_input_name}, not text: only its bias can be drawn.")
    subject = tables_subject(run, positions, layer_numbers(layer, len(positions)))
    _refuse_sizes(str(run.folder), subject.layers[0].heads, heads, head_dim, options)
    return subject


def _fetched_subject(what: str, length: int, layer: str | int) -> Subject | None:
    """The bias of a model on the hub, of which only the positional tensors are fetched; None for all others."""
    if "/" not in what or Path(what).exists():
        return None
    from relpos.pretrained.open import fetch_positions
    from relpos.pretrained.reader import static_call
    from relpos.pretrained.source import is_hub_name

    fetched = fetch_positions(what) if is_hub_name(what) else None
    if fetched is None:
        return None
    model, positions, read = fetched
    numbers = layer_numbers(layer, len(positions))
    layers = []
    for number in numbers:
        bias = positions[number - 1].bias_by_distance
        assert bias is not None
        causal = positions[number - 1].kind == "alibi" or "decoder" in positions[number - 1].name.split(".")
        layers.append(open_layer(number, static_call(bias(length), causal)))
    kind = model.config.model_type
    which = "all layers" if len(numbers) > 1 else f"layer {numbers[0]} of {len(positions)}"
    name = positions[numbers[0] - 1].title
    about = {"model": {"folder": what, "layers": len(positions), "bytes_fetched": read}, "input": None}
    ending = f"for {length} tokens; of the weights, {read:,} bytes were read"
    return Subject(name, "score", layers, layers, Path(what).name, f"{name}, {kind} {what}, {which}", ending, about)


def _refuse_sizes(name: str, own: int, heads: int | None, head_dim: int | None, options: Mapping[str, Any]) -> None:
    """Refuse heads, head_dim and options for anything but an encoding by name."""
    if heads is not None or head_dim is not None:
        option = f"--heads {heads}" if heads is not None else f"--head-dim {head_dim}"
        raise ValueError(
            f"{option} is for an untrained encoding; {name} has its own {own} heads: leave it out, and choose some of "
            "them with --head."
        )
    if options:
        raise ValueError(
            f"options {', '.join(options)} are for an encoding by name; a trained model has its own: leave them out."
        )


def _open(what: "str | Path | Run") -> "Run":
    if not isinstance(what, str | Path):
        return what
    if not Path(what).exists() and len(Path(what).parts) == 1:
        raise unknown("encoding or folder", str(what), names())
    from relpos.runs.run import open_run

    return open_run(what)


def _inputs(
    run: "Run", length: int | None, seed: int, text: tuple[str, str] | None, windows: int
) -> "list[ModelInput]":
    """The input that the model reads, and others of the same length as far as there are: one at least to compare it."""
    from relpos.runs.run import heldout_samples, text_sample

    if text is None:
        trained = run.trained_length or LENGTH
        usual = min(trained, LENGTH) if run.settings is None else trained
        return heldout_samples(run, length or usual, seed, max(2, windows))
    shown = text_sample(run, *text, length)
    try:
        return [shown, *heldout_samples(run, len(shown.ids), seed, 1)]
    except (ValueError, OSError):  # the text is longer than the held-out part, or the corpus is missing
        return [shown]


def layer_numbers(layer: str | int, depth: int) -> list[int]:
    """The layers that are drawn: last, all, or a number; 1 is the first."""
    if layer == "all":
        return list(range(1, depth + 1))
    if layer == "last":
        return [depth]
    if not str(layer).isdigit() or not 1 <= int(layer) <= depth:
        raise ValueError(f"there is no layer {layer}: give last, all, or a number from 1 to {depth}.")
    return [int(layer)]


def token_name(token: str) -> str:
    """The label of a token on an axis: spaces and newlines made visible, long tokens cut."""
    shown = token.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥").replace("\r", "⏎")
    return shown if len(shown) <= 12 else shown[:11] + "…"
