"""Reading documents from text, JSON-lines and Parquet files, with errors that name the file and the line."""

import codecs
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from relpos.system.memory import check_memory

FILES = {".txt": "text", ".md": "text", ".jsonl": "json", ".parquet": "parquet"}  # read from a folder
PIECE = 2**22  # bytes of a large text that are read and tokenized at a time
LINE_END, WORD_END = re.compile(r"(?<=\S)\n(?=\S)"), re.compile(r"(?<=\S)(?= \S)")  # where a text may be cut
SEARCHED, TRIED = 2**16, 20  # characters at the end of a piece, and places in them, where it is tried
CONTEXT = 1000  # characters on each side of a cut that a tokenizer may look at
TOKENIZED = 40  # bytes of memory per character while a text is tokenized


@dataclass(frozen=True)
class Document:
    """A text and its name: the file, and the line or row in it."""

    name: str
    content: str | Callable[[], Iterator[str]]  # for a large file, a function that reads its text in pieces

    @property
    def text(self) -> str:
        """The complete text; refused if it does not fit into memory."""
        if isinstance(self.content, str):
            return self.content
        pieces, size = [], 0
        for piece in self.content():
            size += sys.getsizeof(piece)
            check_memory(f"the text of {self.name}", 2 * size, "give a shorter text")
            pieces.append(piece)
        return "".join(pieces)

    def encoded(self) -> tuple[int, Iterator[bytes]]:
        """The text as UTF-8: its size in bytes, and its pieces."""
        if isinstance(self.content, str):
            data = self.content.encode()
            return len(data), iter([data])
        return sum(len(piece.encode()) for piece in self.content()), (piece.encode() for piece in self.content())

    def pieces(self) -> Iterator[str]:
        """The text in pieces, which may end anywhere; a text in memory is one piece."""
        return iter([self.content]) if isinstance(self.content, str) else self.content()

    def part(self, name: str, begin: int, end: int) -> "Document":
        """The characters from `begin` to `end`, as a document of its own."""
        if isinstance(self.content, str):
            return Document(name, self.content[begin:end])
        return Document(name, lambda: _characters(self.pieces(), begin, end))


def divide(document: Document, separable: Callable[[str, str], bool]) -> Iterator[str]:
    """A document in pieces of about PIECE bytes that can be tokenized one by one, with the tokens of the whole.

    A piece ends after the end of a line, between two lines that are not blank, or else between two words; and only
    where `separable` says that the tokenizer never joins what is before and after. A text in memory is one piece.
    """
    if isinstance(document.content, str):
        yield document.content
        return
    waiting = ""
    for piece in document.pieces():
        waiting += piece
        cut = _last_separation(waiting, separable)
        if cut:
            yield waiting[:cut]
            waiting = waiting[cut:]
        else:
            check_memory(
                f"tokenizing {document.name} at once, because its tokenizer joins lines and words,",
                TOKENIZED * len(waiting),
                "divide the text into several documents",
            )
    if waiting:
        yield waiting


def _last_separation(text: str, separable: Callable[[str, str], bool]) -> int:
    """The last place where a text may be cut; 0 if none of the last few places may be."""
    start = max(0, len(text) - SEARCHED)
    for rule in (LINE_END, WORD_END):
        places = [match.end() for match in rule.finditer(text, start)]
        for cut in reversed(places[-TRIED:]):
            if separable(text[max(0, cut - CONTEXT) : cut], text[cut : cut + CONTEXT]):
                return cut
    return 0


def _characters(pieces: Iterator[str], begin: int, end: int) -> Iterator[str]:
    for piece in pieces:
        if begin < len(piece):
            yield piece[max(begin, 0) : end]
        begin, end = begin - len(piece), end - len(piece)
        if end <= 0:
            return


def document_count(file: Path) -> int | None:
    """The documents of a Parquet file, which says how many it has; None for other files."""
    if file.suffix != ".parquet":
        return None
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(file).num_rows)
    except Exception as error:
        raise _not_parquet(file, error) from error


