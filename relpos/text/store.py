"""The token ids of a corpus in the cache: chunks of whole documents, written one by one and checked when they are read.

A chunk is a sealed folder with the ids of both portions, so a killed process loses the chunk that it was writing and
nothing else, and a truncated or changed file is noticed and written again. Chunks are read while later ones are still
being written: a missing chunk is waited for if another process writes the store, and written here otherwise.
"""

import contextlib
import itertools
import json
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from relpos.system.files import HeldError, Lock, read_json
from relpos.system.progress import Countdown, LiveLine
from relpos.system.seal import cached_folder, damage
from relpos.text.corpus import PORTIONS, Corpus
from relpos.text.documents import Document, divide
from relpos.text.tokenizers import separates

BATCH, BATCH_SIZE = 64, 2**24  # texts, and characters of them, that are tokenized at a time
CHUNK = 2**24  # tokens after which a chunk ends, at the end of a document
ABOUT = "about.json"
WRITER = ".writing"  # the lock of the process that writes the store
POLL = 0.2  # seconds between looks at a chunk that another process writes

Stream = Literal["train", "heldout", "text"]  # "text": all documents, if the first tokens are held out


class ChunkFacts(TypedDict):
    """What about.json of a chunk says."""

    corpus: str
    hash: str
    dtype: str
    first: int  # number of its first document
    after: int  # number of the first document after it
    tokens: dict[str, int]  # by stream
    last: bool  # whether the corpus ends with it


class _Piece(NamedTuple):
    """A piece of a document, and whether the document begins and ends with it."""

    stream: Stream
    text: str
    first: bool
    last: bool


class _Encoded(NamedTuple):
    """The ids of a piece."""

    piece: _Piece
    ids: NDArray[Any]
    size: int  # bytes of its text


