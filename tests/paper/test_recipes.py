"""The recipes of the CABLE paper: every cell has settings that load, numbers with a source, and a verdict."""

import json
import re

import pytest
from typer.testing import CliRunner

from relpos.cli import app
from relpos.encodings.registry import card
from relpos.paper.catalogue import book, deviations, item, items
from relpos.paper.reproduce import RESULT, distinct_recipes, verify
from relpos.runs.settings import known_settings, load_settings

CELLS = [cell for shown in items().values() for cell in shown.cells]


def invoke(*arguments):
    return CliRunner().invoke(app, ["paper", *map(str, arguments)])


class TestTheCatalogue:
    def test_has_every_table_and_figure_of_the_paper(self):
        assert list(items()) == [*(f"table{n}" for n in range(1, 6)), *(f"figure{n}" for n in range(1, 16))]

    def test_every_cell_has_settings_that_load(self):
        for cell in CELLS:
            settings = load_settings(None, {**cell.settings, "run.out": "unused"})
            assert settings.run.batch_size * settings.data.length == (
                131_072 if cell.data == "wikitext-103" else 524_288
            )
            assert (settings.run.seed, settings.data.stream, settings.data.tokenizer) == (1337, True, "gpt2")
            load_settings(None, {**cell.shrunk().settings, "run.out": "unused"})

    def test_steps_are_those_of_the_authors_code(self):
        steps = {(cell.item, cell.size): cell.settings["run.steps"] for cell in CELLS}
        assert [steps["table5", size] for size in ("tiny", "small", "medium")] == [9150, 4575, 2745]
        assert {steps["table4", size] for size in ("tiny", "small", "medium")} == {19_073}
        assert steps["table3", "small"] == 14_000

    def test_printed_numbers_have_a_source_and_others_are_missing(self):
        for cell in CELLS:
            assert (cell.source in book()["sources"]) if cell.printed else cell.source is None
            assert set(cell.printed) <= set(cell.lengths)
        table1 = item("table1").cell("t5bias", "medium", "fineweb-edu")
        assert table1.printed[15360] == 1450.83  # "1,450 at 15 times the trained length", as the project's study says
        assert item("table5").cell("cable", "tiny", None).printed == {}

    def test_the_transcriptions_agree_where_they_overlap(self):
        for row in ("cable", "alibi", "fire", "t5bias", "kerple", "rope"):
            first = item("table1").cell(row, "medium", "fineweb-edu").printed[1024]
            assert item("table4").cell(row, "medium", None).printed[1024] == first

    def test_the_numbers_of_table_1_are_those_that_the_comparison_quotes(self):
        from documents import ROOT

        table = (ROOT / "docs" / "comparison.md").read_text().split("## What others have measured")[1]
        quoted = re.findall(r"^\| .*?\(`(\w+)`\) \| (.*) \|$", table, re.MULTILINE)
        cells = {cell.settings["model.encoding"]: cell for cell in item("figure1").cells}
        assert len(quoted) == 7
        for encoding, numbers in quoted:
            known = [cells[encoding].printed[length] for length in (1024, 4096, 15360)]
            assert [float(number.strip("* ")) for number in numbers.split("|")] == known

    def test_deviations_name_settings_and_options_that_exist(self):
        options = {option for row in book()["rows"].values() for option in card(row["encoding"]).options}
        for deviation in deviations():
            for key in deviation.keys:
                assert key in known_settings() or key.removeprefix("model.options.") in options, key
        assert len({deviation.name for deviation in deviations()}) == len(deviations())

    def test_recipes_that_are_equal_when_shrunk_stand_for_each_other(self):
        recipes = list(distinct_recipes())
        names = [name for _, some in recipes for name in some]
        assert sorted(names) == sorted(cell.name for cell in CELLS if cell.item != "figure3")
        assert len(recipes) < 30


class TestTheCommand:
    def test_lists_everything_with_its_command(self):
        printed = invoke().stdout
        assert all(name in printed for name in items())
        tree = json.loads(invoke("--json").stdout)
        assert tree["figure12"]["command"] == "relpos figures --figure 12"
        assert tree["table4"]["command"] == "relpos paper run table4 --row cable --size tiny"
        assert tree["table4"]["cells"][0]["gpu_hours"] == pytest.approx(
            6 * 44e6 * 19073 * 524288 / (0.4 * 989e12 * 3600), abs=0.01
        )

    def test_shows_the_cells_of_a_table_and_all_deviations(self):
        printed = invoke("table2").stdout
        assert "39.38" in printed
        assert "source: A reader's transcription" in printed
        assert "not known to us" in invoke("table5").stdout
        assert "medium_cable_longest" in invoke("deviations").stdout

    @pytest.mark.parametrize(
        ("words", "sentence"),
        [
            (["table9"], "unknown table or figure 'table9'"),
            (["run"], "relpos paper run takes the name of a table or figure"),
            (["run", "table4"], "table4 has several rows: give --row cable|cable_nw|alibi"),
            (["run", "table4", "--row", "cable"], "table4 has several sizes: give --size tiny|small|medium"),
            (
                ["run", "table1", "--row", "cable", "--size", "medium", "--on", "wikitext-103"],
                "unknown on 'wikitext-103'",
            ),
            (["run", "table4", "--row", "kerpel", "--size", "tiny"], "Did you mean 'kerple'?"),
            (["run", "figure8"], "figure8 is a picture of heads: relpos figures --figure 8 draws it"),
            (["run", "all"], "all tables at full size are weeks of a GPU"),
            (["verify"], "relpos paper verify takes the folder of a run"),
            (["verify", "nowhere"], "there is no run in nowhere"),
            (["--size", "huge"], "unknown size 'huge'"),
        ],
        ids=" ".join,
    )
    def test_refuses_what_is_not_there_with_a_sentence(self, words, sentence):
        result = invoke(*words)
        assert sentence in str(result.exception)

    def test_documents_have_every_deviation(self):
        from documents import ROOT

        page = (ROOT / "docs" / "paper.md").read_text()
        for deviation in deviations():
            cells = (deviation.printed, deviation.code, deviation.relpos, deviation.recipe)
            assert f"| `{deviation.name}` | {' | '.join(cells)} |" in page


