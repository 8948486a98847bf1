"""`relpos.mass`, attention by distance: its error, its time as a ratio to PyTorch's attention, and its peak memory.

    python benchmarks/mass.py                          everything, about 14 minutes on 2 cores
    python benchmarks/mass.py --lengths 4096 --encodings rope

12 heads, head_dim 64, float32, causal, batch 1. Time is a ratio to F.scaled_dot_product_attention(is_causal=True) on
the same queries and keys, interleaved, best of several (one at 65,536). Peak memory is that of one call in a process
of its own, beyond q and k (and the layer's input for cable), in MB and in units of q's bytes. "Materialised" sums the
diagonals of the weights, which take length × length. The error is the largest difference from weights materialised in
float64, at ERROR_LENGTH tokens. Writes benchmarks/results/mass.{json,md}.
"""

import math
from collections.abc import Callable
from operator import itemgetter

import torch
from attention import HEAD_DIM, HEADS, WIDTH
from measure import best_seconds, by_size, machine, made_by, option_parser, peak_bytes, printed_by, write
from torch.nn import functional as F

import relpos

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
    return best_seconds(contestants, rounds)


def peak(name: str, length: int) -> float:
    """Bytes."""
    return printed_by(f"import mass; mass.print_peak({name!r}, {length})")


def print_peak(name: str, length: int) -> None:
    """The child's part of `peak`."""
    torch.set_grad_enabled(False)
    runs(name, 128)()  # code and thread stacks loaded
    print(peak_bytes(runs(name, length)))


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--lengths", default="1024,4096,16384,65536")
    parser.add_argument("--encodings", default=",".join(ENCODINGS))
    parser.add_argument("--rounds", type=int, default=5, help="two beyond 4096 tokens, one at 65536")
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
        facts = machine(torch_version=False)
        write(
            "mass", {"machine": facts, "errors": errors, "results": rows}, made_by("mass", facts), report(errors, rows)
        )


def report(errors: dict[str, float], rows: list[dict]) -> str:
    """The table as Markdown."""
    cells = [{**row, "cell": f"{row['ratio']:.2f} ({row['MB']:.0f} MB)"} for row in rows]
    cells += [{"what": name, "length": math.inf, "cell": f"{error:.0e}"} for name, error in errors.items()]
    title = "`relpos.mass`: time, SDPA = 1 (peak memory)"
    return by_size(title, cells, "length", itemgetter("cell"), lambda n: "error" if n == math.inf else f"{n} tokens")


if __name__ == "__main__":
    main()
