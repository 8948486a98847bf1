"""Reading documents from text, JSON-lines and Parquet files, with errors that name the file and the line."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FILES = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "json",
    ".parquet": "parquet",
}  # read from a folder


@dataclass(frozen=True)
class Document:
    """A text and its name: the file, and the line or row in it."""

    name: str
    text: str


def read_file(file: Path, field: str, keep_line_ends: bool = False) -> Iterator[Document]:
    """Read the documents of a file: one per text file, or one per line of JSON or row of Parquet.

    Args:
        file: A .jsonl or .parquet file; any other file is read as text.
        field: The field of JSON lines and Parquet files that holds the text.
        keep_line_ends: Keep the line ends \\r\\n and \\r; otherwise they are read as newlines.

    Yields:
        The documents, in the order of the file.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file cannot be read; the message names the line.
    """
    if not file.exists():
        raise FileNotFoundError(f"there is no file {file}.")
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder: a file with text is needed.")
    kind = FILES.get(file.suffix, "text")
    if kind == "parquet":
        documents = _parquet(file, field)
    elif kind == "json":
        documents = _json_lines(file, field)
    else:
        documents = iter([Document(str(file), _text(file))])
    for document in documents:
        yield document if keep_line_ends else Document(document.name, with_plain_line_ends(document.text))


def with_plain_line_ends(text: str) -> str:
    """Replace \\r\\n and \\r by newlines; a carriage return would be a token without meaning."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _text(file: Path) -> str:
    data = file.read_bytes()
    if not data.strip():
        raise ValueError(f"{file} is empty.")
    zero = data.find(b"\0")
    if zero >= 0:
        raise ValueError(f"{file} is not text: it has a zero byte at byte {zero}, in line {_line(data, zero)}.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8: byte {data[error.start]:#04x} at byte {error.start}, in line "
            f"{_line(data, error.start)}. Convert it, for instance with iconv -f latin1 -t utf-8."
        ) from error


def _line(data: bytes, place: int) -> int:
    return data.count(b"\n", 0, place) + 1


def _json_lines(file: Path, field: str) -> Iterator[Document]:
    # Only "\n" ends a line of JSON; str.splitlines would also split at other characters inside a text.
    for number, line in enumerate(_text(file).split("\n"), start=1):
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


def _parquet(file: Path, field: str) -> Iterator[Document]:
    import datasets

    try:
        rows = datasets.Dataset.from_parquet(str(file), streaming=True)
        names = list(rows.features or {})
    except Exception as error:
        raise ValueError(f"{file} cannot be read as a Parquet file: {error}") from error
    if field not in names:
        raise ValueError(f"{file} has no column {field!r}; it has {', '.join(names) or 'none'}.")
    for number, row in enumerate(rows):
        if not isinstance(row[field], str) or not row[field].strip():
            raise ValueError(f"{file}, row {number}: there is no text in the column {field!r}.")
        yield Document(f"{file}, row {number}", row[field])
