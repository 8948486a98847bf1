"""Windows and macOS, as far as Linux can try them: their branches run here on stand-ins of what only they have."""

import ctypes
import errno
import fcntl
import importlib.util
import os
import re
import resource
import shutil
import struct
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from relpos.attend import native
from relpos.attend.native import library
from relpos.system import files, lock, processes

ROOT = Path(__file__).parents[2]


def imported_on(platform, name, monkeypatch):
    """A second copy of a module of relpos.system, imported as if Python ran on another system."""
    spec = importlib.util.spec_from_file_location(f"{name}_on_{platform}", ROOT / f"relpos/system/{name}.py")
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", platform)
        spec.loader.exec_module(module)
    return module


# -- Locks


def windows_locking(descriptor, mode, count):
    """msvcrt.locking on Linux's locks of byte ranges: from the file's position, and belonging to the open file."""
    start = os.lseek(descriptor, 0, os.SEEK_CUR)
    kind = fcntl.F_UNLCK if mode == 0 else fcntl.F_WRLCK
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, start, count, 0))
    except BlockingIOError:
        raise PermissionError(errno.EACCES, "Permission denied") from None  # as Windows reports it


@pytest.fixture
def on_windows(monkeypatch):
    """relpos.system.lock with the locks of Windows."""
    fake = types.SimpleNamespace(LK_UNLCK=0, LK_LOCK=1, LK_NBLCK=2, locking=windows_locking)
    monkeypatch.setitem(sys.modules, "msvcrt", fake)
    monkeypatch.setitem(sys.modules, "fcntl", None)  # importing it fails
    module = imported_on("win32", "file_locks", monkeypatch)
    for name in ("try_to_lock", "wait_and_lock", "release"):
        monkeypatch.setattr(lock, name, getattr(module, name))
    return module


def test_on_windows_a_lock_is_held_by_one_and_names_its_holder(on_windows, tmp_path):
    with lock.Lock(tmp_path):
        with pytest.raises(lock.HeldError, match=rf"in use by process {os.getpid()} on .*: wait for it"):
            lock.Lock(tmp_path).__enter__()
        with lock.Lock(tmp_path, ".other"):
            pass
        text = (tmp_path / ".lock").read_bytes()
        assert text.startswith(b"process")
        assert len(text) < on_windows.PLACE  # the locked byte is not in the text, which could not be read otherwise
    with lock.Lock(tmp_path):
        pass


def test_on_windows_waiting_for_a_lock_ends_when_it_is_released(on_windows, tmp_path):
    order = []

    def wait():
        with lock.Lock(tmp_path, wait=True):
            order.append("second")

    with lock.Lock(tmp_path):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(4 * on_windows.PAUSE)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


# -- Memory


def test_on_windows_the_peak_is_that_of_the_working_set(monkeypatch):
    def fill(handle, counters, size):
        # PROCESS_MEMORY_COUNTERS on 64 bits, as documented: two DWORDs, then eight of SIZE_T.
        assert (handle, size, ctypes.c_uint32.from_address(counters).value) == (-1, 72, 72)
        ctypes.c_size_t.from_address(counters + 8).value = 123 << 20
        ctypes.c_size_t.from_address(counters + 16).value = 45 << 20
        return 1

    read = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_uint32)(fill)

    class Read:
        """Converts as the real function would by its argtypes."""

        def __call__(self, handle, counters, size):
            _, pointer, _ = self.argtypes
            return read(handle, ctypes.cast(counters, pointer), size)

    kernel = types.SimpleNamespace(GetCurrentProcess=type("F", (), {"__call__": lambda self: -1})())
    kernel.K32GetProcessMemoryInfo = Read()
    monkeypatch.setattr(ctypes, "WinDLL", lambda name, use_last_error: {"kernel32": kernel}[name], raising=False)
    monkeypatch.setitem(sys.modules, "resource", None)
    assert imported_on("win32", "system_memory", monkeypatch).peak_of_process() == 123 << 20


def test_on_windows_the_memory_of_the_machine_is_asked_of_the_system(monkeypatch):
    def fill(status):
        address = ctypes.addressof(status._obj)
        assert ctypes.c_uint32.from_address(address).value == 64  # bytes of MEMORYSTATUSEX, as documented
        ctypes.c_uint64.from_address(address + 8).value = 16 << 30
        return 1

    kernel = types.SimpleNamespace(GlobalMemoryStatusEx=fill)
    monkeypatch.setattr(ctypes, "WinDLL", lambda name, use_last_error: {"kernel32": kernel}[name], raising=False)
    assert imported_on("win32", "system_memory", monkeypatch).memory_of_machine() == 16 << 30


def test_on_macos_the_peak_is_counted_in_bytes(monkeypatch):
    module = imported_on("darwin", "system_memory", monkeypatch)
    monkeypatch.setattr(module.Path, "exists", lambda self: False)  # no /proc
    monkeypatch.setattr(resource, "getrusage", lambda who: types.SimpleNamespace(ru_maxrss=5000))
    assert module.peak_of_process() == 5000 * 1024  # this Python still is on Linux: kilobytes
    monkeypatch.setattr(sys, "platform", "darwin")
    assert module.peak_of_process() == 5000


# -- Files


def test_on_windows_folders_are_not_flushed_and_files_are_opened_for_writing(monkeypatch, tmp_path):
    opened = []
    real = os.open
    monkeypatch.setattr(files.os, "open", lambda path, flags: opened.append((Path(path), flags)) or real(path, flags))
    monkeypatch.setattr(sys, "platform", "win32")
    with files.atomic_folder(tmp_path / "made") as temporary:
        (temporary / "a").write_bytes(b"1")
    assert (tmp_path / "made/a").read_bytes() == b"1"
    assert [(path.name, flags & os.O_ACCMODE) for path, flags in opened] == [("a", os.O_RDWR)]


