"""`relpos gpu-report`, as a user without a GPU meets it, and its page with numbers from elsewhere."""

import importlib.util
import json

import pytest
import torch
from refused_command import refused
from typer.testing import CliRunner

from relpos.attend import gpu_report
from relpos.cli import app
from relpos.cli.tables import gpu_report_page

RIGHT = {
    **{"case": "Toeplitz", "dtype": "bfloat16", "difference": 4.2e-3, "tensor": "gradient of k", "limit": 3e-2},
    **{"same_bits": True, "error": "", "passed": True},
}
TIMED = {
    **{"what": "forward", "form": "Toeplitz", "head_dim": 64, "length": 2048, "backend": "triton"},
    **{"milliseconds": 1.25, "ratio": 1.5, "megabytes": 12.0, "difference": None, "error": ""},
}
REPORT = {
    **{"device": "A GPU 9000", "interpreted": False, "facts": {"torch": "2.13", "driver": "560"}},
    **{"correctness": [RIGHT], "speed": [TIMED], "seconds": 61.0},
}


@pytest.fixture
def report(monkeypatch):
    """A report that the command prints without any work."""
    made = {**REPORT, "correctness": [dict(RIGHT)]}
    monkeypatch.setattr(gpu_report, "gpu_report", lambda quick, progress: made)
    return made


def test_the_page_has_the_numbers():
    page = gpu_report_page(REPORT)
    assert "On A GPU 9000." in page
    assert "torch 2.13, driver 560. 61 seconds." in page
    assert "1 of 1 cases are right" in page
    assert "| Toeplitz | bfloat16 | yes | 4.2e-03 | gradient of k | 3e-02 | same |" in page
    assert "| Toeplitz | forward | 64 | 2048 | triton | 1.250 | 1.50 | 12 |  |" in page
    failed = {**TIMED, "milliseconds": None, "error": "ValueError: no"}
    wrong = {**RIGHT, "passed": False, "same_bits": False, "difference": None, "error": "out holds nan"}
    page = gpu_report_page({**REPORT, "correctness": [RIGHT, wrong], "speed": [failed]})
    assert "1 of 2 cases are right" in page
    assert "| Toeplitz | bfloat16 | NO | out holds nan | gradient of k | 3e-02 | DIFFERENT |" in page
    assert "| Toeplitz | forward | 64 | 2048 | triton | ValueError: no |  |  |  |" in page


def test_the_report_is_printed_and_written(report, tmp_path):
    page, numbers = tmp_path / "new" / "report.md", tmp_path / "report.json"
    for file in (page, numbers):
        done = CliRunner().invoke(app, ["gpu-report", "--out", str(file)])
        assert done.exit_code == 0, done.output
        assert done.stdout.startswith("# relpos gpu-report\n")
    assert page.read_text() == gpu_report_page(REPORT) + "\n"
    assert json.loads(numbers.read_text()) == report


def test_a_wrong_number_is_an_exit_code(report):
    report["correctness"][0]["passed"] = False
    done = CliRunner().invoke(app, ["gpu-report"])
    assert done.exit_code == 1
    assert "0 of 1 cases are right" in done.stdout


def test_a_file_of_another_kind_is_refused_before_the_work(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu_report, "gpu_report", None)
    assert "'report.txt': the name must end in .md or .json." in refused(
        capsys, "gpu-report", "--out", tmp_path / "report.txt"
    )
    (tmp_path / "file").write_text("")
    assert "could not be written" in refused(capsys, "gpu-report", "--out", tmp_path / "file" / "report.md")


def test_without_triton_one_sentence_says_so(monkeypatch, capsys):
    monkeypatch.setattr(gpu_report.triton, "INSTALLED", False)
    assert refused(capsys, "gpu-report").startswith("relpos: Triton is not installed: it comes with PyTorch")


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is for Linux")
def test_without_a_gpu_the_interpreter_runs_every_case(tmp_path):
    file = tmp_path / "report.json"
    done = CliRunner().invoke(app, ["gpu-report", "--quick", "--out", str(file)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "There is no GPU here" in done.stdout
    report = json.loads(file.read_text())
    assert (report["interpreted"], report["speed"]) == (True, [])
    expected = [case.name for case in gpu_report.cases(quick=True, small=True)]
    assert [row["case"] for row in report["correctness"]] == expected
    assert all(row["passed"] and 0 < row["difference"] < 1e-5 for row in report["correctness"])
    assert {row["same_bits"] for row in report["correctness"]} == {True, None}
    assert done.stdout.count(" | yes | ") == len(expected)
