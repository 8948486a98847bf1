"""A module in the folder of a run, named in transformers' `auto_map`: it opens the model by `trust_remote_code`.

It imports `relpos.models`, and asks people without relpos to install it. Where `relpos.models` is imported already, the
Auto classes know our model types and never run the module, so that no trust is needed.
"""

import json
from pathlib import Path

from relpos.model_catalogue import FAMILIES, PREFIX
from relpos.system.files import write_text

FILE = "modeling_relpos.py"
MODULE = '''"""The package relpos opens this model: pip install relpos, and import relpos.models first."""

try:
    from relpos.models import {names}
except ImportError as error:
    raise ImportError(
        "this model needs the package relpos: pip install relpos, and import relpos.models before opening it. "
        f"(What was missing: {{error}}.)"
    ) from None
'''


def write_stub(folder: Path) -> None:
    """Write the module into the folder of a relpos model, and name it in the folder's config.json.

    Raises:
        ValueError: The folder holds a model of another type.
    """
    file = folder / "config.json"
    entries = json.loads(file.read_text(encoding="utf-8"))
    model_type = str(entries.get("model_type"))
    types = [f"{PREFIX}{name}" for name in FAMILIES]
    if model_type not in types:
        raise ValueError(f"{folder} holds a model of type {model_type!r}, not one of {', '.join(types)}.")
    classes = FAMILIES[model_type.removeprefix(PREFIX)].classes
    write_text(folder / FILE, MODULE.format(names=", ".join(classes.values())))
    auto_map = {auto: f"{Path(FILE).stem}.{name}" for auto, name in classes.items()}
    write_text(file, json.dumps({**entries, "auto_map": auto_map}, indent=2, sort_keys=True) + "\n")
