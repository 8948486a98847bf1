"""Every link, path and command of the documents and workflows is right. test_pages.py runs what they hold."""

import dataclasses
import inspect
import re
import shlex

import documents
import pytest
import typer.main
import yaml

import relpos
from relpos.cli import app
from relpos.cli.from_options import parsed_options
from relpos.cli.tables import markdown_table
from relpos.comparison.compare_options import CompareOptions
from relpos.evaluation.evaluate_options import EvaluateOptions
from relpos.pictures.draw_options import DrawOptions
from relpos.runs.resolve import check_encoding
from relpos.runs.settings import encoding_settings, load_settings, settings_by_key
from relpos.system.options import check_options
from relpos.training.train import TrainOptions

OPTIONS = {"train": TrainOptions, "evaluate": EvaluateOptions, "compare": CompareOptions, "draw": DrawOptions}
GROUP = typer.main.get_command(app)
COMMANDS = {
    " ".join(words): arguments
    for document in documents.DOCUMENTS
    for words in documents.commands(document)
    if (arguments := documents.relpos_arguments(words)) is not None
}
EXAMPLES = {  # those in the help of the commands
    line.strip().removeprefix("- "): shlex.split(line.strip().removeprefix("- relpos "))
    for command in GROUP.commands.values()
    for line in inspect.getdoc(command.callback).splitlines()
    if line.strip().startswith("- relpos ")
}
INLINE = {  # those within the text of guides and of the encodings' pages, which are complete
    command: shlex.split(command)[1:]
    for document in documents.DOCUMENTS
    if document.parent.name in ("guides", "encodings")
    for command in documents.inline_commands(document)
}
ALL = {**COMMANDS, **EXAMPLES, **INLINE}


@pytest.mark.parametrize("document", documents.DOCUMENTS, ids=documents.name)
def test_links_and_files_exist(document):
    for path, anchor in documents.links(document):
        target = document.parent / path if path else document
        assert target.exists(), path
        assert not anchor or anchor in documents.anchors(target), f"{path}#{anchor}"
    missing = [path for path in documents.files_named(document) if not (documents.ROOT / path).exists()]
    assert [path for path in missing if not path.endswith("yours.py")] == []  # which the reader is to write


def test_the_documents_have_what_is_tested_here():
    assert {"README.md", "CONTRIBUTING.md", "docs/training.md"} <= set(map(documents.name, documents.DOCUMENTS))
    assert (len(COMMANDS) > 25, len(INLINE) > 10) == (True, True)
    assert {words[0] for words in COMMANDS.values()} >= {"ls", "draw", "figures", "train", "evaluate", "compare"}
    assert {words[0] for words in EXAMPLES.values()} == {
        "train",
        "evaluate",
        "check",
        "compare",
        "draw",
        "explore",
        "gpu-report",
        "paper",
        "data",
    }
    assert sum(len(documents.links(document)) for document in documents.DOCUMENTS) > 20


def check_command(arguments):
    """Parse a command as the command line does, and check the values of its options."""
    with GROUP.make_context("relpos", list(arguments)) as context:
        command = GROUP.get_command(context, arguments[0])
        assert command is not None, arguments[0]
        with command.make_context(arguments[0], list(arguments[1:]), parent=context) as inner:
            parameters = inner.params
    if arguments[0] in OPTIONS:
        options = OPTIONS[arguments[0]](**parsed_options(OPTIONS[arguments[0]], parameters))
        check_options(options)
        if arguments[0] == "train":
            if str(options.config or "").endswith(".yaml"):  # a file of the reader's own
                options = dataclasses.replace(options, config=None)
            options.settings()
        if arguments[0] == "compare":
            load_settings(None, {**settings_by_key(options), **(options.overrides or {})})
    for encoding in filter(None, (parameters.get("encodings") or "").split(",")):
        check_encoding(load_settings(None, encoding_settings(encoding)))


@pytest.mark.parametrize("command", ALL)
def test_a_command_has_valid_options(command):
    check_command(ALL[command])


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
def test_a_wrong_command_would_be_noticed(command, error):
    with pytest.raises(Exception, match=error):
        check_command(command.split())


def test_the_table_of_encodings_is_current():
    """`make cards` writes it."""
    text = (documents.ROOT / "docs/encodings/index.md").read_text(encoding="utf-8")
    table = text.split("<!-- encodings:", 1)[1].split("-->\n", 1)[1].split("<!-- end of encodings", 1)[0]
    assert table.strip() == markdown_table([relpos.card(name) for name in relpos.names()]).strip()


@pytest.mark.parametrize("file", sorted(documents.ROOT.glob(".github/workflows/*.yml")), ids=lambda file: file.stem)
def test_what_a_workflow_calls_exists(file):
    text = file.read_text(encoding="utf-8")
    assert {"name", "jobs"} < set(yaml.safe_load(text))
    targets = re.findall(r"^([\w-]+):(?!=)", (documents.ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    options = re.findall(r"option\((\w+)", (documents.ROOT / "native/CMakeLists.txt").read_text())
    called = re.findall(r"\bmake ([\w-]+)", text)
    assert called
    assert set(called) <= set(targets)
    assert set(re.findall(r"RELPOS_\w+", text)) <= set(options)
    assert all((documents.ROOT / name).is_file() for name in re.findall(r"tests/[\w/]+\.py", text))
