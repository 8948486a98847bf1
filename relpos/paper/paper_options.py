"""The options of `relpos paper`. Imports nothing heavy: `relpos paper --help` prints them."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from relpos.system.options import TOKENS, option

SIZES = ("tiny", "small", "medium")
TEXTS = ("fineweb-edu", "wikitext-103")
TOLERANCE = 0.01  # relative difference up to which a number counts as reproduced


@dataclass(eq=False, repr=False)
class PaperOptions:
    """The options of `relpos paper`."""

    words: Sequence[str] = option(
        (),
        "Nothing, to list the tables and figures; the name of one, or deviations; run and a name, to train and "
        "evaluate one of its cells; verify and the folder of a run, to compare it with the printed cell. After run "
        "also settings by dotted key, as in data.source=my/fineweb.",
        metavar="[WORD]...",
        argument=True,
    )
    _: KW_ONLY
    row: str | None = option(None, "Row of the table: the encoding, as in cable.", metavar="NAME")
    size: str | None = option(None, "Size of the model.", choices=SIZES)
    on: str | None = option(None, "Text, for tables that have both.", choices=TEXTS)
    lengths: Sequence[int] | None = option(
        None, "Lengths of the evaluation in tokens.", shown="those of the table", metavar="N,N,...", range=TOKENS
    )
    shrink: bool = option(False, "Run the recipe with a nano model, three steps and the default corpus, in seconds.")
    runs: str | Path = option("runs", "Folder of the runs; each is a folder in it.", metavar="FOLDER")
    json: bool = option(False, "Print JSON.")
    say: Callable[[str], None] = option(print, "Called with sentences about the progress.", command=False)