class TokenStore:
    """The tokens of a corpus in a folder of the cache.

    Args:
        folder: The folder; its name is made from everything that decides the ids.
        corpus: Where missing chunks are read from.
        tokenizer: How their text is tokenized.
        separator: The id that ends every document.
    """

    def __init__(self, folder: Path, corpus: Corpus, tokenizer: Tokenizer, separator: int) -> None:
        self.folder, self.corpus, self.tokenizer, self.separator = folder, corpus, tokenizer, separator
        self.dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32)
        self.streams: tuple[Stream, ...] = PORTIONS if corpus.heldout_tokens is None else ("text",)
        self.facts: list[ChunkFacts] = []  # of the chunks known so far
        self._reading: tuple[int, Iterator[_Encoded]] | None = None  # the document that it stands at
        self._documents = 0  # read by this process, for the line of progress
        self.line = LiveLine(sys.stderr)
        if folder.is_file():
            folder.unlink()

    @property
    def complete(self) -> bool:
        """Whether all chunks are known."""
        return bool(self.facts) and self.facts[-1]["last"]

    def look(self) -> None:
        """Learn of the chunks that other processes have written."""
        while not self.complete and self._look_at(len(self.facts)):
            pass

    def know(self, number: int) -> bool:
        """Make sure that a chunk exists: wait for it or write it. False if the corpus ends before it."""
        while len(self.facts) <= number and not self.complete:
            if self._look_at(len(self.facts)):
                continue
            try:
                with Lock(self.folder, WRITER):
                    if not self._look_at(len(self.facts)):
                        self._write_next()
            except HeldError:
                time.sleep(POLL)
        return len(self.facts) > number

    def write_all(self) -> None:
        """Write every chunk that is missing, with a line of progress."""
        self.look()
        if not self.complete:
            with Lock(self.folder, WRITER, wait=True):
                self.look()
                while not self.complete:
                    self._write_next()
        self.line.end()

    def ids(self, number: int, stream: Stream) -> NDArray[Any]:
        """The ids of a chunk, memory-mapped: (tokens,). Checked when they are opened first."""
        file = self._checked(number) / f"{stream}.ids"
        # An empty file, such as the train portion of a corpus that is not divided, cannot be memory-mapped.
        return np.memmap(file, dtype=self.dtype, mode="r") if file.stat().st_size else np.zeros(0, dtype=self.dtype)

    def starts(self, number: int, stream: Stream) -> NDArray[np.int64]:
        """The index in its chunk of the first token of every document: (documents,)."""
        return np.fromfile(self._checked(number) / f"{stream}.starts", dtype=np.int64)

    def _folder(self, number: int) -> Path:
        return self.folder / f"{number:06d}"

    @cached_property
    def _seen(self) -> set[int]:
        return set()

    def _checked(self, number: int) -> Path:
        """The folder of a chunk, whose files were checked once by this process, and written again if damaged."""
        if number in self._seen:
            return self._folder(number)
        folder = cached_folder(self._folder(number), lambda new: self._write(new, number))
        self._seen.add(number)
        return folder

    def _look_at(self, number: int) -> bool:
        """Add the facts of the next chunk, if it exists."""
        folder = self._folder(number)
        if not folder.exists():
            return False
        if damage(folder, only=ABOUT) is not None:
            self._checked(number)
        self.facts.append(cast(ChunkFacts, read_json(folder / ABOUT)))
        return True

    def _write_next(self) -> None:
        self._checked(len(self.facts))
        self._look_at(len(self.facts))

    @cached_property
    def _countdown(self) -> Countdown:
        return Countdown(self.corpus.size, self.line)

    def _write(self, folder: Path, number: int) -> None:
        """Write a chunk: the documents after the chunk before it, up to CHUNK tokens."""
        first = document = self.facts[number - 1]["after"] if number else 0
        if self._reading is None or self._reading[0] != first:
            self._reading = (first, _encoded(self, first))
        reading, self._reading = self._reading[1], None  # nothing is known of where it stands if this is interrupted
        starts: dict[Stream, list[int]] = {stream: [] for stream in self.streams}
        totals = dict.fromkeys(starts, 0)
        last = True
        with contextlib.ExitStack() as files:
            ids_files = {stream: files.enter_context((folder / f"{stream}.ids").open("wb")) for stream in starts}
            if number == 0 and self.corpus.separator_first:
                for stream, file in ids_files.items():
                    file.write(np.array([self.separator], dtype=self.dtype).data)
                    totals[stream] = 1
            for piece, ids, size in reading:
                if piece.first:
                    first_one = number == 0 and not starts[piece.stream]  # to which a leading separator belongs
                    starts[piece.stream].append(0 if first_one else totals[piece.stream])
                totals[piece.stream] += len(ids)
                ids_files[piece.stream].write(ids.data)  # not ids.tofile, whose errors do not say why
                document += piece.last
                self._say(size, piece.last)
                if piece.last and sum(totals.values()) >= CHUNK:
                    last = False
                    break
        if not last:
            following = next(reading, None)
            last = following is None
            if following is not None:
                self._reading = (document, itertools.chain([following], reading))
        for stream, indices in starts.items():
            (folder / f"{stream}.starts").write_bytes(np.array(indices, dtype=np.int64).data)
        about = ChunkFacts(
            corpus=self.corpus.name,
            hash=self.corpus.hash,
            dtype=self.dtype.name,
            first=first,
            after=document,
            tokens={str(stream): total for stream, total in totals.items()},
            last=last,
        )
        (folder / ABOUT).write_text(json.dumps(about), encoding="utf-8")

    def _say(self, size: int, document: bool) -> None:
        self._documents += document
        self._countdown.step(size, f"tokenizing {self.corpus.name}: {self._documents:,} documents")


def _encoded(store: TokenStore, start: int) -> Iterator[_Encoded]:
    """The ids of all pieces from a document on, each document with its separator."""
    for batch in _batches(store.corpus, store.tokenizer, start):
        texts = [piece.text for piece in batch]
        encodings = store.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for piece, encoding in zip(batch, encodings, strict=True):
            ids = np.array([*encoding.ids, *([store.separator] if piece.last else [])], dtype=store.dtype)
            yield _Encoded(piece, ids, len(piece.text.encode()))


def _batches(corpus: Corpus, tokenizer: Tokenizer, start: int) -> Iterator[list[_Piece]]:
    """Pieces that are tokenized together: at most BATCH, and BATCH_SIZE characters or one piece."""
    batch: list[_Piece] = []
    size = 0
    for document in corpus.documents_from(start):
        stream: Stream = "text" if corpus.heldout_tokens is not None else corpus.portion_of(document)
        for piece in _pieces(document, stream, tokenizer):
            if len(batch) == BATCH or (batch and size + len(piece.text) > BATCH_SIZE):
                yield batch
                batch, size = [], 0
            batch.append(piece)
            size += len(piece.text)
    if batch:
        yield batch


