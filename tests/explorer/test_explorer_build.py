"""The built page of the explorer is committed, for people without node: it must not be older than its sources."""

import hashlib
import json
import re
from pathlib import Path

import pytest

from relpos.explorer.replies import typescript

SOURCES = Path(__file__).parents[2] / "explorer"
STATIC = SOURCES.parent / "relpos" / "explorer" / "static"


def hash_of(folder: Path) -> str:
    """The hash that explorer/sources-hash.mjs writes: of the path and the bytes of every source, in order."""
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    total = hashlib.sha256()
    for name in sorted(paths):
        if not name.startswith("node_modules/"):
            total.update(name.encode() + b"\0" + paths[name].read_bytes() + b"\0")
    return total.hexdigest()


def test_the_built_page_is_as_new_as_its_sources():
    kept = (STATIC / "sources.sha256").read_text().strip()
    assert hash_of(SOURCES) == kept, "explorer/ has changed since the page was built: run make explorer"


def test_the_types_of_the_page_are_those_of_the_replies():
    written = (SOURCES / "src" / "data" / "types.ts").read_text(encoding="utf-8")
    assert written == typescript(), "run python -m relpos.explorer.replies > explorer/src/data/types.ts, make explorer"


def test_a_changed_source_is_noticed(tmp_path):
    (tmp_path / "a.ts").write_text("let a = 1")
    before = hash_of(tmp_path)
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "b.js").write_text("not ours")
    assert hash_of(tmp_path) == before
    (tmp_path / "a.ts").write_text("let a = 2")
    assert hash_of(tmp_path) != before


@pytest.mark.parametrize("name", ["index.html", "app.css", "app.js"])
def test_the_page_loads_nothing_from_elsewhere(name):
    text = (STATIC / name).read_text(encoding="utf-8")
    loaded = re.findall(r"""((?:src|href)=|url\(|import\(?)["']?https?:""", text)
    assert loaded == []
    assert "</script" not in text or name == "index.html"  # app.js is inlined in exported files


def test_the_built_page_is_small():
    assert sum(path.stat().st_size for path in STATIC.iterdir()) < 600_000


def test_the_lock_file_names_no_registry():
    text = (SOURCES / "package-lock.json").read_text()
    assert '"resolved"' not in text
    assert all("integrity" in entry for name, entry in json.loads(text)["packages"].items() if name)