def test_on_windows_a_file_that_is_being_read_is_replaced_afterwards(monkeypatch, tmp_path):
    real, refusals = Path.replace, [PermissionError("in use")] * 3

    def replace(self, target):
        if refusals:
            raise refusals.pop()
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    (tmp_path / "a").write_text("old")
    with pytest.raises(PermissionError):  # elsewhere it is an error that does not pass
        files.write_text(tmp_path / "a", "new")
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    monkeypatch.setattr(sys, "platform", "win32")
    files.write_text(tmp_path / "a", "new")
    assert not refusals
    assert (tmp_path / "a").read_text() == "new"


# -- Processes


def test_on_windows_children_are_in_a_group_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0x200, raising=False)
    module = imported_on("win32", "processes", monkeypatch)
    seen = {}
    monkeypatch.setattr(module.subprocess, "Popen", lambda command, **options: seen.update(options))
    module.Children(threads=1).start("a", ["-c", ""], tmp_path / "log")
    assert seen["creationflags"] == 0x200
    assert processes.NEW_GROUP == 0  # and nothing here


def test_a_system_without_sigkill_describes_the_end_of_a_process(monkeypatch):
    monkeypatch.delattr(processes.signal, "SIGKILL")
    assert processes.Exit(3, 1.0, "no.").reason() == "its process ended with code 3: no."
    assert processes.Exit(-11, 1.0, "").reason() == "its process was ended by SIGSEGV."


# -- The kernel


@pytest.mark.parametrize("name", ["librelpos.so", "librelpos.dylib", "librelpos.dll"])
def test_the_library_is_found_under_the_name_of_each_system(monkeypatch, tmp_path, name):
    monkeypatch.delenv("RELPOS_LIBRARY", raising=False)
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    monkeypatch.setattr(native, "__path__", [str(tmp_path)])
    assert library.file() is None
    (tmp_path / name).touch()
    assert library.file() == tmp_path / name


@pytest.mark.skipif(sys.platform != "linux", reason="compares with Linux's list of what the CPU has")
def test_the_cpu_is_asked_the_same_way_without_the_compilers_help(tmp_path):
    """With clang-cl, the kernel reads CPUID itself (native/src/cpu.h)."""
    (tmp_path / "ask.cpp").write_text(
        '#include "cpu.h"\n#include <stdio.h>\nint main() { printf("%d%d", relpos::has_avx2(), relpos::has_avx512()); }'
    )
    for options in ([], ["-DRELPOS_CPUID"]):
        build = ["c++", "-std=c++20", *options, f"-I{ROOT}/native/src", "ask.cpp", "-o", "ask"]
        subprocess.run(build, cwd=tmp_path, check=True)
        answer = subprocess.run([tmp_path / "ask"], capture_output=True, text=True, check=True).stdout
        flags = set(re.search(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())
        avx2 = {"avx2", "fma"} <= flags
        assert answer == f"{avx2:d}{avx2 and {'avx512f', 'avx512dq', 'avx512bw', 'avx512vl'} <= flags:d}"


# What the kernel needs of Windows' C library, which is not here.
HEADERS = {
    "string.h": "void* memcpy(void*, const void*, size_t); void* memset(void*, int, size_t);"
    "int strcmp(const char*, const char*); char* strcat(char*, const char*);",
    "stdlib.h": "void free(void*); void qsort(void*, size_t, size_t, int (*)(const void*, const void*));",
    "malloc.h": "void* _aligned_malloc(size_t, size_t); void _aligned_free(void*);",
    "math.h": "float fabsf(float);",
}


@pytest.mark.skipif(shutil.which("clang++") is None, reason="needs clang, which can compile for Windows")
@pytest.mark.parametrize(
    ("source", "definitions", "isa"),
    [
        ("probe", [], ""),
        ("api", ["-DRELPOS_X86"], ""),
        ("running", [], ""),
        ("kernel", ["-DRELPOS_ISA=portable", "-DRELPOS_LANES=4"], ""),
        ("kernel", ["-DRELPOS_ISA=avx2", "-DRELPOS_LANES=8"], "avx2"),
        ("kernel", ["-DRELPOS_ISA=avx512", "-DRELPOS_LANES=16"], "avx512"),
    ],
)
def test_clang_cl_takes_the_sources_and_the_options(tmp_path, source, definitions, isa):
    for name, declarations in HEADERS.items():
        (tmp_path / name).write_text(f'#pragma once\n#include <stddef.h>\nextern "C" {{ {declarations} }}\n')
    cmake = (ROOT / "native/compiler.cmake").read_text()
    options = re.search(r"set\(common_options (/EH[^)]*)\)", cmake)[1].split()
    if isa:
        width = re.search(r"set\(full_width (/[^)]*)\)", cmake)[1]
        lists = (ROOT / "native/CMakeLists.txt").read_text()
        options += re.search(rf"add_isa\({isa} \d+ (.*)\)", lists)[1].replace("${full_width}", width).split()
    command = ["clang++", "--driver-mode=cl", "--target=x86_64-pc-windows-msvc", "/std:c++20", "/c", "-fsyntax-only"]
    command += ["/clang:-ffreestanding", "/WX", "-imsvc", str(tmp_path), *options, *definitions]
    command += ["--", str(ROOT / f"native/src/{source}.cpp")]  # otherwise its first slash would begin an option
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
