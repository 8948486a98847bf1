"""`relpos.mass`, attention by distance: its error, its time as a ratio to PyTorch's attention, and its peak memory.

    python benchmarks/mass.py                          everything, about 14 minutes on 2 cores
    python benchmarks/mass.py --lengths 4096 --encodings rope

12 heads, head_dim 64, float32, causal, batch 1. Time is a ratio to F.scaled_dot_product_attention(is_causal=True) on
the same queries and keys, interleaved, best of several (one at 65,536). Peak memory is that of one call in a process
of its own, beyond q and k (and the layer's input for cable), in MB and in units of q's bytes. "Materialised" sums the
diagonals of the weights, which take length × length. The error is the largest difference from weights materialised in
float64, at ERROR_LENGTH tokens. Writes benchmarks/results/mass.{json,md}.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from attention import HEAD_DIM, HEADS, RESULTS, WIDTH, _memory, cpu
from torch.nn import functional as F

import relpos
from relpos.attend import native

ENCODINGS = ("nope", "alibi", "t5", "fire", "cable", "rope")
MATERIALISED = "rope, materialised"
MOST_MATERIALISED = 4096  # tokens; 65,536 would need 206 GB
ERROR_LENGTH = 1024
LONGEST = 65536  # has one round


def case(name: str, length: int, dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], dict[str, object]]:
    """Queries and keys, and the further arguments of `relpos.mass`."""
    torch.manual_seed(0)
    q, k = (torch.randn(1, HEADS, length, HEAD_DIM).to(dtype) for _ in range(2))
    options = {"length": length} if name == "fire" else {}
    position = relpos.encoding(name, HEADS, HEAD_DIM, **options).to(dtype)
    hidden = torch.randn(1, length, WIDTH).to(dtype) if position.needs_hidden else None
    return [q, k], {"position": position, "hidden": hidden}


def diagonal_sums(q: torch.Tensor, k: torch.Tensor, **arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
    """By distance (heads, length) and of the first token (heads,), from materialised weights."""
    weights = relpos.scores(q, k, **arguments).softmax(-1)[0]
    length = weights.shape[-1]
    first = weights[..., 0].mean(-1)
    weights[..., 0] = 0
    sums = [weights.diagonal(-distance, dim1=1, dim2=2).sum(-1) for distance in range(length)]
    return torch.stack(sums, dim=-1) / length, first


def runs(name: str, length: int) -> Callable[[], object]:
    if name == MATERIALISED:
        (q, k), arguments = case("rope", length)
        return lambda: diagonal_sums(q, k, **arguments)
    (q, k), arguments = case(name, length)
    return lambda: relpos.mass(q, k, **arguments)


def error(name: str) -> float:
    (q, k), arguments = case(name, ERROR_LENGTH)
    ours = relpos.mass(q, k, **arguments)
    (q, k), arguments = case(name, ERROR_LENGTH, torch.float64)
    by_distance, first = diagonal_sums(q, k, **arguments)
    differences = (ours.by_distance[0] - by_distance).abs().max(), (ours.first_key[0] - first).abs().max()
    return float(max(differences))


def race(names: list[str], length: int, rounds: int) -> dict[str, float]:
    """Best seconds of each, interleaved; PyTorch's attention under the name "SDPA"."""
    (q, k), _ = case("nope", length)
    v = torch.randn_like(k)
    contestants = {"SDPA": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)}
    contestants |= {name: runs(name, length) for name in names}
    best = dict.fromkeys(contestants, math.inf)
    for _ in range(rounds):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def peak(name: str, length: int) -> int:
    """Bytes."""
    code = f"import mass; mass.print_peak({name!r}, {length})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def print_peak(name: str, length: int) -> None:
    """The child's part of `peak`."""
    torch.set_grad_enabled(False)
    runs(name, 128)()  # code and thread stacks loaded
    run = runs(name, length)
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    run()
    print(_memory("VmHWM") - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="1024,4096,16384,65536")
    parser.add_argument("--encodings", default=",".join(ENCODINGS))
    parser.add_argument("--rounds", type=int, default=5, help="two beyond 4096 tokens, one at 65536")
    parser.add_argument("--no-file", action="store_true", help="print only")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    encodings = arguments.encodings.split(",")
    errors = {name: error(name) for name in encodings}
    for name, difference in errors.items():
        print(f"{name:20} error {difference:.1e}", flush=True)
    rows = []
    for length in map(int, arguments.lengths.split(",")):
        names = [*encodings, *([MATERIALISED] if length <= MOST_MATERIALISED else [])]
        best = race(names, length, arguments.rounds if length <= 4096 else 2 if length < LONGEST else 1)
        for name in names:
            memory = peak(name, length)
            row = {"length": length, "what": name, "seconds": best[name], "ratio": best[name] / best["SDPA"]}
            rows.append(row | {"MB": memory / 1e6, "peak in q": memory / (HEADS * length * HEAD_DIM * 4)})
            print(
                f"{length:6} {name:20} {best[name] * 1e3:9.1f} ms {rows[-1]['ratio']:6.2f}   {memory / 1e6:9.1f} MB "
                f"{rows[-1]['peak in q']:7.2f} q",
                flush=True,
            )
    if not arguments.no_file:
        machine = {"cpu": cpu(), "instruction set": native.isa(), "threads": torch.get_num_threads()}
        RESULTS.mkdir(exist_ok=True)
        results = {"machine": machine, "errors": errors, "results": rows}
        (RESULTS / "mass.json").write_text(json.dumps(results, indent=1))
        (RESULTS / "mass.md").write_text(report(machine, errors, rows))


def report(machine: dict, errors: dict[str, float], rows: list[dict]) -> str:
    """The table as Markdown."""
    line = ", ".join(f"{key}: {value}" for key, value in machine.items())
    lengths = sorted({row["length"] for row in rows})
    head = " | ".join(f"{length} tokens" for length in lengths)
    lines = [f"Made by `benchmarks/mass.py` ({line}).", ""]
    lines += [f"| `relpos.mass`: time, SDPA = 1 (peak memory) | {head} | error |", "|---" * (len(lengths) + 2) + "|"]
    for name in dict.fromkeys(row["what"] for row in rows):
        cells = {row["length"]: row for row in rows if row["what"] == name}
        numbers = [f"{cells[n]['ratio']:.2f} ({cells[n]['MB']:.0f} MB)" if n in cells else "" for n in lengths]
        lines.append(f"| {name} | {' | '.join(numbers)} | {f'{errors[name]:.0e}' if name in errors else ''} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
