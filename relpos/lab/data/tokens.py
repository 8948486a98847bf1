"""A corpus as token ids: memory-mapped, computed once for every content and tokenizer."""

import contextlib
import hashlib
import itertools
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from relpos.lab.data.corpus import Corpus, Portion
from relpos.lab.data.documents import Document
from relpos.system.files import atomic_folder, cache_folder
from relpos.system.progress import Countdown, LiveLine

BATCH = 64  # documents tokenized at a time
IGNORED = -100


@dataclass(frozen=True)
class Tokens:
    """The token ids of one part of a corpus, document after document, each ended by the separator."""

    ids: np.ndarray[Any, Any]  # (tokens,), memory-mapped
    starts: np.ndarray[Any, Any]  # (documents,), where each begins

    def __len__(self) -> int:
        return len(self.ids)


def tokenize(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> dict[Portion, Tokens]:
    """The tokens of both parts, from the cache if it has them."""
    rules = tokenizer.backend_tokenizer.to_str()
    key = hashlib.sha256(f"{corpus.hash} {rules}".encode()).hexdigest()[:24]
    folder = cache_folder() / "tokens" / key
    if not folder.exists():
        with atomic_folder(folder) as temporary:
            dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
            _write(temporary, corpus, tokenizer, np.dtype(dtype))
            (temporary / "about.json").write_text(
                json.dumps({"corpus": corpus.name, "hash": corpus.hash, "dtype": np.dtype(dtype).name})
            )
    dtype = np.dtype(json.loads((folder / "about.json").read_text())["dtype"])
    return {part: _open(folder, part, dtype) for part in ("train", "heldout")}


def _write(folder: Path, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, dtype: np.dtype[Any]) -> None:
    """Both parts in one pass: a large corpus is slow to read."""
    starts: dict[str, list[int]] = {"train": [], "heldout": []}
    totals = dict.fromkeys(starts, 0)
    line = LiveLine(sys.stderr)
    countdown = Countdown(sum(corpus.counts.values()), line)
    with contextlib.ExitStack() as files:
        ids_of = {part: files.enter_context((folder / f"{part}.ids").open("wb")) for part in starts}
        for batch in _batched(corpus.documents()):
            texts = [document.text for document in batch]
            encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for document, found in zip(batch, encoded, strict=True):
                part = "heldout" if corpus.held(document) else "train"
                ids = np.array([*found.ids, tokenizer.eos_token_id], dtype=dtype)
                starts[part].append(totals[part])
                totals[part] += len(ids)
                ids.tofile(ids_of[part])
            countdown.step(len(batch), f"tokenizing {corpus.name}: {sum(map(len, starts.values())):,} documents")
    line.end()
    for part, places in starts.items():
        np.array(places, dtype=np.int64).tofile(folder / f"{part}.starts")


def _batched(documents: Iterable[Document]) -> Iterable[list[Document]]:
    waiting = iter(documents)
    while batch := list(itertools.islice(waiting, BATCH)):
        yield batch


def _open(folder: Path, part: str, dtype: np.dtype[Any]) -> Tokens:
    file = folder / f"{part}.ids"
    # A corpus that is not divided has nothing to train on, and an empty file cannot be mapped.
    ids = np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.zeros(0, dtype=dtype)
    return Tokens(ids, np.fromfile(folder / f"{part}.starts", dtype=np.int64))


def spread(count: int, limit: int | None) -> list[int]:
    """Which of `count` things to take, if at most `limit`: a few spread over all say more than the first few."""
    return list(range(count)) if limit is None or limit >= count else [i * count // limit for i in range(limit)]


class Windows(Dataset[dict[str, Tensor]]):
    """Non-overlapping windows of `length` tokens; each predicts its `length` next tokens.

    With `separate`, the window says which document each token belongs to, so that attention does not cross them, and a
    document's first token is not predicted from the one before.
    """

    def __init__(
        self, tokens: Tokens, length: int, separate: bool = False, limit: int | None = None, multiple: int = 1
    ) -> None:
        self.tokens, self.length, self.separate = tokens, length, separate
        count = (len(tokens) - 1) // length // multiple * multiple  # so that every batch is full
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
        window = {"input_ids": ids[:-1], "labels": ids}  # labels one longer: the model predicts the token after too
        if self.separate:
            places = np.arange(start, start + self.length + 1)
            documents = torch.from_numpy(np.searchsorted(self.tokens.starts, places, side="right"))
            firsts = torch.zeros_like(ids, dtype=torch.bool)
            firsts[1:] = documents[1:] != documents[:-1]
            window["labels"] = ids.masked_fill(firsts, IGNORED)
            window["documents"] = documents[:-1]
        return window
