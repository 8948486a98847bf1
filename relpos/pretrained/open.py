"""Opening models that other people trained: complete, or of a model on the hub the positional tensors alone."""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, BinaryIO

import torch
import transformers
from huggingface_hub import HfFileSystem
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from relpos.models.saved import MissingTensorsError, listed, open_exactly
from relpos.pretrained.layer_position import LayerPosition
from relpos.pretrained.positions import layer_positions, named_class, outline
from relpos.pretrained.source import INDEX, WEIGHTS, Source, check_weights, one_line, read_config
from relpos.system.memory import memory_of_machine

Opener = Callable[[str], BinaryIO]
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
POSITIONAL = "relative_attention_bias"  # in the names of tensors that hold a bias by distance
LARGEST_HEADER = 100_000_000  # bytes, as in safetensors' own reader
AUTO = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM", "AutoModel")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
PER_BYTE = 8  # parameters: of one bit each, which is fewer than any quantization has
SMALL = 1_000_000  # parameters that do no harm


def open_model(source: Source, config: PreTrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """Open a model of transformers in float32, in evaluation mode."""
    check_sizes(config, source.what, check_weights(source))
    transformers.utils.logging.disable_progress_bar()  # of loading the weights, which is fast
    options = {"config": config, "dtype": torch.float32, **source.options}
    model: PreTrainedModel
    if source.gguf is None:
        options |= {"use_safetensors": True, "trust_remote_code": trust_remote_code}
        model = _open_folder(source, config, options)
    else:
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(source.folder, **options)
        except Exception as error:  # its reader raises what numpy raises on a truncated file
            raise ValueError(
                f"{source.what} cannot be read: {one_line(error)}. The file is damaged or truncated, or of a model or "
                "quantization that transformers does not read."
            ) from error
    return model.eval()


def check_sizes(config: PreTrainedConfig, where: str, file_bytes: int) -> None:
    """Refuse a model that does not fit its files or this machine, before tensors are made for it."""
    count = sum(parameter.numel() for parameter in outline(config).parameters())
    memory = memory_of_machine()
    size = f"the configuration of {where} describes a model of {count:,} parameters, {4 * count / 2**30:,.1f} GB"
    if 4 * count > memory:
        raise ValueError(f"{size}; this machine has {memory / 2**30:,.1f} GB. Is this its size?")
    if count > PER_BYTE * file_bytes + SMALL:
        raise ValueError(f"{size}, and its weights have {file_bytes:,} bytes. Its configuration is of another model.")


def open_tokenizer(source: Source) -> PreTrainedTokenizerFast | None:
    """The tokenizer of a model; None if it has none."""
    if source.gguf is None and not any((source.folder / name).exists() for name in TOKENIZERS):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=False, **source.options)
    except Exception as error:  # tokenizers raises plain Exceptions
        raise ValueError(f"the tokenizer of {source.what} cannot be read: {one_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"the tokenizer of {source.what} is a {type(tokenizer).__name__}; relpos needs a fast one.")
    return tokenizer


def _open_folder(source: Source, config: PreTrainedConfig, options: Mapping[str, Any]) -> Any:
    """Open the class that the configuration names; the model without its head if the file has none.

    Many models that were fine-tuned without their head still name it in `architectures`.
    """

    def opened(model_class: Any, **further: Any) -> Any:
        return open_exactly(model_class.from_pretrained, source.folder, allow_unknown=True, **options, **further)

    autos = (getattr(transformers, name) for name in AUTO)
    known = named_class(config) or next((auto for auto in autos if type(config) in auto._model_mapping), AutoModel)
    try:
        return opened(known)
    except MissingTensorsError as error:
        if type(config) not in AutoModel._model_mapping or not only_head(known, error.names):
            raise
        base = AutoModel._model_mapping[type(config)]
        lacking = listed("lacks", error.names)[0]
    try:
        model = opened(base)
    except MissingTensorsError as error:  # the pooler is a head too, which a model below another head has not
        if not all(name.startswith("pooler.") for name in error.names):
            raise
        model = opened(base, add_pooling_layer=False)
    warnings.warn(
        f"the file of {source.what} {lacking}, the head of {known.__name__}: {base.__name__} is opened, which has no "
        "head and predicts no tokens.",
        stacklevel=4,
    )
    return model


def only_head(model_class: type[PreTrainedModel], names: Sequence[str]) -> bool:
    """Whether tensors of a model, by their names, are all outside the model that its head stands on."""
    prefix = getattr(model_class, "base_model_prefix", "")
    return bool(prefix) and not any(name.startswith(f"{prefix}.") for name in names)


def fetch_positions(name: str) -> tuple[PreTrainedModel, list[LayerPosition], int] | None:
    """Where position lives in a model on the hub, with the tensors of its bias and no others.

    The modules of the model without other values, its self-attention layers, and how many bytes were read; None if the
    bias of its layers is not a function of the distance alone, so that the model has to be run.
    """
    model = outline(read_config(name))
    if any(position.kind != "none" and position.bias_by_distance is None for position in layer_positions(model)):
        return None
    wanted = [key for key, _ in model.named_parameters() if POSITIONAL in key]
    read = 0
    if wanted:
        tensors, read = read_tensors(hub_opener(name), wanted)
        for key in wanted:
            owner, _, leaf = key.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(tensors[key].float(), requires_grad=False))
    return model, [position for position in layer_positions(model) if position.bias_by_distance is not None], read


def hub_opener(name: str) -> Opener:
    """A function that opens a file of a model on the hub; what is not read is not transferred."""
    hub = HfFileSystem()
    return lambda file: hub.open(f"{name}/{file}", "rb", cache_type="none")


def read_tensors(open_file: Opener, wanted: Iterable[str]) -> tuple[dict[str, Tensor], int]:
    """Some tensors of a model's safetensors files, and how many bytes were read: the headers, and their values."""
    try:
        with open_file(INDEX) as index:
            files = sorted(set(json.load(index)["weight_map"].values()))
    except FileNotFoundError:
        files = [WEIGHTS]
    missing, tensors, read = set(wanted), dict[str, Tensor](), 0
    for name in files:
        with open_file(name) as file:
            size = int.from_bytes(file.read(8), "little")
            if size > LARGEST_HEADER:
                raise ValueError(f"{name} is not a safetensors file: its header would have {size:,} bytes.")
            header = json.loads(file.read(size))
            read += 8 + size
            for key in sorted(missing):
                # In the file, the name of a model around it may stand before a name.
                entry = next((header[at] for at in header if at == key or at.endswith(f".{key}")), None)
                if entry is None:
                    continue
                begin, end = entry["data_offsets"]
                dtype = DTYPES[entry["dtype"]]
                if end - begin != math.prod(entry["shape"]) * dtype.itemsize:
                    raise ValueError(f"the header of {name} is damaged: {key} has {end - begin:,} bytes.")
                file.seek(8 + size + begin)
                tensors[key] = torch.frombuffer(bytearray(file.read(end - begin)), dtype=dtype).view(entry["shape"])
                read += end - begin
        missing -= tensors.keys()
    if missing:
        raise ValueError(f"the model's files have no {sorted(missing)[0]}.")
    return tensors, read
