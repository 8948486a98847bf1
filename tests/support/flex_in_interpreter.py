"""The backend "flex" by PyTorch's own Triton kernels, in Triton's interpreter, on CPU tensors.

`flex_kernels` has PyTorch's compiler write them. Everything that it writes around the templates (sums, paddings,
rotations, sinks) is Triton code too, and interpreted.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from flex_kernels import Tiles, template_of, triton_kernels
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton.backends.compiler import GPUTarget
from triton.language.extra import libdevice
from triton.runtime.interpreter import TensorHandle

# As for bfloat16 on an H100 (head_dim 64 and more), but half as many keys in the forward; tiles of half a block.
TILES = Tiles(forward=(128, 64), backward=(64, 128, 128, 64), splits=3)
ROWS = 128
FUNCTIONS = ("exp", "exp2", "expm1", "isinf", "log1p", "log2", "tanh")


@contextlib.contextmanager
def flex_in_interpreter() -> Iterator[set[str]]:
    """Within this context, relpos.attend.flex runs on CPU tensors. Yields the templates that were run, as they run."""
    templates: set[str] = set()
    original = CachingAutotuner.run

    def run(self: CachingAutotuner, *arguments: Any, **options: Any) -> Any:
        templates.update({template_of(self.fn.arg_names)} - {None})
        for config in self.configs:  # of sums around the templates: fewer programs, as each costs the interpreter time
            config.kwargs |= {name: max(size, ROWS) for name, size in config.kwargs.items() if name == "XBLOCK"}
        return original(self, *arguments, **options)

    functions = {name: elementwise(getattr(np, name)) for name in FUNCTIONS}
    others = {name: missing(name) for name in vars(libdevice) if not name.startswith("_") and name not in FUNCTIONS}
    with (
        triton_kernels(GPUTarget("cuda", 90, 32), TILES),
        # The interpreter has none of NVIDIA's mathematical functions: for all of them it returns None.
        mock.patch.multiple(libdevice, **functions, **others),
        mock.patch.object(CachingAutotuner, "run", run),
        np.errstate(all="ignore"),  # a GPU does not warn that −inf − −inf is NaN
    ):
        yield templates


def elementwise(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], Any]:
    """A function of an interpreted tensor."""
    return lambda x: tl.tensor(TensorHandle(function(x.handle.data), x.handle.dtype), x.type)


def missing(name: str) -> Callable[..., Any]:
    """A function that says that it is missing."""

    def function(*arguments: Any) -> Any:
        raise NotImplementedError(f"libdevice.{name} has no function of NumPy here: add it to FUNCTIONS.")

    return function
