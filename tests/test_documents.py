"""Every link, path, command and code block of the documents is right. test_readme.py runs those of the README."""

import inspect
import shlex
import subprocess
import sys

import documents
import pytest
import typer.main

import relpos
from relpos.cli import app
from relpos.commands.options import parse_lengths, parse_options
from relpos.lab.runs.load_settings import load_settings, parse_overrides
from relpos.lab.train.api import KEYS, make_settings
from relpos.lab.train.training import train

COMMANDS = {
    " ".join(words): arguments
    for document in documents.DOCUMENTS
    for words in documents.commands(document)
    if (arguments := documents.relpos_arguments(words)) is not None
}
LIGHT = ("ls", "info", "figures --figure 12", *(f"draw {name}" for name in relpos.names()))  # what takes only seconds
README = {" ".join(words) for words in documents.commands(documents.ROOT / "README.md")}  # run by test_readme.py
RUNNABLE = [
    command
    for command, arguments in COMMANDS.items()
    if " ".join(arguments).startswith(LIGHT) and command not in README and "torchrun" not in command
]


@pytest.mark.parametrize("document", documents.DOCUMENTS, ids=documents.name)
def test_links_lead_somewhere(document):
    for path, anchor in documents.links(document):
        target = document.parent / path if path else document
        assert target.exists(), path
        assert not anchor or anchor in documents.anchors(target), f"{path}#{anchor}"


@pytest.mark.parametrize("document", documents.DOCUMENTS, ids=documents.name)
def test_files_named_in_the_text_exist(document):
    own = "yours.py"  # what the reader is to write
    missing = [path for path in documents.files_named(document) if not (documents.ROOT / path).exists()]
    assert [path for path in missing if not path.endswith(own)] == []


def test_the_documents_have_what_is_tested_here():
    assert {"README.md", "CONTRIBUTING.md", "docs/training.md"} <= set(map(documents.name, documents.DOCUMENTS))
    assert len(COMMANDS) > 25
    assert {arguments[0] for arguments in COMMANDS.values()} >= {
        "ls",
        "draw",
        "figures",
        "train",
        "evaluate",
        "compare",
    }
    assert {"relpos draw alibi", "relpos ls --tasks recall"} <= set(RUNNABLE)
    assert sum(len(documents.links(document)) for document in documents.DOCUMENTS) > 20


def parsed(arguments):
    """The parameters of a command as the command line reads them; what it does not know is an error."""
    group = typer.main.get_command(app)
    with group.make_context("relpos", list(arguments)) as context:
        command = group.get_command(context, arguments[0])
        assert command is not None, arguments[0]
        with command.make_context(arguments[0], list(arguments[1:]), parent=context) as inner:
            return inner.params


EXAMPLES = {  # those in the help of the commands
    line.strip().removeprefix("- "): shlex.split(line.strip().removeprefix("- relpos "))
    for command in typer.main.get_command(app).commands.values()
    for line in inspect.getdoc(command.callback).splitlines()
    if line.strip().startswith("- relpos ")
}


def test_the_help_of_the_long_commands_has_examples():
    assert {arguments[0] for arguments in EXAMPLES.values()} == {"train", "evaluate", "compare", "draw"}


@pytest.mark.parametrize("command", {**COMMANDS, **EXAMPLES})
def test_a_command_has_valid_options(command):
    arguments = {**COMMANDS, **EXAMPLES}[command]
    parameters = parsed(arguments)
    if parameters.get("lengths"):
        parse_lengths(parameters["lengths"])
    if arguments[0] in ("train", "compare"):
        named = {name: parameters[name] for name in KEYS if name in parameters}
        config = parameters.get("config")
        recipe = None if config is None or config.endswith(".yaml") else config  # a file of the reader's own
        overrides = parse_overrides(parameters.get("overrides") or [])
        make_settings(recipe, parse_options(parameters.get("option") or []), overrides, **named)
    for encoding in (parameters.get("encodings") or "").split(","):
        name, *pairs = encoding.split(":")
        if name:
            relpos.encoding(name, heads=4, head_dim=8, **parse_options(pairs))


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("train --encoding alibi --stepps 3", "stepps"),
        ("train --encoding alibbi", "alibbi"),
        ("train optimizer.rat=1", "optimizer.rat"),
        ("compare --encodings rope:bas=5", "bas"),
        ("evaluate runs/x --lengths 5,k", "5,k"),
    ],
)
def test_a_wrong_command_would_be_noticed(command, error, monkeypatch):
    monkeypatch.setitem(COMMANDS, command, command.split())
    with pytest.raises(Exception, match=error):
        test_a_command_has_valid_options(command)


@pytest.mark.heavy
@pytest.mark.parametrize("command", RUNNABLE)
def test_a_light_command_runs(command, tmp_path):
    arguments = [sys.executable, "-m", "relpos.cli", *COMMANDS[command]]
    run = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


# Python


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the runs that the blocks open, each trained for one step on little text."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / "text.txt").write_text("\n".join(f"line {i}: {i * i % 97} words, {i % 13} more" for i in range(3000)))
    common = {"data.tokenizer": "bpe-300", "data.source": str(folder / "text.txt"), "data.length": 64}
    trained = {
        "runs/fire": {"model.encoding": "fire", **common},
        "runs/comparison/learned-s0": {"model.encoding": "learned", **common, "data.length": 256},
        "runs/recall-rope": {"model.encoding": "rope", "data.task": "recall"},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELPOS_CACHE", str(folder / "cache"))
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        patch.chdir(folder)
        for out, overrides in trained.items():
            short = {"run.steps": 1, "run.batch_size": 1, "run.eval_windows": 1}
            train(load_settings(None, {**overrides, **short, "run.out": out}))
        yield folder


PYTHON = [document for document in documents.DOCUMENTS if documents.blocks(document, "python")]
SHORTER = {  # what would compute for long, and what is run instead
    ":20480]": ":1024]",
    "[64, 256, 1024], samples=200": "[64, 256], samples=2",
    '"alibi", length=512, minutes=5': '"alibi", length=32, steps=1, batch_size=1, data="text.txt", tokenizer="bpe-300"',
}


@pytest.mark.heavy
@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("document", [one for one in PYTHON if one.name != "README.md"], ids=documents.name)
def test_the_python_blocks_run_in_order(document):
    names: dict[str, object] = {}
    for block in documents.blocks(document, "python"):
        for long, short in SHORTER.items():
            block = block.replace(long, short)  # noqa: PLW2901
        exec(compile(block, documents.name(document), "exec"), names)
