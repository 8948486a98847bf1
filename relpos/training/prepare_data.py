"""`relpos data prepare`: tokenize a text before it is trained on. If interrupted, rerun the command to resume."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TypedDict

from relpos.runs.settings import load_settings, parse_overrides, recipes, setting, settings_by_key
from relpos.system.options import option


@dataclass(eq=False, repr=False)
class DataOptions:
    """The options of `relpos data`."""

    words: Sequence[str] = option(
        (),
        "prepare; then settings of the data by dotted key, as in data.heldout=1e8.",
        metavar="[WORD]...",
        argument=True,
    )
    _: KW_ONLY
    data: str | Path | None = setting("data.source")
    tokenizer: str | None = setting("data.tokenizer")
    config: str | Path | None = option(
        None,
        f"Take the settings of the data from a YAML file, as `relpos train` does, or from a recipe: "
        f"{', '.join(recipes())}.",
        metavar="FILE|RECIPE",
        complete=recipes,
    )


class Prepared(TypedDict):
    """A text in the cache."""

    folder: str
    chunks: int
    documents: int
    tokens: int
    held_out: int | None  # tokens; None if another text is held out


def prepare(options: DataOptions) -> Prepared:
    """Tokenize the text that settings name, chunk by chunk, as `relpos train` with the same settings reads it.

    Raises:
        ValueError: A setting is unknown or not allowed, or the text cannot be read.
    """
    action, *overrides = options.words or ("",)
    if action != "prepare":
        raise ValueError(f"relpos data does one thing: relpos data prepare, not {action or 'nothing'!r}.")
    config = None if options.config is None else str(options.config)
    settings = load_settings(config, {**settings_by_key(options), **parse_overrides(overrides)})
    data = settings.data
    if data.task is not None:
        raise ValueError(f"the task {data.task} has no text to prepare.")
    from relpos.runs.run import heldout_corpus, training_corpus
    from relpos.text.tokenizers import load_tokenizer
    from relpos.text.tokens import add_mask_token, open_store, tokenize

    corpus = training_corpus(data)
    assert data.tokenizer is not None
    tokenizer = load_tokenizer(data.tokenizer, corpus)
    if data.masking is not None:
        tokenizer = add_mask_token(tokenizer)
    store = open_store(corpus, tokenizer)
    store.write_all()
    tokens = tokenize(heldout_corpus(data), tokenizer)
    return {
        "folder": str(store.folder),
        "chunks": len(store.facts),
        "documents": store.facts[-1]["after"],
        "tokens": sum(sum(facts["tokens"].values()) for facts in store.facts),
        "held_out": None if data.heldout_source is not None else len(tokens["heldout"]),
    }
