"""What mkdocs does for us while it builds the site."""

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

import relpos
from relpos.encodings.registry import FILES
from relpos.forms.cards import grouped
from website import cards, export, faults, notebooks, pages, pictures
from website.mathematics import with_mathml
from website.repository import ROOT, outside, page_of, rewrite_links

_markdown: dict[str, str] = {}  # of each page, by its path: for the export
_order: list[tuple[str, Page]] = []  # section and page, in the order of the navigation


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of all encodings, by the place where they act, and of all faults into the navigation."""
    groups = grouped(relpos.card(name) for name in FILES)
    sections = [
        {title: [{card.name: f"encodings/{card.name}.md"} for card in cards]} for title, cards in groups.items()
    ]
    entries: list[Any] = ["encodings/index.md", *sections]
    assert config.nav is not None
    for item in config.nav:
        if item.get("Encodings") == "encodings":
            item["Encodings"] = entries
        if "Faults" in item:
            item["Faults"] = ["faults.md", *({fault.name: path} for path, fault in faults.pages().items())]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add documents from outside of docs/, pages of new encodings, pictures and notebooks."""
    for path in outside():
        files.append(File.generated(config, page_of(path) or path, abs_src_path=str(ROOT / path)))
    for name in FILES:
        if files.get_file_from_path(f"encodings/{name}.md") is None:
            files.append(File.generated(config, f"encodings/{name}.md", content=cards.page(name)))
        for kind, file in pictures.pictures(name).items():
            files.append(File.generated(config, f"encodings/pictures/{name}-{kind}.png", abs_src_path=str(file)))
    for path, fault in faults.pages().items():
        files.append(File.generated(config, path, content=faults.page(fault)))
    for notebook in notebooks.notebooks():
        folder = notebooks.page(notebook)
        text = (folder / "page.md").read_text(encoding="utf-8")
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=text))
        for file in [notebook, *folder.glob("*.png")]:
            files.append(File.generated(config, f"notebooks/{file.name}", abs_src_path=str(file)))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Remember the order of the pages."""
    _order[:] = [(section_of(page), page) for page in nav.pages]
    return nav


def section_of(page: Page) -> str:
    """Title of the outermost section that a page is in."""
    sections = list(page.ancestors)
    return str(sections[-1].title) if sections else "Start"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put in generated parts and pictures; links lead to pages of the site."""
    path = page.file.src_uri
    if page.file.generated_by is None:
        markdown = pages.complete(path, markdown)
    _markdown[path] = markdown
    if not path.startswith(("notebooks/", "faults")):  # whose links lead to generated pages
        markdown = rewrite_links(markdown, path)
    if "<!-- pictures -->" in markdown:
        markdown = markdown.replace("<!-- pictures -->", pictures.markdown(page.file.name))
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas as MathML."""
    return with_mathml(html)


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt and the single page."""
    written = [(section, page.url, _markdown[page.file.src_uri]) for section, page in _order]
    export.write(Path(config.site_dir), written)
