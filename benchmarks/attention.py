"""Attention with a bias, as ratios to PyTorch's own attention without any: one run, interleaved, best of several.

    python benchmarks/attention.py                    everything, about 20 minutes on 2 cores
    python benchmarks/attention.py --lengths 512,1024 --rounds 5

12 heads, head_dim 64, float32, causal, batch so that length × batch is 4096 (1 beyond), denormals flushed for all. What
is timed of ours is `relpos.attention`. The yardstick is F.scaled_dot_product_attention(is_causal=True) with no bias.
"skipping off" computes every tile. "window 512" sees 512 tokens. Peak memory is measured in a process of its own for
each, beyond q, k and v, in units of q's bytes; for ours that includes the layer's input, of which cable and forgetting
make their gates. Lengths below 512 have only those rows that ask how rotation compares with none.
Writes benchmarks/results/attention-ISA.{json,md,png}. On a CPU with AVX-512, the table for AVX2 is made by
RELPOS_ISA=avx2 ATEN_CPU_CAPABILITY=avx2, which holds PyTorch's kernels to AVX2 too, but not the matrix products of
MKL. Rows of an earlier run on the same machine that are not measured again stay.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from measure import (
    RESULTS,
    best_seconds,
    by_size,
    machine,
    made_by,
    merged,
    option_parser,
    peak_bytes,
    printed_by,
    read,
    write,
)
from torch.nn import functional as F

import relpos
from relpos.attend import native
from relpos.forms.call import Call

HEADS, HEAD_DIM, WIDTH = 12, 64, 12 * 64
LENGTHS = (49, 64, 256, 512, 1024, 2048, 4096, 16384, 65536)
SHORT = 512
AT_SHORT = ("SDPA, no bias", "ours, no bias", "ours, rope", "ours, Toeplitz (kerple_log), skipping off")
LONGEST = 65536  # only a few take part: forward, and of ours the backward too
AT_LONGEST = {
    False: ("SDPA, no bias", "ours, Toeplitz (kerple_log), skipping off", "ours, alibi, skipping on"),
    True: ("ours, alibi, skipping on",),
}
WRITTEN_OUT_LIMIT = 4096  # a bias of 12 heads at 16384 is 13 GB, and autograd needs several
FLEX_LIMIT = 4096

Run = Callable[[], torch.Tensor]
Make = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Run]


def ours(name: str | None, skip: bool = True, **arguments: object) -> Make:
    """relpos.attention with an encoding; its numbers are computed within the measured time, as in training."""

    def make(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
        batch, length = q.shape[0], q.shape[2]
        torch.manual_seed(1)
        options = {"length": length} if name == "fire" else {}
        position = relpos.encoding(name, HEADS, HEAD_DIM, **options) if name else None
        hidden = torch.randn(batch, length, WIDTH) if position is not None and position.needs_hidden else None

        def run() -> torch.Tensor:
            if skip:
                return relpos.attention(q, k, v, position, hidden=hidden, **arguments)
            with native.every_tile():
                return relpos.attention(q, k, v, position, hidden=hidden, **arguments)

        return run

    return make


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_with_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """A fixed bias as a float mask; its gradient is not to be had this way."""
    mask = relpos.encoding("kerple_log", HEADS, HEAD_DIM).map(q.shape[2])[None]
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """What everybody writes: the bias of a learned table, materialised, with its gradient."""
    length = q.shape[2]
    position = relpos.encoding("kerple_log", HEADS, HEAD_DIM)
    index = torch.arange(length)
    future = index[:, None] < index
    distance = (index[:, None] - index).clamp(min=0)

    def run() -> torch.Tensor:
        table = position.bias(Call(length, length)).table  # (heads, length)
        scores = q @ k.transpose(-1, -2) * HEAD_DIM**-0.5 + table[:, distance]
        return scores.masked_fill(future, -math.inf).softmax(-1) @ v

    return run


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """Compiled FlexAttention with a table; on a CPU it has a forward only."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = q.shape[2]
    table = relpos.encoding("kerple_log", HEADS, HEAD_DIM).bias(Call(length, length)).table.detach()
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)

    def add_table(score, b, h, i, j):
        return score + table[h, (i - j).clamp(min=0)]

    return lambda: compiled(q, k, v, score_mod=add_table, block_mask=mask)


CONTESTANTS: dict[str, Make] = {
    "SDPA, no bias": sdpa,
    "ours, no bias": ours(None, skip=False),
    "ours, rope": ours("rope"),
    "ours, no bias, window 512": ours(None, window=511),
    "ours, no bias, sinks": ours(None, sinks=torch.zeros(HEADS)),
    "ours, Toeplitz (kerple_log), skipping off": ours("kerple_log", skip=False),
    "ours, rank one (cable), skipping off": ours("cable", skip=False),
    "ours, scaled (fire)": ours("fire", skip=False),
    "ours, kerple_log, skipping on": ours("kerple_log"),
    "ours, alibi, skipping on": ours("alibi"),
    "ours, forgetting, skipping on": ours("forgetting"),
    "SDPA with a float mask": sdpa_with_mask,
    "eager, bias materialised": eager,
    "FlexAttention, compiled": flex,
}


def takes_part(name: str, length: int, backward: bool) -> bool:
    if length >= LONGEST:
        return name in AT_LONGEST[backward]
    if length < SHORT:
        return name in AT_SHORT
    if name in ("SDPA with a float mask", "eager, bias materialised"):
        return length <= WRITTEN_OUT_LIMIT
    if name.startswith("Flex"):
        return length <= FLEX_LIMIT and not backward
    return True


