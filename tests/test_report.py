"""The report of a comparison: its numbers are those of the parts, and it stands alone."""

import re
from pathlib import Path

import numpy as np
import pytest

from relpos.lab.part import write_record
from relpos.lab.plan import Part, Plan, make_plan
from relpos.lab.summary import Cell, best, change, findings, make_table, notes, read_records, told
from relpos.view.document import Code, Heading, Items, Table, Text, to_html, to_markdown
from relpos.view.report import write_report

LENGTHS = [32, 64, 128]
PERPLEXITIES = {  # two seeds each, at 32, 64 and 128
    "alibi": ([20.0, 19.5, 19.25], [21.0, 20.0, 19.75]),
    "rope": ([19.0, 26.03, 1234.5], [20.0, 27.4, 2469.0]),
    "learned": ([18.0, None, None], [19.0, None, None]),
}


def record(encoding: str, seed: int, values: list[float | None]) -> dict[str, object]:
    """What a part leaves that has found these perplexities."""
    rows = []
    for length, value in zip(LENGTHS, values, strict=True):
        row = {"length": length, "perplexity": value, "low": None, "high": None, "error": None}
        row |= {"tokens_per_second": 1000.0 + length, "peak_memory_bytes": 2**30}
        rows.append(row if value else {**row, "error": f"{encoding} has 32 positions.", "tokens_per_second": None})
    training = {"step": 7, "tokens": 1792, "seconds": 12.0, "tokens_per_second": 500.0 + 100 * seed}
    bins = [{"from": 0, "to": 16, "loss": 3.0, "control": 3.0}, {"from": 16, "to": 64, "loss": 4.0, "control": 2.5}]
    bins = [{**one, "low": None, "high": None} for one in bins]
    about = {"parameters": 12345, "corpus": {"name": "sotu", "hash": "f" * 64}, "tokens": {"train": 9, "heldout": 5}}
    return {
        "encoding": encoding,
        "seed": seed,
        "error": None,
        "attempts": 1,
        "seconds": 14.0,
        "training": {**training, "peak_memory_bytes": 2**29},
        "windows": {"rows": rows},
        **({} if seed else {"positions": {"rows": rows[1:2], "bins": bins if values[1] else []}}),
        "about": {**about, "versions": {"relpos": "0.1.0", "torch": "2.13.0"}},
        "machine": {"cpu": "A", "cores": 2, "threads": 1, "memory_bytes": 2**34, "system": "Linux 6"},
    }


@pytest.fixture
def plan(tmp_path) -> Plan:
    return make_plan(tmp_path, ["alibi", "rope", "learned"], 2, LENGTHS, settings={"data.length": 32, "run.steps": 7})


@pytest.fixture
def out(tmp_path, plan) -> Path:
    for encoding, seeds in PERPLEXITIES.items():
        for seed, values in enumerate(seeds):
            part = Part(encoding, seed)
            (tmp_path / part.name).mkdir()
            write_record(tmp_path, part, record(encoding, seed, values))
    return tmp_path


