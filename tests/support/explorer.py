"""Helpers of the explorer's tests: a client, and maps that are reduced by numpy."""

from pathlib import Path

import numpy as np
from dense_layers import reduce_cells
from starlette.testclient import TestClient

from relpos.explorer.explorer import Explorer
from relpos.explorer.scenes import ExplorerSubject
from relpos.explorer.server import make_app
from relpos.maps.subject import EncodingSubject

TILE = 256


def client(*subjects, static: Path | None = None, **arguments) -> TestClient:
    explorer = Explorer(subjects, **({} if static is None else {"static": static}))
    app = make_app(explorer, **arguments)
    made = TestClient(app, base_url="http://127.0.0.1:8123", raise_server_exceptions=False)
    made.explorer = explorer
    return made


def named(name: str, length: int | None = None, id: str = "0") -> ExplorerSubject:
    """An encoding as it is named on the command line."""
    return ExplorerSubject(id, EncodingSubject(name), length)


def make_scene(web: TestClient, **request) -> dict:
    reply = web.post("/api/scenes", json=request)
    assert reply.status_code == 200, reply.text
    return reply.json()


def get_tile(web: TestClient, scene: dict, show: str, layer: int, head: int, level: int, row: int, column: int):
    reply = web.get(f"/api/scenes/{scene['scene']}/tiles/{show}/{layer}/{head}/{level}/{row}/{column}")
    assert reply.status_code == 200, reply.text
    return np.frombuffer(reply.content, "<f4").reshape(3, TILE, TILE)


def reduced_tile(dense, level: int, row: int, column: int):
    """The tile of a dense map (length, length) with NaN where a key is not seen, cell by cell."""
    size = 2**level
    wide = TILE * size
    block = dense[row * wide : (row + 1) * wide, column * wide : (column + 1) * wide]
    padded = np.full((wide, wide), np.nan)
    padded[: block.shape[0], : block.shape[1]] = block
    return reduce_cells(padded, size)


def levels(length: int) -> range:
    top = 0
    while length > TILE * 2**top:
        top += 1
    return range(top + 1)
