"""The workflows of GitHub, which do not run here: that they are YAML, and that what they call exists."""

import re
import shlex

import documents
import pytest
import yaml
from typer.main import get_command

from relpos.cli import app

WORKFLOWS = sorted((documents.ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+):(?!=)", (documents.ROOT / "Makefile").read_text(), flags=re.MULTILINE))
OPTIONS = re.findall(r"option\((\w+)", (documents.ROOT / "native/CMakeLists.txt").read_text())
# Commands that the machines of GitHub have, or that a step before has installed.
OTHERS = {"python -m pip", "auditwheel repair"}


def commands(tree):
    """Every command of a workflow: of its steps, and of cibuildwheel's settings."""
    for job in tree["jobs"].values():
        for step in job["steps"]:
            lines = [step.get("run", "")]
            lines += [
                value for name, value in step.get("env", {}).items() if name.startswith("CIBW") and "_COMMAND" in name
            ]
            for line in "\n".join(lines).replace("&&", "\n").splitlines():
                if line.strip():
                    yield shlex.split(line)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_what_a_workflow_calls_exists(file):
    tree = yaml.safe_load(file.read_text())
    assert {"name", "jobs"} < set(tree)
    assert True in tree  # "on", which YAML reads as a truth value
    found = list(commands(tree))
    assert any(words[0] == "make" for words in found)
    for words in found:
        if words[0] == "make":
            assert set(words[1:]) <= TARGETS, words
        elif words[:3] == ["python", "-m", "pytest"]:
            assert all((documents.ROOT / name).is_file() for name in words[3:]), words
        elif words[0] == "relpos":
            assert words[1] in get_command(app).commands, words
        else:
            assert any(" ".join(words).startswith(other) for other in OTHERS), words


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_the_options_of_the_build_exist(file):
    used = set(re.findall(r"RELPOS_\w+", file.read_text()))
    assert used
    assert used <= set(OPTIONS)
