"""The versions of the software that computed a result."""

import importlib.metadata
import platform
from collections.abc import Sequence

from relpos import __version__

PACKAGES = ("torch", "transformers", "accelerate", "tokenizers", "numpy")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """The versions of relpos, Python and the packages that numbers depend on, by name."""
    installed = {name: importlib.metadata.version(name) for name in packages}
    return {"relpos": __version__, "python": platform.python_version(), **installed}
