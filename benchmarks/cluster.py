"""A comparison on a Ray cluster of two machines, one of which is killed, and then the driver: the same table.

    python benchmarks/cluster.py [--steps 30] [--out FOLDER]

Both machines are this one, with one core each. Three encodings with two seeds are compared three times with the same
number of threads: with local processes; on the cluster, where one machine is killed while both train; and on the
cluster with the command killed after its first trial and rerun. Prints what the commands print about lost machines,
the three tables, the seconds that each took, and whether every weight and every loss is equal.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import option_parser

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}
ENCODINGS, SEEDS = ("alibi", "rope", "cable"), 2
NAMES = [f"{encoding}-s{seed}" for seed in range(SEEDS) for encoding in ENCODINGS]
STORE = 80 * 2**20  # bytes, the least that Ray allows


def command(out: Path, steps: int, *where: str) -> list[str]:
    words = f"--encodings {','.join(ENCODINGS)} --seeds {SEEDS} --length 32 --lengths 32,64,128 --steps {steps}"
    more = f"--batch-size 4 --eval-tokens 4096 --data {out.parent / 'text.txt'} data.tokenizer=bpe-512"
    settings = "run.save_every=5 run.eval_windows=4"
    return [
        sys.executable,
        "-m",
        "relpos.cli",
        "compare",
        *f"{words} {more} {settings}".split(),
        "--out",
        str(out),
        *where,
    ]


def training(out: Path) -> list[str]:
    """The trials that have a checkpoint and no record."""
    return [
        name for name in NAMES if list((out / name).glob("checkpoint-*")) and not (out / name / "trial.json").exists()
    ]


def complete(out: Path) -> list[str]:
    """The trials that have been trained and evaluated."""
    records = {file.parent.name: json.loads(file.read_text(encoding="utf-8")) for file in out.glob("*/trial.json")}
    return sorted(name for name, record in records.items() if "seconds" in record)


def table(out: Path) -> list[str]:
    lines = (out / "report.md").read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| encoding"))
    return lines[start : start + 2 + len(ENCODINGS)]


def numbers(out: Path) -> list[object]:
    """Every weight and every loss of a comparison."""
    found: list[object] = []
    for name in NAMES:
        record = json.loads((out / name / "trial.json").read_text(encoding="utf-8"))
        found += [(out / name / "model.safetensors").read_bytes(), [row["loss"] for row in record["windows"]["rows"]]]
    return found


def finish(process: "subprocess.Popen[str]") -> None:
    """Wait for a command, and print what it says about machines."""
    assert process.stdout is not None
    for line in process.stdout:
        if " was lost" in line or "Traceback" in line:
            print("   ", line.rstrip())
    if process.wait() != 0:
        sys.exit(f"the command ended with code {process.returncode}")


def start(words: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main() -> None:
    parser = option_parser(__doc__, file=False)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = (arguments.out or Path(tempfile.mkdtemp(prefix="relpos-cluster-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    words = [f"word{i * i % 97} and {i % 13} of {i % 7}" for i in range(6000)]
    (folder / "text.txt").write_text("\n\n".join(" ".join(words[i : i + 150]) for i in range(0, 6000, 150)))
    os.environ["RELPOS_CACHE"] = str(folder / "cache")

    from ray.cluster_utils import Cluster

    outs = [folder / name for name in ("local", "machine-killed", "driver-killed")]
    seconds = []
    begun = time.perf_counter()
    print("local processes", flush=True)
    finish(start(command(outs[0], arguments.steps, "--workers", "2", "--cores", "1")))
    seconds.append(time.perf_counter() - begun)

    head = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    machines = [cluster.add_node(num_cpus=1, object_store_memory=STORE) for _ in range(2)]
    where = ("--ray", cluster.address, "--cores", "1")
    try:
        begun = time.perf_counter()
        print("two machines, one of them killed while both train", flush=True)
        process = start(command(outs[1], arguments.steps, *where))
        while len(training(outs[1])) < 2 and process.poll() is None:
            time.sleep(0.05)
        print("    killed while these trained:", ", ".join(training(outs[1])), flush=True)
        cluster.remove_node(machines.pop(), allow_graceful=False)
        finish(process)
        seconds.append(time.perf_counter() - begun)

        cluster.add_node(num_cpus=1, object_store_memory=STORE)
        begun = time.perf_counter()
        print("the driver killed after its first trial, and rerun", flush=True)
        process = start(command(outs[2], arguments.steps, *where))
        while not complete(outs[2]) and process.poll() is None:
            time.sleep(0.05)
        process.kill()
        process.wait()
        print(
            "    finished when it was killed:", ", ".join(sorted(p.parent.name for p in outs[2].glob("*/trial.json")))
        )
        finish(start(command(outs[2], arguments.steps, *where)))
        seconds.append(time.perf_counter() - begun)
    finally:
        cluster.shutdown()
    for out, taken in zip(outs, seconds, strict=True):
        print(f"\n{out.name}, {taken:.0f} s", *table(out), sep="\n")
    same = all(numbers(out) == numbers(outs[0]) and table(out) == table(outs[0]) for out in outs[1:])
    print(f"\nrelpos compare: all weights, losses and tables are {'equal, bit for bit' if same else 'NOT equal'}")
    sys.exit(not same)


if __name__ == "__main__":
    main()
