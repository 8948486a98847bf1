"""Is anything slower than in another checkout? Both in one run, in turns, as ratios.

    git worktree add ../before COMMIT && (cd ../before && make .venv/installed)
    python benchmarks/versions.py ../before
    python benchmarks/versions.py ../before --only attention --lengths 49,512 --rounds 20

Each checkout has a process of its own, which runs with its own relpos (its .venv). They take turns, case by case, in
alternating order; the other process is stopped meanwhile, since threads that wait for work would take time from it. A
number is the best time of this checkout divided by the best of the other, so that below 1 is faster. Attention is
`relpos.attention`, forward and backward, 12 heads of 64, float32, causal, length × batch = 4096; a training step is
forward, backward and AdamW of GPT-2 with kerple_log, 12 heads, 3 layers and GPT-2's vocabulary; decoding is 32 steps of
such a model after a prompt; a start is a new Python process.
"""

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measure import option_parser

ENCODINGS = ("nope", "alibi", "kerple_log", "t5", "fire", "cable", "rope")
LENGTHS = (49, 512, 2048, 4096)
TRAIN, DECODE = "training step", "decoding"
STARTS = {
    "import relpos": "import relpos",
    "relpos --help": "import sys; from relpos.cli import main; sys.argv = ['relpos', '--help']; main()",
}
STEPS = 32  # of decoding


def work() -> None:
    """Time what is asked for on the standard input, one line of JSON each: the seconds, one line each."""
    import torch

    import relpos

    cases: dict[str, Any] = {}
    for line in sys.stdin:
        name, length = json.loads(line)
        if line not in cases:
            cases = {line: case(torch, relpos, name, length)}
            cases[line]()
        cases[line]()  # caches and threads are warm again
        start = time.perf_counter()
        cases[line]()
        print(time.perf_counter() - start, flush=True)


def case(torch: Any, relpos: Any, name: str, length: int) -> Any:
    """What is timed under a name."""
    if name in STARTS:
        command = [sys.executable, "-c", STARTS[name]]
        return lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    if name == TRAIN:
        return training(length)
    if name.startswith(DECODE):
        return decoding(name.split()[1], length)
    return attention(torch, relpos, name, length)


def attention(torch: Any, relpos: Any, name: str, length: int) -> Any:
    """Forward and backward of attention."""
    torch.manual_seed(0)
    batch = max(1, 4096 // length)
    q, k, v, out = (torch.randn(batch, 12, length, 64) for _ in range(4))
    hidden = torch.randn(batch, length, 768)
    position = relpos.encoding(name, 12, 64, **({"length": length} if name == "fire" else {}))
    inputs = [x.requires_grad_() for x in (q, k, v)] + list(position.parameters())

    def run() -> None:
        given = {"hidden": hidden} if position.needs_hidden else {}
        torch.autograd.grad(relpos.attention(q, k, v, position, **given), inputs, out, allow_unused=True)

    return run


def small_gpt2(encoding: str) -> Any:
    import torch

    from relpos.models import RelposGPT2Config, RelposGPT2ForCausalLM

    torch.manual_seed(0)
    config = RelposGPT2Config(position={"name": encoding}, n_layer=3, n_embd=768, n_head=12)
    return RelposGPT2ForCausalLM(config)


def decoding(encoding: str, length: int) -> Any:
    """Steps of a small GPT-2 after a prompt, which is read again each time and costs about as much as a few steps."""
    import torch

    model, ids = small_gpt2(encoding).eval(), torch.randint(50257, (1, length + STEPS))

    @torch.no_grad()
    def run() -> None:
        cache = model(input_ids=ids[:, :length], logits_to_keep=1).past_key_values
        for step in range(length, length + STEPS):
            model(input_ids=ids[:, step : step + 1], past_key_values=cache)

    return run


def training(length: int) -> Any:
    """One step of a small GPT-2."""
    import torch

    model = small_gpt2("kerple_log").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(50257, (max(1, 1024 // length), length))

    def run() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def start(checkout: Path) -> subprocess.Popen[str]:
    """A process that times with the relpos of a checkout."""
    python = checkout / ".venv" / "bin" / "python"
    return subprocess.Popen(
        [str(python), str(Path(__file__).resolve()), "--work"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=checkout,
    )


def ask(process: subprocess.Popen[str], case: tuple[str, int]) -> float:
    """The seconds of one case in one of the processes, which is stopped before and after."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.send_signal(signal.SIGCONT)
    process.stdin.write(json.dumps(case) + "\n")
    process.stdin.flush()
    seconds = float(process.stdout.readline())
    process.send_signal(signal.SIGSTOP)
    return seconds


def main() -> None:
    if "--work" in sys.argv:
        work()
        return
    parser = option_parser(__doc__, file=False)
    parser.add_argument("other", type=Path, help="a checkout with its environment")
    parser.add_argument("--only", choices=("attention", "train", "decode", "start"))
    parser.add_argument("--encodings", default=",".join(ENCODINGS))
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    processes = [start(Path(__file__).resolve().parent.parent), start(arguments.other.resolve())]
    cases: list[tuple[str, int]] = []
    if arguments.only in (None, "attention"):
        lengths = [int(length) for length in arguments.lengths.split(",")]
        cases += [(name, length) for name in arguments.encodings.split(",") for length in lengths]
    if arguments.only in (None, "train"):
        cases += [(TRAIN, 512), (TRAIN, 1024)]
    if arguments.only in (None, "decode"):
        cases += [(f"{DECODE} {name}", 64) for name in arguments.encodings.split(",")]
    if arguments.only in (None, "start"):
        cases += [(name, 0) for name in STARTS]
    for case in cases:
        best = dict.fromkeys(range(2), math.inf)
        for number in range(arguments.rounds):
            for which in (0, 1) if number % 2 else (1, 0):  # neither is always first
                best[which] = min(best[which], ask(processes[which], case))
        ours, theirs = best[0], best[1]
        print(f"{case[0]:20} {case[1]:6} {ours * 1e3:9.2f} ms {theirs * 1e3:9.2f} ms {ours / theirs:6.2f}", flush=True)
    for process in processes:
        process.kill()


if __name__ == "__main__":
    main()
