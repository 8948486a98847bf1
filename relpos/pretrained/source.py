"""Where a model's files are: a folder, a GGUF file, or a name on the Hugging Face hub. Nothing is unpickled."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType as Kind
from gguf import GGUFWriter
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig
from transformers.integrations.gguf import read_gguf_metadata

from relpos.model_catalogue import check_model_exists
from relpos.system.files import read_json

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FETCHED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # of a model on the hub
ADAPTER, ADAPTER_PICKLE = "adapter_config.json", "adapter_model.bin"  # of peft, which transformers opens by itself
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
PICKLE = (
    "is a pickle, which can run any code when it is opened. If you trust it, convert it to safetensors: open it with "
    "the class of transformers that its config.json names, and save_pretrained to another folder"
)
VOCABULARY = "tokenizer.ggml.tokens"  # in a GGUF file
GGUF_KINDS = {bool: Kind.BOOL, int: Kind.INT64, float: Kind.FLOAT64, str: Kind.STRING}


@dataclass(frozen=True)
class Source:
    """The local files of a model."""

    what: str  # as the user wrote it
    folder: Path
    gguf: str | None = None  # the name of its GGUF file in the folder

    @property
    def options(self) -> dict[str, str]:
        """The arguments of transformers' `from_pretrained` beside the folder."""
        return {} if self.gguf is None else {"gguf_file": self.gguf}


def find_source(what: str | Path, fetch: bool = True) -> Source:
    """A folder, a .gguf file, or a name on the hub, which is downloaded; without `fetch`, its JSON files only."""
    path = Path(what)
    if path.is_dir():
        return Source(str(what), path)
    if path.exists():
        return Source(str(what), path.parent, _gguf(path))
    check_model_exists(what)
    return Source(str(what), _download(str(what), fetch))


def read_config(what: str | Path) -> PreTrainedConfig:
    """The configuration of a model in a folder, a .gguf file or on the hub, without its weights."""
    return source_config(find_source(what, fetch=False))


