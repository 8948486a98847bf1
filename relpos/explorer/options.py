"""The options of `relpos.explore`. Imports nothing heavy: `relpos explore --help` prints them."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.explorer.limits import LENGTH as LONGEST
from relpos.system.options import Range, option

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from relpos.runs.run import Run

LENGTH = 512  # of an encoding


@dataclass(frozen=True)
class ExploreOptions:
    """The options of `relpos.explore` and `relpos explore`."""

    what: "str | Path | Run | Tensor | NDArray[Any] | Sequence[Any]" = option(
        (),
        "The name of an encoding (`relpos ls`), or a model: the folder of a run or checkpoint, a .gguf file, or a name "
        "on the hub. Several are compared. With none, the pages of all encodings. In Python also an open `Run`, or a "
        "tensor or array that you already have: (heads, tokens, tokens) or (layers, heads, tokens, tokens), rows are "
        "queries, NaN and −inf are keys that are not seen; or one per layer, as the `attentions` of transformers.",
        metavar="WHAT",
        argument=True,
    )
    _: KW_ONLY
    length: int | None = option(
        None,
        "Number of tokens at first.",
        shown=f"the trained length; {LENGTH} for an encoding",
        range=Range(1, LONGEST),
    )
    text: str | None = option(None, "Text for the models to read.", shown="held-out text", command=False)
    bos: bool = option(
        True,
        "Whether models that others trained see their special tokens, BOS or CLS and SEP, around each window: "
        "docs/evaluation.md.",
    )
    show: str | None = option(None, "What a tensor holds: bias, scores or weights.", command=False)
    tokens: Sequence[str] | None = option(None, "Names of the tokens of a tensor.", command=False)
    server: bool = option(
        False,
        "Whether a notebook shows a running server, which computes what is asked for, instead of a page with the first "
        "view of everything.",
        command=False,
    )
