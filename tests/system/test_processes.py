"""Child processes, locks, memory and lines of progress."""

import errno
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from waiting import gone, wait_until

from relpos.system import memory
from relpos.system.executors import Exit, LocalExecutor, Part
from relpos.system.files import HeldError, Lock, lock_holder
from relpos.system.progress import Countdown, LiveLine

pytestmark = pytest.mark.heavy

WAITING = "from relpos.system.executors import end_with_parent; end_with_parent(); import time; time.sleep({})"


@pytest.fixture
def part_of(tmp_path, monkeypatch):
    """A part that runs some code in the current folder."""
    monkeypatch.chdir(tmp_path)

    def make(code: str, name: str = "child") -> Part:
        Path(f"{name}.py").write_text(f"import os, signal, sys; {code}")
        return Part(name, (), Path(), Path(f"{name}.log"))

    return make


def end_of(executor: LocalExecutor, name: str) -> Exit:
    ended: dict[str, Exit] = {}
    wait_until(lambda: ended.update(executor.ended()) or name in ended)
    return ended[name]


def test_a_child_has_its_threads_and_its_log_and_runs_to_its_end(part_of):
    part = part_of(f"print(os.environ['OMP_NUM_THREADS']); print('x', file=sys.stderr); {WAITING.format(0.3)}")
    part.log.write_text("before\n")
    executor = LocalExecutor(cores=3)
    executor.start("a", part)
    assert executor.running == ["a"]
    end = end_of(executor, "a")
    assert end.code == 0
    assert end.seconds > 0.3
    assert part.log.read_text() == "before\n3\nx\n"
    assert executor.running == []


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL, as the system does when memory runs out."),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV."),
        ("exit(3)", "ended with code 3: see the log."),
    ],
)
def test_how_a_child_ended_is_a_sentence(code, sentence, part_of):
    executor = LocalExecutor()
    executor.start("a", part_of(code))
    assert end_of(executor, "a").reason("see the log.") == f"its process {sentence}"


def test_stop_ends_all_and_waits(part_of):
    executor, code = LocalExecutor(), f"print(os.getpid()); {WAITING.format(600)}"
    parts = {name: part_of(code, name) for name in ("a", "b")}
    for name, part in parts.items():
        executor.start(name, part)
    wait_until(lambda: all(part.log.read_text() for part in parts.values()))
    assert executor.seconds("a") >= executor.seconds("b") > 0
    executor.stop()
    assert executor.running == []
    assert all(gone(int(part.log.read_text())) for part in parts.values())


def test_a_child_ends_when_its_parent_is_killed(part_of):
    part = part_of(f"print(os.getpid()); {WAITING.format(600)}")
    parent = """
import time
from pathlib import Path
from relpos.system.executors import LocalExecutor, Part
executor = LocalExecutor()
executor.start("a", Part("child", (), Path(), Path("child.log")))
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", parent])
    try:
        wait_until(lambda: part.log.exists() and part.log.read_text().endswith("\n"))
        child = int(part.log.read_text())
        assert not gone(child)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: gone(child))


class TestALock:
    def test_refuses_with_the_sentence_of_its_caller(self, tmp_path):
        with Lock(tmp_path), pytest.raises(HeldError, match=r"^.* is in use by process \d+ on .*: wait for it"):
            Lock(tmp_path).__enter__()
        sentence = "{folder} {{}} is being trained by {holder}."
        with Lock(tmp_path), pytest.raises(HeldError, match=rf"\{{\}} is being trained by process {os.getpid()} on"):
            Lock(tmp_path, in_use=sentence).__enter__()

    def test_names_its_holder(self, tmp_path):
        with Lock(tmp_path, "a"), Lock(tmp_path, "b"):
            assert lock_holder(tmp_path, "a") == f"process {os.getpid()} on {os.uname().nodename}"
        (tmp_path / "a").write_text("")
        assert lock_holder(tmp_path, "a") == "another process"

    def test_is_waited_for(self, tmp_path):
        order = []

        def wait():
            with Lock(tmp_path, wait=True):
                order.append("second")

        with Lock(tmp_path):
            thread = threading.Thread(target=wait)
            thread.start()
            thread.join(0.2)
            order.append("first")
        thread.join()
        assert order == ["first", "second"]

    @pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
    def test_is_taken_as_held_where_the_file_system_has_no_locks(self, number, tmp_path, monkeypatch):
        def refuse(*args):
            raise OSError(number, "No locks available")

        monkeypatch.setattr("fcntl.flock", refuse)
        with Lock(tmp_path), Lock(tmp_path, wait=True):
            assert lock_holder(tmp_path).startswith("process")


class TestMemory:
    def test_is_limited_by_the_container(self, tmp_path, monkeypatch):
        (tmp_path / "memory.max").write_text("1000\n")
        (tmp_path / "unlimited").write_text("max\n")
        files = [tmp_path / name for name in ("unlimited", "memory.max", "missing")]
        monkeypatch.setattr(memory, "CGROUP_LIMITS", files)
        assert memory.memory_limit() == 1000 < memory.memory_of_machine()

    def test_peak_rises_with_an_allocation_and_begins_anew(self):
        device = torch.device("cpu")
        memory.begin_peak(device)
        before = memory.peak(device)
        torch.ones(2**24)  # 64 MB
        assert memory.peak(device) - before > 50 * 2**20
        memory.begin_peak(device)
        assert memory.peak(device) - before < 50 * 2**20


class TestProgress:
    def test_in_a_terminal_replaces_the_line(self):
        class Terminal(io.StringIO):
            def isatty(self):
                return True

        stream = Terminal()
        line = LiveLine(stream, every=100.0)  # which is for what is not a terminal
        line("step 10")
        line(lambda: "step 9")
        line.end()
        line("gone")
        line.clear()
        kept, removed = stream.getvalue().split("\n", 1)
        assert kept.index("step 10") < kept.index("\r") < kept.index("step 9")
        assert removed.rindex("\x1b[2K") > removed.index("gone")  # rich erases it

    def test_elsewhere_prints_lines_below_each_other_every_few_seconds(self, capsys, monkeypatch):
        now = iter([0.0, 1.0, 3.0, 3.0, 4.0, 9.0, 9.0])
        monkeypatch.setattr("time.monotonic", lambda: next(now))
        line = LiveLine(every=5.0, first=2.0)
        for text in ("at 1", "at 3", "at 4", lambda: "at 9"):
            line(text)
        line.end()
        assert capsys.readouterr().out == "at 3\nat 9\n"

    def test_tells_the_time_left(self, monkeypatch):
        now = iter([0.0, 2.0, 6.0, 7.0, 12.0])
        monkeypatch.setattr("time.monotonic", lambda: next(now))
        messages = []
        countdown = Countdown(130, messages.append, every=5)
        countdown.skip(30)
        for _ in range(4):
            countdown.step(20, "length 16")
        assert messages == ["length 16  0:09 left", "length 16  0:03 left"]