def source_config(source: Source, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a model whose files have been found."""
    if source.gguf is None and not (source.folder / CONFIG).exists():
        raise FileNotFoundError(f"there is no model in {source.what}: it has no {CONFIG}.")
    with contextlib.ExitStack() as files:
        folder = source.folder
        if source.gguf is not None:
            folder = files.enter_context(_header_copy(folder / source.gguf)).parent
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **source.options)
        except (StrictDataclassError, ValueError, TypeError, KeyError, OSError, ImportError) as error:
            file = source.what if source.gguf else source.folder / CONFIG
            raise ValueError(f"the configuration in {file} cannot be read: {one_line(error)}") from error
    config.name_or_path = str(source.folder)
    return config


def check_weights(source: Source) -> int:
    """Check that weights are complete safetensors files, before anything opens them. Returns their size in bytes."""
    if source.gguf is not None:
        return (source.folder / source.gguf).stat().st_size
    folder, refused = source.folder, f"the model in {source.what} is not opened:"
    entries = read_json(folder / CONFIG)
    name = str(entries.get("transformers_weights") or (WEIGHTS if (folder / WEIGHTS).exists() else INDEX))
    if Path(name).suffix in PICKLES:
        raise ValueError(f"{refused} {name} {PICKLE}.")
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if (folder / ADAPTER).exists() and ADAPTER_PICKLE in pickles:
        raise ValueError(f"{refused} {ADAPTER_PICKLE} {PICKLE}.")
    if not (folder / name).exists():
        if pickles:
            raise ValueError(f"{refused} {pickles[0]} {PICKLE}.")
        expected = WEIGHTS if name == INDEX else name
        raise FileNotFoundError(f"there are no weights in {source.what}: it has no {expected}.")
    parts = [name]
    if name.endswith(".index.json"):
        parts = _indexed_files(folder / name)
        missing = [part for part in parts if not (folder / part).exists()]
        if missing:
            raise FileNotFoundError(
                f"{source.what} is incomplete: {name} names {len(parts)} files, and {missing[0]} is missing. "
                "Copy or download it again."
            )
    for part in parts:
        _check_file(folder / part, quantized="quantization_config" in entries)
    return sum((folder / part).stat().st_size for part in parts)


def _check_file(file: Path, quantized: bool) -> None:
    try:
        with safe_open(file, framework="pt") as tensors:
            kinds = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"the weights in {file} cannot be read: {error}. The file is damaged or truncated; copy it again."
        ) from error
    integers = [name for name, kind in kinds.items() if not kind.startswith(("F", "BF")) and name.endswith("weight")]
    if integers and not quantized:
        raise ValueError(
            f"{file} holds integers ({kinds[integers[0]]}) where a model has real numbers: {integers[0]}. If it is "
            "quantized, its config.json must say how (quantization_config)."
        )


def _indexed_files(file: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(file.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} cannot be read: {one_line(error)}. Copy it again.") from error
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{file} names {name!r}, which is not a file in its folder.")
    return names


def _gguf(path: Path) -> str:
    if path.suffix in PICKLES:
        raise ValueError(f"{path} is not opened: it {PICKLE}.")
    if path.suffix != ".gguf":
        raise ValueError(f"{path} is a file: give the folder of a run or of a checkpoint, or a .gguf file.")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it does not begin with the letters GGUF.")
    return path.name


def _download(name: str, fetch: bool) -> Path:
    patterns = FETCHED if fetch else [CONFIG, "tokenizer*.json"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except GatedRepoError as error:
        cause: Exception = error
        reason = "the model on the hub asks you to accept its terms: accept them on its page, then hf auth login."
    except LocalEntryNotFoundError as error:
        cause = error
        reason = "a model of this name is neither in the hub's cache nor can the hub be reached."
    except (RepositoryNotFoundError, EntryNotFoundError, HFValidationError) as error:
        cause = error
        reason = "no model of this name on the hub; for a private one log in with hf auth login."
    except OSError as error:  # no connection
        cause = error
        reason = f"the hub cannot be reached: {one_line(error)[:200]}. With HF_HUB_OFFLINE=1 only its cache is read."
    raise FileNotFoundError(f"there is no folder {name}, and {reason}") from cause


def read_metadata(file: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The metadata of a GGUF file by key, of an array of strings only its length; and the names of its tensors."""
    try:
        metadata, names = read_gguf_metadata(str(file))
    except Exception as error:  # it raises what struct and numpy raise
        raise ValueError(
            f"{file} cannot be read: {one_line(error)}. The file is damaged or truncated: copy it again."
        ) from error
    return metadata, names


@contextlib.contextmanager
def _header_copy(file: Path) -> Iterator[Path]:
    """A small GGUF file with the header of another, but for its vocabulary, and with tensors of one number each.

    transformers reads the same configuration from both. Its reader makes a Python object of every entry of the
    vocabulary, which takes seconds.
    """
    metadata, names = read_metadata(file)
    architecture = str(metadata.pop("general.architecture"))
    if VOCABULARY in metadata:
        metadata.setdefault(f"{architecture}.vocab_size", metadata[VOCABULARY])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, file.name)
        writer: Any = GGUFWriter(path, architecture)
        for key, value in metadata.items():
            if key in (VOCABULARY, "tokenizer.ggml.merges", "general.alignment"):
                continue
            if not isinstance(value, list):
                writer.add_key_value(key, value, GGUF_KINDS[type(value)])
            elif value and not key.startswith("tokenizer."):  # an empty list has no type
                writer.add_key_value(key, value, Kind.ARRAY, GGUF_KINDS[type(value[0])])
        for name in names:
            writer.add_tensor(name, np.zeros(1, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        yield path


def one_line(error: BaseException) -> str:
    """The text of an error in one line."""
    return " ".join(str(error).split())
