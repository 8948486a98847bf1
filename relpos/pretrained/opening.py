"""Opening models that other people trained, from files that `relpos.pretrained.source` has found."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from relpos.models.exact import MissingTensorsError, listed, open_exactly
from relpos.pretrained.positions.outline import check_sizes
from relpos.pretrained.source import Source, check_weights

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
