"""The model card and the module for people without relpos, in the folder of a run."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import transformers
from huggingface_hub import ModelCard
from task_scores import score_task

from relpos.evaluation.evaluation import evaluate
from relpos.models import RelposGPT2ForCausalLM
from relpos.runs.results import MARK
from relpos.runs.run import open_run
from relpos.runs.settings import load_settings
from relpos.training.training import train

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("world")]
WITHOUT_RELPOS = """
import sys
class NoRelpos:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "relpos":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoRelpos())
"""
OPEN = """from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({folder!r}, trust_remote_code=True)"""


def quiet(text):
    pass


@pytest.fixture(scope="module")
def trained(world, settings):
    out = world / "trained"
    train(settings(out, model__encoding="rope", run__steps=3), say=quiet)
    return out


@pytest.fixture
def folder(trained, tmp_path):
    """A copy, as somebody else has it."""
    return shutil.copytree(trained, tmp_path / "trained", ignore=shutil.ignore_patterns("checkpoint-*"))


def in_python(code, folder):
    """Run it in a fresh process that cannot ask anything and has a cache of modules of its own."""
    env = {**os.environ, "HF_HOME": str(folder.parent / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL)


class TestTheCard:
    def test_has_the_metadata_of_the_hub_and_says_what_it_is_without_paths_of_the_machine(self, trained, world):
        data = ModelCard.load(trained / "README.md").data
        assert (data.library_name, data.pipeline_tag) == ("relpos", "text-generation")
        assert {"relpos", "rope"} <= set(data.tags)
        text = (trained / "README.md").read_text()
        result = json.loads((trained / "result.json").read_text())
        count = sum(parameter.numel() for parameter in open_run(trained).model.parameters())
        assert "positional encoding `rope" in text
        assert f"3 steps, {result['tokens']:,} tokens in windows of 16, seed 0; {count:,} parameters" in text
        assert f"{result['heldout']:.4f} at the end" in text
        assert "`text.txt`" in text
        assert str(world) not in text

    def test_its_code_opens_the_model(self, trained, monkeypatch):
        monkeypatch.chdir(trained.parent)
        block = re.search(r"```python\n(.*?)```", (trained / "README.md").read_text(), flags=re.DOTALL)
        names: dict[str, object] = {}
        exec(block[1], names)
        assert type(names["model"]) is RelposGPT2ForCausalLM
        assert names["tokenizer"].decode(names["tokenizer"]("word1")["input_ids"]) == "word1"

    def test_gets_what_is_measured(self, folder, world):
        run = open_run(folder)
        row = evaluate(run, [16], say=quiet)["rows"][0]
        other = evaluate(run, [16], data=str(world / "text.txt"), split="all", say=quiet)
        text = (folder / "README.md").read_text()
        cells = ("16 (trained)", f"{row['perplexity']:.2f}", "–", f"{row['bits_per_byte']:.4f}", f"{row['tokens']:,}")
        assert f"| {' | '.join(cells)} |" in text
        assert "held-out part of `text.txt`" in text
        assert "all of `text.txt`" in text
        assert f"{other['rows'][0]['perplexity']:.2f}" in text
        assert "was trained on most of this text" in text
        assert str(folder.parent) not in text

    def test_keeps_nothing_of_an_earlier_model(self, trained, tmp_path, settings):
        out = shutil.copytree(trained, tmp_path / "further")
        evaluate(open_run(out), [16], say=quiet)
        assert "| 16 (trained) |" in (out / "README.md").read_text()
        train(settings(out, model__encoding="rope", run__steps=4), say=quiet)
        text = (out / "README.md").read_text()
        assert "4 steps" in text
        assert "| 16 (trained) |" not in text

    def test_that_somebody_has_made_their_own_is_left_alone(self, folder):
        own = (folder / "README.md").read_text().replace(MARK, "") + "\nMine.\n"
        (folder / "README.md").write_text(own)
        evaluate(open_run(folder), [16], say=quiet)
        assert (folder / "README.md").read_text() == own

    def test_of_a_task_has_its_answers(self, tmp_path):
        values = {"data.task": "copy", "data.length": 16, "run.steps": 1, "run.batch_size": 1, "run.eval_windows": 1}
        train(load_settings(None, {**values, "model.encoding": "alibi", "run.out": str(tmp_path)}), say=quiet)
        (tmp_path / "evaluation").mkdir()
        (tmp_path / "evaluation" / "broken.json").write_text("{")
        row = score_task(open_run(tmp_path), "copy", [16], samples=5, say=quiet)["rows"][0]
        text = (tmp_path / "README.md").read_text()
        assert "on the task `copy`" in text
        assert f"| 16 (trained) | {row['accuracy']:.1%} |" in text

    def test_is_not_written_into_a_checkpoint_or_for_results_elsewhere(self, trained, tmp_path):
        checkpoint = trained / "checkpoint-3"
        before = (trained / "README.md").read_text()
        evaluate(open_run(checkpoint), [16], out=tmp_path, say=quiet)
        assert not (checkpoint / "README.md").exists()
        assert (trained / "README.md").read_text() == before


class TestWithoutRelpos:
    def test_the_folder_says_what_to_install(self, folder):
        ended = in_python(f"{WITHOUT_RELPOS}\n{OPEN.format(folder=str(folder))}", folder)
        last = ended.stderr.strip().splitlines()[-1]
        assert ended.returncode == 1
        assert last.startswith("ImportError: this model needs the package relpos: pip install relpos")

    @pytest.mark.slow  # a process that imports relpos and transformers
    def test_installed_but_not_imported_it_opens_by_trust_and_saves_no_code(self, folder, tmp_path):
        saved = tmp_path / "saved"
        save = f"model.save_pretrained({str(saved)!r}); print(type(model).__module__, type(model).__name__)"
        ended = in_python(f"{OPEN.format(folder=str(folder))}\n{save}", folder)
        assert ended.stdout.split() == ["relpos.models.gpt2", "RelposGPT2ForCausalLM"], ended.stderr
        assert not list(saved.glob("*.py"))
        assert "auto_map" not in json.loads((saved / "config.json").read_text())

    def test_with_relpos_imported_nobody_is_asked_for_trust(self, folder, monkeypatch):
        def asked(*_):
            raise AssertionError("nobody is there to answer")

        monkeypatch.setattr("builtins.input", asked)
        (folder / "modeling_relpos.py").write_text("raise SystemExit('this must not run')")
        assert "auto_map" in json.loads((folder / "config.json").read_text())
        for trust in ({}, {"trust_remote_code": True}, {"trust_remote_code": False}):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, **trust)
            assert type(model) is RelposGPT2ForCausalLM
        assert transformers.AutoModel.from_pretrained(folder).config.position["name"] == "rope"
