"""The command line, as a user meets it."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import relpos
from relpos.cli import app, main


def test_ls_prints_every_encoding():
    printed = CliRunner().invoke(app, ["ls"]).stdout
    assert [line.split()[0] for line in printed.splitlines()[1:]] == relpos.names()


def test_ls_json_lists_every_card():
    cards = json.loads(CliRunner().invoke(app, ["ls", "--json"]).stdout)
    assert [card["name"] for card in cards] == relpos.names()
    assert all(card["formula"] and card["paper"] for card in cards)


def test_ls_prints_a_markdown_table_with_links_to_the_papers():
    lines = CliRunner().invoke(app, ["ls", "--markdown"]).stdout.splitlines()
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1  # as many cells in every row
    assert [line.split("`")[1] for line in lines[2:]] == relpos.names()
    (alibi,) = [line for line in lines if line.startswith("| `alibi` |")]
    assert "| score |" in alibi
    assert "[2108.12409](https://arxiv.org/abs/2108.12409)" in alibi


def test_ls_of_one_shows_formula_and_options():
    printed = CliRunner().invoke(app, ["ls", "rope"]).stdout
    assert relpos.card("rope").formula in printed
    assert all(option in printed for option in relpos.card("rope").options)


@pytest.mark.parametrize("name", relpos.names())
def test_ls_of_one_prints_its_texts_with_their_brackets(name):
    printed = " ".join(CliRunner().invoke(app, ["ls", name]).stdout.split())  # lines may be folded
    card = relpos.card(name)
    for text in (card.formula, card.paper, *(option.meaning for option in card.options.values())):
        assert " ".join(text.split()) in printed


def test_draw_writes_the_picture_with_its_options(tmp_path):
    out = tmp_path / "alibi.svg"
    arguments = ["draw", "alibi", "--heads", "3", "--length", "20", "--option", "slopes=press", "--out", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "slopes=press" in result.stdout
    assert "Head 3" in out.read_text()  # text stays text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ls", "kerpel_log"], "Did you mean 'kerple_log'?"),
        (["draw", "alibii"], "Did you mean 'alibi'?"),
        (["draw", "alibi", "--option", "slope=press"], "Did you mean 'slopes'?"),
        (["draw", "alibi", "--option", "slopes"], "key=value"),
        (["draw", "rope", "--head-dim", "7"], "head_dim 7"),
        (["draw", "alibi", "--length", "8", "--out", "x.gif"], ".png, .pdf, .svg"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_gets_one_sentence(arguments, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["relpos", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.splitlines()) == 1


def test_wrong_input_ends_the_process_with_code_2_and_no_traceback():
    command = [sys.executable, "-m", "relpos.cli", "ls", "kerpel_log"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == f"relpos: {relpos_error()}\n"  # and no traceback


def relpos_error() -> str:
    """What Python says of the same mistake."""
    with pytest.raises(ValueError, match="kerpel_log") as refused:
        relpos.card("kerpel_log")
    return str(refused.value)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [("matplotlib", ["draw", "alibi"], "figures"), ("yaml", ["train"], "lab"), ("accelerate", ["train"], "lab")],
)
def test_what_is_not_installed_is_named_with_the_command_that_installs_it(missing, command, extra):
    code = f"""
import sys
sys.modules[{missing!r}] = None
from relpos.cli import main
sys.argv[1:] = {command!r}
main()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert f"pip install 'relpos[{extra}]'" in result.stderr
