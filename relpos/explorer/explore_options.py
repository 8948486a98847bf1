"""The options of `relpos.explore`, and what one request, and the server as a whole, may use. Imports nothing heavy."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.maps import BOS, LENGTH, TENSOR
from relpos.system.options import Range, option

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from relpos.runs.run import Run

LONGEST = 65_536  # tokens, where the values are a function of the form
ENTRY_LENGTH = 16_384  # tokens, where they are computed from queries and keys
ROWS_LENGTH = 2_048  # tokens, where they need complete rows of all heads (CoPE, DAPE)
MAP_LENGTH = 2_048  # tokens up to which uniformity and context dependence of scores are measured
CLASS_LENGTH = 8192  # tokens up to which heads are classed: the fits take longer than linear time
MASS_LENGTH = 4096  # tokens up to which the mass of content that is not a function of the distance is computed
TEXT_BYTES = 1_000_000  # of a text
BODY_BYTES = 2 * TEXT_BYTES  # of a request
MOST_HEADS = 64  # of an encoding without a model
WRITTEN, MOST_WRITTEN = 64, 512  # tokens that a model writes at a time, and in all
SCENES, SCENE_BYTES = 32, 2**30  # that are kept, and of all scenes together
IDLE = 120.0  # seconds after which a scene that nobody looks at is dropped
WAITING = 256  # requests that wait for a worker
SECONDS = 60.0  # of computing per request
CSV_ENTRIES = 1_000_000


@dataclass(eq=False, repr=False)
class ExploreOptions:
    """The options of `relpos.explore` and `relpos explore`."""

    what: "str | Path | Run | Tensor | NDArray[Any] | Sequence[Any]" = option(
        (),
        "The name of an encoding (`relpos ls`), or a model: the folder of a run or checkpoint, a .gguf file, or a name "
        "on the hub. Several are compared. With none, the gallery of all encodings, with stories. In Python also an "
        f"open `Run`, an open model of transformers or of relpos, or {TENSOR}",
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
    bos: bool = option(True, BOS)
    tokenizer: Any = option(
        None, "Tokenizer of a model that is open already; without one it reads random tokens.", command=False
    )
    show: str | None = option(
        None,
        "What a tensor holds: bias, scores or weights.",
        shown="weights if its rows sum to 1, else scores",
        command=False,
    )
    tokens: Sequence[str] | None = option(None, "Names of the tokens of a tensor.", command=False)
    server: bool = option(
        False,
        "Whether a notebook shows a running server, which computes what is asked for, instead of a page with the first "
        "view of everything.",
        command=False,
    )
