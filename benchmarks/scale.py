"""Attention over one sequence that is divided among processes: efficiency here, and bytes and memory on paper.

    python benchmarks/scale.py                  2 and 4 processes, about 3 minutes on 2 cores
    python benchmarks/scale.py --paper          only the table for 64 processes and 2^20 tokens, computed from formulas

`relpos.attention(…, group=…)`, forward and backward, 8 heads, head_dim 64, float32, causal, batch 1, the same sequence
for any number of processes, over gloo. Every process has one thread, and so has the one that they are compared with.
The efficiency is the time of one process, divided by the time of N processes and by the ideal speed-up: N, but no more
than the machine has cores. So 4 processes on 2 cores are compared with half the time of one. Times are the best of
several rounds; within a round all schemes take turns. Writes benchmarks/results/scale.{json,md}.
"""

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import cpu, option_parser, table, write

HEADS, HEAD_DIM = 8, 64
ENCODINGS = ("nope", "alibi", "fire", "cable", "rope")
SCHEMES = ("heads", "ring", "gather")
PROCESSES = (2, 4)


def work(folder: str, rank: int, processes: int, names: list[str], length: int, rounds: int) -> None:
    """Time every encoding and scheme in one of the processes; the first one writes the seconds."""
    import torch
    from torch import distributed as dist

    import relpos

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store-{processes}",
        rank=rank,
        world_size=processes,
        timeout=datetime.timedelta(minutes=30),
    )
    tokens = length // processes
    found: dict[str, float] = {}
    for name in names:
        torch.manual_seed(0)
        position = relpos.encoding(name, HEADS, HEAD_DIM, **({"length": length} if name == "fire" else {}))
        whole = [torch.randn(1, HEADS, length, HEAD_DIM) for _ in range(3)]
        own = slice(rank * tokens, (rank + 1) * tokens)
        q, k, v = (x[:, :, own].clone().requires_grad_() for x in whole)
        hidden = torch.randn(1, length, HEADS * HEAD_DIM)[:, own] if position.needs_hidden else None
        for number in range(rounds + 1):  # the first round loads the kernel and connects the processes
            for scheme in SCHEMES if processes > 1 else ("alone",):
                options = {} if processes == 1 else {"group": dist.group.WORLD, "scheme": scheme}
                dist.barrier()
                begun = time.perf_counter()
                relpos.attention(q, k, v, position, hidden=hidden, **options).sum().backward()
                dist.barrier()
                seconds = time.perf_counter() - begun
                if number:
                    found[f"{name} {scheme}"] = min(seconds, found.get(f"{name} {scheme}", seconds))
    if rank == 0:
        Path(folder, f"seconds-{processes}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def launch(processes: int, names: list[str], length: int, rounds: int) -> dict[str, float]:
    """The best seconds of each encoding and scheme."""
    with tempfile.TemporaryDirectory() as folder:
        words = [folder, str(processes), ",".join(names), str(length), str(rounds)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        children = [
            subprocess.Popen([sys.executable, __file__, "--worker", str(rank), *words], env=environment)
            for rank in range(processes)
        ]
        codes = [child.wait() for child in children]
        if any(codes):
            raise SystemExit(f"one of {processes} processes has failed.")
        seconds: dict[str, float] = json.loads(Path(folder, f"seconds-{processes}.json").read_text())
        return seconds


def measure(names: list[str], length: int, rounds: int) -> dict[str, dict[str, float]]:
    """Efficiency by encoding and scheme, for each number of processes."""
    cores = os.cpu_count() or 1
    alone = launch(1, names, length, rounds)
    efficiencies: dict[str, dict[str, float]] = {}
    for processes in PROCESSES:
        for case, seconds in launch(processes, names, length, rounds).items():
            name = case.split()[0]
            ideal = alone[f"{name} alone"] / min(processes, cores)
            efficiencies.setdefault(case, {})[str(processes)] = round(ideal / seconds, 3)
    return efficiencies


def paper(
    processes: int = 64, tokens: int = 2**20, heads: int = 64, key_heads: int = 8, head_dim: int = 128, size: int = 2
) -> list[list[str]]:
    """Bytes that a process sends per layer in a forward and a backward, and what it holds of q, k, v and the output.

    Args:
        processes: N.
        tokens: Of the sequence, T; a slice has T / N.
        heads: H.
        key_heads: H_k.
        head_dim: D.
        size: Bytes per value: 2 for bfloat16. Gradients of keys and values travel in float32 in the ring.
    """
    slice_head = tokens // processes * head_dim  # values of one head of one slice
    copies = max(key_heads, processes)  # of key heads, all processes together: each gets those that it needs
    others = (processes - 1) / processes
    rows = {
        "heads": (
            (2 * heads + 2 * copies) * slice_head * size * others,
            (2 * heads + 2 * copies) * slice_head * size * others,
            (2 * heads + 2 * copies) * slice_head * size,
        ),
        "ring": (
            2 * key_heads * slice_head * size * (processes - 1),
            2 * key_heads * slice_head * (size * (processes - 1) + 4 * processes),
            (2 * heads + 4 * key_heads) * slice_head * size,
        ),
        "gather": (
            2 * key_heads * slice_head * size * (processes - 1),
            2 * key_heads * slice_head * size * (processes - 1),
            2 * (heads + key_heads * processes) * slice_head * size,
        ),
    }
    return [[scheme, *(f"{value / 2**30:.2f} GiB" for value in values)] for scheme, values in rows.items()]


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        rank, folder, processes, names, length, rounds = sys.argv[2:]
        work(folder, int(rank), int(processes), names.split(","), int(length), int(rounds))
        return
    parser = option_parser(__doc__)
    parser.add_argument("--paper", action="store_true", help="print the table on paper, and measure nothing")
    parser.add_argument("--encodings", default=",".join(ENCODINGS))
    parser.add_argument("--length", type=int, default=4096, help="tokens of the whole sequence")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    on_paper = table(["scheme", "sent forward", "sent backward", "q, k, v and output held"], paper())
    if arguments.paper:
        print(on_paper)
        return
    names = arguments.encodings.split(",")
    begun = time.perf_counter()
    efficiencies = measure(names, arguments.length, arguments.rounds)
    machine = f"cpu: {cpu()}, cores: {os.cpu_count()}, one thread per process"
    header = ["efficiency, 1 = ideal", *(f"{scheme}, {n} processes" for n in PROCESSES for scheme in SCHEMES)]
    rows = [
        [name, *(f"{efficiencies[f'{name} {scheme}'][str(n)]:.2f}" for n in PROCESSES for scheme in SCHEMES)]
        for name in names
    ]
    about = f"relpos.attention over {arguments.length} tokens, forward and backward"
    title = f"Made by `benchmarks/scale.py` ({machine}): {about}."
    print(title, table(header, rows), sep="\n\n")
    print(f"{time.perf_counter() - begun:.0f} seconds")
    if not arguments.no_file:
        numbers = {"machine": machine, "length": arguments.length, "efficiency": efficiencies}
        write("scale", numbers, title, table(header, rows))


if __name__ == "__main__":
    main()
