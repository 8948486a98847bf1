"""Which tokens a masked language model predicts: random ones in training, always the same in evaluation.

Training follows BERT (Devlin et al. 2019, arXiv 1810.04805): 15 % of the tokens are predicted; 80 % of these are
replaced by the mask, 10 % by a random token, and 10 % stay. With `words`, all tokens of a word are chosen together
(whole-word masking). The choice follows from the seed, the epoch and the number of the window, so that a resumed run
sees the same.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from relpos.text.tokens import IGNORED, Windows

SHARE = 0.15  # of the tokens that are predicted in training
REPLACED, RANDOM = 0.8, 0.1  # of these: by the mask, by a random token; the rest stay
MASKED_EVERY = 7  # in evaluation one token in seven is masked, about as many as in training


def masked_places(places: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which places of a text are masked in evaluation: one in seven, by a hash of the place.

    The same tokens are masked whatever the length of the window, so that lengths can be compared.
    """
    mixed = places.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return np.asarray((mixed >> np.uint64(33)) % np.uint64(MASKED_EVERY) == 0)


def begins_word(tokenizer: PreTrainedTokenizerFast) -> NDArray[np.bool_]:
    """Which entries of a byte-level tokenizer begin a word: those that are not a letter or digit after another.

    Returns:
        (entries,).
    """
    entries = tokenizer.get_vocab()
    begins = np.ones(max(entries.values()) + 1, dtype=np.bool_)
    for entry, number in entries.items():
        begins[number] = not entry[:1].isalnum() or entry[:1] in "ĠĊĉč"  # byte-level spellings of blanks
    for number in tokenizer.added_tokens_decoder:
        begins[number] = True
    return begins


class MaskedWindows(Dataset[dict[str, Tensor]]):
    """Windows of text with some tokens masked: the input, and the labels of the masked tokens.

    Args:
        windows: The windows of text.
        tokenizer: A tokenizer with a mask token.
        seed: Seed of the masks.
        share: Share of the tokens that are predicted.
        words: Whether to mask whole words.
        fixed: Whether to use the same masks in every epoch, as for held-out text.

    Raises:
        ValueError: The tokenizer has no mask token.
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
