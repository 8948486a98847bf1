"""Opening saved weights that fit the model exactly.

transformers gives a tensor that the file lacks its start value, and says so in a log that nobody reads: what is then
measured is a model that was never trained.
"""

from collections.abc import Callable, Iterable
from typing import Any

from safetensors import SafetensorError
from transformers.utils import logging

SHOWN = 3  # names of tensors in a sentence


def open_exactly(from_pretrained: Callable[..., Any], folder: Any, *args: Any, **options: Any) -> Any:
    """What `from_pretrained` opens, if the file's tensors are the model's: no more, no fewer, of the same shapes.

    Args:
        from_pretrained: that of transformers, bound to the model's class.
        folder: where the model is, or its name on the hub.
        args: for `from_pretrained`.
        options: for `from_pretrained`; with `ignore_mismatched_sizes=True` other shapes are allowed, as it says.

    Returns:
        The model; with `output_loading_info=True` the model and transformers' account of what was loaded.

    Raises:
        ValueError: the file cannot be read, or lacks tensors, or has others, or has them in other shapes.
    """
    with_info = options.pop("output_loading_info", False)
    other_shapes = options.pop("ignore_mismatched_sizes", False)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its report is in the sentence below
    try:
        model, info = from_pretrained(folder, *args, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    except SafetensorError as error:
        raise ValueError(
            f"the weights in {folder} cannot be read: {error}. The file is damaged or was cut short; copy it again, or "
            "run the same relpos train again where it was trained."
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    shapes = [] if other_shapes else info["mismatched_keys"]
    problems = [
        *_told("lacks", sorted(info["missing_keys"])),
        *_told("has unknown", sorted(info["unexpected_keys"])),
        *_told(
            "has other shapes of", [f"{name} {tuple(saved)}, not {tuple(own)}" for name, saved, own in sorted(shapes)]
        ),
    ]
    if problems:
        raise ValueError(
            f"the weights in {folder} do not fit its model: the file {'; it '.join(problems)}. It is damaged, or its "
            "config.json belongs to other weights. To start another model from what fits, build it and use "
            "load_state_dict(..., strict=False)."
        )
    return (model, info) if with_info else model


def _told(verb: str, names: Iterable[str]) -> list[str]:
    """The first names, and how many there are; nothing if there are none."""
    known = list(names)
    if not known:
        return []
    more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
    return [f"{verb} {', '.join(known[:SHOWN])}{more}"]
