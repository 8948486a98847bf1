"""The positional tensors of a model on the hub, read by byte ranges: kilobytes of a file of gigabytes."""

import json
import math
from collections.abc import Callable, Iterable
from typing import BinaryIO

import torch
from huggingface_hub import HfFileSystem
from torch import Tensor, nn
from transformers import PreTrainedModel

from relpos.pretrained.positions.description import LayerPosition
from relpos.pretrained.positions.outline import outline
from relpos.pretrained.positions.registry import layer_positions
from relpos.pretrained.source import INDEX, WEIGHTS, read_config

Opener = Callable[[str], BinaryIO]
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
POSITIONAL = ("relative_attention_bias",)  # in the names of tensors that hold a bias by distance
LARGEST_HEADER = 100_000_000  # bytes, as in safetensors' own reader


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
    missing, found, read = set(wanted), {}, 0
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
                found[key] = torch.frombuffer(data, dtype=dtype).view(entry["shape"])
                read += end - begin
        missing -= found.keys()
    if missing:
        raise ValueError(f"the model's files have no {sorted(missing)[0]}.")
    return found, read
