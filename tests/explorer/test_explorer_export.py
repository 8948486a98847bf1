"""The built page, which is committed, and the exported page: one file with the numbers of its subjects inside."""

import base64
import hashlib
import html
import json
import re
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from explorer import client, make_scene, named
from typer.testing import CliRunner

import relpos
from relpos.cli import app
from relpos.explorer import exports
from relpos.explorer.explore import Exploration
from relpos.explorer.exports import IN_A_NOTEBOOK, Room, export_page, page_data
from relpos.explorer.replies import to_json, typescript

pytestmark = pytest.mark.heavy
SOURCES = Path(__file__).parents[2] / "explorer"
STATIC = SOURCES.parent / "relpos" / "explorer" / "static"
INDEX = """<!doctype html><html><head><title>relpos</title>
<script type="module" crossorigin src="./static/app.js"></script>
<link rel="stylesheet" crossorigin href="./static/app.css">
<meta name="relpos" content='{"token_required":false}'></head><body><div id="app"></div></body></html>"""


def test_the_built_page_is_as_new_as_its_sources():
    """The hash is that of explorer/sources-hash.mjs: of the path and the bytes of every source, in order."""
    paths = {path.relative_to(SOURCES).as_posix(): path for path in SOURCES.rglob("*") if path.is_file()}
    total = hashlib.sha256()
    for name in sorted(name for name in paths if not name.startswith("node_modules/")):
        total.update(name.encode() + b"\0" + paths[name].read_bytes() + b"\0")
    kept = (STATIC / "sources.sha256").read_text().strip()
    assert total.hexdigest() == kept, "explorer/ has changed since the page was built: run make explorer"
    written = (SOURCES / "src" / "data" / "types.ts").read_text(encoding="utf-8")
    assert written == typescript(), "run python -m relpos.explorer.replies > explorer/src/data/types.ts, make explorer"


def test_the_built_page_is_small_and_loads_nothing_from_elsewhere():
    assert sum(path.stat().st_size for path in STATIC.iterdir()) < 600_000
    for name in ("index.html", "app.css", "app.js"):
        text = (STATIC / name).read_text(encoding="utf-8")
        assert re.findall(r"""((?:src|href)=|url\(|import\(?)["']?https?:""", text) == []
        assert "</script" not in text or name == "index.html"  # app.js is inlined in exported files
    lock = (SOURCES / "package-lock.json").read_text()
    assert '"resolved"' not in lock  # names no registry
    assert all("integrity" in entry for name, entry in json.loads(lock)["packages"].items() if name)


@pytest.fixture
def static(tmp_path, monkeypatch):
    """A page as it is built, as far as an export knows it."""
    folder = tmp_path / "static"
    folder.mkdir()
    (folder / "index.html").write_text(INDEX)
    (folder / "app.js").write_text('const close = "</script>"; if (1 < 2) console.log(close);')
    (folder / "app.css").write_text("body { margin: 0 }")
    monkeypatch.setattr(exports, "export_page", partial(export_page, static=folder))
    return folder


def data_of(page):
    return json.loads(re.search(r'id="relpos-data">(.*?)</script>', page, re.DOTALL)[1])


def test_an_export_needs_nothing_else_and_its_cells_are_the_map(static):
    page = export_page([named("kerple_log", 70), named("rope", 70, id="1")], static)
    assert "./static" not in page
    assert "src=" not in page
    assert not re.search(r"https?://", page.split('id="relpos-data"')[0])
    assert "body { margin: 0 }" in page
    assert page.count("</script>") == 2  # of the data and of the page: that in the text of the script is escaped
    assert r"<\/script>" in page
    assert "default-src 'none'" in page
    data = data_of(page)
    assert [scene["request"]["subject"] for scene in data["scenes"]] == ["0", "1"]
    scene = data["scenes"][0]
    assert scene["shows"] == ["bias", "flat"] == data["start"]["subjects"][0]["shows"]
    entry = data["maps"][f"{scene['scene']}/bias/1/3"]
    cells = np.frombuffer(zlib.decompress(base64.b64decode(entry["cells"])), np.uint8).reshape(70, 70)
    torch.manual_seed(0)
    dense = relpos.encoding("kerple_log", 12, 64).map(70)[2].double().numpy()
    assert (cells[np.triu_indices(70, 1)] == 0).all()
    below, step = np.tril_indices(70), (entry["high"] - entry["low"]) / 254
    np.testing.assert_allclose(entry["low"] + (cells[below] - 1.0) * step, dense[below], atol=0.51 * step)
    assert len(data["overview"][f"{scene['scene']}/bias"][0]["heads"]) == 12
    assert data["heads"][f"{scene['scene']}/flat/1/8"]["log"] is True


def test_what_the_export_holds_is_what_the_server_answers():
    web = client(named("t5", 40))
    data = page_data([named("t5", 40)])
    scene = make_scene(web, subject="0")
    assert data["scenes"][0]["scene"] == scene["scene"]
    details = web.get(f"/api/scenes/{scene['scene']}/head/1/2?show=bias").json()
    assert json.loads(to_json(data["heads"][f"{scene['scene']}/bias/1/2"])) == details


def test_a_long_map_is_held_in_coarser_cells_and_as_many_kinds_as_fit():
    data = page_data([named("alibi", 5000)], room=Room(megabytes=0, cells=1024))
    assert data["scenes"][0]["shows"] == ["bias"]
    assert all("/bias/" in key for key in data["maps"])
    entry = data["maps"][f"{data['scenes'][0]['scene']}/bias/1/1"]
    assert entry["level"] == 3
    assert len(zlib.decompress(base64.b64decode(entry["cells"]))) == 625**2


def test_a_notebook_shows_the_export_in_a_frame(static):
    exploration = relpos.explore("alibi", length=300)
    shown = exploration._repr_html_()
    data = data_of(html.unescape(shown))  # a cell's output is saved with its notebook: coarser cells than a file's
    assert {entry["level"] for entry in data["maps"].values()} == {1}
    assert sum(len(entry["cells"]) for entry in data["maps"].values()) < 1e6 * IN_A_NOTEBOOK.megabytes
    assert shown.startswith("<iframe srcdoc=")
    assert 'sandbox="allow-scripts' in shown
    assert "<script" not in shown  # all of it is in the attribute
    address = exploration.start()
    try:
        assert exploration._repr_html_().startswith(f'<iframe src="{address}"')
    finally:
        exploration.stop()
    assert exploration.url is None


def test_the_command_exports_and_refuses(static, tmp_path):
    out = tmp_path / "pages" / "alibi.html"
    result = CliRunner().invoke(app, ["explore", "alibi", "--length", "32", "--export", str(out)])
    assert result.exit_code == 0, result.output
    assert data_of(out.read_text())["scenes"][0]["length"] == 32
    for arguments in (["--export", str(out)], ["alibi", "--export", "page.txt"], ["alibbi"]):
        assert isinstance(CliRunner().invoke(app, ["explore", *arguments]).exception, ValueError)
    with pytest.raises(FileNotFoundError, match="has not been built"):
        export_page([named("alibi")], tmp_path)
    assert "make explorer" in client(static=tmp_path).get("/").text
    with pytest.raises(ValueError, match="nothing to export"):
        Exploration([]).save(tmp_path / "a.html")
