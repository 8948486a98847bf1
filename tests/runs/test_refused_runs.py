"""A command that is refused says which setting is wrong and leaves nothing behind; the corrected one then runs."""

import errno
import os

import pytest
from refused_command import refused

from relpos.comparison.comparison import make_comparison
from relpos.runs.settings import load_settings
from relpos.system import memory
from relpos.system.files import Lock, atomic_folder, write_text, writing
from relpos.system.memory import check_memory
from relpos.text.documents import Document
from relpos.training.training import train

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("world")]


class TestARefusedRun:
    WRONG = {
        "shares": ({"run.micro_batch_size": 3}, "not a multiple of run.micro_batch_size=3"),
        "vocabulary": ({"model.vocab_size": 5}, "model.vocab_size is 5"),
        "embedding": ({"model.vocab_size": 10**9}, "model.vocab_size=1,000,000,000 rows"),
        "window": ({"data.length": 10**6}, "tokens are fewer than a batch of 4 windows"),
        "source": ({"data.source": "/nowhere/a.txt"}, "no file or folder"),
    }

    @pytest.mark.parametrize("case", WRONG)
    def test_leaves_nothing_and_the_corrected_one_is_not_refused(self, settings, tmp_path, case):
        overrides, sentence = self.WRONG[case]
        out = tmp_path / "parent" / "run"
        wrong = settings(out, **{key.replace(".", "__"): value for key, value in overrides.items()})
        with pytest.raises((ValueError, FileNotFoundError), match=sentence):
            train(wrong)
        assert not list(tmp_path.iterdir())

    def test_leaves_an_existing_folder_as_it_is(self, settings, tmp_path):
        with pytest.raises(ValueError, match=r"data\.length=16 does not fit the encoding learned: learned has 8"):
            train(settings(tmp_path, model__encoding="learned", model__options={"length": 8}))
        assert not list(tmp_path.iterdir())
        assert train(settings(tmp_path, model__encoding="learned", run__steps=1))["step"] == 1

    def test_of_a_task_with_windows_beyond_memory_leaves_nothing(self, tmp_path):
        out = str(tmp_path / "run")
        huge = load_settings(None, {"data.task": "copy", "data.length": 10**8, "run.out": out})
        with pytest.raises(ValueError, match=r"64 windows of 100,000,000 tokens per process needs .* TB of memory"):
            train(huge)
        assert not list(tmp_path.iterdir())

    def test_where_the_folder_is_a_file_leaves_the_file(self, settings, tmp_path):
        (tmp_path / "run").write_text("notes")
        with pytest.raises(ValueError, match="run is a file, and a run needs a folder"):
            train(settings(tmp_path / "run"))
        assert (tmp_path / "run").read_text() == "notes"

    def test_a_refused_comparison_leaves_nothing(self, tmp_path):
        with pytest.raises(ValueError, match=r"optimizer\.beta1 must be at least 0 and below 1"):
            make_comparison(tmp_path / "new", ["alibi"], settings={"optimizer.beta1": 2})
        with pytest.raises(FileNotFoundError):
            make_comparison(tmp_path / "new", ["alibi"], settings={"data.source": "./nowhere.txt"})
        assert not list(tmp_path.iterdir())


class TestSizesBeyondMemory:
    @pytest.mark.parametrize(
        ("words", "sentence"),
        [
            (["draw", "alibi", "--length", 10**9], "a picture of 12 heads and 1,000,000,000 tokens needs"),
            (["draw", "alibi", "--heads", 100_000], "a picture of 100,000 heads and 512 tokens needs"),
            (["draw", "clipped", "--option", f"limit={10**11}"], "clipped with heads=12, head_dim=64, limit=100,000"),
            (["draw", "learned", "--option", f"length={10**11}"], "learned with heads=12, head_dim=64, length=100,0"),
            (["train", "--data", "/dev/zero"], "/dev/zero is a device or a pipe"),
        ],
    )
    def test_are_refused_with_the_size(self, tmp_path, monkeypatch, capsys, words, sentence):
        monkeypatch.chdir(tmp_path)
        assert sentence in refused(capsys, *words)
        assert not list(tmp_path.iterdir())

    def test_are_those_of_the_machine_or_of_the_container(self, monkeypatch):
        monkeypatch.setattr(memory, "memory_limit", lambda: 3 * 2**29)
        check_memory("a table", 3 * 2**29, "give less")
        with pytest.raises(ValueError, match=r"a table needs 2\.0 GB of memory, and there are 1\.5 GB: give less\."):
            check_memory("a table", 2**31, "give less")

    def test_an_allocation_that_fails_is_a_sentence(self, monkeypatch, capsys):
        import torch

        monkeypatch.setattr("relpos.cli.app", lambda: torch.empty(2**55))
        assert "memory ran out: 128.0 PB were asked for at once" in refused(capsys, "ls")

    def test_a_text_beyond_memory_is_not_joined(self, monkeypatch):
        monkeypatch.setattr(memory, "memory_limit", lambda: 10**6)
        endless = Document("endless", lambda: iter(lambda: "word " * 1000, ""))
        with pytest.raises(ValueError, match=r"the text of endless needs 1,\d+,\d+ bytes of memory"):
            _ = endless.text


class TestWhatCannotBeWrittenIsNamed:
    @pytest.mark.parametrize(
        ("number", "words"),
        [
            (errno.ENOSPC, r"the disk is full, [\d,]+ MB are free\. Free some space\."),
            (errno.EACCES, r"you may not write to .*\. Choose another folder or change its permissions\."),
            (errno.EROFS, r"the file system is read-only\. Choose another folder\."),
        ],
    )
    def test_with_the_reason_and_what_to_do(self, tmp_path, number, words):
        def fail():
            raise OSError(number, os.strerror(number))

        with (
            pytest.raises(OSError, match=rf"^{tmp_path}/file could not be written: {words}$"),
            writing(tmp_path / "file"),
        ):
            fail()

    def test_where_a_folder_has_the_name_of_a_file(self, tmp_path):
        (tmp_path / "result.json").mkdir()
        with pytest.raises(
            OSError, match=r"result\.json could not be written: there is a folder of that name\. Rename"
        ):
            write_text(tmp_path / "result.json", "{}")
        assert [path.name for path in tmp_path.iterdir()] == ["result.json"]

    def test_where_a_file_has_the_name_of_a_folder(self, tmp_path):
        (tmp_path / "runs").write_text("notes")
        with pytest.raises(OSError, match=rf"{tmp_path}/runs is a file, not a folder\. Choose another folder"):
            Lock(tmp_path / "runs" / "a").__enter__()
        with pytest.raises(OSError, match=rf"{tmp_path}/runs is a file, not a folder\. Choose another folder"):
            atomic_folder(tmp_path / "runs" / "a").__enter__()
