"""Every code block and command of every page runs, in order; what is not run says why."""

import contextlib
import os
import re
import subprocess
import warnings
from pathlib import Path

import documents
import pytest
import torch

from relpos.cli import app
from relpos.encodings import registry

pytestmark = pytest.mark.heavy

PAGES = [document for document in documents.DOCUMENTS if documents.all_blocks(document)]
RUN = {"python", "sh", "setup"}
SHOWN = {"json", "", "text", "cpp", "yaml"}  # trees, outputs, a workflow; cpp is compared with the sources
SOURCES = re.sub(r"\s+", " ", "\n".join(file.read_text() for file in (documents.ROOT / "native/src").iterdir()))
TRAINING = ("--preset", "nano", "--batch-size", "1", "run.eval_windows=1")
SINGLE = ("--encodings", "alibi", "--seeds", "1", "--eval-tokens", "64", "--lengths", "64")
SHORTER = {  # what is added to a command that would compute for long, by its first word
    "train": (*TRAINING, "--steps", "1"),
    "evaluate": ("--eval-tokens", "64", "--lengths", "64,128"),
    "compare": (*TRAINING, "--steps", "1", *SINGLE),
}
SLOW = ("scale.md", "train-and-compare.md", "training.md", "evaluation.md", "models.md", "checkpoint.md")  # they train
SLOW += ("positional-part.md", "read-figures.md")  # they draw trained models
REPLACED = {  # the same in Python
    ":20480]": ":1024]",
    "[64, 256, 1024], samples=200": "[64, 256], samples=2",
    '"alibi", length=512, minutes=5': '"alibi", length=32, steps=1, batch_size=1',
    "length=512, out=": 'length=32, steps=1, batch_size=1, overrides={"run.eval_windows": 1}, out=',
    "lengths=[512, 1024, 2048, 4096]": "lengths=[512, 1024, 2048, 4096], eval_tokens=64",
}


def shortened(words: list[str]) -> list[str]:
    """The arguments of a command as they are run: those that name few steps or samples stay as they are."""
    steps = int(words[words.index("--steps") + 1]) if "--steps" in words else None
    if words[0] not in SHORTER or (steps is not None and steps <= 3) or "--samples" in words:
        return words
    extra = list(SHORTER[words[0]])
    if "--task" in words and words[0] == "evaluate":
        return [*words, "--samples", "2"]
    if "--from" in words:
        extra = extra[2:]  # the model's own size
    if words[0] == "train" and "--task" not in words:
        extra += ["--length", "32"]
    return [*words, *extra]


def run_command(words: list[str]) -> None:
    """Run a command in this process, or make in its dry run; another command is an error."""
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if words[0] == "make":
        subprocess.run([*words, "--dry-run"], cwd=documents.ROOT, check=True, capture_output=True)
        return
    assert words[0] == "relpos", f"mark the block with <!-- not run: the reason -->, or run it: {' '.join(words)}"
    app(shortened(words[1:]), standalone_mode=False)


def run_block(block: documents.Block, names: dict[str, object], file: str) -> None:
    """Run one block, if it is to be run."""
    if block.language not in RUN or block.reason is not None:
        return
    if block.language == "sh":
        for words in documents.commands_of(block.code):
            run_command(words)
    else:
        code = block.code
        for long, short in REPLACED.items():
            code = code.replace(long, short)
        exec(compile(code, file, "exec"), names)


def check_readme(names: dict[str, object]) -> None:
    """What the README says of its results."""
    assert names["out"].shape == (2, 12, 512, 64)
    assert isinstance(names["enc"], torch.nn.Module)


def check_attention_page(names: dict[str, object]) -> None:
    """What docs/attention.md says of its results; q, k, v are those of a later block."""
    assert names["near"].shape == (2, 12, 512, 64)
    assert ([step.shape for step in names["new"]], len(names["cache"])) == ([(2, 12, 1, 64)] * 3, 3)
    assert (names["share"].by_distance.shape, names["bias"].shape) == ((2, 12, 512), (12, 512, 512))
    assert names["same"].shape == (2, 12, 512, 64)


CHECKS = {"README.md": check_readme, "docs/attention.md": check_attention_page}


