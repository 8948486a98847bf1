"""The command line, as a user meets it."""

import inspect
import io
import json
import re
import subprocess
import sys
import typing

import pytest
import typer.main
from refused_command import refused
from rich.console import Console
from typer.testing import CliRunner

import relpos
from relpos.cli import app, main, tables
from relpos.comparison import summary
from relpos.comparison.comparison import make_comparison
from relpos.evaluation import evaluate_options as evaluation_options
from relpos.model_catalogue import PRESETS
from relpos.runs.settings import load_settings
from relpos.tasks import names as task_names

COMMANDS = sorted(typer.main.get_command(app).commands)


def printed(*arguments, **environment) -> str:
    return CliRunner().invoke(app, list(arguments), env=environment).stdout


def test_ls_lists_every_encoding_as_a_table_json_and_markdown():
    lines = printed("ls").splitlines()
    assert [line.split()[0] for line in lines[1 : len(relpos.names()) + 1]] == relpos.names()
    assert all(relpos.card(line.split()[0]).summary in line for line in lines[1 : len(relpos.names()) + 1])
    cards = json.loads(printed("ls", "--json"))
    assert [card["name"] for card in cards] == relpos.names()
    assert all(card["formula"] and card["paper"] for card in cards)
    lines = printed("ls", "--markdown").splitlines()
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1  # as many cells in every row
    assert [line.split("`")[1] for line in lines[2:]] == relpos.names()
    (alibi,) = [line for line in lines if line.startswith("| `alibi` |")]
    assert "| score |" in alibi
    assert "[2108.12409](https://arxiv.org/abs/2108.12409)" in alibi


@pytest.mark.parametrize("name", relpos.names())
def test_ls_of_one_prints_its_texts_with_their_brackets(name):
    words = " ".join(printed("ls", name).split())  # lines may be folded
    card = relpos.card(name)
    meanings = (option.meaning for option in card.options.values())
    for text in (card.formula, card.paper, *card.options, *meanings):
        assert " ".join(text.split()) in words


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ls", "kerpel_log"], "Did you mean 'kerple_log'?"),
        (["draw", "alibii"], "Did you mean 'alibi'?"),
        (["draw", "alibi", "--option", "slope=press"], "Did you mean 'slopes'?"),
        (["draw", "alibi", "--option", "slopes"], "key=value"),
        (["draw", "rope", "--head-dim", "7"], "head_dim 7"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_gets_one_sentence(arguments, sentence, capsys):
    said = refused(capsys, *arguments)
    assert sentence in said
    assert said.count("relpos: ") == 1


@pytest.mark.parametrize("module", ["relpos", "relpos.cli"])  # the second is what torchrun starts
def test_wrong_input_ends_the_process_with_code_2_and_no_traceback(module):
    command = [sys.executable, "-m", module, "ls", "kerpel_log"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    with pytest.raises(ValueError, match="kerpel_log") as refused:
        relpos.card("kerpel_log")
    assert (result.returncode, result.stderr) == (2, f"relpos: {refused.value}\n")  # what Python says


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [
        ("matplotlib", ["draw", "alibi"], "figures"),
        ("yaml", ["train"], "lab"),
        ("ray", ["compare", "--ray"], "ray"),
        ("submitit", ["compare", "--slurm"], "slurm"),
    ],
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


# Empty strings, and numbers out of range


def parameters_of(*kinds):
    """Command and option of every parameter that is of these types, or a list of them; None for an argument."""
    for name, command in typer.main.get_command(app).commands.items():
        parameters = command.params  # made now, and with them the hints
        hints = typing.get_type_hints(inspect.unwrap(command.callback))
        for parameter in parameters:
            hint = str(hints.get(parameter.name, bool))
            if any(re.search(rf"\b{kind}\b", hint) for kind in kinds):
                yield name, parameter.opts[0] if parameter.param_type_name == "option" else None


NEEDED = {"draw": ["alibi"], "evaluate": ["runs/none"]}  # arguments that a command cannot do without


@pytest.mark.parametrize(("command", "option"), [*parameters_of("str", "Path", "int", "float")])
def test_an_empty_string_is_refused_with_the_name_of_its_option(command, option, capsys):
    arguments = [command, *NEEDED.get(command, []), *([] if option is None else [option]), ""]
    said = refused(capsys, *arguments)
    name = option or said.removeprefix("relpos: ").split()[0]
    assert said == f"relpos: {name} is empty (an unset shell variable?): give a value, or leave it out."


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        *((command, option, value) for command, option in parameters_of("float") for value in ("nan", "inf", "-1")),
        *((command, option, "-1") for command, option in parameters_of("int")),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_name_of_its_option(command, option, value, capsys):
    assert option in refused(capsys, command, *NEEDED.get(command, []), option, value)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["compare", "--encodings", ","], "--encodings takes names separated by commas, not ','."),
        (["compare", "--lengths", "512,1"], "--lengths takes whole numbers of at least 2, as in 512,1024"),
        (["evaluate", "runs/none", "--rope-scaling", ", ,"], "--rope-scaling takes names separated by commas"),
        (["evaluate", "runs/none", "--memory", "0GB", "--slurm"], "--memory takes a size such as 8GB"),
        (["train", "data.source="], "data.source is empty"),
        (["draw", "rope", "--option", "scaling="], "--option scaling is empty"),
        (["train", "--seed", str(2**32)], "--seed"),
        (["compare", "--ray", " "], "--ray is empty"),
        (["draw", "alibi", "--out", "  "], "--out is empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_value_that_holds_nothing_is_refused(arguments, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no folder runs/ lies
    assert sentence in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        ("train", {"encoding": ""}, "encoding"),
        ("train", {"overrides": {"data.source": ""}}, "overrides['data.source']"),
        ("evaluate", {"runs": ["runs/cable", ""]}, "runs"),
        ("compare", {"encodings": ["alibi", ""]}, "encodings"),
        ("draw", {"what": ""}, "what"),
        ("draw", {"what": "alibi", "layer": ""}, "layer"),
        ("draw", {"what": "alibi", "options": {"slopes": ""}}, "options['slopes']"),
        ("figures", {"out": ""}, "out"),
        ("explore", {"what": ["alibi", ""]}, "what"),
        ("open", {"what": ""}, "what"),
    ],
)
def test_python_refuses_empty_strings_too(function, arguments, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"^{re.escape(name)} is empty"):
        getattr(relpos, function)(**arguments)
    assert not list(tmp_path.iterdir())


