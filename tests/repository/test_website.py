"""The generated parts of the documents, and what makes the site."""

import doctest
import inspect
import json
import re

import documents
import pytest
import yaml

import relpos
from relpos.encodings.registry import FILES
from relpos.forms.cards import GROUPS
from relpos.runs.settings import known_settings
from website import benchmarks, cards, export, mathematics, notebooks, pages, repository, tiles

pytestmark = pytest.mark.heavy
WRITTEN = sorted((documents.ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("path", pages.PARTS)
def test_a_page_has_a_place_for_its_generated_part(path):
    written = (documents.ROOT / "docs" / path).read_text(encoding="utf-8")
    assert len(pages.complete(path, written)) > len(written) + 1000


@pytest.mark.parametrize("name", relpos.names())
def test_the_page_of_an_encoding(name):
    """A new encoding has a page without a hand-written middle; its code runs like that of the others."""
    file = documents.ROOT / "docs/encodings" / f"{name}.md"
    page = cards.page(name, file.read_text(encoding="utf-8") if file.exists() else None)
    assert relpos.card(name).summary in page
    sections = ["The formula", "The idea", "Past the trained length", "Traps", "When to choose it", "Use it", "Options"]
    if file.exists():
        assert [section for section in sections if f"## {section}\n" not in page] == []
        assert "<!-- pictures -->" in page
    exec(cards.use(relpos.card(name)), {})


def test_the_table_of_settings_has_every_setting_with_its_meaning():
    table = pages.settings_tables()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| .* \| (.*) \|$", table, flags=re.MULTILINE))
    assert set(rows) == set(known_settings())
    assert [name for name, meaning in rows.items() if not meaning.strip()] == []
    assert "| `optimizer.beta2` | float | `0.95` |" in table


def test_links_lead_to_pages_of_the_site():
    rewrite = repository.rewrite_links
    assert rewrite("[a](../native/README.md#x)", "attention.md") == "[a](native/kernel.md#x)"
    assert rewrite("[a](../../relpos/__init__.py)", "reference/index.md") == "a"
    assert rewrite("[a](../../relpos/cli/__init__.py)", "reference/index.md") == "a"
    assert rewrite("[![p](smollm2/figure13-fire.png)](smollm2/figure13-fire.png)", "figures.md").count("smollm2/") == 2
    assert rewrite("[a](docs/models.md)", "CONTRIBUTING.md") == "[a](models.md)"
    assert rewrite("```\n[a](nowhere.md)\n```", "attention.md") == "```\n[a](nowhere.md)\n```"
    with pytest.raises(FileNotFoundError, match=r"nowhere\.md"):
        rewrite("[a](nowhere.md)", "attention.md")


def test_all_result_files_are_sections_of_one_page_and_links_lead_there():
    page = benchmarks.tables()
    stems = {file.stem for file in (documents.ROOT / "benchmarks/results").glob("*.md")}
    assert set(re.findall(r"^## .+ \{#([\w-]+)\}$", page, flags=re.MULTILINE)) == stems
    assert not re.findall(r"^# ", page, flags=re.MULTILINE)
    link = repository.rewrite_links("[a](../benchmarks/results/use.md)", "use.md")
    assert link == "[a](benchmarks.md#use)"


@pytest.mark.parametrize("folder", [".", "encodings"])
def test_the_gallery_has_a_tile_for_every_encoding_below_its_group(folder):
    page = tiles.gallery(folder)
    places = re.findall(r'^### (.+)$|href="(?:encodings/)?(\w+)\.html"', page, flags=re.MULTILINE)
    group, shown = "", {}
    for title, name in places:
        group = title or group
        if name:
            shown[name] = group
    assert shown == {name: GROUPS[relpos.card(name).group] for name in FILES}
    assert page.count("<img") == len(FILES)


def test_the_pages_of_the_navigation_have_different_titles():
    def titles(items):
        for item in items:
            for title, where in item.items() if isinstance(item, dict) else ():
                yield from titles(where) if isinstance(where, list) else [title]

    text = (documents.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = yaml.safe_load(text[text.index("\nnav:") :])["nav"]
    every = list(titles(navigation))
    assert len(every) > 30
    assert sorted(set(every)) == sorted(every)
    headings = [re.search(r"^# (.+)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1] for file in WRITTEN]
    assert sorted(set(headings)) == sorted(headings)


def test_formulas_become_mathml_and_an_unknown_command_is_noticed():
    text = "".join(document.read_text(encoding="utf-8") for document in documents.DOCUMENTS)
    formulas = re.findall(r"\$\$(.+?)\$\$", text, flags=re.DOTALL)
    assert len(formulas) > 10
    assert all(mathematics.mathml(tex, "block").startswith("<math") for tex in formulas)
    with pytest.raises(ValueError, match="nosuchcommand"):
        mathematics.mathml(r"\nosuchcommand x", "block")
    page = '<p><span class="arithmatex">\\(a &lt; b\\)</span></p>'
    assert "<math" in mathematics.with_mathml(page)


NOTEBOOKS = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem == "compare" else [])  # trains three models
    for path in notebooks.notebooks()
]


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_notebook_runs_and_is_committed_without_outputs(notebook, tmp_path):
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert content["nbformat"] == 4
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in content["cells"])
    done, names = notebooks.run(notebook, tmp_path)
    assert sum(cell.kind == "code" for cell in done) >= 4
    if notebook.stem == "own-model":
        assert names["loss"].item() < 1.0
        assert "places only" in names["write"]("position reaches attention in thr", 20)
    if notebook.stem == "compare":
        assert set(names["evaluation"].results) == {"alibi", "rope", "cable"}
    assert notebook.stem == "own-model" or any(png.startswith(b"\x89PNG") for cell in done for png in cell.pictures)


def test_the_export_has_signatures_in_place_of_directives():
    page = (documents.ROOT / "docs/reference/attention.md").read_text(encoding="utf-8")
    text = export.expanded(page)
    assert ":::" not in text
    assert "softcap · tanh" in text
    assert export.first_sentence("# T\n\nSee [this](x.md). And more.") == "See this."


# The reference

PUBLIC = sorted([*relpos.__all__, "open"])


def test_the_reference_has_every_public_name_and_names_what_exists():
    text = "\n".join(file.read_text(encoding="utf-8") for file in (documents.ROOT / "docs/reference").glob("*.md"))
    documented = set(re.findall(r"^::: ([\w.]+)$", text, flags=re.MULTILINE))
    public = [getattr(relpos, name) for name in PUBLIC]
    assert {f"{thing.__module__}.{thing.__qualname__}" for thing in public} <= documented
    assert [path for path in documented if not inspect.getdoc(export.resolve(path))] == []


@pytest.mark.parametrize("name", [*PUBLIC, "Encoding.map", "Encoding.embed", "Encoding.gates"])
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
