"""The tasks: exact lengths, answers that follow from the context, and nothing trained on that is tested on."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from relpos.cli import app
from relpos.runs.settings import load_settings
from relpos.tasks import Example, names, task
from relpos.tasks.windows import TaskWindows, task_tokenizer
from relpos.text.corpus import PORTIONS

NAMES = names()
lengths = st.one_of(st.integers(0, 100), st.integers(0, 3000))  # over the shortest


def words_of(name: str, ids) -> list[str]:
    vocabulary = list(task(name).vocabulary)
    return [vocabulary[i] for i in ids]


def check_answers(name: str, example: Example, at_most: int) -> None:
    """Every answer is the one that `solve` finds from the words before it; of many answers some are checked."""
    words = words_of(name, example.ids)
    assert not {"<pad>", "<unk>"} & set(words)
    places = np.flatnonzero(example.answers)
    assert len(places) > 0
    for place in {*places[:: max(1, len(places) // at_most)], places[-1]}:
        assert task(name).solve(words[:place]) == words[place]


@pytest.mark.parametrize(
    ("name", "context", "answer"),
    [
        ("passkey", "go . the pass key is 1 2 3 4 5 . remember it . what is the pass key ? the pass key is 1 2", "3"),
        ("recall", "k3 v5 . k1 v7 . . ? k3 v5 k1", "v7"),
        ("copy", ". a b c a | a b c", "a"),
        ("selective_copy", ". a . . b a . | a", "b"),
        ("count", "a+1 b=0 a=0 pass a+1 b+1 a+1 ? b 1 a", "2"),
        ("flip_flop", "w 1 i 0 r 1 w 0 i 1 r", "0"),
        ("flip_flop", ". w 1 i 0 i 0 r", "1"),
    ],
)
def test_answers_found_by_hand(name, context, answer):
    """So that `solve` and `sample`, which are held against each other below, are not wrong together."""
    assert task(name).solve(context.split()) == answer


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(over=lengths, seed=st.integers(0, 2**32), index=st.integers(0, 2**31), portion=st.sampled_from(PORTIONS))
def test_a_sequence_has_exactly_its_length_and_answers_that_follow(name, over, seed, index, portion):
    length = task(name).shortest + over
    example = task(name).draw(length, seed, index, portion)
    assert example.ids.shape == example.answers.shape == (length,)
    assert not example.answers[0]
    check_answers(name, example, at_most=40)


def test_flip_flop_is_pairs_of_an_act_and_a_bit_that_reads_repeat():
    for length in (16, 17, 99, 400):
        words = words_of("flip_flop", task("flip_flop").draw(length, 0, length, "train").ids)
        pairs = words[length % 2 :]
        assert words[: length % 2] == ["."] * (length % 2)
        memory = None
        for act, bit in zip(pairs[::2], pairs[1::2], strict=True):
            assert act in "wri"
            assert bit in "01"
            memory = bit if act == "w" else memory
            assert act != "r" or bit == memory


@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_is_the_same_whenever_it_is_drawn_and_no_other_is(name):
    drawn = task(name)
    length = max(70, drawn.shortest)
    first, again = (drawn.draw(length, 3, 5, "train") for _ in range(2))
    assert (first.ids == again.ids).all()
    assert (first.answers == again.answers).all()
    others = [(length, 3, 6), (length, 4, 5), (length + 1, 3, 5)]
    assert all(drawn.draw(*other, "train").ids.tobytes() != first.ids.tobytes() for other in others)
    assert drawn.digest == type(drawn)(name).digest
    check_answers(name, drawn.draw(16384, 0, 0, "heldout"), at_most=2)  # the longest is solved as well


@pytest.mark.parametrize("name", NAMES)
def test_no_sequence_is_in_both_portions(name):
    """At the shortest length, where there are few, some are drawn again and again: never for the other portion."""
    length = task(name).shortest
    train, heldout = (
        {task(name).draw(length, seed, i, portion).ids.tobytes() for seed in (0, 1) for i in range(300)}
        for portion in PORTIONS
    )
    assert not train & heldout
    assert min(len(train), len(heldout)) > 10
    if name == "flip_flop":
        assert len(heldout) < 600  # it does repeat, so that this test can fail


@pytest.mark.parametrize("name", NAMES)
def test_a_guess_is_right_by_chance(name):
    length = max(64, task(name).shortest)
    drawn = (task(name).draw(length, 0, i, "train") for i in range(2000))
    answers = [words_of(name, example.ids[example.answers]) for example in drawn]
    flat = np.array([word for answer in answers for word in answer])
    kinds, counts = np.unique(flat, return_counts=True)
    assert len(kinds) == round(1 / task(name).chance)
    assert counts.max() / len(flat) == pytest.approx(task(name).chance, abs=0.03)


@pytest.mark.parametrize("length", [64, 1000])
def test_the_pass_key_stands_at_the_depth_that_is_asked_for(length):
    passkey = task("passkey")
    for depth in (0.0, 0.3, 1.0):
        words = words_of("passkey", passkey.draw(length, 0, 1, "heldout", depth).ids)
        before = len(" ".join(words).split("the pass key is")[0].split())
        assert before == round(depth * (length - passkey.shortest))
    depths = [passkey.draw(length, 0, i, "train").depth for i in range(400)]
    assert np.mean(depths) == pytest.approx(0.5, abs=0.05)


def test_recall_cannot_be_solved_by_elimination():
    """Someone who knows which values occur and which were answered, but no key, is right about once in six."""
    shares = []
    for index in range(300):
        example = task("recall").draw(64, 0, index, "heldout")
        words = [list(task("recall").vocabulary)[i] for i in example.ids]
        left = [word for word in words[: words.index("?")] if word.startswith("v")]
        for answer in (words[place] for place in np.flatnonzero(example.answers)):
            shares.append(left.count(answer) / len(left))
            left.remove(answer)
    assert 1 / 16 < np.mean(shares) < 0.2


@pytest.mark.parametrize("name", ["recall", "selective_copy", "count"])
def test_what_is_asked_for_stands_anywhere(name):
    """The places of what is not filler are spread evenly over what is before the question."""
    filler = task(name).vocabulary["pass" if name == "count" else "."]
    length, body = 200, 200 - {"recall": 25, "selective_copy": 17, "count": 7}[name]
    places = np.concatenate(
        [np.flatnonzero(task(name).draw(length, 0, i, "train").ids[:body] != filler) for i in range(1000)]
    )
    quarters = np.histogram(places, bins=4, range=(0, body))[0] / len(places)
    assert quarters == pytest.approx([0.25] * 4, abs=0.02)


def test_the_tokenizer_reads_what_it_writes(tmp_path):
    for name in NAMES:
        task_tokenizer(task(name)).save_pretrained(tmp_path / name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        ids = task(name).draw(max(64, task(name).shortest), 0, 0, "train").ids.tolist()
        text = tokenizer.decode(ids)
        assert text.split() == words_of(name, ids)
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.get_vocab() == task(name).vocabulary
        assert tokenizer("elephant")["input_ids"] == [tokenizer.unk_token_id]


def test_windows_have_the_answers_as_labels_or_all_tokens_and_padding_at_the_end():
    window = TaskWindows(task("recall"), "train", 64, 10**9, seed=7)[123_456_789]
    sample = task("recall").draw(64, 7, 123_456_789, "train")
    assert window["input_ids"].tolist() == sample.ids.tolist()
    asked = window["labels"] != -100
    assert asked.tolist() == sample.answers.tolist()
    assert (window["labels"][asked] == window["input_ids"][asked]).all()
    window = TaskWindows(task("recall"), "train", 64, 10, all_tokens=True)[0]
    assert (window["labels"] == window["input_ids"]).all()
    lengths_drawn = []
    for window in TaskWindows(task("recall"), "train", 64, 200, all_tokens=True, shortest=57):
        assert window["input_ids"].shape == (64,)
        length = int((window["labels"] != -100).sum())
        assert (window["labels"][length:] == -100).all()
        assert (window["input_ids"][length:] == 0).all()
        assert (window["input_ids"][:length] != 0).all()
        lengths_drawn.append(length)
    assert (min(lengths_drawn), max(lengths_drawn)) == (57, 64)


class TestSettings:
    def test_a_task_takes_the_place_of_the_text(self):
        settings = load_settings(None, {"data.task": "recall"})
        data = settings.data
        values = (data.task, data.task_loss, data.source, data.tokenizer, data.length)
        assert values == ("recall", "answers", None, None, 64)
        assert settings.run.out == "runs/recall-kerple_log-pico"
        assert load_settings(None, {}).data.source == "sotu"
        assert load_settings(None, {"data.task": "recall", "data.length": 300}).data.length == 300

    def test_a_task_has_the_defaults_of_a_small_run_and_given_values_win(self):
        settings = load_settings(None, {"data.task": "count"})
        values = (settings.model.preset, settings.run.steps, settings.run.batch_size, settings.optimizer.weight_decay)
        assert values == ("pico", 1000, 64, 0.0)
        chosen = {"model.preset": "nano", "run.steps": 7, "run.batch_size": 2, "optimizer.weight_decay": 0.3}
        settings = load_settings(None, {"data.task": "count", **chosen})
        values = (settings.model.preset, settings.run.steps, settings.run.batch_size, settings.optimizer.weight_decay)
        assert values == tuple(chosen.values())
        assert load_settings(None, {}).optimizer.weight_decay == 0.1

    def test_copy_is_trained_on_many_lengths_unless_told_otherwise(self):
        """At one length every answer is at one distance from its letter, and nothing about order is learned."""
        assert load_settings(None, {"data.task": "copy"}).data.task_shortest == 9
        assert load_settings(None, {"data.task": "copy", "data.task_shortest": 64}).data.task_shortest == 64
        assert load_settings(None, {"data.task": "selective_copy"}).data.task_shortest is None

    @pytest.mark.parametrize(
        ("given", "sentence"),
        [
            ({"data.task": "recal"}, r"unknown task 'recal'\. Did you mean 'recall'\?"),
            ({"data.task": "recall", "data.length": 16}, "recall has at least 57 tokens, not 16"),
            ({"data.task": "copy", "data.length": 8}, "copy has at least 9 tokens, not 8"),
            ({"data.task": "recall", "data.source": "sotu"}, "a task or on text.*leave out data.source=sotu"),
            ({"data.task": "recall", "data.tokenizer": "gpt2"}, "leave out data.tokenizer=gpt2"),
            ({"data.task": "recall", "data.separate_documents": True}, "leave out data.separate_documents=True"),
            ({"data.task": "recall", "data.task_loss": "some"}, "unknown task_loss 'some'"),
            ({"data.task": "recall", "data.task_shortest": 16}, "at least 57 tokens, not 16"),
            ({"data.task": "recall", "data.task_shortest": 99}, "data.task_shortest=99 is over data.length=64"),
            ({"data.task_loss": "all"}, "data.task_loss is for a task"),
        ],
    )
    def test_what_cannot_be_is_refused_with_a_sentence(self, given, sentence):
        with pytest.raises(ValueError, match=sentence):
            load_settings(None, given)


def test_the_page_about_tasks_shows_each_as_it_is():
    """A new task need not be on the page, which says how to list all; what is on it must be true."""
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    shown = re.findall(r"^`(\w+)`: ", page, flags=re.MULTILINE)
    assert len(shown) >= 6
    assert set(shown) <= set(NAMES)
    text = " ".join(page.split())
    for name in shown:
        assert f"``` {task(name).example()} ```" in text
        assert all(paper in text for paper in re.findall(r"arXiv (\d+\.\d+)", task(name).paper)[:1])


def test_ls_lists_every_task():
    printed = CliRunner().invoke(app, ["ls", "--tasks"]).stdout
    assert [line.split()[0] for line in printed.splitlines()[1:] if line[0] != " "] == NAMES
    cards = json.loads(CliRunner().invoke(app, ["ls", "--tasks", "--json"]).stdout)
    assert [card["name"] for card in cards] == NAMES
    card = " ".join(CliRunner().invoke(app, ["ls", "--tasks", "count"]).stdout.split())
    assert task("count").layout in card
    assert "[7]" in card  # no markup of rich's
