"""Opening what was trained; files of a run that were damaged: mended where a checkpoint can, else refused by name."""

import json
import shutil
from functools import partial

import pytest
import torch
import transformers
from refused_command import refused

from relpos.comparison.comparison import Trial, load_comparison, read_record
from relpos.runs.checkpoints import checkpoints, install, newest_undamaged
from relpos.runs.run import open_run
from relpos.system.seal import damage, seal
from relpos.training.training import train

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("world")]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def again(settings):
    """Settings of the run in a folder."""
    return partial(settings, model__encoding="rope", run__log_every=3)


@pytest.fixture(scope="module")
def finished(world, again):
    train(again(world / "finished"))
    return world / "finished"


@pytest.fixture
def run(finished, tmp_path):
    """A copy of a finished run, to be damaged: checkpoint-9, checkpoint-6 and the model of step 9."""
    return shutil.copytree(finished, tmp_path / "run")


def cut(file, size=1000):
    file.write_bytes(file.read_bytes()[:size])


def test_a_run_knows_how_it_was_trained(finished):
    run = open_run(finished)
    assert (run.encoding, run.trained_length, run.result["step"]) == ("rope", 16, 9)
    assert run.settings.data.source == run.about["corpus"]["name"]
    assert len(run.heldout()) == run.about["tokens"]["heldout"]
    assert not run.model.training


def test_a_checkpoint_is_a_run_at_an_earlier_step(finished):
    run = open_run(finished / "checkpoint-6")
    assert run.trained_length == 16
    last = open_run(finished)
    assert not torch.equal(run.model.lm_head.weight, last.model.lm_head.weight)


def test_another_encoding_may_be_put_in(finished):
    tokens = torch.arange(100)[None]
    one = open_run(finished).model(tokens).logits
    same = open_run(finished, {"name": "rope"}).model(tokens).logits
    other = open_run(finished, {"name": "rope", "scaling": "linear", "factor": 4.0}).model(tokens).logits
    torch.testing.assert_close(same, one, rtol=0, atol=0)
    assert (other - one).abs().max() > 1e-3


def test_a_gpt2_of_transformers_opens(tmp_path):
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=32, vocab_size=50257)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path)
    run = open_run(tmp_path)
    assert (run.encoding, run.trained_length, run.settings) == ("learned", 32, None)
    tokens = torch.tensor([run.tokenizer("Hello world")["input_ids"]])
    torch.testing.assert_close(run.model(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "no config.json"),
        ({"run.yaml": "run: {}"}, "rerun relpos train to finish it"),
        ({"config.json": "{"}, "is not valid JSON"),
        ({"config.json": json.dumps({"model_type": "mistral"})}, "there are no weights"),
    ],
)
def test_what_is_no_model_is_refused_with_a_sentence(tmp_path, files, sentence):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises((ValueError, OSError), match=sentence):
        open_run(tmp_path)


class TestOnlyWholeCheckpointsCount:
    def test_for_the_model_and_the_result_of_a_finished_run(self, run, finished, again):
        shutil.copytree(run / "checkpoint-9", run / "checkpoint-12")
        cut(run / "checkpoint-12" / WEIGHTS)
        (run / "result.json").unlink()
        assert train(again(run))["step"] == 9
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

    def test_and_a_kill_after_resuming_from_before_a_damaged_one_loses_nothing(self, run, finished, again):
        cut(run / "checkpoint-9" / "optimizer.pt")
        train(again(run, run__keep_checkpoints=1, run__save_every=1, run__steps=7))
        assert newest_undamaged(run) == run / "checkpoint-7"

    def test_and_a_file_of_that_name_is_none(self, run, again, capsys):
        (run / "checkpoint-77").write_text("notes")
        train(again(run))
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
    def test_gets_a_damaged_file_of_its_model_back(self, run, finished, again, capsys, name):
        cut(run / name, 100)
        train(again(run))
        assert f"{name} in {run} was damaged: copied again from {run / 'checkpoint-9'}" in capsys.readouterr().out
        assert (run / name).read_bytes() == (finished / name).read_bytes()

    @pytest.mark.parametrize("text", ["", "[]", "{", '{"step": "x"}', "{}"])
    def test_gets_a_damaged_result_back(self, run, finished, again, text):
        (run / "result.json").write_text(text)
        train(again(run))
        mended, result = (json.loads((folder / "result.json").read_text()) for folder in (run, finished))
        assert {**mended, "seconds": 0} == {**result, "seconds": 0}

    def test_without_a_log_has_a_result_without_losses(self, run, again, capsys):
        (run / "result.json").unlink()
        (run / "log.jsonl").write_text("")
        result = train(again(run))
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
        ("about: {a: 1}\nmodel: {encoding: rope}", r"run\.yaml is not what relpos train wrote: it has no data.length"),
        ("model: {encoding: rope}\ndata: {length: [, source: a}", "is not valid YAML"),
        ("model: {encoding: rope}\ndata: {length: x, source: a}\nabout: {a: 1}", "data.length must be a number"),
    ],
)
def test_a_broken_run_yaml_is_refused_before_the_work(run, again, text, sentence, monkeypatch):
    (run / "run.yaml").write_text(text)
    monkeypatch.setattr("relpos.training.training.open_data", lambda settings: pytest.fail("the text was read"))
    for use in (open_run, lambda folder: train(again(folder))):
        with pytest.raises(ValueError, match=sentence):
            use(run)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "result.json"])
@pytest.mark.parametrize(("text", "sentence"), BROKEN_MAPPINGS)
def test_a_broken_json_file_of_a_run_is_named(run, capsys, name, text, sentence):
    (run / name).write_text(text)
    line = refused(capsys, "evaluate", run)
    assert f"{run / name} {sentence}" in line


@pytest.mark.parametrize(
    ("name", "tree", "sentence"),
    [
        ("tokenizer.json", {"model": 3}, "the tokenizer of .* cannot be read"),
        ("tokenizer_config.json", [1], "the tokenizer of .* cannot be read"),
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
def test_a_broken_log_is_refused_before_the_work(run, again, data, sentence, monkeypatch):
    (run / "log.jsonl").write_bytes(data)
    monkeypatch.setattr("relpos.training.training.open_data", lambda settings: pytest.fail("the text was read"))
    with pytest.raises(ValueError, match=rf"log\.jsonl is not the log of a run: {sentence}.*Remove it"):
        train(again(run))


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
        (["train", "--tokenizer", "bpe-²"], "unknown tokenizer 'bpe-²'"),
        (["train", "--config", "nowhere.yaml"], "there is no file nowhere.yaml: --config takes a YAML file"),
        (["train", "--config", "."], "is a folder"),
        (["train", "--encoding", "rope", "--option", "bass=3"], "unknown option of rope 'bass'. Did you mean 'base'?"),
        (["train", "--encoding", "rope", "--option", "base=-3"], "base must be a positive number"),
        (["draw", "alibi", "--text-file", "nowhere.txt"], "there is no file nowhere.txt"),
        (["draw", "alibi", "--text-file", "."], ". is a folder"),
    ],
)
def test_what_is_wrong_with_a_command_is_one_sentence(tmp_path, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(tmp_path)
    assert sentence in refused(capsys, *words)
    assert not list(tmp_path.rglob("*.safetensors"))