def marked(page: Path) -> object:
    return pytest.param(page, id=documents.name(page), marks=[pytest.mark.slow] if page.name in SLOW else [])


@pytest.mark.parametrize("page", [marked(page) for page in PAGES])
def test_the_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(registry, "_registered", {})
    names: dict[str, object] = {"__name__": "__main__"}
    with contextlib.chdir(tmp_path), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fewer than 10 documents.*")
        for block in documents.all_blocks(page):
            run_block(block, names, documents.name(page))
        if documents.name(page) in CHECKS:
            CHECKS[documents.name(page)](names)
    torch.set_num_threads(1)


def test_what_is_not_run_is_little_and_says_why():
    """Counts what is run, so that a mistake in the parser cannot leave pages out unnoticed."""
    blocks = [block for page in PAGES for block in documents.all_blocks(page)]
    assert {block.language for block in blocks} <= RUN | SHOWN
    code = [block for block in blocks if block.language in RUN]
    left_out = [block for block in blocks if block.reason]
    assert all(len(block.reason.split()) >= 3 for block in left_out)
    text = "\n".join(page.read_text(encoding="utf-8") for page in documents.DOCUMENTS)
    assert text.count("<!-- not run:") - text.count("`<!-- not run:") == len(left_out)  # each stands before a block
    assert len(code) - len(left_out) > 100
    assert sum(len(documents.commands_of(block.code)) for block in code if block.language == "sh") > 60
    assert len(left_out) <= len(code) // 6  # servers, installations, hours of training (the paper), GPUs


def test_cpp_blocks_stand_in_the_sources_of_the_kernel():
    shown = [block.code for page in PAGES for block in documents.all_blocks(page) if block.language == "cpp"]
    assert shown
    for code in shown:
        assert re.sub(r"\s+", " ", code).strip() in SOURCES


def test_a_wrong_block_would_be_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- setup\nx = 1\n-->\n\n```python\nassert x == 2\n```\n\n<!-- not run: it is slow -->\n```sh\nmake x\n```\n"
    )
    setup, python, shell = documents.all_blocks(page)
    assert (setup.language, python.language, shell.reason) == ("setup", "python", "it is slow")
    names: dict[str, object] = {}
    run_block(setup, names, "page.md")
    with pytest.raises(AssertionError):
        run_block(python, names, "page.md")
    with pytest.raises(AssertionError, match="not run"):
        run_command(["curl", "somewhere"])


# The site


def test_every_document_is_in_the_navigation():
    """A new page fails here until mkdocs.yml has a place for it."""
    navigation = (documents.ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n", 1)[1]
    pages = {Path(path).as_posix() for path in re.findall(r"[\w/.-]+\.md", navigation)}
    folder = documents.ROOT / "docs"
    written = {file.relative_to(folder).as_posix() for file in folder.rglob("*.md") if file.parent.name != "encodings"}
    assert written - pages == set()
    notebooks = {f"notebooks/{file.stem}.md" for file in documents.ROOT.glob("notebooks/*.ipynb")}
    outside = {"CONTRIBUTING.md", "CHANGELOG.md", "native/kernel.md"}
    assert pages - written == notebooks | outside


@pytest.mark.slow
def test_the_site_builds_strictly(tmp_path):
    """Broken links and anchors, unknown formulas and pages without a place in the navigation are errors."""
    command = ["python", "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    path = f"{documents.ROOT / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        command, cwd=documents.ROOT, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path}
    )
    assert run.returncode == 0, run.stderr
    assert "<math" in (tmp_path / "encodings/alibi.html").read_text(encoding="utf-8")
    for page in tmp_path.rglob("*.html"):  # nothing is loaded from elsewhere
        text = page.read_text(encoding="utf-8")
        assert re.findall(r"""<(?:script|img|iframe)[^>]*\ssrc=["']?https?:[^>]*""", text) == []
        assert re.findall(r"""<link[^>]*rel=["']?(?:style|preconnect|icon)[^>]*href=["']?https?:[^>]*""", text) == []
        assert "unpkg" not in text
    assert "encodings/alibi" in (tmp_path / "llms.txt").read_text(encoding="utf-8")
    assert "Queries, (batch, heads, queries, head_dim)" in (tmp_path / "relpos.md").read_text(encoding="utf-8")
