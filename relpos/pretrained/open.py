"""Opening models that other people trained: complete, or of a model on the hub the positional tensors alone."""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO

import torch
import transformers
from huggingface_hub import HfFileSystem
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from relpos.models.saved import MissingTensorsError, listed, open_exactly
from relpos.pretrained.facts import check_sizes, outline
from relpos.pretrained.positions import LayerPosition, layer_positions
from relpos.pretrained.source import INDEX, WEIGHTS, Source, check_weights, read_config

Opener = Callable[[str], BinaryIO]
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
POSITIONAL = ("relative_attention_bias",)  # in the names of tensors that hold a bias by distance
LARGEST_HEADER = 100_000_000  # bytes, as in safetensors' own reader
AUTO = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM", "AutoModel")


def open_model(source: Source, config: PreTrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """Open a model of transformers in float32, in evaluation mode.

    Args:
        source: Its files.
        config: Its configuration.
        trust_remote_code: Whether to run the code of a checkpoint that transformers does not know.

    Raises:
        FileNotFoundError: Weights are missing.
        ValueError: The weights are pickled, damaged, or do not fit the configuration or this machine's memory.
    """
    check_sizes(config, source.what, check_weights(source))
    transformers.utils.logging.disable_progress_bar()  # of loading the weights, which is fast
    options = {"config": config, "dtype": torch.float32, **source.options}
    if source.gguf is None:
        options |= {"use_safetensors": True, "trust_remote_code": trust_remote_code}
        opened = _open_folder(source, config, options)
    else:
        opened = _open_gguf(source, config, options)
    model: PreTrainedModel = opened
    return model.eval()


def open_tokenizer(source: Source) -> PreTrainedTokenizerFast | None:
    """The tokenizer of a model; None if it has none.

    Raises:
        ValueError: It cannot be read.
    """
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    if source.gguf is None and not any((source.folder / name).exists() for name in names):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=False, **source.options)
    except Exception as error:  # tokenizers raises plain Exceptions
        raise ValueError(f"the tokenizer of {source.what} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"the tokenizer of {source.what} is a {type(tokenizer).__name__}; relpos needs a fast one.")
    return tokenizer


def _model_class(config: PreTrainedConfig) -> Any:
    """The class that the configuration names; else the first Auto class that knows its type."""
    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, PreTrainedModel):
            return named
    for name in AUTO:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            return auto
    return transformers.AutoModel


def _open_folder(source: Source, config: PreTrainedConfig, options: dict[str, Any]) -> Any:
    """Open the class that the configuration names; the model without its head if the file has none.

    Many models that were fine-tuned without their head still name it in `architectures`.
    """
    named = _model_class(config)
    try:
        return open_exactly(named.from_pretrained, source.folder, allow_unknown=True, **options)
    except MissingTensorsError as error:
        if type(config) not in AutoModel._model_mapping or not only_head(named, error.names):
            raise
        base = AutoModel._model_mapping[type(config)]
        lacking = listed("lacks", error.names)[0]
    try:
        opened = open_exactly(base.from_pretrained, source.folder, allow_unknown=True, **options)
    except MissingTensorsError as error:  # the pooler is a head too, which a model below another head has not
        if not all(name.startswith("pooler.") for name in error.names):
            raise
        options |= {"add_pooling_layer": False}
        opened = open_exactly(base.from_pretrained, source.folder, allow_unknown=True, **options)
    warnings.warn(
        f"the file of {source.what} {lacking}, the head of {named.__name__}: {base.__name__} is opened, which has no "
        "head and predicts no tokens.",
        stacklevel=4,
    )
    return opened


def only_head(model_class: type[PreTrainedModel], names: Sequence[str]) -> bool:
    """Whether tensors of a model, by their names, are all outside the model that its head stands on."""
    prefix = getattr(model_class, "base_model_prefix", "")
    return bool(prefix) and not any(name.startswith(f"{prefix}.") for name in names)


def _open_gguf(source: Source, config: PreTrainedConfig, options: dict[str, Any]) -> Any:
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(source.folder, **options)
    except Exception as error:  # its reader raises what numpy raises on a truncated file
        raise ValueError(
            f"{source.what} cannot be read: {' '.join(str(error).split())}. The file is damaged or truncated, or of a "
            "model or quantization that transformers does not read."
        ) from error


def fetch_positions(name: str) -> tuple[PreTrainedModel, list[LayerPosition], int] | None:
    """Where position lives in a model on the hub, with the tensors of its bias and no others.

    Args:
        name: Of the model, as in "google-t5/t5-base".

    Returns:
        The modules of the model without other values, its self-attention layers, and how many bytes were read; None if
        the bias of its layers is not a function of the distance alone, so that the model has to be run.

    Raises:
        FileNotFoundError: There is no such model, or the hub cannot be reached.
        ValueError: Its files cannot be read.
    """
    model = outline(read_config(name))
    if any(position.kind != "none" and position.bias_by_distance is None for position in layer_positions(model)):
        return None
    wanted = {key: parameter for key, parameter in model.named_parameters() if any(part in key for part in POSITIONAL)}
    read = 0
    if wanted:
        open_file = hub_opener(name)
        tensors, read = read_tensors(open_file, weight_files(open_file), wanted)
        for key in wanted:
            owner, _, leaf = key.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(tensors[key].float(), requires_grad=False))
    return model, [position for position in layer_positions(model) if position.bias_by_distance is not None], read


def hub_opener(name: str) -> Opener:
    """A function that opens a file of a model on the hub; what is not read is not transferred."""
    hub = HfFileSystem()
    return lambda file: hub.open(f"{name}/{file}", "rb", cache_type="none")


def weight_files(open_file: Opener) -> list[str]:
    """The names of the safetensors files of a model."""
    try:
        with open_file(INDEX) as index:
            return sorted(set(json.load(index)["weight_map"].values()))
    except FileNotFoundError:
        return [WEIGHTS]


def read_tensors(open_file: Opener, files: Iterable[str], wanted: Iterable[str]) -> tuple[dict[str, Tensor], int]:
    """Read some tensors of safetensors files: their headers, and the bytes of the tensors.

    Args:
        open_file: Opens a file by name.
        files: Names of the files.
        wanted: Names of the tensors; in the file they may have the name of a model around it before them.

    Returns:
        The tensors, and how many bytes were read.

    Raises:
        ValueError: A header is damaged, or tensors are missing.
    """
    missing, tensors, read = set(wanted), dict[str, Tensor](), 0
    for name in files:
        with open_file(name) as file:
            size = int.from_bytes(file.read(8), "little")
            if size > LARGEST_HEADER:
                raise ValueError(f"{name} is not a safetensors file: its header would have {size:,} bytes.")
            header = json.loads(file.read(size))
            read += 8 + size
            for key in sorted(missing):
                entry = next((header[at] for at in header if at == key or at.endswith(f".{key}")), None)
                if entry is None:
                    continue
                begin, end = entry["data_offsets"]
                dtype = DTYPES[entry["dtype"]]
                if end - begin != math.prod(entry["shape"]) * dtype.itemsize:
                    raise ValueError(f"the header of {name} is damaged: {key} has {end - begin:,} bytes.")
                file.seek(8 + size + begin)
                data = bytearray(file.read(end - begin))
                tensors[key] = torch.frombuffer(data, dtype=dtype).view(entry["shape"])
                read += end - begin
        missing -= tensors.keys()
    if missing:
        raise ValueError(f"the model's files have no {sorted(missing)[0]}.")
    return tensors, read
