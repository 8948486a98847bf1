"""What a picture refuses: arguments that exclude each other or do not fit what is drawn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast, get_args

from relpos.forms.checks import MOST_SEED, integer_at_least
from relpos.maps.layer import Quantity
from relpos.pictures.figures import FORMATS
from relpos.pictures.options import MOST_LABELS
from relpos.pictures.picture_arrays import ARRAY_FORMATS
from relpos.pictures.subjects import Subject

BY_DISTANCE = ("profile", "mass", "position")  # pictures with an axis of distances
NUMBER_FORMATS = (".json", *ARRAY_FORMATS)


def check_files(picture: Path, numbers: Path | None = None) -> None:
    """Refuse names of files that do not end in a format of pictures or numbers, or of numbers alone."""
    for kind, file, endings in (
        ("a picture", picture, (*FORMATS, *NUMBER_FORMATS)),
        ("the numbers of a picture", numbers, NUMBER_FORMATS),
    ):
        if file is not None and file.suffix.lower() not in endings:
            raise ValueError(f"cannot write {kind} to {file.name!r}: the name must end in {', '.join(endings)}.")


def check_sizes(seed: int, **sizes: int | None) -> None:
    """Refuse a seed or sizes that are out of range."""
    for name, size in sizes.items():
        if size is not None:  # 0 is not the default
            integer_at_least(name, size)
    integer_at_least("seed", seed, 0, MOST_SEED)


def check_tensor_arguments(others: Mapping[str, object]) -> None:
    """Refuse what does not apply to a tensor."""
    for name, value in others.items():
        if value not in (None, False) or (name == "causal" and value is not None):
            raise ValueError(f"{name} is not for a tensor, which is drawn as it is: leave {name} out.")


def check_arguments(
    several: Sequence[object], show: str | None, layer: str | int, shared_scale: bool, log: bool
) -> None:
    """Refuse arguments that exclude each other."""
    if not several:
        raise ValueError("nothing to draw: give an encoding's name or a folder.")
    if show in BY_DISTANCE and shared_scale:
        raise ValueError("a profile has no colours to share: leave --shared-scale out.")
    if show not in BY_DISTANCE and log:
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


def check_directions(subjects: list[Subject], causal: bool | None) -> None:
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


def values_shown(subjects: list[Subject], show: str | None) -> Quantity:
    """Which values are drawn: bias, scores or weights."""
    kinds: dict[str, Quantity] = {}
    for subject in subjects:
        without = [layer.number for layer in subject.layers if layer.form is None]
        if show == "bias" and without:
            some = len(without) < len(subject.layers)
            name = f"layer {without[0]} of {subject.label}" if some else f"{subject.encoding} (place: {subject.place})"
            raise ValueError(f"{name} adds no bias: show the scores or the weights.")
        default: Quantity = "bias" if not without and subject.place == "score" else "scores"
        kinds[subject.label] = cast(Quantity, show) if show in get_args(Quantity) else default
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{kind} of {label}" for label, kind in kinds.items())
        raise ValueError(
            f"one profile shows one kind of value, and these have several ({listed}): draw them separately."
        )
    return next(iter(kinds.values()))


def chosen_heads(head: Sequence[int], heads: int) -> list[int]:
    """The heads to draw; 0 is the first."""
    for number in head:
        if not 1 <= number <= heads:
            raise ValueError(f"there is no head {number}: give numbers from 1 to {heads}.")
    return [number - 1 for number in head] or list(range(heads))


def token_labels(subject: Subject, label_tokens: bool, small: bool) -> list[str] | None:
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
