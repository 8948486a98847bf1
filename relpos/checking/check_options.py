"""The options of `relpos.check`. Imports nothing heavy: `relpos check --help` prints them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from relpos.system.options import option

TESTS = (  # the names of all tests, as `only` takes them
    *("mask", "causality", "rotation", "attention factor", "window", "sinks", "bias", "table", "precision", "kernel"),
    *("cache", "pieces", "crop", "static cache", "left padding", "right padding"),
    *("packing", "batch", "shift", "trained", "ports", "lengths"),
)


@dataclass(frozen=True)
class CheckOptions:
    """The options of `relpos.check` and `relpos check`."""

    model: Any = option(
        None,
        "A model: the folder of a run or checkpoint, a .gguf file or a name on the hub; in Python also a model of "
        "transformers, any module that returns logits for token ids, or an attention function of q, k and v.",
        metavar="[MODEL]",
        argument=True,
    )
    _: KW_ONLY
    against: Any = option(None, "Another port of the same model, to compare with.", metavar="OTHER")
    quick: bool = option(False, "On texts of 32 tokens, which need not leave windows.")
    full: bool = option(False, "Also what takes minutes: longer texts, variants on real text, loss by position.")
    only: Sequence[str] | None = option(None, "Only these tests.", metavar="TEST,TEST,...", complete=lambda: TESTS)
    data: str | None = option(
        None,
        "Text for the variants and the loss by position: sotu, a file, a folder.",
        shown="sotu",
        metavar="NAME|PATH",
    )
    example: Mapping[str, Any] | None = option(
        None, "Further arguments of the module's forward, for one that needs more than token ids.", command=False
    )
    decode: Callable[[Any], Any] | None = option(
        None,
        "A function that reads token ids (1, length) step by step with the module's own cache and returns the logits "
        "of all of them, to compare with reading them at once.",
        command=False,
    )
    trust_remote_code: bool = option(False, "Run the code of a checkpoint that transformers does not know.")
    say: Callable[[str], object] | None = option(
        None, "Called with lines about the progress.", shown="nothing is said", command=False
    )
