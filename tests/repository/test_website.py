"""The generated parts of the documents are current, and what makes the site is right."""

import doctest
import inspect
import json
import re

import documents
import pytest

import relpos
from relpos.runs.settings import Settings
from website import blocks, cards, export, mathematics, notebooks, pages, repository, settings_table

GENERATED = pages.generated()


@pytest.mark.parametrize("path", GENERATED)
def test_generated_parts_are_current(path):
    """If this fails: make pages. An encoding without a page does not wait for it."""
    file = documents.ROOT / path
    if file.exists():
        assert file.read_text(encoding="utf-8") == GENERATED[path]


def test_encodings_without_a_written_page_are_listed():
    """A new encoding gets a page without a hand-written middle; this prints which pages still want one."""
    missing = pages.without_middle()
    print("without a hand-written middle:", missing)
    assert len(missing) < len(relpos.names())
    for name in missing:
        assert "## Use it" in pages.encoding_page(name)


def test_a_new_encoding_has_a_page(monkeypatch):
    monkeypatch.setattr(pages, "ENCODINGS", documents.ROOT / "nowhere")
    page = pages.encoding_page("alibi")
    assert cards.UNWRITTEN in page
    assert relpos.card("alibi").summary in page


def test_written_pages_have_every_section():
    sections = ["The formula", "The idea", "Past the trained length", "Traps", "When to choose it", "Use it", "Options"]
    for name in set(pages.FILES) - set(pages.without_middle()):
        page = pages.encoding_page(name)
        assert [section for section in sections if f"## {section}\n" not in page] == [], name
        assert "<!-- pictures -->" in page


def test_a_generated_part_keeps_what_is_written_by_hand():
    before = pages.encoding_page("alibi").replace("## The idea", "## My idea")
    assert "## My idea" in cards.page("alibi", before)
    with pytest.raises(ValueError, match="one part"):
        blocks.replaced("nothing here", "list", "x")


def test_the_table_of_settings_has_every_setting_with_its_meaning():
    table = settings_table.tables()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| .* \| (.*) \|$", table, flags=re.MULTILINE))
    settings = Settings()
    assert set(rows) == {f"{group}.{name}" for group, part in vars(settings).items() for name in vars(part)}
    assert [name for name, meaning in rows.items() if not meaning.strip()] == []
    assert "| `optimizer.beta2` | float | `0.95` |" in table


def test_links_lead_to_pages_of_the_site():
    rewrite = repository.rewrite_links
    assert rewrite("[a](../native/README.md#x)", "attention.md") == "[a](native/kernel.md#x)"
    assert rewrite("[a](../../relpos/__init__.py)", "reference/index.md") == "a"
    assert rewrite("[![p](smollm2/figure13-fire.png)](smollm2/figure13-fire.png)", "figures.md").count("smollm2/") == 2
    assert rewrite("[a](docs/models.md)", "CONTRIBUTING.md") == "[a](models.md)"
    assert rewrite("```\n[a](nowhere.md)\n```", "attention.md") == "```\n[a](nowhere.md)\n```"
    with pytest.raises(FileNotFoundError, match=r"nowhere\.md"):
        rewrite("[a](nowhere.md)", "attention.md")


FORMULA = re.compile(r"\$\$(.+?)\$\$", flags=re.DOTALL)


@pytest.mark.parametrize("document", documents.DOCUMENTS, ids=documents.name)
def test_formulas_become_mathml(document):
    for tex in FORMULA.findall(document.read_text(encoding="utf-8")):
        result = mathematics.mathml(tex, "block")
        assert result.startswith("<math")


def test_an_unknown_command_in_a_formula_is_noticed():
    with pytest.raises(ValueError, match="nosuchcommand"):
        mathematics.mathml(r"\nosuchcommand x", "block")
    page = '<p><span class="arithmatex">\\(a &lt; b\\)</span></p>'
    assert "<math" in mathematics.with_mathml(page)


@pytest.mark.parametrize("notebook", notebooks.notebooks(), ids=lambda path: path.stem)
def test_a_notebook_runs(notebook, tmp_path):
    done, names = notebooks.run(notebook, tmp_path)
    assert sum(cell.kind == "code" for cell in done) >= 4
    if notebook.stem == "own-model":
        assert names["loss"].item() < 1.0
        assert "places only" in names["write"]("position reaches attention in thr", 20)
    if notebook.stem == "compare":
        assert set(names["evaluation"].results) == {"alibi", "rope", "cable"}
    assert notebook.stem == "own-model" or any(png.startswith(b"\x89PNG") for cell in done for png in cell.pictures)


@pytest.mark.parametrize("notebook", notebooks.notebooks(), ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(notebook):
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert content["nbformat"] == 4
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in content["cells"])


def test_the_export_has_signatures_in_place_of_directives():
    page = (documents.ROOT / "docs/reference/attention.md").read_text(encoding="utf-8")
    text = export.expanded(page)
    assert ":::" not in text
    assert "softcap · tanh" in text
    assert export.first_sentence("# T\n\nSee [this](x.md). And more.") == "See this."


# The reference

PUBLIC = sorted([*relpos.__all__, "open"])


def documented() -> set[str]:
    text = "\n".join(file.read_text(encoding="utf-8") for file in (documents.ROOT / "docs/reference").glob("*.md"))
    return set(re.findall(r"^::: ([\w.]+)$", text, flags=re.MULTILINE))


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_in_the_reference(name):
    thing = getattr(relpos, name)
    assert f"{thing.__module__}.{thing.__qualname__}" in documented()


def test_the_reference_names_what_exists():
    for path in documented():
        assert inspect.getdoc(export.resolve(path)), path


ENCODING_METHODS = [
    f"Encoding.{name}"
    for name, member in vars(relpos.Encoding).items()
    if not name.startswith("_") and name != "extra_repr" and inspect.isfunction(member)
]


@pytest.mark.parametrize("name", [*PUBLIC, *ENCODING_METHODS])
def test_a_docstring_has_arguments_results_and_an_example(name):
    thing = relpos
    for part in name.split("."):
        thing = getattr(thing, part)
    text = inspect.getdoc(thing)
    parameters = [each for each in inspect.signature(thing).parameters.values() if each.name != "self"]
    for parameter in parameters:
        if parameter.name not in ("args", "kwargs"):
            assert re.search(rf"^    \*{{0,2}}{parameter.name}: ", text, flags=re.MULTILINE), (
                f"{name}: {parameter.name}"
            )
    if inspect.isfunction(thing) and thing.__annotations__.get("return") not in (None, "None"):
        assert "Returns:" in text, name
    assert "Example:" in text, name
    examples = doctest.DocTestParser().get_examples(text)
    assert examples, name
    for example in examples:
        compile(example.source, name, "exec")  # `...` stands for what the reader has
