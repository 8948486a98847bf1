"""The folder of a saved model: weights that fit it exactly, and the module that opens it elsewhere.

If a tensor is missing in the file, transformers initialises it and only logs a warning, which is easily overlooked.
The numbers measured are then those of a model that was never trained.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers.utils import logging

from relpos.model_catalogue import FAMILIES, PREFIX
from relpos.system.files import write_text

SHOWN = 3  # names of tensors in a sentence
MODULE_FILE = "modeling_relpos.py"
MODULE = '''"""The package relpos opens this model: pip install relpos, and import relpos.models first."""

try:
    from relpos.models import {names}
except ImportError as error:
    raise ImportError(
        "this model needs the package relpos: pip install relpos, and import relpos.models before opening it. "
        f"(What was missing: {{error}}.)"
    ) from None
'''


class MissingTensorsError(ValueError):
    """A file lacks tensors of a model, and fits it otherwise."""

    def __init__(self, message: str, names: Iterable[str]) -> None:
        super().__init__(message)
        self.names = sorted(names)


def open_exactly(
    from_pretrained: Callable[..., Any], folder: Any, *args: Any, allow_unknown: bool = False, **options: Any
) -> Any:
    """Open a model with transformers' `from_pretrained`, if the file has exactly the model's tensors and shapes.

    Only safetensors are opened, unless `use_safetensors=False` is among the options: a pickle can run any code. The
    file may have more tensors with `allow_unknown`, and other shapes with `ignore_mismatched_sizes`.
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


def write_stub(folder: Path) -> None:
    """Write the module that transformers runs with `trust_remote_code`, and name it in the folder's config.json.

    It imports `relpos.models`. Where that is imported already, the Auto classes know our model types and never run the
    module, so that no trust is needed.
    """
    file = folder / "config.json"
    entries = json.loads(file.read_text(encoding="utf-8"))
    model_type = str(entries.get("model_type"))
    types = [f"{PREFIX}{name}" for name in FAMILIES]
    if model_type not in types:
        raise ValueError(f"{folder} holds a model of type {model_type!r}, not one of {', '.join(types)}.")
    classes = FAMILIES[model_type.removeprefix(PREFIX)].classes
    write_text(folder / MODULE_FILE, MODULE.format(names=", ".join(classes.values())))
    auto_map = {auto: f"{Path(MODULE_FILE).stem}.{name}" for auto, name in classes.items()}
    write_text(file, json.dumps({**entries, "auto_map": auto_map}, indent=2, sort_keys=True) + "\n")
