"""The options of `relpos.draw`, and their defaults. Imports nothing heavy: `relpos draw --help` prints them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from relpos.maps import BOS, HEAD_DIM, HEADS, LENGTH, TENSOR
from relpos.system.options import COUNT, SEED, Range, option, required

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from relpos.forms.encoding import Encoding
    from relpos.runs.run import Run

Show = Literal["bias", "scores", "weights", "profile", "mass", "position"]
SHOWS: tuple[Show, ...] = get_args(Show)
MOST_LABELS = 64  # tokens that can be named on the axes
COLUMNS = 2  # of a printed page: the width of a picture
SHOWN, LOOKS, UNTRAINED = "What is shown", "How it looks", "An untrained encoding"  # groups in the help


@dataclass(eq=False, repr=False)
class DrawOptions:
    """The options of `relpos.draw` and `relpos draw`."""

    what: "str | Path | Encoding | Run | Tensor | NDArray[Any] | Sequence[Any]" = field(
        metadata=required(
            "The name of an encoding (`relpos ls`), drawn untrained; or a model: the folder of a run or checkpoint, a "
            ".gguf file, or a name on the hub. Several are drawn together as profiles. In Python also an encoding, "
            f"an open `Run`, or {TENSOR}",
            metavar="WHAT...",
            argument=True,
        )
    )
    _: KW_ONLY
    show: Show | None = option(
        None,
        "bias; scores, before the softmax; weights, after the softmax; profile, value against distance; mass, "
        "attention against distance, with the class of each head; position, the positional part of the scores.",
        shown="bias, or scores if the encoding adds no bias",
        choices=SHOWS,
        panel=SHOWN,
    )
    layer: int | Literal["last", "all"] = option(
        "last",
        "Layer of a trained model; 1 is the first, all gives a contact sheet.",
        metavar="last|all|N",
        complete=lambda: ("last", "all"),
        panel=SHOWN,
    )
    head: Sequence[int] = option((), "Head to draw; 1 is the first.", shown="all", range=COUNT, panel=SHOWN)
    length: int | None = option(
        None,
        "Number of tokens.",
        shown=f"the trained length; {LENGTH} for an untrained encoding",
        range=COUNT,
        panel=SHOWN,
    )
    causal: bool | None = option(
        None,
        "Whether a query sees only keys up to its own position. False draws an untrained encoding in both directions; "
        "a trained model attends as it was trained.",
        shown="True for an untrained encoding",
        command=False,
    )
    text: str | None = option(None, "Text for the model to read.", shown="held-out text", panel=SHOWN)
    text_name: str = option("the text", "Name of the text in the caption.", command=False)
    seed: int = option(
        0,
        "Seed that chooses the window of held-out text; for an untrained encoding, of its initial values.",
        range=SEED,
        panel=SHOWN,
    )
    bos: bool = option(True, BOS, panel=SHOWN)
    label_tokens: bool = option(False, f"Name the tokens on the axes (at most {MOST_LABELS}).", panel=LOOKS)
    shared_scale: bool = option(False, "One colour scale for all panels.", panel=LOOKS)
    log: bool = option(False, "Logarithmic distance axis, for a profile, mass or position.", panel=LOOKS)
    width: float | None = option(
        None,
        f"Width in inches, instead of {COLUMNS} columns of a printed page.",
        range=Range(1, 40),
        panel=LOOKS,
    )
    heads: int | None = option(None, "Number of heads.", shown=f"{HEADS}", range=COUNT, panel=UNTRAINED)
    head_dim: int | None = option(None, "Size of each head.", shown=f"{HEAD_DIM}", range=COUNT, panel=UNTRAINED)
    options: Mapping[str, Any] | None = option(
        None, "An option of the encoding.", flag="--option", metavar="KEY=VALUE", panel=UNTRAINED
    )
    tokens: Sequence[str] | None = option(
        None, f"Names of the tokens of a tensor; up to {MOST_LABELS} are written on the axes.", command=False
    )
    title: str = option("", "Text before the caption.", command=False)
    progress: Callable[[float], None] = option(lambda done: None, "Called with the completed fraction.", command=False)
