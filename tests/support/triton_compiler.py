"""A process in which Triton compiles its kernels: it decides that when it is imported, and here it interprets them."""

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest


@contextlib.contextmanager
def triton_compiler() -> Iterator[ProcessPoolExecutor]:
    """One process, to which functions are submitted; what it imports stays imported from one to the next."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("TRITON_INTERPRET", raising=False)
            process.submit(os.getpid).result()  # it starts here, and keeps this environment
        yield process
