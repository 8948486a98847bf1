"""Files of a run that were damaged: mended where a whole checkpoint can, refused with a sentence where not."""

import json
import shutil
import sys

import pytest
import yaml

from relpos.cli import main
from relpos.comparison.comparison import Trial, load_comparison, read_record
from relpos.runs.checkpoints import checkpoints, install, newest_undamaged
from relpos.runs.run import open_run
from relpos.system.seal import damage, seal
from relpos.training.training import train

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("world")]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def finished(world, settings):
    train(settings(world / "finished", run__log_every=3))
    return world / "finished"


@pytest.fixture
def run(finished, tmp_path):
    """A copy of a finished run, to be damaged: checkpoint-9, checkpoint-6 and the model of step 9."""
    return shutil.copytree(finished, tmp_path / "run")


def refused(capsys, *words):
    """What the command prints when it refuses: one sentence and exit code 2."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["relpos", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert "Errno" not in printed
    (line,) = printed.splitlines()
    return line


def cut(file, size=1000):
    file.write_bytes(file.read_bytes()[:size])


class TestOnlyWholeCheckpointsCount:
    def test_for_the_model_and_the_result_of_a_finished_run(self, run, finished, settings):
        shutil.copytree(run / "checkpoint-9", run / "checkpoint-12")
        cut(run / "checkpoint-12" / WEIGHTS)
        (run / "result.json").unlink()
        assert train(settings(run))["step"] == 9
        assert (run / WEIGHTS).read_bytes() == (finished / WEIGHTS).read_bytes()

    def test_for_the_number_that_is_kept(self, tmp_path):
        def write(step, text="whole"):
            part = tmp_path / f".part-{step}"
            part.mkdir()
            (part / "weights").write_text(text)
            return part

        for step in (3, 6, 9):
            install(write(step), tmp_path / f"checkpoint-{step}", keep=3)
        cut(tmp_path / "checkpoint-9" / "weights", 2)
        install(write(7), tmp_path / "checkpoint-7", keep=1)  # resumed from 6; 9 is damaged and not reached again yet
        assert newest_undamaged(tmp_path) == tmp_path / "checkpoint-7"
        install(write(8), tmp_path / "checkpoint-8", keep=2)
        assert [folder.name for folder in checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in (9, 8, 7)]
        install(write(9), tmp_path / "checkpoint-9", keep=2)
        assert [folder.name for folder in checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-8"]
        assert damage(tmp_path / "checkpoint-9") is None

    def test_and_a_kill_after_resuming_from_before_a_damaged_one_loses_nothing(self, run, finished, settings):
        cut(run / "checkpoint-9" / "optimizer.pt")
        train(settings(run, run__keep_checkpoints=1, run__save_every=1, run__steps=7, run__log_every=3))
        assert newest_undamaged(run) == run / "checkpoint-7"

    def test_and_a_file_of_that_name_is_none(self, run, settings, capsys):
        (run / "checkpoint-77").write_text("notes")
        train(settings(run))
        assert "is already finished at step 9" in capsys.readouterr().out
        part = run / ".part"
        part.mkdir()
        (part / "weights").write_text("whole")
        install(part, run / "checkpoint-77", keep=2)
        assert damage(run / "checkpoint-77") is None

    @pytest.mark.parametrize("text", ["", "[]", "{}", "3", "null", '{"a": 3}', '{"a": [1]}', "{", "\x00", '"a"'])
    def test_and_one_with_a_broken_list_of_checksums_is_damaged(self, tmp_path, text):
        (tmp_path / "a").write_text("a")
        seal(tmp_path)
        assert damage(tmp_path) is None
        (tmp_path / "sealed.json").write_text(text)
        assert "sealed.json" in damage(tmp_path)


class TestAFinishedRun:
    @pytest.mark.parametrize("name", [WEIGHTS, "config.json", "tokenizer.json"])
    def test_gets_a_damaged_file_of_its_model_back(self, run, finished, settings, capsys, name):
        cut(run / name, 100)
        train(settings(run))
        assert f"{name} in {run} was damaged: copied again from {run / 'checkpoint-9'}" in capsys.readouterr().out
        assert (run / name).read_bytes() == (finished / name).read_bytes()

    @pytest.mark.parametrize("text", ["", "[]", "{", '{"step": "x"}', "{}"])
    def test_gets_a_damaged_result_back(self, run, finished, settings, text):
        (run / "result.json").write_text(text)
        train(settings(run))
        mended, result = (json.loads((folder / "result.json").read_text()) for folder in (run, finished))
        assert {**mended, "seconds": 0} == {**result, "seconds": 0}

    def test_without_a_log_has_a_result_without_losses(self, run, settings, capsys):
        (run / "result.json").unlink()
        (run / "log.jsonl").write_text("")
        result = train(settings(run))
        assert (result["step"], result["heldout"], result["loss"]) == (9, None, None)
        assert "held-out unknown" in capsys.readouterr().out

    def test_with_a_truncated_model_is_not_evaluated(self, run, capsys):
        cut(run / WEIGHTS, 100_000)
        assert f"the weights in {run / 'model.safetensors'}" in refused(capsys, "evaluate", run)


def test_a_checkpoint_whose_weights_have_changed_is_not_opened(run):
    data = bytearray((run / "checkpoint-6" / WEIGHTS).read_bytes())
    data[-1000] ^= 1
    (run / "checkpoint-6" / WEIGHTS).write_bytes(data)
    with pytest.raises(ValueError, match=r"checkpoint-6 is damaged: model\.safetensors has changed since"):
        open_run(run / "checkpoint-6")
    (run / "checkpoint-9" / "optimizer.pt").unlink()  # what is not needed may be removed
    assert open_run(run / "checkpoint-9").trained_length == 16


BROKEN_MAPPINGS = [("", "is empty"), ("[1]", "must hold a mapping"), ("3", "must hold a mapping"), ("{a: [", "is no")]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        *BROKEN_MAPPINGS,
        ("run: {}", "it has no about and no model.encoding and no data.length and no data.source"),
        ("about: {versions: {}}", "it has no model.encoding and no data.length and no data.source"),
        ("about: [1]", "it has no about"),
        ("model: {encoding: rope}\ndata: {length: [, source: a}", "is not valid YAML"),
        ("model: {encoding: rope}\ndata: {length: x, source: a}\nabout: {a: 1}", "data.length must be a number"),
    ],
)
def test_a_broken_run_yaml_is_refused_before_the_work(run, settings, text, sentence, monkeypatch):
    (run / "run.yaml").write_text(text)
    monkeypatch.setattr("relpos.training.training.open_data", lambda settings: pytest.fail("the text was read"))
    for use in (open_run, lambda folder: train(settings(folder))):
        with pytest.raises(ValueError, match=sentence):
            use(run)


@pytest.mark.parametrize("key", ["about", "data", "model"])
def test_a_run_yaml_without_a_section_is_refused(run, key):
    tree = yaml.safe_load((run / "run.yaml").read_text())
    del tree[key]
    (run / "run.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ValueError, match=rf"run\.yaml is not what relpos train wrote: it has no {key}"):
        open_run(run)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "result.json"])
@pytest.mark.parametrize(("text", "sentence"), BROKEN_MAPPINGS)
def test_a_broken_json_file_of_a_run_is_named(run, capsys, name, text, sentence):
    (run / name).write_text(text)
    line = refused(capsys, "evaluate", run)
    assert f"{run / name} {sentence}" in line


@pytest.mark.parametrize(
    ("name", "tree", "sentence"),
    [
        ("tokenizer.json", {"model": 3}, "the tokenizer in .* cannot be read"),
        ("tokenizer_config.json", [1], "the tokenizer in .* cannot be read"),
        ("config.json", {"model_type": "relpos_gpt2", "n_layer": "two"}, "is not a configuration of GPT-2"),
        ("config.json", {"model_type": "relpos_gpt2", "position": [1]}, "is not a configuration of GPT-2"),
        (
            "config.json",
            {"model_type": "relpos_gpt2", "vocab_size": 10},
            "belongs to another model: it has 280 entries",
        ),
    ],
)
def test_json_of_something_else_is_refused(run, name, tree, sentence):
    (run / name).write_text(json.dumps(tree))
    with pytest.raises(ValueError, match=sentence):
        open_run(run)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"[1]\n", "line 1 has no step and tokens"),
        (b"3\n", "line 1 has no step and tokens"),
        (b'{"loss": 3}\n', "line 1 has no step and tokens"),
        (b'{"step": "a", "tokens": 1}\n', "line 1 has no step and tokens"),
        (b'{"step": 1, "tokens": 1, "loss": "low"}\n', "line 1 has values that are not numbers"),
        (b"\xff\xfe", "it is not UTF-8 at byte 0"),
    ],
)
def test_a_broken_log_is_refused_before_the_work(run, settings, data, sentence, monkeypatch):
    (run / "log.jsonl").write_bytes(data)
    monkeypatch.setattr("relpos.training.training.open_data", lambda settings: pytest.fail("the text was read"))
    with pytest.raises(ValueError, match=rf"log\.jsonl is not the log of a run: {sentence}.*Remove it"):
        train(settings(run))


@pytest.mark.parametrize(("text", "sentence"), BROKEN_MAPPINGS)
def test_broken_files_of_a_comparison_are_named(tmp_path, text, sentence):
    (tmp_path / "comparison.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"comparison\.yaml {sentence}"):
        load_comparison(tmp_path)
    trial = Trial("alibi", 0)
    (tmp_path / trial.name).mkdir()
    (tmp_path / trial.name / "trial.json").write_text(text)
    with pytest.raises(ValueError, match=rf"trial\.json {sentence}.*Remove the file"):
        read_record(tmp_path, trial)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", "data.length=["], "'data.length=[' is not a setting: '[' is not a YAML value"),
        (["train", "--tokenizer", "bpe-99999999999999999999"], "bpe-N with N entries, 257 (bytes and separator) to"),
        (["train", "--tokenizer", "bpe-²"], "unknown tokenizer 'bpe-²'"),
        (["train", "--config", "nowhere.yaml"], "there is no file nowhere.yaml: --config takes a YAML file"),
        (["train", "--config", "."], "is a folder"),
        (["train", "--encoding", "rope", "--option", "bass=3"], "unknown option of rope 'bass'. Did you mean 'base'?"),
        (["train", "--encoding", "rope", "--option", "base=-3"], "base must be a positive number"),
        (["draw", "alibi", "--text-file", "nowhere.txt"], "there is no file nowhere.txt"),
        (["draw", "alibi", "--text-file", "."], ". is a folder"),
        (["compare", "--encodings", "alibi,rope:bass=3"], "Did you mean 'base'?"),
    ],
)
def test_what_is_wrong_with_a_command_is_one_sentence(tmp_path, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(tmp_path)
    assert sentence in refused(capsys, *words)
    assert not list(tmp_path.rglob("*.safetensors"))
