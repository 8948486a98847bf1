"""Reading JSON and YAML files that hold a mapping, with errors that name the file and what is wrong with it."""

import json
from pathlib import Path
from typing import Any

import yaml


def read_json(file: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is empty, is not JSON, or does not hold an object.
    """
    text = _text(file, "JSON")
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    return _mapping(file, tree)


def read_yaml(file: Path) -> dict[str, Any]:
    """Read the YAML mapping in a file.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is empty, is not YAML, or does not hold a mapping.
    """
    try:
        tree = yaml.safe_load(_text(file, "YAML"))
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from None
    return _mapping(file, tree)


def _text(file: Path, kind: str) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {file}.") from None
    except IsADirectoryError:
        raise IsADirectoryError(f"{file} is a folder: a {kind} file is needed.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not valid {kind}: it is not UTF-8 at byte {error.start}.") from None
    if not text.strip():
        raise ValueError(f"{file} is empty: a {kind} mapping is needed.")
    return text


def _mapping(file: Path, tree: Any) -> dict[str, Any]:
    if not isinstance(tree, dict):
        raise ValueError(f"{file} must hold a mapping of names to values, not {type(tree).__name__}.")
    return {str(key): value for key, value in tree.items()}
