"""Who may ask the explorer's server, and what it refuses."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request

import pytest
from explorer import client, make_scene, named

from relpos.explorer import explore_options as options
from relpos.explorer.explore import explore
from relpos.explorer.explorer import SceneStore
from relpos.explorer.model_inputs import check_text
from relpos.explorer.scenes import Scene, scene_hash
from relpos.explorer.server import Server, open_port
from relpos.maps import HEADS
from relpos.maps.values import CancelledError, Work, check_time, within

pytestmark = pytest.mark.heavy
JSON = {"Content-Type": "application/json"}
KERPLE = {"subject": None, "encoding": "kerple_log"}


@pytest.fixture(scope="module")
def web():
    return client(named("alibi"))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        *(
            ({"Host": host}, 403)
            for host in ("evil.example", "evil.example:8123", "127.0.0.1.evil.example", "", "[::1")
        ),
        ({"Host": "10.0.0.7"}, 403),
        *(({"Host": host}, 200) for host in ("127.0.0.1:8123", "localhost:8123", "[::1]:8123", "LOCALHOST")),
        *(({"Origin": origin}, 403) for origin in ("http://evil.example", "null", "http://127.0.0.1:9999")),
        ({"Origin": "https://127.0.0.1"}, 403),
        ({"Origin": "http://127.0.0.1:8123"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
def test_only_the_machine_itself_is_answered(web, headers, status):
    for reply in (
        web.get("/api/start", headers=headers),
        web.post("/api/scenes", json={"encoding": "alibi"}, headers=headers),
    ):
        assert reply.status_code == status
        if "Host" in headers and status == 403:
            assert "names of its own machine" in reply.json()["error"]


def test_outside_loopback_every_request_needs_the_token(tmp_path):
    (tmp_path / "index.html").write_text('<html><meta name="relpos" content=\'{"token_required":false}\'></html>')
    web = client(named("alibi"), static=tmp_path, host="0.0.0.0", token="secret")
    token = {"X-Relpos-Token": "secret"}
    for path, headers, status in (
        ("/api/start", {}, 403),
        ("/api/start", {"X-Relpos-Token": "guess"}, 403),
        ("/api/start?token=secret", {}, 403),  # only the page itself takes it from its address
        ("/api/start", token, 200),
        ("/", {}, 403),
        ("/?token=secret", {}, 200),
        ("/api/start", {**token, "Host": "evil.example"}, 403),
        ("/api/start", {**token, "Host": "10.0.0.7:8123"}, 200),
    ):
        assert web.get(path, headers=headers).status_code == status, (path, headers)
    assert '"token_required":true' in web.get("/?token=secret").text


def test_a_server_outside_loopback_makes_a_token_and_one_inside_none():
    inside, outside = Server([], port=0), Server([], host="0.0.0.0", port=0)
    try:
        assert inside.token is None
        assert len(outside.token) >= 32
        assert outside.url.endswith(f"?token={outside.token}")
        assert inside.socket.getsockname()[0] == "127.0.0.1"
    finally:
        inside.socket.close()
        outside.socket.close()


def test_every_reply_has_a_strict_policy(web):
    for path in ("/api/start", "/", "/nothing", "/api/scenes/none/tokens"):
        headers = web.get(path).headers
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "'unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in headers


def test_no_path_of_the_file_system_is_reachable(tmp_path):
    (tmp_path / "static").mkdir()
    (tmp_path / "static" / "app.js").write_text("1")
    (tmp_path / "static" / "link").symlink_to("/etc/passwd")
    (tmp_path / "app.py").write_text("secret")
    web = client(static=tmp_path / "static")
    assert web.get("/static/app.js").text == "1"
    for path in ("/static/link", "/static/../app.py", "/static/%2e%2e/app.py", "/static//etc/passwd", "/../app.py"):
        reply = web.get(path)
        assert reply.status_code == 404
        assert "secret" not in reply.text


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/etc/passwd", "runs/cable", "alibi/../../x", "http://evil.example", "", None, 3, ["a"]],
)
def test_a_scene_names_no_folder(web, name):
    reply = web.post("/api/scenes", json={"subject": None, "encoding": name})
    assert reply.status_code == 400
    assert "Allowed" in reply.json()["error"]
    assert web.post("/api/scenes", json={"subject": name or "x"}).status_code == 400


@pytest.mark.parametrize(
    "changed",
    [
        *({"length": n} for n in (0, -5, options.LONGEST + 1, 10**30, 1.5, "512", True, None)),
        *({"heads": n} for n in (0, 10**6)),
        {"seed": -1},
        {"causal": "yes"},
        {"parameters": []},
        *({"parameters": {"r1": value}} for value in ("1", [1.0] * 3, 1e300, {"a": 1})),
        {"parameters": {"nothing": 1.0}},
        {"input": {"kind": "text", "text": "hello"}},
        {"input": {"kind": "file", "path": "/etc/passwd"}},
        {"unknown": 1},
    ],
)
def test_bad_descriptions_are_refused_with_a_sentence(web, changed):
    reply = web.post("/api/scenes", json={**KERPLE, **changed})
    assert reply.status_code == 400
    assert reply.json()["error"].rstrip().endswith(".")
    assert len(reply.json()["error"]) < 1001


def test_one_value_stands_for_all_heads(web):
    assert make_scene(web, **KERPLE, parameters={"r1": [1.0]})["heads"] == HEADS


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        *(
            (f'{{"encoding": "kerple_log", "parameters": {{"r1": {x}}}}}', "application/json", 400)
            for x in ("NaN", "1e999")
        ),
        *((f'{{"encoding": "kerple_log", "length": {x}}}', "application/json", 400) for x in ("Infinity", "-Infinity")),
        *((body, "application/json", 400) for body in (b"{", b"[1]", b"\xff\xfe", b"[" * 100_000)),
        (b"{}", "text/plain", 415),  # what a form of another site could send
        (b'"' + b"x" * (options.BODY_BYTES + 1) + b'"', "application/json", 413),
    ],
)
def test_bad_bodies_are_refused(web, body, kind, status):
    reply = web.post("/api/scenes", content=body, headers={"Content-Type": kind})
    assert reply.status_code == status
    assert reply.json()["error"]


class Reader:
    tokenizer = object()


def test_text_that_is_no_text_or_too_long_is_refused():
    for text in ("\ud800", "ab\udfffcd", "", None, 7, "é" * options.TEXT_BYTES):
        with pytest.raises(ValueError, match="text"):
            check_text(text, Reader())
    for odd in ("<script>alert(1)</script>", "\u202e\u0000\u0301", "👩‍👩‍👧", "a" * 1000):
        assert check_text(odd, Reader()) == odd


def test_places_that_do_not_exist_are_refused(web):
    scene = make_scene(web, subject="0")
    for path in (
        *("tiles/bias/1/1/0/9/0", "tiles/bias/1/1/7/0/0", "tiles/bias/2/1/0/0/0", "tiles/bias/1/99/0/0/0"),
        *("tiles/nothing/1/1/0/0/0", "row/bias/1/1/512", "value/bias/1/1/0/512", "overview?show=nothing"),
        *("overview?layers=0-9", "tokens", "export/1/1.png?show=bias&first_query=-1", "export/1/1.exe"),
        *("export/1/1.csv?show=bias&last_key=1e9", "export/1/1.png?show=bias&last_key=512"),
    ):
        reply = web.get(f"/api/scenes/{scene['scene']}/{path}")
        assert reply.status_code == 400, path
        assert reply.json()["error"]
    long = make_scene(web, subject="0", length=4000)
    reply = web.get(f"/api/scenes/{long['scene']}/export/1/1.csv?show=bias")
    assert (reply.status_code, "too many" in reply.json()["error"]) == (400, True)
    assert web.get("/api/subjects/7/evaluation").status_code == 404


def test_a_scene_that_was_dropped_is_gone_and_can_be_made_again():
    web = client(named("alibi"))
    scenes = [make_scene(web, subject=None, encoding="alibi", length=100 + n) for n in range(options.SCENES + 3)]
    path = f"/api/scenes/{scenes[0]['scene']}/tiles/bias/1/1/0/0/0"
    assert len(web.explorer.scenes) == options.SCENES
    assert web.get(path).status_code == 410
    assert make_scene(web, **scenes[0]["request"])["scene"] == scenes[0]["scene"]
    assert web.get(path).status_code == 200


def test_scenes_are_kept_within_their_bytes(web):
    subject = web.explorer.subject_of({"encoding": "cable"})
    requests = [subject.complete({"length": 64, "seed": seed}) for seed in range(6)]
    store = SceneStore(most_bytes=int(3.5 * subject.scene(requests[0]).view.nbytes), most=10)
    for request in requests:
        store.make(request, lambda request=request: subject.scene(request))
    assert len(store) == 3
    assert store.get(scene_hash(requests[5])) is not None
    assert store.get(scene_hash(requests[0])) is None


def test_scenes_that_nobody_looks_at_are_dropped(web):
    first, second = (make_scene(web, subject="0", length=length) for length in (50, 60))
    store = web.explorer.scenes
    store.get(first["scene"]).used -= options.IDLE + 1
    store.drop_idle()
    assert store.get(first["scene"]) is None
    assert store.get(second["scene"]) is not None
    with web:  # the server's own task starts and ends with it
        assert web.get("/api/start").status_code == 200


def test_computing_ends_when_its_time_is_up():
    check_time()
    with within(-1.0), pytest.raises(TimeoutError, match="too long"):
        check_time()
    check_time()


def test_an_error_of_the_server_says_nothing_about_it(web, monkeypatch):
    scene = make_scene(web, subject="0")
    monkeypatch.setattr(Scene, "head_map", lambda *_: 1 / 0)
    reply = web.get(f"/api/scenes/{scene['scene']}/tiles/bias/1/1/0/0/0")
    assert reply.status_code == 500
    assert "division" not in reply.text


def test_ports_and_hosts():
    first = open_port("127.0.0.1", 0)
    try:
        first.listen()
        port = first.getsockname()[1]
        second = open_port("127.0.0.1", port)  # the next that is free
        assert second.getsockname()[1] > port
        second.close()
    finally:
        first.close()
    with pytest.raises(OSError, match=r"cannot listen on 203\.0\.113\.9"):
        open_port("203.0.113.9", 8123)
    with pytest.raises(ValueError, match="host is empty"):
        explore("alibi").serve(host="")


@pytest.mark.parametrize(("ending", "codes"), [(signal.SIGINT, (0, 130)), (signal.SIGKILL, (-9,))])
def test_a_killed_or_interrupted_server_leaves_nothing_behind(tmp_path, ending, codes):
    environment = {**os.environ, "TMPDIR": str(tmp_path), "RELPOS_CACHE": str(tmp_path / "cache")}
    (tmp_path / "cache").mkdir()
    command = [sys.executable, "-m", "relpos.cli", "explore", "alibi", "--no-browser", "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, **pipes)
    port = int(process.stdout.readline().split(" at ")[1].split()[0].rsplit(":", 1)[1].strip("/"))
    for _ in range(100):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/start") as reply:
                assert json.load(reply)["subjects"][0]["name"] == "alibi"
            break
        except OSError:
            time.sleep(0.1)
    process.send_signal(ending)
    _, errors = process.communicate(timeout=30)
    assert process.returncode in codes, errors
    assert "Traceback" not in errors
    with socket.socket() as attempt:  # the port is free again
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        attempt.bind(("127.0.0.1", port))
    assert [path for path in tmp_path.rglob("*") if path.is_file() and "cache" not in path.parts] == []


def test_a_client_that_leaves_prints_nothing(capfd):
    """Whether it leaves while it sends or while it receives, and closes its connection or resets it."""
    server = Server([named("alibi")], port=0)
    server.start()
    while not server.uvicorn.started:
        time.sleep(0.01)
    head = f"HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
    body = 'Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"subject'
    chunk = 'Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"sub\r\n'
    data = json.dumps({"subject": "0", "length": 2048}).encode()
    request_scene = urllib.request.Request(f"http://127.0.0.1:{server.port}/api/scenes", data, JSON)
    try:
        with urllib.request.urlopen(request_scene) as reply:
            scene = json.load(reply)["scene"]
        for reset in (False, True):
            for request in (
                "POST /api/scenes HT",
                f"POST /api/scenes {head}{body}",
                f"POST /api/scenes {head}{chunk}",
                f"POST /api/scenes/{scene}/write {head}{body}",
                f"GET /api/scenes/{scene}/overview {head}\r\n",
                f"GET /api/scenes/{scene}/export/1/1.csv?show=bias {head}\r\n",
            ):
                leave(server.port, request, reset)
        with urllib.request.urlopen(request_scene) as reply:  # it still answers
            assert reply.status == 200
    finally:
        server.stop()
    assert "".join(capfd.readouterr()) == ""


def leave(port, request, reset):
    """Send a part of a request, or read a part of the reply, and go."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(request.encode())
        if request.startswith("GET"):
            connection.recv(10)
        else:
            time.sleep(0.05)  # until the server waits for the rest
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_what_nobody_waits_for_is_cancelled():
    work = Work(0.0)
    with within(60.0, work):
        check_time(0.25)
        assert work.done == 0.25
        work.cancelled = True
        with pytest.raises(CancelledError):
            check_time()


def test_a_task_is_followed_and_cancelled_by_its_name(web):
    running = web.explorer.tasks["mine"] = Work(0.0, done=0.5)
    assert web.get("/api/tasks/mine").json() == {"done": 0.5}
    assert web.get("/api/tasks/another").json() == {"done": None}
    web.post("/api/tasks/mine/cancel", json={})
    assert running.cancelled
    del web.explorer.tasks["mine"]
    assert web.post("/api/scenes", json=KERPLE, headers={"X-Relpos-Task": "mine"}).status_code == 200
    assert web.explorer.tasks == {}