class TestVerdicts:
    @pytest.fixture
    def run(self, tmp_path):
        """The folder of a run with the recipe of a cell, and numbers as they are given."""
        import dataclasses

        import yaml

        def make(perplexity, item_name="table4", size="tiny", **changes):
            cell = item(item_name).cell("cable", size, None)
            settings = load_settings(None, {**cell.settings, "run.out": str(tmp_path), **changes})
            about = {"versions": {}, "parameters": 1}
            (tmp_path / "run.yaml").write_text(yaml.safe_dump({**dataclasses.asdict(settings), "about": about}))
            facts = {"item": item_name, "row": "cable", "size": size, "data": cell.data, "shrunk": False, "step": 1}
            (tmp_path / RESULT).write_text(json.dumps({**facts, "perplexity": perplexity}))
            return tmp_path

        return make

    def test_within_a_percent_under_the_recipe_is_reproduced(self, run):
        folder = run({"512": 29.9, "1024": 28.73 * 1.009}, **{"run.micro_batch_size": 8, "run.precision": "float32"})
        verdict = verify(folder)
        assert verdict.reproduced
        assert verdict.sentence == "reproduced within 1 %: the largest difference is 0.90 %."
        assert {difference.key for difference in verdict.differences} == {"run.micro_batch_size", "run.precision"}
        assert invoke("verify", folder).exit_code == 0

    def test_beyond_a_percent_is_not(self, run):
        verdict = verify(run({"1024": 28.73 * 1.02}))
        assert not verdict.reproduced
        assert verdict.sentence == "not reproduced: off by up to 2.0 %, and no setting differs."

    def test_other_settings_are_named_one_by_one_with_their_deviation(self, run):
        changes = {
            "data.order": "random",
            "optimizer.warmup_steps": 750,
            "run.steps": 100,
            "model.options.step": "softplus",
        }
        folder = run({"1024": 28.73}, **changes)
        verdict = verify(folder)
        assert not verdict.reproduced
        assert verdict.sentence == "within 1 % of the printed numbers, but 4 settings differ from the recipe."
        assert {difference.key: difference.deviation for difference in verdict.differences} == {
            "data.order": "order",
            "optimizer.warmup_steps": "warmup_steps",
            "run.steps": None,
            "model.options.step": "cable_nw_step",
        }
        result = invoke("verify", folder)
        assert result.exit_code == 1
        assert "optimizer.warmup_steps: the recipe has 715, the run 750  (warmup_steps)" in result.stdout
        assert json.loads(invoke("verify", folder, "--json").stdout)["reproduced"] is False

    def test_without_a_printed_number_the_settings_alone_are_compared(self, run):
        folder = run({"1024": 20.0}, "table5")
        verdict = verify(folder)
        assert verdict.sentence == "the printed number is not known to us; the settings are those of the recipe."
        assert not verdict.reproduced
        printed = invoke("verify", folder).stdout
        assert "the printed number is not known to us: the settings alone are compared." in printed
        assert not re.search(r"%\s*$", printed, re.MULTILINE)

    def test_a_retrieval_score_is_not_compared_with_a_perplexity(self, run):
        (shown,) = [cell for cell in item("table3").cells if cell.row == "cable"]
        assert shown.printed[512] == 14.96
        assert all(number.printed is None for number in verify(run({"512": 14.96}, "table3", "small")).numbers)

    def test_a_run_of_relpos_train_is_compared_with_the_cell_that_is_named(self, run):
        folder = run({"1024": 28.73})
        (folder / RESULT).unlink()
        with pytest.raises(ValueError, match="was not made by relpos paper run: say which cell it is"):
            verify(folder)
        result = invoke("verify", folder, "table4", "--row", "cable", "--size", "tiny")
        assert "the printed number was not measured; the settings are those of the recipe." in result.stdout


@pytest.mark.heavy
def test_a_shrunk_cell_goes_from_start_to_table(tmp_path, monkeypatch):
    """A text and a held-out text in place of the default corpus, which takes long to tokenize."""
    monkeypatch.setenv("RELPOS_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.jsonl"
    text.write_text(
        "\n".join(json.dumps({"text": f"message {n}: " + "so it was said and done " * 30}) for n in range(60))
    )
    where = ["--row", "kerple", "--size", "tiny", "--shrink", "--runs", tmp_path]
    result = invoke("run", "table5", f"data.source={text}", f"data.heldout_source={text}", *where)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "paper-table5-kerple-tiny-wikitext-103-shrunk"
    measured = json.loads((folder / RESULT).read_text())
    assert (measured["step"], measured["shrunk"]) == (3, True)
    assert measured["perplexity"].keys() == {"64", "128"}
    assert all(1e3 < value < 1e5 for value in measured["perplexity"].values())
    rows = json.loads(next((folder / "evaluation" / "paper-64").glob("*.json")).read_text())["rows"]
    assert (rows[0]["windows"], rows[0]["tokens"]) == (4, 256)
    verdict = verify(folder)
    assert {"model.preset", "data.source", "run.steps"} <= {difference.key for difference in verdict.differences}
