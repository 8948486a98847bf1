"""Every command and code block of the README does what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import documents
import pytest
from documents import ROOT

import relpos

pytestmark = pytest.mark.heavy

README = (ROOT / "README.md").read_text(encoding="utf-8")
RUN = [block.code for block in documents.all_blocks(ROOT / "README.md") if block.language == "sh" and not block.reason]
COMMANDS = [" ".join(words) for code in RUN for words in documents.commands_of(code)]
PYTHON = documents.blocks(ROOT / "README.md", "python")
CHAIN = ("relpos train", "relpos evaluate")  # the second reads what the first writes


def test_the_readme_has_what_is_tested_here():
    assert len(COMMANDS) >= 5
    assert len(PYTHON) >= 3
    assert sum(command.startswith(CHAIN) for command in COMMANDS) >= 2
    languages = re.findall(r"^```(\w+)$", README, flags=re.MULTILINE)
    assert set(languages) == {"sh", "python"}  # a block without a language is not code


@pytest.mark.parametrize("command", [command for command in COMMANDS if not command.startswith(CHAIN)])
def test_command(command, tmp_path):
    if command.startswith("make"):
        # make itself, against this checkout. The suite cannot run inside itself, so of that one the dry run; of the
        # figures the one that needs no training.
        less = {"make test": ["--dry-run"], "make figures": ["ARGS=--figure 12"]}[command]
        run = subprocess.run([*command.split(), *less], cwd=ROOT, capture_output=True, text=True, check=False)
    else:
        run = relpos_command(command, tmp_path)
    assert run.returncode == 0, run.stderr


def test_the_commands_that_train_and_evaluate_run_in_order(tmp_path):
    for command in COMMANDS:
        if command.startswith(CHAIN):
            run = relpos_command(command, tmp_path)
            assert run.returncode == 0, run.stderr


def relpos_command(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command as it stands, cut short where it would compute for long."""
    training = " run.steps=1 run.batch_size=1 run.eval_windows=1 data.length=32"
    single = " --encodings alibi --seeds 1 --lengths 64 --eval-tokens 64"
    short = {"train": training, "evaluate": " --eval-tokens 64", "compare": single + training}
    words = (command + short.get(command.split()[1], "")).split()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path}
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, env=env)


SHORTER = {  # what would compute for long, and what is run instead
    "length=512, out=": 'length=32, steps=1, batch_size=1, overrides={"run.eval_windows": 1}, out=',
    "lengths=[512, 1024, 2048, 4096]": "lengths=[512, 1024, 2048, 4096], eval_tokens=64",
}


def test_the_python_blocks_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in PYTHON:
        for long, short in SHORTER.items():
            block = block.replace(long, short)  # noqa: PLW2901
        exec(compile(block, "README.md", "exec"), names)
    assert names["out"].shape == (2, 12, 512, 64)
    assert [step.shape for step in names["new"]] == [(2, 12, 1, 64)] * 3
    assert (len(names["cache"]), names["near"].shape) == (3, (2, 12, 512, 64))
    assert names["share"].by_distance.shape == (2, 12, 512)
    assert names["text"].shape == (1, 8)
    assert list(names["perplexity"]) == [512, 1024, 2048, 4096]
    assert (tmp_path / "cable.png").exists()
    same = relpos.scores(names["q"], names["k"]).add(names["bias"]).softmax(-1) @ names["v"]
    assert (names["same"] - same).abs().max() < 1e-5


def test_the_table_of_encodings_stands_between_the_comments_that_make_readme_looks_for():
    """Its rows need not be current: `make readme` writes them, and a new encoding does not wait for it."""
    table = README.split("<!-- encodings:", 1)[1].split("<!-- end of encodings -->", 1)[0]
    rows = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \|", table, flags=re.MULTILINE)
    assert len(rows) >= 20
    for name, place in rows:
        assert place == relpos.card(name).place
