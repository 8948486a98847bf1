"""What the benchmarks share: options, times in turns, peaks of memory, and the files of results."""

import argparse
import ctypes
import gc
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Run = Callable[[], object]


def option_parser(doc: str | None, file: bool = True) -> argparse.ArgumentParser:
    """A parser of options that prints the docstring of a benchmark as its help."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if file:
        parser.add_argument("--no-file", action="store_true", help="print only")
    return parser


def seconds(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def best_seconds(
    runs: Mapping[str, Run], rounds: int, after: Callable[[str], object] | None = None
) -> dict[str, float]:
    """Best seconds of each, in turns; `after` is called after each, not timed."""
    best = dict.fromkeys(runs, math.inf)
    for _ in range(rounds):
        for name, run in runs.items():
            best[name] = min(best[name], seconds(run))
            if after is not None:
                after(name)
    return best


def peak_bytes(run: Run) -> int:
    """Peak of resident memory during a call, beyond what stood before (Linux)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    run()
    return _memory("VmHWM") - before


def _memory(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def printed_by(code: str) -> float:
    """The number that a program prints in a process of its own."""
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    return float(run.stdout)


def machine(torch_version: bool = True) -> dict[str, Any]:
    """What the numbers depend on."""
    import torch

    from relpos.attend import native

    facts: dict[str, Any] = {"cpu": cpu(), "instruction set": native.isa(), "threads": torch.get_num_threads()}
    return facts | ({"torch": torch.__version__} if torch_version else {})


def cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def merged(before: Iterable[dict], now: Iterable[dict], key: Sequence[str]) -> list[dict]:
    """The rows of both, those of now in place of earlier ones with the same key."""
    rows = {tuple(row[name] for name in key): row for row in [*before, *now]}
    return list(rows.values())


def made_by(script: str, facts: Mapping[str, object]) -> str:
    return f"Made by `benchmarks/{script}.py` ({', '.join(f'{key}: {value}' for key, value in facts.items())})."


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def by_size(
    title: str, rows: Sequence[dict], size: str | tuple[str, ...], cell: Callable[[dict], str], name: Any = str
) -> str:
    """A table with a line for each `what` of the rows and a column for each size."""

    def size_of(row: dict) -> Any:
        return row[size] if isinstance(size, str) else tuple(row[key] for key in size)

    sizes = sorted({size_of(row) for row in rows})
    lines = []
    for what in dict.fromkeys(row["what"] for row in rows):
        cells = {size_of(row): cell(row) for row in rows if row["what"] == what}
        lines.append([what, *(cells.get(each, "") for each in sizes)])
    return table([title, *map(name, sizes)], lines)


def read(name: str) -> Any:
    """The numbers of an earlier run; None if there is none."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def write(name: str, numbers: object, *blocks: str) -> None:
    """Write results/NAME.json and results/NAME.md."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text("\n\n".join(blocks) + "\n")
