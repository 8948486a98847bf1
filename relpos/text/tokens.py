"""The token ids of a corpus, kept in the cache and memory-mapped; windows of them to train on, plain or masked.

A masked language model is trained as BERT was (Devlin et al. 2019, arXiv 1810.04805): 15 % of the tokens are predicted;
80 % of these are replaced by the mask, 10 % by a random token, and 10 % stay. The choice follows from the seed, the
epoch and the number of the window, so that a resumed run sees the same.
"""

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
from numpy.typing import NDArray
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
SHARE = 0.15  # of the tokens that are predicted by a masked language model in training
REPLACED, RANDOM = 0.8, 0.1  # of these: by the mask, by a random token; the rest stay
MASKED_EVERY = 7  # in evaluation one token in seven is masked, about as many as in training


@dataclass(frozen=True)
class Tokens:
    """The token ids of a portion of a corpus."""

    ids: NDArray[Any]  # (tokens,) of all documents, each followed by the separator; memory-mapped
    starts: NDArray[Any]  # (documents,): the index of the first token of each

    def __len__(self) -> int:
        return len(self.ids)


def tokenize(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> dict[Portion, Tokens]:
    """Tokenize both portions of a corpus, or take them from the cache. Every document ends with the separator."""
    rules = tokenizer.backend_tokenizer.to_str()
    key = hashlib.sha256(f"{corpus.hash} {separator_of(tokenizer)} {rules}".encode()).hexdigest()[:24]
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
    folder = cached_folder(cache_folder() / "tokens" / key, lambda new: _write(new, corpus, tokenizer, dtype))
    return {portion: _open(folder, portion, dtype) for portion in PORTIONS}


def separator_of(tokenizer: PreTrainedTokenizerFast) -> int:
    """The id of the token that ends a document: the end-of-text token, or the separator of a BERT."""
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
        for batch in _batches(corpus, tokenizer.backend_tokenizer):
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


def _batches(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[list[_Piece]]:
    """Pieces that are tokenized together: at most BATCH, and BATCH_SIZE characters or one piece."""
    batch: list[_Piece] = []
    size = 0
    for document in corpus.documents():
        for piece in _pieces(document, corpus.portion_of(document), tokenizer):
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
        texts = (before + after, before, after)
        together, *apart = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
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
    """The indices of at most `limit` of `count` items, evenly spread over all of them."""
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


def masked_places(places: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which places of a text are masked in evaluation: one in seven, by a hash of the place.

    The same tokens are masked whatever the length of the window, so that lengths can be compared.
    """
    mixed = places.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return np.asarray((mixed >> np.uint64(33)) % np.uint64(MASKED_EVERY) == 0)


def begins_word(tokenizer: PreTrainedTokenizerFast) -> NDArray[np.bool_]:
    """Which entries of a byte-level tokenizer begin a word: those that are not a letter or digit after another."""
    entries = tokenizer.get_vocab()
    begins = np.ones(max(entries.values()) + 1, dtype=np.bool_)
    for entry, number in entries.items():
        begins[number] = not entry[:1].isalnum() or entry[:1] in "ĠĊĉč"  # byte-level spellings of blanks
    for number in tokenizer.added_tokens_decoder:
        begins[number] = True
    return begins


class MaskedWindows(Dataset[dict[str, Tensor]]):
    """Windows of text with some tokens masked: the input, and the labels of the masked tokens.

    With `words`, all tokens of a word are chosen together (whole-word masking). With `fixed`, the masks are the same in
    every epoch, as for held-out text.
    """

    def __init__(
        self,
        windows: Windows,
        tokenizer: PreTrainedTokenizerFast,
        seed: int,
        share: float = SHARE,
        words: bool = False,
        fixed: bool = False,
    ) -> None:
        if tokenizer.mask_token_id is None:
            raise ValueError("the tokenizer has no mask token: a masked language model needs one.")
        self.windows, self.seed, self.share, self.fixed = windows, seed, share, fixed
        self.mask, self.epoch = int(tokenizer.mask_token_id), 0
        self.special = np.array(sorted(tokenizer.all_special_ids))
        self.ordinary = np.setdiff1d(np.arange(len(tokenizer)), self.special)  # what a random token is drawn from
        self.begins = begins_word(tokenizer) if words else None

    def __len__(self) -> int:
        return len(self.windows)

    def set_epoch(self, epoch: int) -> None:
        """Called by accelerate at the start of every epoch: each has its own masks."""
        self.epoch = 0 if self.fixed else epoch

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window: dict[str, Any] = dict(self.windows[index])
        ids = window["input_ids"].numpy()
        random = np.random.default_rng([self.seed, self.epoch, index])
        chosen = self._choose(ids, random)
        kind = random.random(len(ids))
        read = np.where(chosen & (kind < REPLACED), self.mask, ids)
        swapped = chosen & (kind >= REPLACED) & (kind < REPLACED + RANDOM)
        read = np.where(swapped, random.choice(self.ordinary, len(ids)), read)
        window["input_ids"] = torch.from_numpy(read)
        window["labels"] = torch.from_numpy(np.where(chosen, ids, IGNORED))
        return window

    def _choose(self, ids: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.bool_]:
        """Which tokens are predicted: (length,). At least one."""
        allowed = ~np.isin(ids, self.special)
        if self.begins is None:
            units = np.arange(len(ids))
        else:
            starts = self.begins[ids] | ~allowed
            starts[1:] |= ~allowed[:-1]
            units = np.cumsum(starts) - starts[0]  # the number of the word of every token
        drawn = random.random(units[-1] + 1)[units]
        chosen: NDArray[np.bool_] = allowed & (drawn < self.share)
        if not chosen.any() and allowed.any():
            chosen = allowed & (drawn == drawn[allowed].min())
        return chosen


def add_mask_token(tokenizer: PreTrainedTokenizerFast, token: str = "<|mask|>") -> PreTrainedTokenizerFast:
    """The tokenizer with one more entry, the mask, unless it has one."""
    if tokenizer.mask_token is None:
        tokenizer.add_special_tokens({"mask_token": token})
    return tokenizer
