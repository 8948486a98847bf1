import os
import signal
import tempfile
from pathlib import Path

# Compiled graphs of another version of our operators must not be found again: torch keys them by name alone.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="relpos-inductor-")
# On some virtual machines the CPU claims AMX and has none: torch's products of bfloat16 matrices end the process there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

# The Triton kernels run in Triton's interpreter, on CPU tensors.
os.environ["TRITON_INTERPRET"] = "1"

# Small tensors on a machine where pytest-xdist already uses every core; the processes that tests start inherit it. Two
# threads that share a core with other work spend most of their time waiting for each other.
os.environ["OMP_NUM_THREADS"] = "1"

# A shell that starts pytest in the background makes it ignore Ctrl-C, which the processes of the tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
from small_run import SMALL_RUN

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    # A worker runs all tests of a file, which may share a trained model (--dist loadfile): the long files come first.
    items.sort(key=lambda item: item.get_closest_marker("heavy") is None)


@pytest.fixture(autouse=True)
def _same_start():
    torch.manual_seed(0)


@pytest.fixture
def two_threads(monkeypatch):
    """Two threads for the native kernel, however little there is to do."""
    monkeypatch.setattr("relpos.attend.native.problem.WORK_FOR_A_THREAD", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A text of 32 windows (eight steps an epoch), and a cache of its own."""
    folder = tmp_path_factory.mktemp("world")
    words = [f"word{i * i % 97} and {i % 13}" for i in range(60)]
    (folder / "text.txt").write_text("\n".join(" ".join(words[i : i + 4]) for i in range(0, 60, 2)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELPOS_CACHE", str(folder / "cache"))
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        yield folder


@pytest.fixture(scope="module")
def settings(world):
    """Settings of a small run in a folder; overrides by dotted key with __ for the dot."""
    from relpos.runs.settings import load_settings

    def make(out: Path, **overrides: object):
        named = {key.replace("__", "."): value for key, value in overrides.items()}
        return load_settings(None, {**SMALL_RUN, "data.source": str(world / "text.txt"), "run.out": str(out), **named})

    return make
