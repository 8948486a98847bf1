"""What does asking cost where the answer is always no? Skipping on against skipping off, where no tile can be skipped.

    python benchmarks/skipping.py [--rounds 40]

12 heads, head_dim 64, float32, causal, length × batch 4096. No tile can be skipped (checked by skipped_fraction):
clipped and cable_nw have biases so small that the tests are not even begun; `shelf` is 28 lower on the nearer half of
the distances than on the farther, so that every test runs, and fails. The two take turns in pairs, first the one,
then the other; a pair gives one ratio, and the table shows the median of all pairs with its 95 % interval
(bootstrap), which holds up on a noisy machine where the best of several does not.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from measure import option_parser, seconds

import relpos
from relpos.attend import native
from relpos.forms.bias import Form, Toeplitz
from relpos.forms.call import Call

HEADS, HEAD_DIM, TOKENS = 12, 64, 4096
LENGTHS = (512, 1024, 4096)


def maker(name: str, length: int, backward: bool) -> Callable[[bool], None]:
    torch.manual_seed(0)
    batch = TOKENS // length
    q, k, v = (torch.randn(batch, HEADS, length, HEAD_DIM, requires_grad=backward) for _ in range(3))
    grad = torch.randn(batch, HEADS, length, HEAD_DIM)
    if name == "shelf":
        table = (-28.0 * (torch.arange(length) < length // 2)).repeat(HEADS, 1).requires_grad_()
        call, gated = Call(length, length, scale=HEAD_DIM**-0.5), False

        def bias() -> Form | None:
            return Toeplitz(table, 0)
    else:
        position = relpos.encoding(name, HEADS, HEAD_DIM)
        hidden = torch.randn(batch, length, HEADS * HEAD_DIM) * 1e-3  # gates of almost nothing
        call, gated = Call(length, length, gates=position.gates(hidden), scale=HEAD_DIM**-0.5), position.needs_hidden

        def bias() -> Form | None:
            return position.bias(call)

    def run(skip: bool) -> None:
        out, _ = native.attention(q, k, v, bias(), call, skip)
        if skip:
            assert native.skipped_fraction() == 0, f"{name} skips {native.skipped_fraction():.1%} of the tiles"
        if backward:
            out.backward(grad, retain_graph=gated)

    return run


def interval(ratios: np.ndarray) -> tuple[float, float, float]:
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)


def tell(title: str, ratios: list[float]) -> None:
    middle, low, high = interval(np.array(ratios))
    print(f"{title:38} {middle - 1:+.1%}  [{low - 1:+.1%}, {high - 1:+.1%}]", flush=True)


def main() -> None:
    parser = option_parser(__doc__, file=False)
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    torch.set_flush_denormal(True)
    print(f"{native.isa()}, {torch.get_num_threads()} threads, {given.rounds} pairs")
    every: list[float] = []
    for name in ("clipped", "cable_nw", "shelf"):
        for length in LENGTHS:
            for backward in (False, True):
                run = maker(name, length, backward)
                ratios = []
                for turn in range(-1, given.rounds):  # the first is for warming up
                    first = turn % 2 == 0
                    taken = {skip: seconds(partial(run, skip)) for skip in (first, not first)}
                    if turn >= 0:
                        ratios.append(taken[True] / taken[False])
                every += ratios
                tell(f"{name:10} {length:6} {'forward + backward' if backward else 'forward':20}", ratios)
    tell(f"all {len(every)} pairs", every)


if __name__ == "__main__":
    main()
