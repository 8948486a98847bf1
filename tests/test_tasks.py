"""The tasks: exact lengths, answers that follow from the context, and nothing trained on that is tested on."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from relpos.cli import app
from relpos.lab.runs.settings import load_settings
from relpos.lab.tasks import names, task
from relpos.lab.tasks.tokenizer import task_tokenizer
from relpos.lab.tasks.windows import TaskWindows

NAMES = names()
PARTS = ("train", "heldout")
lengths = st.one_of(st.integers(0, 100), st.integers(0, 3000))  # over the shortest


# Each solver sees words, with a hole in place of the answer and nothing after it, and says the answer.


def solve_passkey(context: list[str]) -> str:
    found = re.search(r"the pass key is ((?:\d ){5})\. remember", " ".join(context))
    given = len(context) - 1 - max(i for i, word in enumerate(context) if word == "is")
    return found[1].split()[given]


def solve_recall(context: list[str]) -> str:
    told = context[: context.index("?")]
    return told[told.index(context[-1]) + 1]


def solve_copy(context: list[str]) -> str:
    bar = context.index("|")
    letters = [word for word in context[:bar] if word != "."]
    return letters[len(context) - bar - 1]


def solve_count(context: list[str]) -> str:
    values: dict[str, int] = {}
    for word in context[: context.index("?")]:
        if word.endswith("=0"):
            values[word[0]] = 0
        elif word.endswith("+1") and word[0] in values:
            values[word[0]] += 1
    return str(values[context[-1]])


def solve_flip_flop(context: list[str]) -> str:
    memory = None
    acts = [word for word in context if word != "."][:-1]
    assert context[-1] == "r"
    for act, bit in zip(acts[::2], acts[1::2], strict=True):
        assert act in "wri"
        if act == "w":
            memory = bit
        elif act == "r":
            assert bit == memory
    assert memory is not None
    return memory


SOLVERS = {
    "passkey": solve_passkey,
    "recall": solve_recall,
    "copy": solve_copy,
    "selective_copy": solve_copy,
    "count": solve_count,
    "flip_flop": solve_flip_flop,
}


def words_of(name: str, ids) -> list[str]:
    vocabulary = list(task(name).vocabulary)
    return [vocabulary[i] for i in ids]


def test_every_task_has_a_solver_here():
    assert sorted(SOLVERS) == NAMES


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(over=lengths, seed=st.integers(0, 2**32), index=st.integers(0, 2**31), part=st.sampled_from(PARTS))
def test_a_sequence_has_exactly_its_length_and_answers_that_follow(name, over, seed, index, part):
    length = task(name).shortest + over
    sample = task(name).draw(length, seed, index, part)
    assert sample.ids.shape == sample.answers.shape == (length,)
    assert not sample.answers[0]
    words = words_of(name, sample.ids)
    assert not {"<pad>", "<unk>"} & set(words)
    places = np.flatnonzero(sample.answers)
    assert len(places) > 0
    for place in places[:: max(1, len(places) // 40)]:
        assert SOLVERS[name](words[:place]) == words[place]


@pytest.mark.parametrize("name", NAMES)
def test_the_longest_is_solved_as_well(name):
    sample = task(name).draw(16384, 0, 0, "heldout")
    words = words_of(name, sample.ids)
    assert len(words) == 16384
    places = np.flatnonzero(sample.answers)
    for place in places[[0, len(places) // 2, -1]]:
        assert SOLVERS[name](words[:place]) == words[place]


@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_is_the_same_whenever_it_is_drawn_and_no_other_is(name):
    one = task(name)
    first, again = (one.draw(70, 3, 5, "train") for _ in range(2))
    assert (first.ids == again.ids).all()
    assert (first.answers == again.answers).all()
    others = [one.draw(70, 3, 6, "train"), one.draw(70, 4, 5, "train"), one.draw(71, 3, 5, "train")]
    assert all(other.ids.tobytes() != first.ids.tobytes() for other in others)
    assert one.digest == type(one)(name).digest


@pytest.mark.parametrize("name", NAMES)
def test_no_sequence_is_in_both_parts(name):
    """At the shortest length, where there are few, some are drawn again and again: never for the other part."""
    length = task(name).shortest
    train, heldout = ({task(name).draw(length, seed, i, part).ids.tobytes() for seed in (0, 1) for i in range(300)}
                      for part in PARTS)  # fmt: skip
    assert not train & heldout
    assert min(len(train), len(heldout)) > 10


def test_flip_flop_at_its_shortest_does_repeat():
    """So that the test above can fail."""
    drawn = [task("flip_flop").draw(16, 0, i, "heldout").ids.tobytes() for i in range(600)]
    assert len(set(drawn)) < len(drawn)


@pytest.mark.parametrize("name", NAMES)
def test_a_guess_is_right_by_chance(name):
    answers = [words_of(name, s.ids[s.answers]) for s in (task(name).draw(64, 0, i, "train") for i in range(2000))]
    flat = np.array([word for answer in answers for word in answer])
    kinds, counts = np.unique(flat, return_counts=True)
    assert len(kinds) == round(1 / task(name).chance)
    assert counts.max() / len(flat) == pytest.approx(task(name).chance, abs=0.03)


@pytest.mark.parametrize("length", [64, 1000])
def test_the_pass_key_stands_at_the_depth_that_is_asked_for(length):
    one = task("passkey")
    for depth in (0.0, 0.3, 1.0):
        words = " ".join(words_of("passkey", one.draw(length, 0, 1, "heldout", depth).ids)).split("the pass key is")
        before = len(words[0].split())
        assert before == round(depth * (length - one.shortest))
    depths = [one.draw(length, 0, i, "train").depth for i in range(400)]
    assert np.mean(depths) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("name", ["recall", "selective_copy", "count"])
def test_what_is_asked_for_stands_anywhere(name):
    """The places of what is not filler are spread evenly over the part before the question."""
    filler = task(name).vocabulary["pass" if name == "count" else "."]
    length, body = 200, 200 - {"recall": 17, "selective_copy": 17, "count": 7}[name]
    places = np.concatenate(
        [np.flatnonzero(task(name).draw(length, 0, i, "train").ids[:body] != filler) for i in range(1000)]
    )
    quarters = np.histogram(places, bins=4, range=(0, body))[0] / len(places)
    assert quarters == pytest.approx([0.25] * 4, abs=0.02)


def test_the_tokenizer_reads_what_it_writes(tmp_path):
    for name in NAMES:
        task_tokenizer(task(name)).save_pretrained(tmp_path / name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        ids = task(name).draw(64, 0, 0, "train").ids.tolist()
        text = tokenizer.decode(ids)
        assert text.split() == words_of(name, ids)
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.get_vocab() == task(name).vocabulary
        assert tokenizer("elephant")["input_ids"] == [tokenizer.unk_token_id]


class TestWindows:
    def test_labels_are_the_answers(self):
        window = TaskWindows(task("recall"), "train", 64, 10**9, seed=7)[123_456_789]
        sample = task("recall").draw(64, 7, 123_456_789, "train")
        assert window["input_ids"].tolist() == sample.ids.tolist()
        asked = window["labels"] != -100
        assert asked.tolist() == sample.answers.tolist()
        assert (window["labels"][asked] == window["input_ids"][asked]).all()

    def test_or_everything(self):
        window = TaskWindows(task("recall"), "train", 64, 10, everything=True)[0]
        assert (window["labels"] == window["input_ids"]).all()

    def test_shorter_ones_are_padded_at_the_end(self):
        windows = TaskWindows(task("recall"), "train", 64, 200, everything=True, shortest=40)
        found = []
        for window in windows:
            assert window["input_ids"].shape == (64,)
            length = int((window["labels"] != -100).sum())
            assert (window["labels"][length:] == -100).all()
            assert (window["input_ids"][length:] == 0).all()
            assert (window["input_ids"][:length] != 0).all()
            found.append(length)
        assert (min(found), max(found)) == (40, 64)


class TestSettings:
    def test_a_task_takes_the_place_of_the_text(self):
        settings = load_settings(None, {"data.task": "recall"})
        data = settings.data
        assert (data.task, data.task_loss, data.source, data.tokenizer, data.length) == (
            "recall", "answers", None, None, 64,
        )  # fmt: skip
        assert settings.run.out == "runs/recall-kerple_log-nano"
        assert load_settings(None, {}).data.source == "sotu"
        assert load_settings(None, {"data.task": "recall", "data.length": 300}).data.length == 300

    @pytest.mark.parametrize(
        ("given", "sentence"),
        [
            ({"data.task": "recal"}, r"unknown task 'recal'\. Did you mean 'recall'\?"),
            ({"data.task": "recall", "data.length": 16}, "recall has at least 17 tokens, not 16"),
            ({"data.task": "recall", "data.source": "sotu"}, "a task or on text.*takes no data.source=sotu"),
            ({"data.task": "recall", "data.tokenizer": "gpt2"}, "takes no data.tokenizer=gpt2"),
            ({"data.task": "recall", "data.separate_documents": True}, "takes no data.separate_documents=True"),
            ({"data.task": "recall", "data.task_loss": "some"}, "unknown task_loss 'some'"),
            ({"data.task": "recall", "data.task_shortest": 16}, "at least 17 tokens, not 16"),
            ({"data.task": "recall", "data.task_shortest": 99}, "data.task_shortest=99 is over data.length=64"),
            ({"data.task_loss": "all"}, "data.task_loss is for a task"),
        ],
    )
    def test_what_cannot_be_is_refused_with_a_sentence(self, given, sentence):
        with pytest.raises(ValueError, match=sentence):
            load_settings(None, given)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "--task", "passkeys"], "Did you mean 'passkey'?"),
        (["train", "--task", "copy", "--data", "sotu"], "a task or on text"),
        (["ls", "--tasks", "flipflop"], "Did you mean 'flip_flop'?"),
    ],
)
def test_the_command_refuses_before_torch_is_imported(arguments, sentence):
    code = f"""
import sys
from relpos.cli import main
sys.argv[1:] = {arguments!r}
try: main()
finally: assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert sentence in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_the_page_about_tasks_shows_each_as_it_is():
    page = " ".join((Path(__file__).parent.parent / "docs" / "tasks.md").read_text(encoding="utf-8").split())
    for name in NAMES:
        assert f"`{name}`: " in page
        assert f"``` {task(name).example()} ```" in page
        assert all(paper in page for paper in re.findall(r"arXiv (\d+\.\d+)", task(name).paper)[:1])


def test_ls_tells_of_every_task():
    printed = CliRunner().invoke(app, ["ls", "--tasks"]).stdout
    assert [line.split()[0] for line in printed.splitlines()[1:] if line[0] != " "] == NAMES
    cards = json.loads(CliRunner().invoke(app, ["ls", "--tasks", "--json"]).stdout)
    assert [card["name"] for card in cards] == NAMES
    one = " ".join(CliRunner().invoke(app, ["ls", "--tasks", "count"]).stdout.split())
    assert task("count").layout in one
    assert "[7]" in one  # no markup of rich's
