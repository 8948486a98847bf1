"""The backend "flex" by PyTorch's own Triton kernels, interpreted on CPU tensors, beside the definition in float64.

`flex_kernels` has PyTorch's compiler write them. Everything that it writes around the templates (sums, paddings,
rotations, sinks) is Triton code too, and interpreted. Call `compare` in the process of `triton_interpreter`.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from flex_kernels import Tiles, template_of, triton_kernels
from kernel_cases import FAMILIES, Compared, Family, Numbers, normal, random_numbers, values_and_gradients
from torch import Tensor
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton.backends.compiler import GPUTarget
from triton.language.extra import libdevice
from triton.runtime.interpreter import TensorHandle

from relpos.attend import flex, reference
from relpos.forms.bias import Form, Scaled, locate
from relpos.forms.call import Call

# Tiles smaller than the blocks of a mask, and of four sizes; three parts of the keys in decoding.
TILES = Tiles(forward=(64, 32), backward=(32, 64, 128, 64), splits=3)
FUNCTIONS = ("exp", "exp2", "expm1", "isinf", "log1p", "log2", "tanh")


class Problem(NamedTuple):
    """A form, shapes (batch, heads, key_heads, queries, keys, head_dim, value_dim) and options of a call."""

    family: str
    sizes: tuple[int, ...]
    options: dict[str, Any]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Report:
    """Numbers of a problem by the kernels and by the definition, and which templates were run."""

    compared: list[Compared]
    templates: set[str] = field(default_factory=set)


def _both_directions(numbers: Numbers, call: Call) -> Scaled:
    form = FAMILIES["scaled"].form(numbers, call)
    assert isinstance(form, Scaled)
    position = torch.maximum(call.key_positions.to(call.dtype), numbers["threshold"])
    return replace(form, column=torch.log1p(numbers["log_c"].exp() * position))


def located(family: Family) -> Family:
    """The family with the positions of the call, where these have gaps."""

    def form(numbers: Numbers, call: Call) -> Form | None:
        bias = family.form(numbers, call)
        return None if bias is None else locate(bias, call)

    return Family(family.numbers, form)


FORMS = {
    name: located(family)
    for name, family in {
        **FAMILIES,
        "scaled, both directions": Family(FAMILIES["scaled"].numbers, _both_directions),
    }.items()
}


def compare(problems: list[Problem]) -> list[Report]:
    """Every problem by the kernels and by the definition; later ones may run what was compiled for earlier ones."""
    torch.manual_seed(0)
    with triton_kernels(GPUTarget("cuda", 90, 32), TILES), interpreted_libdevice():
        return [_compare(problem) for problem in problems]


def _compare(problem: Problem) -> Report:
    family, tensors = FORMS[problem.family], [x.to(problem.dtype).double() for x in normal(*problem.sizes)]
    numbers = random_numbers(family, tensors, problem.options)
    arguments = tensors, family, numbers, problem.options
    expected = values_and_gradients(reference.attention, torch.float64, *arguments)
    with recorded_templates() as templates:
        ours = values_and_gradients(flex.attention, problem.dtype, *arguments)
    return Report([(f"{name} by flex", ours[name], expected[name]) for name in expected], templates)


@contextlib.contextmanager
def recorded_templates() -> Iterator[set[str]]:
    """The templates of FlexAttention that are run within this context."""
    templates: set[str] = set()
    original = CachingAutotuner.run

    def run(self: CachingAutotuner, *arguments: Any, **options: Any) -> Any:
        templates.update({template_of(self.fn.arg_names)} - {None})
        return original(self, *arguments, **options)

    with mock.patch.object(CachingAutotuner, "run", run):
        yield templates


@contextlib.contextmanager
def interpreted_libdevice() -> Iterator[None]:
    """NVIDIA's mathematical functions by NumPy: the interpreter has none, and returns None for them."""
    functions = {name: elementwise(getattr(np, name)) for name in FUNCTIONS}
    others = {name: missing(name) for name in vars(libdevice) if not name.startswith("_") and name not in FUNCTIONS}
    with mock.patch.multiple(libdevice, **functions, **others):
        yield


def elementwise(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], Any]:
    """A function of an interpreted tensor."""
    return lambda x: tl.tensor(TensorHandle(function(x.handle.data), x.handle.dtype), x.type)


def missing(name: str) -> Callable[..., Any]:
    """A function that says that it is missing."""

    def function(*arguments: Any) -> Any:
        raise NotImplementedError(f"libdevice.{name} has no function of NumPy here: add it to FUNCTIONS.")

    return function


def every_third(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A mask that depends on everything."""
    return (i + j + h) % 3 != b
