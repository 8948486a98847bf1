"""The options of `relpos.draw`, and their defaults. Imports nothing heavy: `relpos draw --help` prints them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from relpos.encodings.registry import check_options_of
from relpos.maps import BOS, HEAD_DIM, HEADS, LENGTH, NO_ATTENTIONS, TENSOR, check_encoding_request
from relpos.system.options import COUNT, SEED, Range, option

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from relpos.forms.encoding import Encoding
    from relpos.runs.run import Run

Show = Literal["bias", "scores", "weights", "profile", "mass", "position"]
SHOWS: tuple[Show, ...] = get_args(Show)
BY_DISTANCE: tuple[Show, ...] = ("profile", "mass", "position")  # pictures with an axis of distances
FORMATS = (".png", ".pdf", ".svg")
ARRAY_FORMATS = (".npz", ".safetensors")
NUMBER_FORMATS = (".json", *ARRAY_FORMATS)
CAPTION_FORMAT = ".txt"
WIDTHS = {1: 3.33, 2: 7.0}  # inches of one and of two columns of a printed page
MOST_LABELS = 64  # tokens that can be named on the axes
COLUMNS = 2  # of a printed page: the width of a picture
OF_ALL = ("what", "all", "length", "seed", "caption", "width", "title", "progress")  # options for all encodings
of_values, of_looks, of_encoding = (  # groups in the help
    partial(option, panel=panel) for panel in ("What is shown", "How it looks", "An untrained encoding")
)


@dataclass(eq=False, repr=False)
class DrawOptions:
    """The options of `relpos.draw` and `relpos draw`."""

    what: "str | Path | Encoding | Run | Tensor | NDArray[Any] | Sequence[Any]" = option(
        (),
        "The name of an encoding (`relpos ls`), drawn untrained; or a model: the folder of a run or checkpoint, a "
        ".gguf file, or a name on the hub. Several are drawn side by side. In Python also an encoding, "
        f"an open `Run`, or {TENSOR}",
        metavar="WHAT...",
        argument=True,
    )
    _: KW_ONLY
    all: bool = of_values(False, "Draw all encodings, untrained, on one page, grouped by where position acts.")
    show: Show | None = of_values(
        None,
        "bias; scores, before the softmax; weights, after the softmax; profile, value against distance; mass, "
        "attention against distance, with the class of each head; position, the positional part of the scores.",
        shown="bias, or scores if the encoding adds no bias",
        choices=SHOWS,
    )
    layer: int | Literal["last", "all"] = of_values(
        "last",
        "Layer of a trained model; 1 is the first, all gives a contact sheet.",
        metavar="last|all|N",
        complete=lambda: ("last", "all"),
    )
    head: Sequence[int] = of_values(
        (), "Head to draw; 1 is the first.", shown="all; three of several encodings", range=COUNT
    )
    length: int | None = of_values(
        None, "Number of tokens.", shown=f"the trained length; {LENGTH} for an untrained encoding", range=COUNT
    )
    causal: bool | None = option(
        None,
        "Whether a query sees only keys up to its own position. False draws an untrained encoding in both directions; "
        "a trained model attends as it was trained.",
        shown="True for an untrained encoding",
        command=False,
    )
    text: str | None = of_values(None, "Text for the model to read.", shown="held-out text")
    text_name: str = option("the text", "Name of the text in the caption.", command=False)
    seed: int = of_values(
        0,
        "Seed that chooses the window of held-out text; for an untrained encoding, of its initial values.",
        range=SEED,
    )
    bos: bool = of_values(True, BOS)
    label_tokens: bool = of_looks(False, f"Name the tokens on the axes (at most {MOST_LABELS}).")
    shared_scale: bool = of_looks(False, "One colour scale for all panels.")
    caption: bool = of_looks(
        True, "Whether the caption is below the picture. Without it, the command writes it to a .txt file, for LaTeX."
    )
    log: bool = of_looks(False, "Logarithmic distance axis, for a profile, mass or position.")
    width: float | None = of_looks(
        None, f"Width in inches, instead of {COLUMNS} columns of a printed page.", range=Range(1, 40)
    )
    heads: int | None = of_encoding(None, "Number of heads.", shown=f"{HEADS}", range=COUNT)
    head_dim: int | None = of_encoding(None, "Size of each head.", shown=f"{HEAD_DIM}", range=COUNT)
    options: Mapping[str, Any] | None = of_encoding(
        None, "An option of the encoding.", flag="--option", metavar="KEY=VALUE"
    )
    tokens: Sequence[str] | None = option(
        None, f"Names of the tokens of a tensor; up to {MOST_LABELS} are written on the axes.", command=False
    )
    title: str = option("", "Text before the caption.", command=False)
    name: str = option("", "Another name of the encoding, which comes first in the caption.", command=False)
    progress: Callable[[float], None] = option(lambda done: None, "Called with the completed fraction.", command=False)


def check_files(picture: Path, numbers: Path | None = None) -> None:
    """Refuse names of files that do not end in a format of pictures or numbers, or of numbers alone."""
    for kind, file, endings in (
        ("a picture", picture, (*FORMATS, *NUMBER_FORMATS, CAPTION_FORMAT)),
        ("the numbers of a picture", numbers, NUMBER_FORMATS),
    ):
        if file is not None and file.suffix.lower() not in endings:
            raise ValueError(f"cannot write {kind} to {file.name!r}: the name must end in {', '.join(endings)}.")


def check_heads(numbers: Sequence[int], heads: int) -> None:
    """Refuse a head that is not there; 1 is the first."""
    for number in numbers:
        if not 1 <= number <= heads:
            raise ValueError(f"there is no head {number}: give numbers from 1 to {heads}.")


def check_encoding(name: str, options: DrawOptions) -> None:
    """Refuse what an untrained encoding does not have, as far as its card tells: before torch is imported."""
    check_options_of(name, options.options or {})
    check_heads(options.head, options.heads or HEADS)
    check_encoding_request(options.layer, options.text)


def listed(what: object) -> list[Any]:
    """What is to be drawn, as a list."""
    return list(what) if isinstance(what, Sequence) and not isinstance(what, str) else [what]


def check_combination(several: Sequence[object], options: DrawOptions) -> None:
    """Refuse options that exclude each other."""
    by_distance = options.show in BY_DISTANCE
    if options.all:
        _check_all(several, options)
        return
    if not several:
        raise ValueError(
            f"nothing to draw: give an encoding's name or a folder, or --all for all encodings. {NO_ATTENTIONS}"
        )
    if by_distance and options.shared_scale:
        raise ValueError("a profile has no colours to share: leave --shared-scale out.")
    if not by_distance and options.log:
        raise ValueError("--log is for the distances of a profile: add --show profile, or leave it out.")
    if len(several) == 1:
        return
    if options.show in ("mass", "position"):
        raise ValueError(
            f"{len(several)} encodings can be drawn together as heat maps or profiles: leave --show {options.show} out."
        )
    if options.layer == "all":
        raise ValueError("several encodings have one panel per head: give one layer, not all.")
    if options.label_tokens:
        raise ValueError("the tokens of several models cannot be named on one page: leave --label-tokens out.")
    for place, item in enumerate(several):
        if item in several[:place]:
            raise ValueError(f"{item} is given twice: give each encoding or folder once.")


def _check_all(several: Sequence[object], options: DrawOptions) -> None:
    """Refuse whatever the page of all encodings cannot show."""
    if several:
        raise ValueError(f"--all draws every encoding: leave {several[0]} out, or --all.")
    for about in fields(options):
        if about.name not in OF_ALL and getattr(options, about.name) != about.default:
            raise ValueError(f"--all draws every encoding in the same way: leave {about.name} out.")
