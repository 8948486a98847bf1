"""Every link, path and command of the documents is right. test_pages.py and test_readme.py run what they hold."""

import dataclasses
import inspect
import shlex

import documents
import pytest
import typer.main

import relpos
from relpos.cli import app
from relpos.cli.from_options import parse_options, parsed_options
from relpos.comparison.options import CompareOptions
from relpos.evaluation.options import EvaluateOptions
from relpos.pictures.options import DrawOptions
from relpos.runs.settings import load_settings, settings_by_key
from relpos.system.options import check_options
from relpos.training.train import TrainOptions

OPTIONS = {"train": TrainOptions, "evaluate": EvaluateOptions, "compare": CompareOptions, "draw": DrawOptions}

COMMANDS = {
    " ".join(words): arguments
    for document in documents.DOCUMENTS
    for words in documents.commands(document)
    if (arguments := documents.relpos_arguments(words)) is not None
}


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
    assert {arguments[0] for arguments in EXAMPLES.values()} == {"train", "evaluate", "compare", "draw", "explore"}


INLINE = {  # those within the text of guides and of the encodings' pages, which are complete
    command: shlex.split(command)[1:]
    for document in documents.DOCUMENTS
    if document.parent.name in ("guides", "encodings")
    for command in documents.inline_commands(document)
}


def test_there_are_commands_within_the_text():
    assert len(INLINE) > 10


@pytest.mark.parametrize("command", {**COMMANDS, **EXAMPLES, **INLINE})
def test_a_command_has_valid_options(command):
    arguments = {**COMMANDS, **EXAMPLES, **INLINE}[command]
    parameters = parsed(arguments)
    if arguments[0] in OPTIONS:
        options = OPTIONS[arguments[0]](**parsed_options(OPTIONS[arguments[0]], parameters))
        check_options(options)
        if arguments[0] == "train":
            if str(options.config or "").endswith(".yaml"):  # a file of the reader's own
                options = dataclasses.replace(options, config=None)
            options.settings()
        if arguments[0] == "compare":
            load_settings(None, {**settings_by_key(options), **(options.overrides or {})})
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
