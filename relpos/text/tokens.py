"""The token ids of a corpus, kept in the cache and memory-mapped; windows of them to train on, plain or masked.

A masked language model is trained as BERT was (Devlin et al. 2019, arXiv 1810.04805): 15 % of the tokens are predicted;
80 % of these are replaced by the mask, 10 % by a random token, and 10 % stay. The choice follows from the seed, the
epoch and the number of the window, so that a resumed run sees the same.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from relpos.system.files import cache_folder
from relpos.text import store as stores
from relpos.text.corpus import PORTIONS, Corpus, Portion
from relpos.text.store import ChunkedIds, TokenStore

ENDLESS = 10**9  # more windows than any run reads
IGNORED = -100  # the label of a token that has no loss
SHARE = 0.15  # of the tokens that are predicted by a masked language model in training
REPLACED, RANDOM = 0.8, 0.1  # of these: by the mask, by a random token; the rest stay
MASKED_EVERY = 7  # in evaluation one token in seven is masked, about as many as in training


@dataclass(frozen=True)
class Tokens:
    """The token ids of a portion of a corpus."""

    ids: NDArray[Any] | ChunkedIds  # (tokens,) of all documents, each followed by the separator; memory-mapped
    starts: NDArray[Any]  # (documents,): the index of the first token of each

    def __len__(self) -> int:
        return len(self.ids)


def tokenize(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> dict[Portion, Tokens]:
    """Tokenize both portions of a corpus, or take them from the cache. Every document ends with the separator.

    Of a corpus that is streamed, only the held-out part is tokenized now, and the rest when it is read.
    """
    store = open_store(corpus, tokenizer)
    if not corpus.streamed or corpus.heldout_tokens is None:  # documents are held out all over the text
        store.write_all()
    return {portion: _tokens(store, portion) for portion in PORTIONS}


def open_store(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> TokenStore:
    """The tokens of a corpus in the cache. Nothing is written yet."""
    rules, separator = tokenizer.backend_tokenizer.to_str(), separator_of(tokenizer)
    words = f"{corpus.hash} {separator} {corpus.heldout_tokens is None} {corpus.separator_first} {stores.CHUNK} {rules}"
    key = hashlib.sha256(words.encode()).hexdigest()[:24]
    return TokenStore(cache_folder() / "tokens" / key, corpus, tokenizer.backend_tokenizer, separator)


def _tokens(store: TokenStore, portion: Portion) -> Tokens:
    """The tokens of a portion. Those of one chunk are its memory map; the starts of a stream are not known before."""
    limit = store.corpus.heldout_tokens
    if limit is not None:
        ids = ChunkedIds(store, "text", 0, limit) if portion == "heldout" else ChunkedIds(store, "text", limit)
        if portion == "heldout" and len(ids) < limit:
            raise ValueError(
                f"{store.corpus.name} has {len(ids):,} tokens, and the first {limit:,} are to be held out: "
                "make data.heldout smaller."
            )
        streamed = portion == "train" and store.corpus.streamed
        return Tokens(ids, np.zeros(0, dtype=np.int64) if streamed else ids.starts())
    if len(store.facts) == 1:
        return Tokens(store.ids(0, portion), store.starts(0, portion))
    ids = ChunkedIds(store, portion)
    return Tokens(ids, ids.starts())


def separator_of(tokenizer: PreTrainedTokenizerFast) -> int:
    """The id of the token that ends a document: the end-of-text token, or the separator of a BERT."""
    for separator in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if separator is not None:
            return int(separator)
    raise ValueError("the tokenizer has no token that ends a document: set its eos_token or sep_token.")


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
        endless: After the last window comes the first one again. How long a streamed text is need not be known then.
    """

    def __init__(
        self,
        tokens: Tokens,
        length: int,
        separate: bool = False,
        limit: int | None = None,
        multiple: int = 1,
        endless: bool = False,
    ) -> None:
        self.tokens, self.length, self.separate, self.multiple = tokens, length, separate, multiple
        self.endless, ids = endless, tokens.ids
        if endless and isinstance(ids, ChunkedIds) and ids.reaches(length * multiple):
            self.chosen: range | list[int] = range(ENDLESS)
            return
        count = self._count()
        if count < 1:
            needed = "one window" if multiple == 1 else f"a batch of {multiple} windows"
            raise ValueError(
                f"{len(tokens)} tokens are fewer than {needed} of {length} and the token after it: "
                "give more text, a smaller length or a smaller batch."
            )
        self.chosen = range(ENDLESS) if endless else spread(count, limit)

    def _count(self) -> int:
        return (len(self.tokens) - 1) // self.length // self.multiple * self.multiple

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = self._wrapped(self.chosen[index]) * self.length
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

    def _wrapped(self, number: int) -> int:
        """The window that is read in place of an endless one: from the start again behind the end of the text."""
        if not self.endless:
            return number
        ids, batch = self.tokens.ids, number // self.multiple
        if isinstance(ids, ChunkedIds) and ids.reaches((batch + 1) * self.multiple * self.length):
            return number
        return number % self._count()


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
