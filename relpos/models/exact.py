"""Loading saved weights that fit the model exactly.

If a tensor is missing in the file, transformers initialises it and only logs a warning, which is easily overlooked.
The numbers measured are then those of a model that was never trained.
"""

from collections.abc import Callable, Iterable
from typing import Any

from safetensors import SafetensorError
from transformers.utils import logging

SHOWN = 3  # names of tensors in a sentence


class MissingTensorsError(ValueError):
    """A file lacks tensors of a model, and fits it otherwise.

    Args:
        message: The sentence.
        names: Of the missing tensors.
    """

    def __init__(self, message: str, names: Iterable[str]) -> None:
        super().__init__(message)
        self.names = sorted(names)


def open_exactly(
    from_pretrained: Callable[..., Any], folder: Any, *args: Any, allow_unknown: bool = False, **options: Any
) -> Any:
    """Open a model with `from_pretrained`, if the file has exactly the model's tensors, in the same shapes.

    Only safetensors are opened, unless `use_safetensors=False` is among the options: a pickle can run any code.

    Args:
        from_pretrained: The method of transformers, bound to the model's class.
        folder: The model's folder, or its name on the hub.
        args: Passed to `from_pretrained`.
        allow_unknown: Whether the file may have tensors that the model does not have.
        options: Passed to `from_pretrained`; with `ignore_mismatched_sizes=True` other shapes are allowed.

    Returns:
        The model; with `output_loading_info=True` the model and transformers' description of what was loaded.

    Raises:
        MissingTensorsError: Tensors are missing, and nothing else is wrong.
        ValueError: The file cannot be read, or tensors are missing, unknown or of other shapes.
    """
    options.setdefault("use_safetensors", True)
    with_info = options.pop("output_loading_info", False)
    other_shapes = options.pop("ignore_mismatched_sizes", False)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the error below reports the same
    try:
        model, info = from_pretrained(folder, *args, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    except SafetensorError as error:
        raise ValueError(
            f"the weights in {folder} cannot be read: {error}. The file is damaged or truncated; copy it again, or "
            "rerun relpos train in the folder where it was trained."
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    shapes = [] if other_shapes else info["mismatched_keys"]
    problems = [
        *listed("lacks", sorted(info["missing_keys"])),
        *listed("has unknown", [] if allow_unknown else sorted(info["unexpected_keys"])),
        *listed(
            "has other shapes of", [f"{name} {tuple(saved)}, not {tuple(own)}" for name, saved, own in sorted(shapes)]
        ),
    ]
    if problems:
        sentence = (
            f"the weights in {folder} do not fit its model: the file {'; it '.join(problems)}. It is damaged, or its "
            "config.json belongs to other weights. To initialise another model from the tensors that fit, build it and "
            "use load_state_dict(..., strict=False)."
        )
        if info["missing_keys"] and len(problems) == 1:
            raise MissingTensorsError(sentence, info["missing_keys"])
        raise ValueError(sentence)
    return (model, info) if with_info else model


def listed(verb: str, names: Iterable[str]) -> list[str]:
    """The first names, and how many there are; nothing if there are none."""
    known = list(names)
    if not known:
        return []
    more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
    return [f"{verb} {', '.join(known[:SHOWN])}{more}"]
