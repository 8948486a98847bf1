"""How fast is the native kernel? Time as a ratio to PyTorch's attention without any bias, in one interleaved run.

python benchmarks/attention_quick.py [--lengths 512,1024,4096] [--repeats 5] [--isa avx2] [--packed]

Below 1 is faster than F.scaled_dot_product_attention(is_causal=True). 12 heads of 64; length × batch is 4096, and the
batch is 1 beyond. "fwd+bwd" includes the gradients of q, k, v and of everything the bias is made of.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import relpos
from relpos.attend import library, native
from relpos.encodings.call import Call
from relpos.encodings.forms import RankOne, Toeplitz

HEADS, HEAD_DIM, TOKENS = 12, 64, 4096


def inputs(batch: int, length: int, packed: bool) -> tuple[Tensor, Tensor, Tensor]:
    if packed:
        qkv = torch.randn(batch, length, 3, HEADS, HEAD_DIM)
        q, k, v = (x.transpose(1, 2).requires_grad_() for x in qkv.unbind(2))
        return q, k, v
    q, k, v = (torch.randn(batch, HEADS, length, HEAD_DIM, requires_grad=True) for _ in range(3))
    return q, k, v


def candidates(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    batch, _, length, _ = q.shape
    call = Call(length, length, scale=HEAD_DIM**-0.5)
    slopes = 2.0 ** (-8 * (torch.arange(HEADS) + 1) / HEADS)
    table = (-slopes[:, None] * torch.arange(length)).requires_grad_()
    # Falls too slowly to be skipped, so that it measures the form and not the skipping.
    flat = (-0.5 * torch.log1p(torch.arange(length).float())).repeat(HEADS, 1).requires_grad_()
    total = (0.02 * torch.rand(batch, HEADS, length).double()).cumsum(-1).requires_grad_()
    weight = torch.rand(batch, HEADS, length, requires_grad=True)
    fire = relpos.encoding("fire", heads=HEADS, head_dim=HEAD_DIM)

    def ours(form: Callable[[], object], skip: bool) -> Callable[[], Tensor]:
        return lambda: native.attention(q, k, v, form(), call, skip)  # type: ignore[arg-type]

    return {
        "SDPA, no bias": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "none": ours(lambda: None, False),
        "Toeplitz": ours(lambda: Toeplitz(flat, 0), False),
        "Toeplitz, skipping on": ours(lambda: Toeplitz(flat, 0), True),
        "rank one": ours(lambda: RankOne(total, None, torch.float32), False),
        "rank one, weighted": ours(lambda: RankOne(total, weight, torch.float32), False),
        "scaled (FIRE)": ours(lambda: fire.bias(call), False),
        "ALiBi": ours(lambda: Toeplitz(table, 0), False),
        "ALiBi, skipping on": ours(lambda: Toeplitz(table, 0), True),
    }


def measure(length: int, repeats: int, packed: bool) -> None:
    batch = max(1, TOKENS // length)
    q, k, v = inputs(batch, length, packed)
    runs = candidates(q, k, v)
    grad = torch.randn(q.shape)
    forward, both = (dict.fromkeys(runs, float("inf")) for _ in range(2))
    skipped = {}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            with torch.no_grad():
                run()
            middle = time.perf_counter()
            skipped[name] = native.skipped_fraction() if name.endswith("on") else 0.0
            start_both = time.perf_counter()
            run().backward(grad)
            end = time.perf_counter()
            q.grad = k.grad = v.grad = None
            if repeat:  # the first round warms up
                forward[name] = min(forward[name], middle - start)
                both[name] = min(both[name], end - start_both)
    base = "SDPA, no bias"
    print(f"\nlength {length}, batch {batch}: SDPA {forward[base] * 1e3:.1f} ms fwd, {both[base] * 1e3:.1f} ms fwd+bwd")
    print(f"  {'':24s} {'fwd':>6s} {'fwd+bwd':>8s} {'skipped':>8s}")
    for name in list(runs)[1:]:
        print(f"  {name:24s} {forward[name] / forward[base]:6.2f} {both[name] / both[base]:8.2f} {skipped[name]:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="512,1024,4096")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--isa", default=None, help="portable, avx2 or avx512")
    parser.add_argument("--packed", action="store_true", help="q, k, v are views of one packed tensor")
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    if options.isa:
        library.use(options.isa)
    print(f"isa {library.isa()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for length in options.lengths.split(","):
        measure(int(length), options.repeats, options.packed)


if __name__ == "__main__":
    main()
