"""What a picture is of: an encoding by name, or a trained model, as layers on an input."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from relpos.encodings.encoding import Encoding
from relpos.encodings.registry import card, encoding, names
from relpos.errors import unknown
from relpos.view import captions
from relpos.view.defaults import HEAD_DIM, HEADS, LENGTH, MOST_LABELS
from relpos.view.layers import Layer, encoding_layer, input_free_layers, model_layers

if TYPE_CHECKING:
    from relpos.lab.runs.inputs import ModelInput
    from relpos.lab.runs.run import Run


@dataclass(frozen=True)
class Subject:
    """What is drawn: layers on an input, the same on another input, and what is known of them."""

    encoding: str
    place: str  # where the encoding enters
    layers: list[Layer]
    others: list[Layer] | None
    label: str  # in a legend
    told: str  # in a caption, before what is shown
    ending: str  # and after it
    about: dict[str, Any]
    tokens: list[str] | None = None
    untrained: str = ""  # what its numbers are, if nobody has trained them


def encoding_subject(
    what: str | Encoding,
    heads: int | None,
    head_dim: int | None,
    options: Mapping[str, Any],
    length: int | None,
    seed: int,
    layer: str | int,
    text: tuple[str, str] | None,
) -> Subject:
    """An encoding at its start, or as it was made."""
    if text is not None:
        raise ValueError("an encoding alone reads no text: give a run's folder, or leave the text out.")
    if layer not in ("last", "all", 1):
        raise ValueError(f"an encoding alone has one layer, and no layer {layer}.")
    torch.manual_seed(seed)
    if isinstance(what, Encoding):
        _refuse_sizes(type(what).__name__, what.heads, heads, head_dim, options)
        made, name, untrained = what, type(what).__name__, ""
    else:
        made, name = encoding(what, heads or HEADS, head_dim or HEAD_DIM, **options), what
        with torch.random.fork_rng(devices=[]):
            again = encoding(what, made.heads, made.head_dim, **options)
        untrained = _start(made, again)
    first, second = encoding_layer(made, length or LENGTH), encoding_layer(made, length or LENGTH)
    size = f"{made.heads} heads, head_dim {made.head_dim}" + "".join(
        f", {key}={value}" for key, value in options.items()
    )
    reads = made.needs_hidden or made.needs_scores
    about = {"model": None, "heads": made.heads, "head_dim": made.head_dim, "options": dict(options), "input": None}
    ending = f"{'for a random input ' if reads else ''}({size})"
    return Subject(name, made.place, [first], [second], name, name, ending, about, untrained=untrained)


def _start(made: Encoding, again: Encoding) -> str:
    """What the parameters of a new encoding are, in words: empty if it has none. `again` is another new one."""
    pairs = list(zip(made.parameters(), again.parameters(), strict=True))
    if not pairs:
        return ""
    random = any(not torch.equal(one, other) for one, other in pairs)
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
) -> Subject:
    """A trained model on one input; `input_free` if only what does not depend on the input is looked at."""
    run = _open(what)
    _refuse_sizes(str(run.folder), run.model.config.n_head, heads, head_dim, options)
    depth = len(run.model.transformer.h)
    numbers = _layer_numbers(layer, depth)
    shown, other = _inputs(run, length, seed, text)
    if input_free and static_bias(run.model.config.make_position()):
        layers = input_free_layers(run.model, len(shown.ids), numbers)
        others = None if other is None else layers
    else:
        layers = model_layers(run.model, shown.ids, numbers)
        others = None if other is None else model_layers(run.model, other.ids, numbers)
    trained = run.training()
    preset = "" if run.settings is None else f" {run.settings.model.preset}"
    which = "all layers" if len(numbers) > 1 else f"layer {numbers[0]} of {depth}"
    start = f", from token {shown.offset}" if shown.offset else ""
    ending = f"on {len(shown.ids)} tokens of {shown.document}{start}. {captions.training_sentence(trained)}"
    about = {
        "model": {
            "folder": str(run.folder),
            "preset": preset.strip() or None,
            "layers": depth,
            "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
            "position": dict(run.model.config.position),
        },
        "training": trained or None,
        "input": captions.input_words(shown),
        "compared_with": None if other is None else captions.input_words(other),
    }
    named = [_token_name(run.tokenizer.decode([int(one)])) for one in shown.ids[: MOST_LABELS + 1]]
    told = f"{run.encoding}, GPT-2{preset}, {which}"
    place = card(run.encoding).place
    return Subject(run.encoding, place, layers, others, run.folder.name, told, ending.strip(), about, named)


def static_bias(made: Encoding) -> bool:
    """Whether an encoding adds a bias that is the same for every input."""
    return made.place == "score" and not made.needs_hidden and not made.needs_scores


def _refuse_sizes(name: str, own: int, heads: int | None, head_dim: int | None, options: Mapping[str, Any]) -> None:
    """Heads, head_dim and options are those of an encoding that is made here by its name."""
    if heads is not None or head_dim is not None:
        option = f"--heads {heads}" if heads is not None else f"--head-dim {head_dim}"
        raise ValueError(
            f"{option} is for an untrained encoding; {name} has its own {own} heads: leave it out, and choose some of "
            "them with --head."
        )
    if options:
        raise ValueError("the options of an encoding are given with its name; a trained model has its own.")


def _open(what: "str | Path | Run") -> "Run":
    if not isinstance(what, str | Path):
        return what
    if not Path(what).is_dir():
        if Path(what).exists():
            raise ValueError(f"{what} is a file: give the folder of a run or of a checkpoint.")
        if len(Path(what).parts) > 1:
            raise FileNotFoundError(f"there is no folder {what}.")
        raise unknown("encoding or folder", str(what), names())
    from relpos.lab.runs.run import open_run

    return open_run(what)


def _inputs(
    run: "Run", length: int | None, seed: int, text: tuple[str, str] | None
) -> "tuple[ModelInput, ModelInput | None]":
    """What the model reads, and another input of the same length where there is one."""
    from relpos.lab.runs.inputs import heldout_samples, text_sample

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


def _token_name(token: str) -> str:
    """A token as it can be read on an axis: blanks and line ends made visible, long ones cut."""
    shown = token.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥").replace("\r", "⏎")
    return shown if len(shown) <= 12 else shown[:11] + "…"
