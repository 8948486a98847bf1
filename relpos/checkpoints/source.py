"""Where a model comes from: a folder, a GGUF file or a name on the Hugging Face hub."""

from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig


def read_config(what: str | Path) -> PreTrainedConfig:
    """The configuration of a model, without its weights.

    Args:
        what: A folder with config.json, a .gguf file, or a name on the hub.

    Raises:
        FileNotFoundError: There is no such file, or the folder has no config.json.
        ValueError: The configuration cannot be read.
    """
    path = Path(what)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}.")
        return _read(str(path.parent), gguf_file=path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"there is no model in {path}: it has no config.json.")
        return _read(str(path), local_files_only=True)
    return _read(str(what))


def _read(name: str, **where: object) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=False, **where)
    except Exception as error:  # of transformers, huggingface_hub or gguf
        raise ValueError(f"the configuration of {name} cannot be read: {' '.join(str(error).split())}") from error
    return config
