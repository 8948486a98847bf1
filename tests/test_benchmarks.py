"""The benchmarks run: what they measure is printed by them, never tested here."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("train.py", ["--smoke", "--rounds", "1", "--only", "nano"]),
        ("evaluate.py", ["--smoke"]),
        ("attention.py", ["--lengths", "64", "--rounds", "1", "--no-memory"]),
    ],
)
def test_a_benchmark_runs(script, arguments, tmp_path):
    command = [sys.executable, str(FOLDER / script), *arguments]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "relpos" in run.stdout or "kerple" in run.stdout
