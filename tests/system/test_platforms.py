"""The kernel on Windows and macOS, as far as Linux can try it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from relpos.attend import native
from relpos.attend.native import library

ROOT = Path(__file__).parents[2]


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
