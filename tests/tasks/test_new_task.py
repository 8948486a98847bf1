"""Adding a task: one file and one line in the registry. It is then listed, trained on and scored."""

import json
import sys
from types import ModuleType

import numpy as np
import pytest
from task_scores import score_task
from test_tasks import check_answers
from typer.testing import CliRunner

from relpos import tasks
from relpos.cli import app
from relpos.runs.run import open_run
from relpos.runs.settings import load_settings
from relpos.tasks import Example, Task, names, task
from relpos.training.training import train

pytestmark = pytest.mark.heavy


# --- the whole file of a new task ---
class LastBit(Task):
    """Bits, then the last of them again."""

    measures = "reading the token before the question"
    layout = "bits, ?, the last bit"
    paper = "this test"
    words = ("0", "1", "?")
    shortest = 100  # longer than any other task's
    chance = 1 / 2

    def sample(self, rng, length, depth=None):
        ids = np.array([*rng.choice(self.ids("01"), length - 2), *self.ids("??")])
        ids[-1] = ids[-3]
        return Example(ids, np.arange(length) == length - 1)

    def solve(self, context):
        return context[-2]


# --- and its line in the registry ---
@pytest.fixture
def _last_bit(monkeypatch):
    module = ModuleType("relpos.tasks.last_bit")
    module.LastBit = LastBit
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(tasks.FILES, "last_bit", ("last_bit", "LastBit"))
    yield
    task.cache_clear()


@pytest.mark.usefixtures("_last_bit")
def test_a_registered_task_is_listed_and_solved():
    assert "last_bit" in names()
    cards = json.loads(CliRunner().invoke(app, ["ls", "--tasks", "--json"]).stdout)
    assert {card["name"]: card["summary"] for card in cards}["last_bit"] == "Bits, then the last of them again."
    check_answers("last_bit", task("last_bit").draw(100, 0, 0, "heldout"), at_most=1)


@pytest.mark.usefixtures("_last_bit")
def test_a_registered_task_is_trained_on_and_scored(tmp_path):
    small = {"data.task": "last_bit", "data.length": 100, "run.steps": 2, "run.batch_size": 2, "run.eval_windows": 2}
    train(load_settings(None, {**small, "run.out": str(tmp_path / "run")}))
    result = score_task(open_run(tmp_path / "run"), "last_bit", [100, 120], samples=4, say=lambda text: None)
    assert [row["error"] for row in result["rows"]] == [None, None]
    assert all(0 <= row["accuracy"] <= 1 for row in result["rows"])
