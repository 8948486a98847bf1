"""How fast the explorer answers, in its own server process. Run by `make bench WHAT=explore`.

    python benchmarks/explore.py [--run FOLDER] [--rounds 20] [--only export]

First view: from the line with the address to the last byte of /api/start, POST /api/scenes and the overview of the
first layer, of a nano model with kerple_log (a new one with random weights, unless --run names a run). Tiles: the
median and the largest of tiles at random places, each asked for once; a tile of level z has cells of 2^z × 2^z entries.
Clients: 50 at once, each with its own places; the memory is the server's resident memory before, and after they have
left. Export: GPT-2 Small with random weights at 512 tokens as one page.
"""

import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

from measure import option_parser

CLIENTS = 50
GOALS = {"first view": 2.0, "static": 0.050, "scores": 0.200}  # seconds


def make_model(folder: Path, preset: str, encoding: str) -> Path:
    """A model with random weights and GPT-2's tokenizer, as a folder that relpos opens."""
    import torch

    from relpos.models import RelposGPT2Config, RelposGPT2ForCausalLM
    from relpos.text.tokenizers import published_tokenizer

    torch.manual_seed(0)
    tokenizer = published_tokenizer("gpt2")
    options = {"length": 16384} if encoding == "learned" else {}
    config = RelposGPT2Config.preset(preset, vocab_size=len(tokenizer), position={"name": encoding, **options})
    RelposGPT2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Server:
    """The explorer in a process of its own."""

    def __init__(self, *what: str) -> None:
        command = [sys.executable, "-m", "relpos.cli", "explore", *what, "--no-browser", "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        self.started = time.perf_counter()
        self.address = re.search(r"http://\S+", line)[0].rstrip("/")

    def get(self, path: str, body: object = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data else {}
        request = urllib.request.Request(self.address + path, data, headers)
        for _ in range(200):
            try:
                with urllib.request.urlopen(request, timeout=120) as reply:
                    return reply.read()
            except urllib.error.HTTPError as error:
                raise RuntimeError(f"{path}: {error.code} {error.read().decode()}") from None
            except urllib.error.URLError:  # the port is open a moment after its line
                time.sleep(0.02)
        raise RuntimeError(f"{self.address} does not answer")

    def scene(self, **request: object) -> dict:
        return json.loads(self.get("/api/scenes", request))

    def memory(self) -> float:
        """Resident megabytes."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def timed(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def report(name: str, seconds: list[float], goal: float | None = None) -> None:
    middle, most = statistics.median(seconds), max(seconds)
    wanted = "" if goal is None else f"   goal {goal * 1e3:.0f} ms: {'met' if middle <= goal else 'missed'}"
    print(f"{name:58} median {middle * 1e3:7.1f} ms   largest {most * 1e3:7.1f} ms{wanted}", flush=True)


def first_view(run: Path) -> None:
    server = Server(str(run))
    server.get("/api/start")
    scene = server.scene(subject="0")
    server.get(f"/api/scenes/{scene['scene']}/overview?layers=1")
    report("first view of a nano run", [time.perf_counter() - server.started], GOALS["first view"])
    all_layers = timed(lambda: server.get(f"/api/scenes/{scene['scene']}/overview"))
    report("  the overview of all its layers", [all_layers])
    server.stop()


def tiles(server: Server, scene: dict, show: str, level: int, rounds: int) -> list[float]:
    """The seconds of tiles at random places on or below the diagonal."""
    side = -(-scene["length"] // (256 << level))
    places = [(row, column) for row in range(side) for column in range(row + 1)]
    random.Random(0).shuffle(places)
    base = f"/api/scenes/{scene['scene']}/tiles/{show}"
    heads = [(1 + n // 8 % scene["layers"], 1 + n % scene["heads"]) for n in range(rounds)]
    chosen = [(*heads[n % rounds], *places[n % len(places)]) for n in range(max(1, min(rounds, 64)))]
    return [
        timed(partial(server.get, f"{base}/{layer}/{head}/{level}/{row}/{column}"))
        for layer, head, row, column in chosen
    ]


def static_tiles(rounds: int) -> None:
    server = Server("kerple_log")
    for name in ("kerple_log", "t5", "rope", "fire"):
        show = "scores" if name == "rope" else "bias"
        scene = server.scene(subject=None, encoding=name, length=65536)
        for level in (0, 4, 8):
            seconds = tiles(server, scene, show, level, 8 if level == 8 else rounds)
            report(f"tile of {name}, 65,536 tokens, level {level}", seconds, GOALS["static"])
    moved = [timed(partial(move, server, place)) for place in range(rounds)]
    report("a moved slider of kerple_log, 512 tokens, and its tile", moved)
    server.stop()


def move(server: Server, place: int) -> None:
    parameters = {"r1": [0.1 + place / 10] * 8}
    scene = server.scene(subject=None, encoding="kerple_log", length=512, parameters=parameters)
    server.get(f"/api/scenes/{scene['scene']}/tiles/bias/1/1/1/0/0")


def score_tiles(folder: Path, rounds: int) -> None:
    server = Server(str(folder))
    scene = server.scene(subject="0", length=8192, input={"kind": "none"})
    print(f"{'the model reads 8,192 tokens (once)':58}", end=" ", flush=True)
    seconds = timed(lambda: server.get(f"/api/scenes/{scene['scene']}/value/scores/1/1/0/0"))
    print(f"       {seconds * 1e3:7.1f} ms")
    for show in ("scores", "weights"):
        for level in (0, 2, 3):
            goal = GOALS["scores"] if show == "scores" or level else None
            report(f"tile of {show}, 8,192 tokens, level {level}", tiles(server, scene, show, level, rounds), goal)
        base = f"/api/scenes/{scene['scene']}/tiles/{show}/2"
        first = [timed(partial(server.get, f"{base}/{head}/5/0/0")) for head in (1, 2, 3)]
        report(f"the first tile of {show}, 8,192 tokens, level 5 (pyramid)", first)
        again = [timed(partial(server.get, f"{base}/{head}/4/1/0")) for head in (1, 2, 3)]
        report(f"every later tile of {show}, 8,192 tokens, level 4", again, GOALS["scores"])
    server.stop()


def many_clients(run: Path) -> None:
    from relpos.explorer.explore_options import IDLE

    server = Server(str(run), "kerple_log", "fire")

    def wander(number: int) -> None:
        choice = random.Random(number)
        try:
            json.loads(server.get("/api/start"))
            for _ in range(3):
                subject = choice.choice(["0", "1", "2"])
                scene = server.scene(subject=subject, length=choice.choice([256, 512, 300]))
                show = choice.choice(scene["shows"])
                head = choice.randint(1, scene["heads"])
                base = f"/api/scenes/{scene['scene']}"
                server.get(f"{base}/head/1/{head}?show={show}")
                for level in (0, 1):
                    if 256 << level <= 2 * scene["length"] and (level == 0 or scene["length"] > 256):
                        server.get(f"{base}/tiles/{show}/1/{head}/{level}/0/0")
                server.get(f"{base}/row/{show}/1/{head}/{choice.randrange(scene['length'])}")
        except Exception as error:
            failures.append(repr(error))

    def visit() -> float:
        threads = [threading.Thread(target=wander, args=(number,)) for number in range(CLIENTS)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    failures: list[str] = []
    wander(0)  # caches and imports are warm
    before = server.memory()
    rounds = [visit() for _ in range(2)]
    during = server.memory()
    time.sleep(IDLE * 1.3)
    after = server.memory()
    middle = statistics.median(rounds)
    print(f"{CLIENTS} clients at once: {len(failures)} errors; {middle:.1f} s for about 16 requests of each")
    print(f"  memory of the server: {before:.0f} MB before, {during:.0f} MB with them, {after:.0f} MB after they left")
    for failure in failures[:3]:
        print("  ", failure)
    server.stop()


def export(folder: Path) -> None:
    file = folder / "small.html"
    model = make_model(folder / "small", "small", "learned")
    command = [sys.executable, "-m", "relpos.cli", "explore", str(model), "--length", "512", "--export", str(file)]
    seconds = timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
    size = file.stat().st_size / 1e6
    data = re.search(r'id="relpos-data">(.*?)</script>', file.read_text(), re.DOTALL)[1]
    shows = ", ".join(json.loads(data)["scenes"][0]["shows"])
    print(f"GPT-2 Small (random weights), 512 tokens, 144 heads: {size:.1f} MB with {shows}; {seconds:.0f} s")


def main() -> None:
    parser = option_parser(__doc__, file=False)
    parser.add_argument("--run", type=Path, help="a nano run; by default a new model with random weights")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=("first", "static", "scores", "clients", "export"))
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    parts = (arguments.only,) if arguments.only else ("first", "static", "scores", "clients", "export")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = arguments.run or make_model(folder / "nano", "nano", "kerple_log")
        for part in parts:
            match part:
                case "first":
                    first_view(run)
                case "static":
                    static_tiles(arguments.rounds)
                case "scores":
                    score_tiles(run, arguments.rounds)
                case "clients":
                    many_clients(run)
                case "export":
                    export(folder)


if __name__ == "__main__":
    main()