def read_file(file: Path, field: str, keep_line_ends: bool = False, skip: int = 0) -> Iterator[Document]:
    """Read the documents of a file: one per text file, or one per line of JSON or row of Parquet.

    Args:
        file: A .jsonl or .parquet file; any other file is read as text.
        field: The field of JSON lines and Parquet files that holds the text.
        keep_line_ends: Keep the line ends \\r\\n and \\r; otherwise they are read as newlines.
        skip: Leave out this many rows of a Parquet file.
    """
    if not file.exists():
        raise FileNotFoundError(f"there is no file {file}.")
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder: a file with text is needed.")
    if not file.is_file():
        raise ValueError(
            f"{file} is a device or a pipe: a text is read several times, and its end must be known. Give a file."
        )
    kind = FILES.get(file.suffix, "text")
    if kind == "text":
        yield _text_file(file, keep_line_ends)
        return
    for document in _parquet(file, field, skip) if kind == "parquet" else _json_lines(file, field):
        yield document if keep_line_ends else Document(document.name, plain_line_ends(document.text))


def plain_line_ends(text: str) -> str:
    """Replace \\r\\n and \\r by newlines; a carriage return would be a token without meaning."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _text_file(file: Path, keep_line_ends: bool) -> Document:
    """The text of a file; a large one is read in pieces whenever it is needed."""

    def pieces() -> Iterator[str]:
        decoder = io.IncrementalNewlineDecoder(None, translate=True)  # \r\n may lie in two pieces
        for piece in _blocks(file):
            yield piece if keep_line_ends else decoder.decode(piece)
        yield decoder.decode("", final=True)

    return Document(str(file), "".join(pieces()) if file.stat().st_size <= PIECE else pieces)


def _blocks(file: Path) -> Iterator[str]:
    """Read a text file in pieces; refuse what is not text, with its line."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    place, lines, empty = 0, 1, True  # bytes before the block, the line it begins in
    try:
        with file.open("rb") as handle:
            if handle.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
                place = len(codecs.BOM_UTF8)
            handle.seek(place)
            while data := handle.read(PIECE):
                zero = data.find(b"\0")
                if zero >= 0:
                    line = lines + data.count(b"\n", 0, zero)
                    raise ValueError(f"{file} is not text: it has a zero byte at byte {place + zero}, in line {line}.")
                yield _decoded(file, decoder, data, place, lines)
                place, lines, empty = place + len(data), lines + data.count(b"\n"), empty and not data.strip()
    except OSError as error:
        raise type(error)(f"{file} cannot be read: {error.strerror or error}.") from error
    if empty:
        raise ValueError(f"{file} is empty.")
    _decoded(file, decoder, b"", place, lines)


def _decoded(file: Path, decoder: codecs.IncrementalDecoder, data: bytes, place: int, lines: int) -> str:
    """Decode a block, or at the end of the file an empty one; `place` and `lines` are those of its first byte."""
    pending = len(decoder.getstate()[0])  # bytes of a character that began in the block before
    try:
        return decoder.decode(data, final=not data)
    except UnicodeDecodeError as error:
        line = lines + error.object.count(b"\n", 0, error.start)
        raise ValueError(
            f"{file} is not UTF-8: byte {error.object[error.start]:#04x} at byte {place - pending + error.start}, in "
            f"line {line}. Convert it, for instance with iconv -f latin1 -t utf-8."
        ) from error


def _lines(file: Path) -> Iterator[str]:
    # Only "\n" ends a line of JSON; str.splitlines would also split at other characters inside a text.
    rest = ""
    for block in _blocks(file):
        *lines, rest = (rest + block).split("\n")
        check_memory(f"a line of {file}", 3 * sys.getsizeof(rest), "divide its text into several lines")
        yield from lines
    yield rest


def _json_lines(file: Path, field: str) -> Iterator[Document]:
    for number, line in enumerate(_lines(file), start=1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place} is not valid JSON: {error.msg} at column {error.colno}.") from error
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"{place}: there is no text under {field!r}; it has {has or 'nothing'}.")
        if not row[field].strip():
            raise ValueError(f"{place}: the text under {field!r} is empty.")
        yield Document(place, row[field])


def _not_parquet(file: Path, error: Exception) -> ValueError:
    return ValueError(f"{file} cannot be read as a Parquet file: {error}")


def _parquet(file: Path, field: str, skip: int) -> Iterator[Document]:
    import datasets

    try:
        rows = datasets.Dataset.from_parquet(str(file), streaming=True)
        names = list(rows.features or {})
    except Exception as error:
        raise _not_parquet(file, error) from error
    if field not in names:
        raise ValueError(f"{file} has no column {field!r}; it has {', '.join(names) or 'none'}.")
    for number, row in enumerate(rows.skip(skip) if skip else rows, start=skip):
        if not isinstance(row[field], str) or not row[field].strip():
            raise ValueError(f"{file}, row {number}: there is no text in the column {field!r}.")
        yield Document(f"{file}, row {number}", row[field])