def test_an_empty_setting_in_a_file_is_refused(tmp_path):
    (tmp_path / "settings.yaml").write_text("data: {source: ''}")
    with pytest.raises(ValueError, match=r"^data\.source is empty"):
        load_settings(str(tmp_path / "settings.yaml"), {})


def test_completion_of_an_empty_word_is_not_refused():
    words = {"_RELPOS_COMPLETE": "complete_bash", "COMP_WORDS": "relpos draw --layer '' --show ", "COMP_CWORD": "5"}
    completed = CliRunner().invoke(app, [], prog_name="relpos", env=words).stdout
    assert completed.split() == ["bias", "scores", "weights", "profile", "mass", "position"]


# Help


def help_of(command):
    """The help of a command on one line."""
    return " ".join(printed(command, "--help", COLUMNS="400").replace("│", " ").split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_defaults_in_one_style_and_is_not_cut_in_a_terminal_of_80_columns(command):
    assert "Usage:" in help_of(command)
    assert not re.search(r"\(default|unless given|unless told", help_of(command))
    assert not re.search(r"\w…", printed(command, "--help", COLUMNS="80"))


@pytest.mark.parametrize(
    ("command", "groups"),
    [
        ("train", ("Model", "Data", "Training", "Run")),
        ("evaluate", ("Text", "Task", "Output")),
        ("compare", ("Encodings and model", "Training", "Evaluation", "Run")),
        ("draw", ("What is shown", "How it looks", "An untrained encoding")),
    ],
)
def test_help_has_groups_and_examples(command, groups):
    assert all(f"─ {group} ─" in help_of(command) for group in groups)
    assert help_of(command).count(f"• relpos {command}") >= 3


# Choices and completion


@pytest.mark.parametrize("scaling", evaluation_options.ROPE_SCALINGS)
def test_a_rope_scaling_that_is_offered_needs_no_further_parameters(scaling):
    rope = {"rope_type": scaling, "factor": 2.0, "max_position_embeddings": 16, "original_max_position_embeddings": 16}
    assert relpos.encoding("rope", heads=2, head_dim=8, rope_parameters=rope).rope.scaling == scaling


COMPLETIONS = {
    "relpos ls kc": ["kcable"],
    "relpos train --preset ": list(PRESETS),
    "relpos train --encoding kerple": ["kerple_log", "kerple_power"],
    "relpos train --family ll": ["llama"],
    "relpos train --task ": task_names(),
    "relpos train --config paper-s": ["paper-small"],
    "relpos compare --encodings alibi,kerple_p": ["alibi,kerple_power"],
    "relpos compare --preset sm": ["small"],
    "relpos evaluate runs/x --protocol ": ["windows", "last", "sliding", "positions"],
    "relpos evaluate runs/x --split ": ["heldout", "validation", "test", "all"],
    "relpos evaluate runs/x --rope-scaling yarn:4,li": ["yarn:4,linear"],
    "relpos evaluate runs/x --task pass": ["passkey"],
    "relpos draw kerple": ["kerple_log", "kerple_power"],
    "relpos draw ru": ["runs/"],
    "relpos draw runs/": ["runs/a/", "runs/b/"],
    "relpos draw alibi --show ": ["bias", "scores", "weights", "profile", "mass", "position"],
    "relpos figures --preset n": ["nano"],
}


@pytest.mark.heavy
def test_the_shell_completes_choices_without_heavy_imports(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    code = """
import contextlib, io, json, os, sys
from relpos.cli import app
completed = {}
for line in json.loads(sys.argv[1]):
    os.environ |= {"_RELPOS_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
        app(prog_name="relpos")
    completed[line] = output.getvalue().split()
heavy = {"torch", "transformers", "matplotlib", "datasets", "yaml"}
print(json.dumps([completed, sorted(heavy & set(sys.modules))]))
"""
    command = [sys.executable, "-c", code, json.dumps(list(COMPLETIONS))]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == [COMPLETIONS, []]


# Tables


def test_the_table_of_a_comparison_prints_brackets_as_they_are(tmp_path, monkeypatch):
    """rich would read [red] as a style, and [/] as the end of one."""
    make_comparison(tmp_path, ["alibi"], lengths=[256])
    names = ["sum[red]", "alibi[/]"]
    monkeypatch.setattr(summary, "make_table", lambda plan, records: {name: {256: "1.5"} for name in names})
    monkeypatch.setattr(summary, "make_standings", lambda plan, records: {})
    stream = io.StringIO()
    monkeypatch.setattr(tables, "console", lambda: Console(file=stream, width=80))
    tables.print_comparison(tmp_path)
    assert all(name in stream.getvalue() for name in names)


def test_a_process_of_torchrun_leaves_its_group_before_it_ends(monkeypatch):
    """Threads of Gloo that outlive Python aborted one now and then, after its work was done."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr("sys.argv", ["relpos", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert not distributed.is_initialized()
