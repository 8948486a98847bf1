"""The benchmarks run: what they measure is printed by them, never tested here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("train.py", ["--smoke", "--rounds", "1", "--only", "nano"]),
        ("evaluate.py", ["--smoke"]),
        ("attention.py", ["--lengths", "64", "--rounds", "1", "--no-memory", "--no-file"]),
        ("mass.py", ["--lengths", "128", "--rounds", "1", "--encodings", "kerple_log,rope", "--no-file"]),
        ("decode.py", ["--only", "steps", "--keys", "64", "--steps", "2", "--encodings", "kerple_log", "--no-file"]),
        ("explore.py", ["--only", "first"]),
        ("families.py", ["--families", "bloom,wav2vec2-bert relative", "--no-file"]),
        ("images.py", ["--no-file"]),
        ("gpu_static.py", ["--targets", "sm_80", "--head-dims", "64", "--no-file"]),
        ("scale.py", ["--length", "64", "--rounds", "1", "--encodings", "kerple_log", "--no-file"]),
    ],
)
def test_a_benchmark_runs(script, arguments, tmp_path):
    command = [sys.executable, str(FOLDER / script), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}  # some compile
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert any(name in run.stdout for name in ("relpos", "kerple", "bloom", "nano"))
    assert "rror:" not in run.stdout  # families.py continues after one that fails