def rows(markdown: str) -> dict[str, list[str]]:
    """The cells of the first table by encoding."""
    table = markdown.split("\n\n| encoding", 1)[1].split("\n\n", 1)[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {line[0].strip("`"): line[1:] for line in lines}


class TestTheReport:
    def test_has_the_mean_and_deviation_of_the_parts_numbers(self, out):
        found = rows(write_report(out)[1].read_text())
        for encoding, (one, two) in PERPLEXITIES.items():
            for cell, values in zip(found[encoding], zip(one, two, strict=True), strict=True):
                if None in values:
                    assert cell == "refused"
                    continue
                mean, deviation = (float(text.replace(",", "")) for text in cell.strip("*").split(" ± "))
                assert mean == pytest.approx(np.mean(values), abs=0.5 if values[0] > 1000 else 0.005)
                assert deviation == pytest.approx(np.std(values, ddof=1), abs=0.5 if values[0] > 1000 else 0.005)

    def test_marks_the_best_of_each_length_and_the_trained_length(self, out):
        html, markdown = (path.read_text() for path in write_report(out))
        bold = {encoding: [cell.startswith("**") for cell in cells] for encoding, cells in rows(markdown).items()}
        expected = {"alibi": [False, True, True], "rope": [False] * 3, "learned": [True, False, False]}
        assert bold == expected
        assert re.findall(r"<strong>(.*?)</strong>", html) == ["19.75 ± 0.35", "19.50 ± 0.35", "18.50 ± 0.71"]
        assert "| 32 (trained) | 64 | 128 |" in markdown
        assert '<th class="marked">32 (trained)</th>' in html

    def test_stands_alone(self, out):
        html, markdown = write_report(out)
        page = html.read_text()
        sources = re.findall(r"""(?:src|href|url|@import)\s*[=(]\s*["']?([^"')]{0,30})""", page)
        assert len(sources) >= 2
        assert all(source.startswith("data:image/png;base64,") for source in sources)
        assert "http" not in re.sub(r"base64,[^\"]*", "", page)
        assert "<script" not in page
        pictures = re.findall(r"!\[.*?\]\((.*?)\)", markdown.read_text())
        assert len(pictures) == len(sources)
        assert all((out / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)

    def test_says_what_each_costs(self, out):
        text = write_report(out)[1].read_text()
        line = next(line for line in text.split("What each costs")[1].splitlines() if line.startswith("| `rope`"))
        cells = [cell.strip() for cell in line.strip("|").split("|")[1:]]
        assert cells == ["12,345", "7", "1,792", "550", "12", "512 MiB", "1,032", "1,128", "1,024 MiB"]

    def test_says_how_it_was_made(self, out, plan):
        text = write_report(out)[1].read_text()
        assert plan.command(out) in text
        assert f"relpos train model.encoding=rope run.seed=0 run.out={out}/rope-s0 data.length=32" in text
        assert "f" * 64 in text
        assert "torch 2.13.0" in text
        assert "Machine: A, 2 cores" in text

    def test_of_a_comparison_half_done_says_what_is_missing(self, out, plan):
        (out / "alibi-s1" / "part.json").unlink()
        write_record(out, Part("rope", 0), {"error": "it <broke> | here.", "attempts": 1})
        html, markdown = (path.read_text() for path in write_report(out))
        assert "4 of 6 parts are finished" in markdown
        assert "Not finished yet: `alibi-s1`." in markdown
        assert "`rope-s0` failed: it &lt;broke> | here." in markdown
        assert "it &lt;broke&gt; | here." in html
        assert rows(markdown)["alibi"][0] == "20.00"
        assert rows(markdown)["rope"][0] == "20.00"

    def test_before_anything_is_finished_is_there(self, tmp_path, plan):
        assert "0 of 6 parts are finished" in write_report(tmp_path)[1].read_text()
        assert all(
            cell == "–"
            for row in make_table(plan, read_records(plan, tmp_path)).values()
            for cell in map(str, row.values())
        )

    def test_of_runs_by_the_clock_says_that_data_differ(self, tmp_path):
        make_plan(tmp_path, ["alibi"], settings={"run.minutes": 3.0})
        assert "the faster encodings have seen more data" in write_report(tmp_path)[1].read_text()

    def test_of_other_lengths_is_not_mixed_in(self, out):
        """The longest length decides which tokens are scored, so that rows of an earlier plan are no match."""
        plan = make_plan(out, lengths=[256])
        assert str(make_table(plan, read_records(plan, out))["alibi"][32]) == "–"


class TestFindings:
    def test_tell_each_change_against_the_trained_length(self, out, plan):
        found = findings(plan, make_table(plan, read_records(plan, out)))
        assert found[0] == (
            "At the trained length (32) `learned` is lowest with 18.50; `alibi` is highest with 20.50, +11 %."
        )
        assert "`rope` against its own perplexity at the trained length: +37 % at 2 ×, 95-fold at 4 ×." in found
        assert "−3.7 % at 2 ×, −4.9 % at 4 ×." in found[1]
        assert len(found) == 3  # of learned there is nothing to tell

    def test_refusals_are_told_once_with_their_lengths(self, out, plan):
        assert notes(plan, read_records(plan, out)) == ["`learned` refused at 64, 128: learned has 32 positions."]

    @pytest.mark.parametrize(
        ("ratio", "words"),
        [
            (1.37, "+37 %"),
            (0.955, "−4.5 %"),
            (1.0, "±0.0 %"),
            (0.9996, "±0.0 %"),
            (1.0996, "+10 %"),
            (9.5, "+850 %"),
            (12.4, "12-fold"),
        ],
    )
    def test_change(self, ratio, words):
        assert change(ratio) == words

    @pytest.mark.parametrize(
        ("number", "words"), [(16.524, "16.52"), (146.72, "146.7"), (3355.86, "3,356"), (2.5e8, "2.50e+08")]
    )
    def test_numbers_have_the_decimals_of_their_size(self, number, words):
        assert told(number) == words

    def test_the_best_is_none_where_nothing_is_known(self):
        nothing = Cell((), "–")
        assert best({"alibi": {32: nothing}}, 32) is None
        assert best({"alibi": {32: nothing}, "rope": {32: Cell((3.0,), "–")}}, 32) == "rope"
        assert str(Cell((3.0,), "–")) == "3.00"


def test_a_page_says_the_same_in_both_forms(tmp_path):
    page = [
        Heading("A & B", 1),
        Text("one `<two>` <three>"),
        Items(["four", "`five`"]),
        Table(["x", "y"], [["a|b", "1"], ["c", "2"]], {(1, 1)}, 1),
        Code("relpos ls"),
    ]
    assert to_markdown(page, tmp_path) == (
        "# A & B\n\none `<two>` &lt;three>\n\n- four\n- `five`\n\n"
        "| x | y |\n| --- | ---: |\n| a\\|b | 1 |\n| c | **2** |\n\n```sh\nrelpos ls\n```\n"
    )
    html = to_html(page)
    assert "<title>A &amp; B</title>" in html
    assert "one <code>&lt;two&gt;</code> &lt;three&gt;" in html
    assert '<td class="marked"><strong>2</strong></td>' in html
    assert "<pre>relpos ls</pre>" in html
