"""The token store: chunks that are written one by one, read while they are written, and checked; held-out tokens."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from relpos.runs.settings import load_settings
from relpos.system.files import cache_folder
from relpos.text import store as stores
from relpos.text.corpus import open_corpus
from relpos.text.documents import Document
from relpos.text.prepare import SOURCE, start_writer
from relpos.text.tokenizers import gpt2_tokenizer
from relpos.text.tokens import Windows, open_store, tokenize
from relpos.training.model_and_data import open_data

TEXTS = [f"Document {number}: " + "the quick brown fox " * (3 + number * number % 23) for number in range(120)]
TOKENIZER = gpt2_tokenizer()
SEPARATOR = TOKENIZER.eos_token_id
# The whole text, tokenized by another call than the store's.
STREAM = [token for text in TEXTS for token in [*TOKENIZER(text)["input_ids"], SEPARATOR]]


@pytest.fixture(autouse=True)
def _small_chunks(tmp_path, monkeypatch):
    monkeypatch.setenv("RELPOS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stores, "CHUNK", 1000)


@pytest.fixture(params=["jsonl", "parquet", "folder"])
def source(request, tmp_path):
    """The texts in a file of JSON lines, in two Parquet files, or one text file each."""
    folder = tmp_path / "texts"
    folder.mkdir()
    if request.param == "jsonl":
        (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
        return str(folder / "a.jsonl")
    if request.param == "parquet":
        import datasets

        for name, part in (("a", TEXTS[:50]), ("b", TEXTS[50:])):
            datasets.Dataset.from_dict({"text": part}).to_parquet(folder / f"{name}.parquet")
    else:
        for number, text in enumerate(TEXTS):
            (folder / f"{number:03d}.txt").write_text(text)
    return str(folder)


@pytest.fixture
def lines(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return str(file)


def chunks():
    return sorted(folder.name for folder in cache_folder().glob("tokens/*/[0-9]*"))


class TestChunks:
    def test_hold_the_documents_in_order_whatever_the_files(self, source):
        corpus = open_corpus(source, split="all")
        tokens = tokenize(corpus, TOKENIZER)["heldout"]
        assert tokens.ids.tolist() == STREAM
        assert len(chunks()) > 4
        assert [STREAM[start - 1] for start in tokens.starts[1:]] == [SEPARATOR] * (len(TEXTS) - 1)
        places = np.array([[0, len(STREAM) - 1], [999, 2500]])
        assert tokens.ids[places].tolist() == np.array(STREAM)[places].tolist()
        assert tokens.ids[990:2100].tolist() == STREAM[990:2100]

    def test_divide_documents_as_one_chunk_does(self, lines, monkeypatch):
        def read():
            return {
                name: (part.ids.tolist(), part.starts.tolist()) for name, part in tokenize(corpus, TOKENIZER).items()
            }

        corpus = open_corpus(lines)
        divided = read()
        monkeypatch.setattr(stores, "CHUNK", 10**6)
        assert read() == divided

    @pytest.mark.parametrize("documents", [1, 37, 119])
    def test_are_kept_when_the_writer_is_interrupted(self, source, documents):
        corpus = open_corpus(source, split="all")
        _ = corpus.hash
        reading = corpus.documents

        def broken():
            for number, document in enumerate(reading()):
                if number == documents:
                    raise KeyboardInterrupt
                yield document

        corpus.documents = broken
        with pytest.raises(KeyboardInterrupt):
            tokenize(corpus, TOKENIZER)
        before = chunks()
        corpus.documents, skipped = reading, []
        from_there = corpus.skipping
        corpus.skipping = lambda start: skipped.append(start) or from_there(start)
        assert tokenize(corpus, TOKENIZER)["heldout"].ids.tolist() == STREAM
        assert chunks()[: len(before)] == before
        assert bool(skipped) == bool(before)  # it went on behind the chunks that were there

    @pytest.mark.parametrize("harm", [lambda data: data[:-2], lambda data: data[:-1] + b"\xff", lambda data: b""])
    def test_that_are_damaged_are_noticed_and_written_again(self, lines, capsys, harm):
        tokenize(open_corpus(lines, split="all"), TOKENIZER)
        (file,) = cache_folder().glob("tokens/*/000002/heldout.ids")
        file.write_bytes(harm(file.read_bytes()))
        assert tokenize(open_corpus(lines, split="all"), TOKENIZER)["heldout"].ids.tolist() == STREAM
        assert f"warning: {file.parent} is damaged and is written again: heldout.ids" in capsys.readouterr().err

    def test_of_a_document_that_alone_is_longer_hold_it_whole(self, tmp_path):
        (tmp_path / "long.jsonl").write_text(
            "\n".join(json.dumps({"text": text}) for text in ("a b " * 3000, "end", "c"))
        )
        tokens = tokenize(open_corpus(str(tmp_path / "long.jsonl"), split="all"), TOKENIZER)["heldout"]
        assert len(chunks()) == 2
        assert len(tokens.starts) == 3


class TestHeldOut:
    def test_tokens_are_the_first_ones_of_the_text_and_training_reads_the_rest(self, source):
        tokens = tokenize(open_corpus(source, heldout=1500), TOKENIZER)
        assert tokens["heldout"].ids.tolist() == STREAM[:1500]
        assert tokens["train"].ids.tolist() == STREAM[1500:]
        assert tokens["train"].starts[0] == 0
        assert all(STREAM[1500 + start - 1] == SEPARATOR for start in tokens["train"].starts[1:])

    def test_tokens_share_their_store(self, lines):
        for count in (10, 700, 2000):
            assert len(tokenize(open_corpus(lines, heldout=count), TOKENIZER)["heldout"]) == count
        assert len(list(cache_folder().glob("tokens/*"))) == 1

    def test_tokens_of_a_shorter_text_are_refused(self, lines):
        with pytest.raises(ValueError, match=f"has {len(STREAM):,} tokens, and the first 1,000,000 are to be held out"):
            tokenize(open_corpus(lines, heldout=10**6), TOKENIZER)

    @pytest.mark.parametrize("share", [0.02, 0.3])
    def test_a_share_of_the_documents_is_about_that_share(self, tmp_path, share):
        file = tmp_path / "many.jsonl"
        file.write_text("\n".join(json.dumps({"text": f"text {number}"}) for number in range(4000)))
        corpus = open_corpus(str(file), heldout=share)
        _ = corpus.hash
        assert corpus.counts["heldout"] / 4000 == pytest.approx(share, abs=4 * (share * (1 - share) / 4000) ** 0.5)

    def test_a_share_of_a_text_file_is_its_end(self, tmp_path):
        (tmp_path / "a.txt").write_text("line\n" * 100)
        corpus = open_corpus(str(tmp_path / "a.txt"), heldout=0.25)
        assert "".join(document.text for document in corpus.portion("heldout")) == "line\n" * 25

    def test_another_text_leaves_the_data_as_a_whole(self, lines, tmp_path):
        (tmp_path / "other.txt").write_text("something else entirely " * 40)
        overrides = {"data.source": lines, "data.heldout_source": str(tmp_path / "other.txt"), "data.tokenizer": "gpt2"}
        data = open_data(load_settings(None, {**overrides, "data.length": 16, "run.batch_size": 2}))
        assert data.train.tokens.ids.tolist() == STREAM
        assert TOKENIZER.decode(data.heldout.tokens.ids[:6].tolist()).startswith("something else entirely")
        assert data.about["heldout"]["name"] == str(tmp_path / "other.txt")

    def test_a_separator_may_come_first(self, lines):
        tokens = tokenize(open_corpus(lines, split="all", separator_first=True), TOKENIZER)["heldout"]
        assert tokens.ids.tolist() == [SEPARATOR, *STREAM]
        assert tokens.starts[:2].tolist() == [0, STREAM.index(SEPARATOR) + 2]

    @pytest.mark.parametrize(
        ("settings", "sentence"),
        [
            ({"data.heldout": 0.1, "data.heldout_source": "sotu"}, "give data.heldout=0.1 or data.heldout_source=sotu"),
            ({"data.heldout": 1.5}, "data.heldout=1.5 is neither a share below 1 nor a whole number of tokens"),
            ({"data.heldout": 100, "data.tokenizer": "bpe-300"}, "bpe-300 is trained on what is not held out"),
            ({"data.stream": True, "data.separate_documents": True}, "data.separate_documents needs the place"),
            ({"data.order": "backwards"}, "unknown order 'backwards'"),
            ({"data.task": "copy", "data.stream": True}, "leave out data.stream=True"),
        ],
    )
    def test_parts_that_cannot_be_are_refused_before_anything_is_read(self, settings, sentence):
        with pytest.raises(ValueError, match=sentence):
            load_settings(None, settings)


class TestOrder:
    def test_sequential_windows_follow_the_text_and_begin_again(self, lines):
        tokens = tokenize(open_corpus(lines, heldout=100), TOKENIZER)["train"]
        windows = Windows(tokens, 50, multiple=4, endless=True)
        count = (len(tokens) - 1) // 50 // 4 * 4
        for index in (0, 1, count - 1, count, 2 * count + 3):
            start = 100 + index % count * 50
            assert windows[index]["labels"].tolist() == STREAM[start : start + 51]
        finite = Windows(tokens, 50, multiple=4)
        assert len(finite) == count
        assert finite[count - 1]["labels"].tolist() == windows[3 * count - 1]["labels"].tolist()


class TestAStream:
    def open(self, lines, heldout=100):
        return open_corpus(lines, heldout=heldout, stream=True)

    def test_is_identified_without_reading_it(self, lines, tmp_path, monkeypatch):
        copy = tmp_path / "elsewhere" / "lines.jsonl"
        copy.parent.mkdir()
        copy.write_bytes((tmp_path / "lines.jsonl").read_bytes())
        monkeypatch.setattr("relpos.text.corpus.read_file", lambda *args: pytest.fail("read"))
        assert self.open(lines).hash == self.open(str(copy)).hash
        copy.write_bytes(copy.read_bytes() + b"\n" + json.dumps({"text": "more"}).encode())
        assert self.open(lines).hash != self.open(str(copy)).hash

    def test_is_tokenized_as_far_as_it_is_read(self, lines):
        corpus = self.open(lines)
        reading, given = corpus.documents, []
        corpus.documents = lambda: (given.append(document) or document for document in reading())
        tokens = tokenize(corpus, TOKENIZER)
        windows = Windows(tokens["train"], 50, multiple=2, endless=True)
        assert windows[0]["labels"].tolist() == STREAM[100:151]
        assert len(chunks()) == 1
        assert windows[30]["labels"].tolist() == STREAM[1600:1651]
        assert len(chunks()) == 2
        assert len(given) < len(TEXTS)

    def test_is_written_by_another_process_while_it_is_read(self, lines):
        store = open_store(self.open(lines), TOKENIZER)
        source = {"corpus": store.corpus.opening, "separator": SEPARATOR, "tokenizer": store.tokenizer.to_str()}
        store.folder.mkdir(parents=True)
        (store.folder / SOURCE).write_text(json.dumps(source))
        code = (  # slowly
            "import sys, time; sys.argv = ['', sys.argv[1]]\n"
            "from relpos.text import prepare, store, corpus\n"
            "store.CHUNK, read = 1000, corpus.read_file\n"
            "def slow(*args):\n    for document in read(*args):\n        time.sleep(0.02); yield document\n"
            "corpus.read_file = slow\nprepare.main()"
        )
        with subprocess.Popen([sys.executable, "-c", code, str(store.folder)], stdin=subprocess.PIPE) as writer:
            deadline = time.monotonic() + 60
            while not chunks() and time.monotonic() < deadline:
                time.sleep(0.05)
            ids = tokenize(self.open(lines), TOKENIZER)["train"].ids
            assert ids[900:2000].tolist() == STREAM[1000:2100]  # waits for the writer
            assert writer.poll() is None
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            assert ids.tolist() == STREAM[100:]  # and goes on without it

    def test_that_is_complete_needs_no_writer(self, lines):
        store = open_store(self.open(lines), TOKENIZER)
        store.write_all()
        assert start_writer(open_store(self.open(lines), TOKENIZER)) is None

    def test_of_a_hub_dataset_asks_the_hub_for_its_version_and_streams_its_rows(self, monkeypatch):
        import datasets
        import huggingface_hub

        asked = []

        def load_dataset(name, subset, **options):
            asked.append((name, subset, options))
            return [{"text": text} for text in ["", *TEXTS]]

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        monkeypatch.setattr(huggingface_hub, "dataset_info", lambda name: type("Info", (), {"sha": "abc"}))
        corpus = open_corpus("someone/corpus:test", "text", "part", heldout=100, stream=True)
        tokens = tokenize(corpus, TOKENIZER)
        assert tokens["heldout"].ids.tolist() == STREAM[:100]
        assert tokens["train"].ids.tolist() == STREAM[100:]
        assert asked[0] == ("someone/corpus", "part", {"split": "test", "streaming": True})
        assert [document.text for document in corpus.documents_from(118)] == TEXTS[118:]


def test_documents_from_a_place_are_those_of_the_whole(source):
    corpus = open_corpus(source)
    names = [document.name for document in corpus.documents()]
    for start in (0, 1, 49, 50, 51, 119, 120):
        assert [document.name for document in corpus.documents_from(start)] == names[start:]
    assert isinstance(next(corpus.documents_from(3)), Document)
