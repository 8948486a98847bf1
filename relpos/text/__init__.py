"""Corpora, documents, tokenizers, and files of token ids."""

from typing import Literal, get_args

SplitName = Literal["heldout", "validation", "test", "all"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)  # which documents are evaluated
