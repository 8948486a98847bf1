"""The token ids of a corpus: computed once per corpus and tokenizer, kept in the cache, memory-mapped."""

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from relpos.system.files import cache_folder
from relpos.system.progress import Countdown, LiveLine
from relpos.system.seal import cached_folder
from relpos.text.corpus import PORTIONS, Corpus, Portion
from relpos.text.documents import Document, divide
from relpos.text.tokenizers import separates

BATCH, BATCH_SIZE = 64, 2**24  # texts, and characters of them, that are tokenized at a time
IGNORED = -100  # the label of a token that has no loss


@dataclass(frozen=True)
class Tokens:
    """The token ids of a portion of a corpus.

    Attributes:
        ids: Token ids (tokens,) of all documents, each followed by the separator; memory-mapped.
        starts: The index of the first token of each document (documents,).
    """

    ids: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.ids)


def tokenize(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> dict[Portion, Tokens]:
    """Tokenize both portions of a corpus, or take them from the cache.

    Args:
        corpus: The corpus.
        tokenizer: A fast tokenizer with a separator (`separator_of`), which ends every document.

    Returns:
        The tokens of the portions "train" and "heldout".

    Raises:
        ValueError: The tokenizer has no separator.
    """
    rules = tokenizer.backend_tokenizer.to_str()
    key = hashlib.sha256(f"{corpus.hash} {separator_of(tokenizer)} {rules}".encode()).hexdigest()[:24]
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
    folder = cached_folder(cache_folder() / "tokens" / key, lambda new: _write(new, corpus, tokenizer, dtype))
    return {portion: _open(folder, portion, dtype) for portion in PORTIONS}


def separator_of(tokenizer: PreTrainedTokenizerFast) -> int:
    """The id of the token that ends a document: the end-of-text token, or the separator of a BERT.

    Raises:
        ValueError: The tokenizer has neither.
    """
    for separator in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if separator is not None:
            return int(separator)
    raise ValueError("the tokenizer has no token that ends a document: set its eos_token or sep_token.")


def _write(folder: Path, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, dtype: np.dtype[Any]) -> None:
    """Write both portions in one pass, because a large corpus is slow to read."""
    starts: dict[Portion, list[int]] = {portion: [] for portion in PORTIONS}
    totals = dict.fromkeys(starts, 0)
    separator = separator_of(tokenizer)
    line = LiveLine(sys.stderr)
    countdown = Countdown(corpus.size, line)
    with contextlib.ExitStack() as files:
        ids_files = {portion: files.enter_context((folder / f"{portion}.ids").open("wb")) for portion in PORTIONS}
        for batch in _batches(corpus, tokenizer):
            texts = [piece.text for piece in batch]
            encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for piece, encoding in zip(batch, encoded, strict=True):
                if piece.first:
                    starts[piece.portion].append(totals[piece.portion])
                ids = np.array([*encoding.ids, *([separator] if piece.last else [])], dtype=dtype)
                totals[piece.portion] += len(ids)
                ids_files[piece.portion].write(ids.data)  # not ids.tofile, whose errors do not say why
            done = sum(len(text.encode()) for text in texts)
            countdown.step(done, f"tokenizing {corpus.name}: {sum(map(len, starts.values())):,} documents")
    line.end()
    for portion, indices in starts.items():
        (folder / f"{portion}.starts").write_bytes(np.array(indices, dtype=np.int64).data)
    about = {"corpus": corpus.name, "hash": corpus.hash, "dtype": dtype.name}
    (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")


class _Piece(NamedTuple):
    """A piece of a document, and whether the document begins and ends with it."""

    portion: Portion
    text: str
    first: bool
    last: bool


def _batches(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> Iterator[list[_Piece]]:
    """Pieces that are tokenized together: at most BATCH, and BATCH_SIZE characters or one piece."""
    batch: list[_Piece] = []
    size = 0
    for document in corpus.documents():
        portion = corpus.portion_of(document)
        for piece in _pieces(document, portion, tokenizer.backend_tokenizer):
            if len(batch) == BATCH or (batch and size + len(piece.text) > BATCH_SIZE):
                yield batch
                batch, size = [], 0
            batch.append(piece)
            size += len(piece.text)
    if batch:
        yield batch


def _pieces(document: Document, portion: Portion, tokenizer: Tokenizer) -> Iterator[_Piece]:
    def separable(before: str, after: str) -> bool:
        if not separates(tokenizer, before, after):
            return False
        together, *apart = (
            tokenizer.encode(text, add_special_tokens=False).ids for text in (before + after, before, after)
        )
        return bool(together == apart[0] + apart[1])  # tokens of the text itself may take the blanks around them

    texts = divide(document, separable)
    text, first = next(texts, ""), True
    for after in texts:
        yield _Piece(portion, text, first, last=False)
        text, first = after, False
    yield _Piece(portion, text, first, last=True)


def _open(folder: Path, portion: Portion, dtype: np.dtype[Any]) -> Tokens:
    file = folder / f"{portion}.ids"
    # An empty file, such as the train portion of a corpus that is not divided, cannot be memory-mapped.
    ids = np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.zeros(0, dtype=dtype)
    return Tokens(ids, np.fromfile(folder / f"{portion}.starts", dtype=np.int64))


def spread(count: int, limit: int | None) -> list[int]:
    """Choose at most `limit` of `count` items, evenly spread over all of them.

    Returns:
        The indices, in order; all of them if `limit` is None.
    """
    return list(range(count)) if limit is None or limit >= count else [i * count // limit for i in range(limit)]


class Windows(Dataset[dict[str, Tensor]]):
    """Non-overlapping windows of a text; every token of a window predicts the next one.

    Args:
        tokens: The text.
        length: Tokens per window.
        separate: Include the document of each token, so that attention does not cross documents; the first token of a
            document is then not predicted.
        limit: The most windows to take, spread over the text.
        multiple: The number of windows is a multiple of this, so that every batch is full.

    Raises:
        ValueError: The text is too short.
    """

    def __init__(
        self, tokens: Tokens, length: int, separate: bool = False, limit: int | None = None, multiple: int = 1
    ) -> None:
        self.tokens, self.length, self.separate = tokens, length, separate
        count = (len(tokens) - 1) // length // multiple * multiple
        if count < 1:
            needed = "one window" if multiple == 1 else f"a batch of {multiple} windows"
            raise ValueError(
                f"{len(tokens)} tokens are fewer than {needed} of {length} and the token after it: "
                "give more text, a smaller length or a smaller batch."
            )
        self.chosen = spread(count, limit)

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = self.chosen[index] * self.length
        ids = torch.from_numpy(self.tokens.ids[start : start + self.length + 1].astype(np.int64))  # (length + 1,)
        window = {"input_ids": ids[:-1], "labels": ids}  # one label more: that of the token after the window
        if self.separate:
            indices = np.arange(start, start + self.length + 1)
            documents = torch.from_numpy(np.searchsorted(self.tokens.starts, indices, side="right"))
            firsts = torch.zeros_like(ids, dtype=torch.bool)
            firsts[1:] = documents[1:] != documents[:-1]
            window["labels"] = ids.masked_fill(firsts, IGNORED)
            window["documents"] = documents[:-1]
        return window
