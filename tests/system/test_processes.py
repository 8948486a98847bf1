"""Child processes: what they inherit, how their end is described, and that none outlives its parent."""

import errno
import io
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from relpos.system import memory
from relpos.system.lock import HeldError, Lock, lock_holder
from relpos.system.processes import Children, Exit
from relpos.system.progress import FractionLine, LiveLine

pytestmark = pytest.mark.heavy

WAITING = "from relpos.system.processes import end_with_parent; end_with_parent(); import time; time.sleep(600)"


def wait_for(children: Children[str], count: int = 1) -> dict[str, Exit]:
    """The next `count` children that end. Counted in naps: a busy machine may halt the test as long as it likes."""
    ended: dict[str, Exit] = {}
    for _ in range(6000):
        ended |= children.ended()
        if len(ended) >= count:
            return ended
        time.sleep(0.02)
    raise AssertionError("no child has ended")


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def test_a_child_has_its_threads_and_its_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("before\n")
    children = Children[str](threads=3)
    code = "import os, sys; print(os.environ['OMP_NUM_THREADS']); print('error', file=sys.stderr)"
    children.start("a", ["-c", code], log)
    assert children.running == ["a"]
    end = wait_for(children)["a"]
    assert (end.code, end.last_line) == (0, "")
    assert log.read_text() == "before\n3\nerror\n"
    assert children.running == []


def test_without_a_log_the_last_line_of_standard_error_is_kept():
    children = Children[str](threads=1)
    children.start("a", ["-c", "import sys; print('output'); sys.exit('first\\nx = 1 is too small.')"])
    children.start("b", ["-c", "import sys; print('e' * 10**6, 'end', file=sys.stderr)"])  # more than a pipe holds
    ended = wait_for(children, 2)
    assert (ended["a"].code, ended["a"].last_line) == (1, "x = 1 is too small.")
    assert ended["a"].reason() == "its process ended with code 1: x = 1 is too small."
    assert ended["a"].reason("see the log.") == "its process ended with code 1: see the log."
    assert ended["b"].code == 0
    assert ended["b"].last_line.endswith("eee end")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("SIGKILL", "its process was ended by SIGKILL, as the system does when memory runs out."),
        ("SIGSEGV", "its process was ended by SIGSEGV."),
    ],
)
def test_a_signal_is_named(name, sentence):
    children = Children[str](threads=1)
    children.start("a", ["-c", f"import os, signal; os.kill(os.getpid(), signal.{name})"])
    assert wait_for(children)["a"].reason() == sentence


def test_stop_ends_all_and_waits(tmp_path):
    children = Children[str](threads=1)
    for name in ("a", "b"):
        log = tmp_path / name
        children.start(name, ["-c", f"import os; print(os.getpid()); {WAITING}"], log)
    while not all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in ("a", "b")):
        time.sleep(0.02)
    assert children.seconds("a") >= children.seconds("b") > 0
    children.stop()
    assert children.running == []
    assert all(gone(int((tmp_path / name).read_text())) for name in ("a", "b"))


def test_a_child_ends_when_its_parent_is_killed(tmp_path):
    log = tmp_path / "log"
    parent = f"""
import time
from pathlib import Path
from relpos.system.processes import Children
Children(threads=1).start("a", ["-c", "import os; print(os.getpid()); {WAITING}"], Path({str(log)!r}))
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", parent])
    try:
        while not (log.exists() and log.read_text().endswith("\n")):
            time.sleep(0.02)
        child = int(log.read_text())
        assert not gone(child)
    finally:
        process.kill()
        process.wait()
    for _ in range(3000):
        if gone(child):
            return
        time.sleep(0.02)
    raise AssertionError("the child outlives its parent")


def test_a_child_with_a_living_parent_runs_to_its_end():
    children = Children[str](threads=1)
    code = "from relpos.system.processes import end_with_parent; end_with_parent(); import time; time.sleep(0.3)"
    children.start("a", ["-c", code])
    end = wait_for(children)["a"]
    assert end.code == 0
    assert end.seconds > 0.3


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

    def test_is_taken_as_held_where_the_file_system_has_no_locks(self, tmp_path, monkeypatch):
        def refuse(*args):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr("fcntl.flock", refuse)
        with Lock(tmp_path):
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
    """Outside a terminal, as in the logs of Ray and SLURM, lines are printed below each other."""

    def test_of_a_fraction_shows_the_time_left(self, capsys):
        line = FractionLine("drawing", every=0, first=0)
        line.next_in_terminal = 0.0
        for done in (0.0, 0.25, 0.5, 1.0):
            line.show(done)
            line.next_in_terminal = 0.0
        lines = capsys.readouterr().err.splitlines()
        assert [line[:12] for line in lines] == ["drawing  25%", "drawing  50%"]
        assert all(line.endswith("left") for line in lines)

    def test_in_a_terminal_replaces_the_line(self, capsys):
        class Terminal(io.StringIO):
            def isatty(self):
                return True

        stream = Terminal()
        line = LiveLine(stream)
        line("step 10")
        line("step 9")
        line.end()
        assert stream.getvalue() == "\rstep 10\rstep 9 \n"
