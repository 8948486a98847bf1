"""Are denormal weights slow? The kernel with a bias that makes most of its weights denormal, and without a bias.

    python benchmarks/denormals.py [--rounds 20]

2 heads, head_dim 16, 1,024 tokens, float32, causal, skipping off so that every weight is computed. The two take turns;
the best of all rounds counts. Many CPUs compute with denormal numbers slowly, so the kernel flushes them to 0.
"""

from functools import partial

import torch
from measure import best_seconds, option_parser

from relpos.attend import native
from relpos.forms.bias import Form, Toeplitz
from relpos.forms.call import Call

HEADS, HEAD_DIM, LENGTH = 2, 16, 1024


def main() -> None:
    parser = option_parser(__doc__, file=False)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, HEADS, LENGTH, HEAD_DIM)
    decay = -0.1 * torch.arange(float(LENGTH)).repeat(HEADS, 1)  # e^-88 and below, for most of the keys
    forms: dict[str, Form | None] = {"no bias": None, "denormal weights": Toeplitz(decay, 0)}
    call = Call(LENGTH, LENGTH)
    runs = {name: partial(native.attention, q, k, v, form, call, skip=False) for name, form in forms.items()}
    best = best_seconds(runs, rounds)
    for name, seconds in best.items():
        print(f"{name:18} {seconds * 1000:6.2f} ms   {seconds / best['no bias']:5.2f} of no bias")


if __name__ == "__main__":
    main()