def inputs(length: int, backward: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    batch = max(1, 4096 // length)
    return [torch.randn(batch, HEADS, length, HEAD_DIM, requires_grad=backward) for _ in range(3)]


def once(run: Run, backward: bool) -> None:
    if backward:
        out = run()
        out.backward(out.detach())
    else:
        with torch.no_grad():
            run()


def race(length: int, backward: bool, rounds: int) -> dict[str, float]:
    """Best seconds of each contestant, interleaved."""
    runs = {}
    for name, make in CONTESTANTS.items():
        if takes_part(name, length, backward):
            runs[name] = make(*inputs(length, backward))
            if length <= 4096:
                once(runs[name], backward)  # warm up
    return best_seconds({name: partial(once, run, backward) for name, run in runs.items()}, rounds)


def peak(name: str, length: int, backward: bool) -> float:
    """Peak memory of one call beyond what stood before, in bytes of q; in a process of its own."""
    return printed_by(f"import attention; attention.print_peak({name!r}, {length}, {backward})")


def print_peak(name: str, length: int, backward: bool) -> None:
    """The child's part of `peak`."""
    torch.set_flush_denormal(True)
    small = CONTESTANTS[name](*inputs(64, backward))
    once(small, backward)  # code and thread stacks loaded
    q, k, v = inputs(length, backward)
    # A mask that is materialised before the call counts too.
    print(peak_bytes(lambda: once(CONTESTANTS[name](q, k, v), backward)) / (q.numel() * 4))


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--rounds", type=int, default=9, help="up to 4096; a third at 16384, one beyond")
    parser.add_argument("--only", choices=("forward", "backward"), help="backward: forward + backward")
    parser.add_argument("--no-memory", action="store_true", help="peaks of an earlier run stay")
    arguments = parser.parse_args()
    torch.set_flush_denormal(True)
    results = []
    for length in map(int, arguments.lengths.split(",")):
        rounds = arguments.rounds if length <= 4096 else max(1, arguments.rounds // 3) if length < LONGEST else 1
        for backward in (False, True) if arguments.only is None else (arguments.only == "backward",):
            best = race(length, backward, rounds)
            for name, seconds in best.items():
                row = {
                    "length": length,
                    "pass": "forward + backward" if backward else "forward",
                    "what": name,
                    "rounds": rounds,
                    "seconds": seconds,
                    "ratio": seconds / best["SDPA, no bias"] if "SDPA, no bias" in best else None,
                    "peak": None if arguments.no_memory or length < 4096 else peak(name, length, backward),
                }
                results.append(row)
                line = f"{length:6} {row['pass']:18} {name:42} {seconds * 1e3:9.1f} ms {row['ratio'] or math.nan:7.3f}"
                print(line, "" if row["peak"] is None else f"   peak {row['peak']:7.1f} q", flush=True)
    if arguments.no_file:
        return
    facts = machine() | {"torch": f"{torch.__version__} ({torch.backends.cpu.get_cpu_capability()})"}
    name = f"attention-{native.isa()}"
    before = read(name) or {"machine": {}}
    if {key: value for key, value in before["machine"].items() if key != "rounds"} == facts:
        if arguments.no_memory:
            peaks = {(row["length"], row["pass"], row["what"]): row["peak"] for row in before["results"]}
            for row in results:
                row["peak"] = peaks.get((row["length"], row["pass"], row["what"]))
        results = merged(before["results"], results, ("length", "pass", "what"))
    facts["rounds"] = rounds_told(results)
    write(name, {"machine": facts, "results": results}, made_by("attention", facts), *tables(results))
    plot(results, facts, RESULTS / f"{name}.png")


def rounds_told(results: list[dict]) -> str:
    """How many rounds each length had, since one run is not a best of several."""
    return ", ".join(f"{n} at {length}" for length, n in sorted({(row["length"], row["rounds"]) for row in results}))


def tables(results: list[dict]) -> Iterator[str]:
    """The ratios as Markdown, one table per pass, and the peaks."""
    for title, field in (("ratio to SDPA without a bias", "ratio"), ("peak memory, in bytes of q", "peak")):
        for which in ("forward", "forward + backward"):
            rows = [row for row in results if row["pass"] == which and row[field] is not None]
            rows.sort(key=lambda row: list(CONTESTANTS).index(row["what"]))
            if rows:
                yield by_size(f"{which}: {title}", rows, "length", lambda row, field=field: f"{row[field]:.2f}")


def plot(results: list[dict], machine: dict, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for panel, which in zip(figure.subplots(1, 2, sharey=True), ("forward", "forward + backward"), strict=True):
        for name in list(CONTESTANTS)[1:]:  # the yardstick is the line at 1
            rows = [row for row in results if row["pass"] == which and row["what"] == name and row["ratio"]]
            panel.plot([row["length"] for row in rows], [row["ratio"] for row in rows], marker="o", ms=3, label=name)
        panel.set(xscale="log", yscale="log", title=which, xlabel="length")
        panel.set_xticks(lengths := sorted({row["length"] for row in results}), [str(n) for n in lengths])
        panel.minorticks_off()
        panel.axhline(1, color="black", lw=0.5)
        panel.grid(alpha=0.3)
    figure.axes[0].set_ylabel("time, SDPA without a bias = 1")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=7)
    figure.suptitle(f"Attention with a positional bias on {machine['cpu']} ({machine['instruction set']})", fontsize=9)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