def _pieces(document: Document, stream: Stream, tokenizer: Tokenizer) -> Iterator[_Piece]:
    def separable(before: str, after: str) -> bool:
        if not separates(tokenizer, before, after):
            return False
        texts = (before + after, before, after)
        together, *apart = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
        return bool(together == apart[0] + apart[1])  # tokens of the text itself may take the blanks around them

    texts = divide(document, separable)
    text, first = next(texts, ""), True
    for after in texts:
        yield _Piece(stream, text, first, last=False)
        text, first = after, False
    yield _Piece(stream, text, first, last=True)


class ChunkedIds:
    """The ids of a stream of a store from `begin` to `end`: an array in chunks, read by slices or arrays of indices.

    Chunks become known as they are needed. The length of a stream without an end is known when the store is complete.
    """

    def __init__(self, store: TokenStore, stream: Stream, begin: int = 0, end: int | None = None) -> None:
        self.store, self.stream, self.begin, self.end = store, stream, begin, end
        self._ends: list[int] = []  # index in the stream at which each known chunk ends
        self._open: dict[int, NDArray[Any]] = {}

    def reaches(self, place: int) -> bool:
        """Whether there are more than `place` ids. Waits until that is known."""
        place += self.begin
        if self.end is not None and place >= self.end:
            return False
        while not self._ends or self._ends[-1] <= place:
            if not self.store.know(len(self._ends)):
                return False
            before = self._ends[-1] if self._ends else 0
            self._ends.append(before + self.store.facts[len(self._ends)]["tokens"][self.stream])
        return True

    def __len__(self) -> int:
        whole = sys.maxsize // 2
        self.reaches((whole if self.end is None else self.end) - self.begin - 1)
        total = self._ends[-1] if self._ends else 0
        return max(0, (total if self.end is None else min(total, self.end)) - self.begin)

    def __getitem__(self, key: slice | NDArray[Any] | int) -> NDArray[Any]:
        if isinstance(key, slice):
            if key.step not in (None, 1) or min(key.start or 0, key.stop or 0) < 0:
                raise TypeError("token ids in chunks are read by slices of step 1 that count from the start.")
            start = key.start or 0
            return self._slice(start, len(self) if key.stop is None else key.stop)
        places = np.asarray(key, dtype=np.int64)
        ids = np.zeros(places.shape, dtype=self.store.dtype)
        if places.size and not (places.min() >= 0 and self.reaches(int(places.max()))):
            raise IndexError(f"there is no token {places.max()}: the text has {len(self):,}.")
        numbers = np.searchsorted(self._ends, places + self.begin, side="right")
        for number in np.unique(numbers):
            inside = numbers == number
            opens = self._ends[number - 1] if number else 0
            ids[inside] = self._chunk(int(number))[places[inside] + self.begin - opens]
        return ids

    def _slice(self, start: int, stop: int) -> NDArray[Any]:
        if stop <= start:
            return np.zeros(0, dtype=self.store.dtype)
        self.reaches(stop - 1)
        first, after = start + self.begin, stop + self.begin
        if self.end is not None:
            after = min(after, self.end)
        parts = []
        for number in range(bisect_right(self._ends, first), len(self._ends)):
            opens = self._ends[number - 1] if number else 0
            if opens >= after:
                break
            parts.append(self._chunk(number)[max(0, first - opens) : after - opens])
        return np.concatenate(parts) if parts else np.zeros(0, dtype=self.store.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self[0:].astype(dtype or self.store.dtype, copy=False)

    def tolist(self) -> list[int]:
        return cast(list[int], self[0:].tolist())

    def starts(self) -> NDArray[np.int64]:
        """The index of the first token of every document that begins here: (documents,)."""
        length = len(self)
        known = [0, *self._ends]
        found = [
            self.store.starts(number, self.stream) + known[number]
            for number in range(len(self._ends))
            if known[number] < self.begin + length
        ]
        places = (np.concatenate(found) if found else np.zeros(0, dtype=np.int64)) - self.begin
        inside: NDArray[np.int64] = places[(places >= 0) & (places < length)]
        cut = self.begin > 0 and length > 0 and (len(inside) == 0 or inside[0] > 0)
        return np.concatenate([[0], inside]) if cut else inside  # it begins inside a document

    def _chunk(self, number: int) -> NDArray[Any]:
        if number not in self._open:
            self._open[number] = self.store.ids(number, self.stream)
        return self._open[number]
