"""What `relpos evaluate` costs: GPT-2 Small, 50,257 entries, Kerple, random weights (the same arithmetic), on the CPU.

python benchmarks/evaluate.py [--rounds 3] [--smoke]

1. Time and peak memory of one window of 16,384 tokens, in a process of its own.
2. The same evaluation at 4,096 with the bias materialised (eager), as a ratio: in one process, taken in turns. And the
   peak memory of each, in a process of its own.
Every evaluation is new: nothing is taken from an earlier one.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from measure import option_parser
from train import ATTENTIONS, attention

from relpos.evaluation.evaluation import evaluate
from relpos.models import RelposGPT2Config, RelposGPT2ForCausalLM
from relpos.runs.run import Run
from relpos.text.tokenizers import gpt2_tokenizer

LONG, COMPARED = 16384, 4096
LIMIT = 4e9  # bytes at 16,384


def make_run(preset: str) -> Run:
    torch.manual_seed(0)
    config = RelposGPT2Config.preset(preset, vocab_size=50257, position="kerple_log")
    model = RelposGPT2ForCausalLM(config).eval()
    return Run(Path("nowhere"), model, gpt2_tokenizer(), None, {}, {})


def measure(run: Run, length: int, name: str) -> dict[str, float]:
    """The row of one window of held-out text."""
    with attention(name), tempfile.TemporaryDirectory() as folder:
        row: dict[str, float] = evaluate(run, [length], eval_tokens=1, out=Path(folder), say=str)["rows"][0]
    assert row["error"] is None, row["error"]
    return row


def measure_alone(preset: str, length: int, name: str) -> dict[str, float]:
    """The same in a process of its own, where the peak of memory is nobody else's."""
    command = [sys.executable, __file__, "--alone", preset, str(length), name]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def ratio(preset: str, length: int, rounds: int) -> dict[str, float]:
    """Median seconds of ours and of eager, taken in turns; both give the same loss."""
    run = make_run(preset)
    times: dict[str, list[float]] = {"relpos": [], "eager": []}
    losses = {}
    for turn in range(rounds + 1):
        for name, taken in times.items():
            row = measure(run, length, name)
            losses[name] = row["loss"]
            if turn:  # the first is for warming up
                taken.append(row["seconds"])
    assert abs(losses["relpos"] - losses["eager"]) < 1e-4, losses
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    parser = option_parser(__doc__, file=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="nano and tiny lengths: whether it runs, not how fast")
    parser.add_argument("--alone", nargs=3, metavar=("PRESET", "LENGTH", "ATTENTION"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        preset, length, name = given.alone
        assert name in ATTENTIONS
        print(json.dumps(measure(make_run(preset), int(length), name)))
        return
    preset, long, compared = ("nano", 512, 128) if given.smoke else ("small", LONG, COMPARED)
    print(f"{preset}, kerple_log, {torch.get_num_threads()} threads, float32\n")
    row = measure_alone(preset, long, "relpos")
    verdict = "" if given.smoke else f"  (wanted < {LIMIT / 1e9:.0f} GB: {row['peak_memory_bytes'] < LIMIT})"
    print(
        f"T = {long}: {row['seconds']:.1f} s, {row['tokens_per_second']:,.0f} tokens/s, "
        f"peak {row['peak_memory_bytes'] / 1e9:.2f} GB{verdict}"
    )
    seconds = ratio(preset, compared, 1 if given.smoke else given.rounds)
    peaks = {name: measure_alone(preset, compared, name)["peak_memory_bytes"] / 1e9 for name in seconds}
    for name, taken in seconds.items():
        print(f"T = {compared}, {name:6}: {taken:.2f} s, {compared / taken:,.0f} tokens/s, peak {peaks[name]:.2f} GB")
    print(f"T = {compared}: ours takes {seconds['relpos'] / seconds['eager']:.2f} of eager's time")


if __name__ == "__main__":
    main()
