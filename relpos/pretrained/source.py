"""Where a model's files are: a folder, a GGUF file, or a name on the Hugging Face hub. Nothing is unpickled."""

import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

from relpos.pretrained.gguf_header import header_copy
from relpos.system.files import read_json

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FETCHED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # of a model on the hub
ADAPTER, ADAPTER_PICKLE = "adapter_config.json", "adapter_model.bin"  # of peft, which transformers opens by itself
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
PICKLE = (
    "is a pickle, which can run any code when it is opened. If you trust it, convert it to safetensors: open it with "
    "the class of transformers that its config.json names, and save_pretrained to another folder"
)


@dataclass(frozen=True)
class Source:
    """The local files of a model."""

    what: str  # as the user wrote it
    folder: Path
    gguf: str | None = None  # the name of its GGUF file in the folder

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of transformers' `from_pretrained` beside the folder."""
        return {} if self.gguf is None else {"gguf_file": self.gguf}


def find_source(what: str | Path, fetch: bool = True) -> Source:
    """Find a model's files; those of a name on the hub are downloaded to its usual cache.

    Args:
        what: A folder, a .gguf file, or a name on the hub as in "HuggingFaceTB/SmolLM2-135M".
        fetch: Whether to download the weights too; otherwise the folder of a name on the hub has the JSON files only.

    Raises:
        FileNotFoundError: There is no such folder or file, and the hub has no such model or cannot be reached.
        ValueError: It is a file of another kind.
    """
    path = Path(what)
    if path.is_dir():
        return Source(str(what), path)
    if path.exists():
        return Source(str(what), path.parent, _gguf(path))
    if path.suffix == ".gguf":
        raise FileNotFoundError(f"there is no file {what}.")
    if not is_hub_name(what):
        raise FileNotFoundError(f"there is no folder {what}.")
    return Source(str(what), _download(str(what), fetch))


def is_hub_name(what: str | Path) -> bool:
    """Whether something that does not exist here may be a name on the hub: owner/name, where owner is not a folder."""
    return HUB_NAME.fullmatch(str(what)) is not None and not Path(what).parent.is_dir()


def read_config(what: str | Path, trust_remote_code: bool = False, **changes: Any) -> PreTrainedConfig:
    """The configuration of a model, without its weights.

    Args:
        what: A folder, a .gguf file, or a name on the hub.
        trust_remote_code: Whether to run the code of a checkpoint that transformers does not know.
        changes: Entries that replace those of the file.

    Raises:
        FileNotFoundError: There is no such model.
        ValueError: The configuration cannot be read, or is of an unknown model.
    """
    return source_config(find_source(what, fetch=False), trust_remote_code, **changes)


def source_config(source: Source, trust_remote_code: bool = False, **changes: Any) -> PreTrainedConfig:
    """The configuration of a model whose files have been found; see `read_config`."""
    if source.gguf is None and not (source.folder / CONFIG).exists():
        raise FileNotFoundError(f"there is no model in {source.what}: it has no {CONFIG}.")
    with contextlib.ExitStack() as files:
        folder = source.folder
        if source.gguf is not None:
            folder = files.enter_context(header_copy(folder / source.gguf)).parent
        try:
            config = AutoConfig.from_pretrained(
                folder, trust_remote_code=trust_remote_code, **source.options, **changes
            )
        except (StrictDataclassError, ValueError, TypeError, KeyError, OSError, ImportError) as error:
            file = source.what if source.gguf else source.folder / CONFIG
            raise ValueError(f"the configuration in {file} cannot be read: {_one_line(error)}") from error
    config.name_or_path = str(source.folder)
    return config


def check_weights(source: Source) -> int:
    """Check that a folder's weights are complete safetensors files, before anything opens them.

    Returns:
        Their size in bytes.

    Raises:
        FileNotFoundError: There are no weights, or a part of them is missing.
        ValueError: They are pickled, truncated, damaged, or hold integers where a model has real numbers.
    """
    if source.gguf is not None:
        return (source.folder / source.gguf).stat().st_size
    folder = source.folder
    entries = read_json(folder / CONFIG)
    name = entries.get("transformers_weights") or (WEIGHTS if (folder / WEIGHTS).exists() else INDEX)
    if Path(str(name)).suffix in PICKLES:
        raise ValueError(f"the model in {source.what} is not opened: {name} {PICKLE}.")
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if (folder / ADAPTER).exists() and ADAPTER_PICKLE in pickles:
        raise ValueError(f"the model in {source.what} is not opened: {ADAPTER_PICKLE} {PICKLE}.")
    if not (folder / name).exists():
        if pickles:
            raise ValueError(f"the model in {source.what} is not opened: {pickles[0]} {PICKLE}.")
        expected = WEIGHTS if name == INDEX else name
        raise FileNotFoundError(f"there are no weights in {source.what}: it has no {expected}.")
    parts = [str(name)]
    if str(name).endswith(".index.json"):
        parts = sorted(set(_index(folder / name).values()))
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


def _index(file: Path) -> dict[str, str]:
    try:
        names: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} cannot be read: {_one_line(error)}. Copy it again.") from error
    for name in names.values():
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
    nowhere = f"there is no folder {name}, and"
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except GatedRepoError as error:
        raise FileNotFoundError(
            f"{nowhere} the model on the hub asks you to accept its terms: accept them on its page, then hf auth login."
        ) from error
    except (RepositoryNotFoundError, EntryNotFoundError, HFValidationError) as error:
        if isinstance(error, LocalEntryNotFoundError):
            raise FileNotFoundError(
                f"{nowhere} a model of this name is neither in the hub's cache nor can the hub be reached."
            ) from error
        raise FileNotFoundError(
            f"{nowhere} no model of this name on the hub; for a private one log in with hf auth login."
        ) from error
    except OSError as error:  # no connection
        raise FileNotFoundError(
            f"{nowhere} the hub cannot be reached: {_one_line(error)[:200]}. With HF_HUB_OFFLINE=1 only its cache is "
            "read."
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
