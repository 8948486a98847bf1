"""The names of tokenizers. Imports nothing heavy: a wrong name is refused before the text is read."""

import re

FEWEST_ENTRIES, MOST_ENTRIES = 257, 2**20  # of a tokenizer trained on the data


def bpe_entries(tokenizer: str) -> int | None:
    """The number of entries in the name of a trained tokenizer, bpe-N; None for GPT-2's tokenizer.

    Raises:
        ValueError: There is no such tokenizer.
    """
    if tokenizer == "gpt2":
        return None
    size = re.fullmatch(r"bpe-([0-9]{1,9})", tokenizer)
    if size is None or not FEWEST_ENTRIES <= int(size[1]) <= MOST_ENTRIES:
        raise ValueError(
            f"unknown tokenizer {tokenizer!r}. Allowed: gpt2, or bpe-N with N entries, {FEWEST_ENTRIES} (bytes and "
            f"separator) to {MOST_ENTRIES:,}."
        )
    return int(size[1])
