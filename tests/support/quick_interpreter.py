"""Triton's interpreter, several times as fast.

It prepares triton.language once, not at every call of a jit function, and looks up each dtype once. Integers are not
computed a second time in 64 bits to find overflows: no index of a test comes near 2³¹.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from triton import language as tl
from triton.runtime import interpreter

GET_DTYPE = interpreter._get_np_dtype
DTYPES: dict[str, np.dtype] = {}


@cache
def languages(function: Callable[..., Any]) -> list[Any]:
    """The modules of the language that a function sees."""
    return [module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())]


def call(self: interpreter.InterpretedFunction, *args: Any, **options: Any) -> Any:
    """Call a jit function from a kernel."""
    if any(tl.core.is_builtin(module.load) for module in languages(self.fn)):  # not prepared yet
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **options)


def numpy_dtype(of: tl.core.dtype) -> np.dtype:
    """The dtype of NumPy in which the interpreter keeps elements."""
    name = of.scalar.name
    if name not in DTYPES:
        DTYPES[name] = GET_DTYPE(of.scalar)
    return DTYPES[name]


@pytest.fixture(autouse=True)
def quick_interpreter(monkeypatch):
    """Let the kernels run several times as fast."""
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_dtype)
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
