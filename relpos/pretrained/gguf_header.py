"""The header of a GGUF file: its metadata and the names of its tensors.

The reader of the package gguf makes a Python object of every entry of the vocabulary, which takes seconds. Here the
vocabulary is skipped and the tensors are not touched.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType as Kind
from gguf import GGUFWriter
from transformers.integrations.gguf import read_gguf_metadata

VOCABULARY = "tokenizer.ggml.tokens"
ADDS_BOS = "tokenizer.ggml.add_bos_token"


def read_metadata(file: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The metadata of a GGUF file, and the names of its tensors.

    Returns:
        The metadata by key, of an array of strings only its length; and the names.

    Raises:
        ValueError: The header is damaged.
    """
    try:
        metadata, names = read_gguf_metadata(str(file))
    except Exception as error:  # it raises what struct and numpy raise
        raise ValueError(
            f"{file} cannot be read: {' '.join(str(error).split())}. The file is damaged or truncated: copy it again."
        ) from error
    return metadata, names


@contextlib.contextmanager
def header_copy(file: Path) -> Iterator[Path]:
    """A small GGUF file with the header of another, but for its vocabulary, and with tensors of one number each.

    transformers reads the same configuration from both.

    Raises:
        ValueError: The header is damaged.
    """
    metadata, names = read_metadata(file)
    architecture = str(metadata.pop("general.architecture"))
    if VOCABULARY in metadata:
        metadata.setdefault(f"{architecture}.vocab_size", metadata[VOCABULARY])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, file.name)
        writer = GGUFWriter(path, architecture)
        for key, value in metadata.items():
            _write(writer, key, value)
        for name in names:
            writer.add_tensor(name, np.zeros(1, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        yield path


def _write(writer: Any, key: str, value: Any) -> None:
    """Write one entry of the metadata, unless it is a part of the vocabulary or an empty list, which has no type."""
    kinds = {bool: Kind.BOOL, int: Kind.INT64, float: Kind.FLOAT64, str: Kind.STRING}
    if key in (VOCABULARY, "tokenizer.ggml.merges", "general.alignment"):
        return
    if not isinstance(value, list):
        writer.add_key_value(key, value, kinds[type(value)])
    elif value and not key.startswith("tokenizer."):
        writer.add_key_value(key, value, Kind.ARRAY, kinds[type(value[0])])
