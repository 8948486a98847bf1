"""Decoding: one step of attention against PyTorch's own, and `generate` of GPT-2 Small against transformers' own.

    python benchmarks/decode.py                                  everything, about 110 minutes on 2 cores
    python benchmarks/decode.py --only steps --keys 1024,4096
    python benchmarks/decode.py --only generate --prompts 512 --batches 1 --new 32 --encodings alibi,rope --rounds 3

A step is one token of a layer with 12 heads, head_dim 64, float32, batch 1: `relpos.attention` with a `relpos.Cache`
(checks, the encoding's gates and rotation, and adding the token to the cache included), as a ratio to
F.scaled_dot_product_attention of the same query over as many keys, which it does not have to add to anything. Both are
interleaved, best of many. `generate` is greedy, without a stop token, in turns; the table holds medians of tokens per
second, the prompt included. Writes benchmarks/results/decode.{json,md}; rows of an earlier run on the same
machine that are not measured again stay.
"""

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from attention import HEAD_DIM, HEADS, RESULTS, WIDTH, cpu, merged
from torch.nn import functional as F

import relpos
from relpos.attend import native

ENCODINGS = ("nope", "alibi", "kerple_log", "t5", "fire", "cable", "rope")
SDPA, TRANSFORMERS = "SDPA, no bias", "transformers' GPT-2, SDPA"


def stepper(name: str, keys: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """A decoding step that ends with `keys` tokens, and what takes its token away again."""
    torch.manual_seed(1)
    position = relpos.encoding(name, HEADS, HEAD_DIM, **({"length": keys} if name == "fire" else {}))
    cache = relpos.Cache()

    def attend(tokens: int) -> torch.Tensor:
        q, k, v = (torch.randn(1, HEADS, tokens, HEAD_DIM) for _ in range(3))
        return relpos.attention(q, k, v, position, hidden=torch.randn(1, tokens, WIDTH), cache=cache)

    attend(keys - 2)
    attend(1)
    q, k, v = (torch.randn(1, HEADS, 1, HEAD_DIM) for _ in range(3))
    hidden = torch.randn(1, 1, WIDTH)
    return (
        lambda: relpos.attention(q, k, v, position, hidden=hidden, cache=cache),
        lambda: cache.crop(keys - 1),
    )


def time_steps(keys: int, encodings: list[str], rounds: int) -> dict[str, float]:
    """Best seconds of a step by each encoding and by PyTorch."""
    q, k, v = torch.randn(1, HEADS, 1, HEAD_DIM), *(torch.randn(1, HEADS, keys, HEAD_DIM) for _ in range(2))
    runs = {SDPA: (lambda: F.scaled_dot_product_attention(q, k, v), lambda: None)}
    runs |= {name: stepper(name, keys) for name in encodings}
    best = dict.fromkeys(runs, math.inf)
    for _ in range(rounds):
        for name, (run, undo) in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
            undo()
    return best


def gpt2(name: str | None, length: int) -> Any:
    """GPT-2 Small: transformers' own with SDPA (None), or ours with an encoding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from relpos.models.gpt2 import RelposGPT2Config, RelposGPT2ForCausalLM

    torch.manual_seed(0)
    if name is None:
        config = GPT2Config(n_positions=length, attn_implementation="sdpa")
        return GPT2LMHeadModel(config).eval()
    return RelposGPT2ForCausalLM(RelposGPT2Config(position={"name": name})).eval()


def time_generate(prompt: int, batch: int, new: int, encodings: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of `generate`, one per round."""
    tokens = torch.randint(50257, (batch, prompt), generator=torch.Generator().manual_seed(0))
    models = {TRANSFORMERS: gpt2(None, prompt + new)} | {name: gpt2(name, prompt + new) for name in encodings}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds):
        names = list(models)
        for name in names[number % len(names) :] + names[: number % len(names)]:  # nobody is always first
            gc.collect()
            start = time.perf_counter()
            models[name].generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )
            seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("steps", "generate"))
    parser.add_argument("--encodings", default=",".join(ENCODINGS))
    parser.add_argument("--keys", default="1024,4096,16384")
    parser.add_argument("--steps", type=int, default=400, help="rounds of single steps; a quarter beyond 4096 keys")
    parser.add_argument("--prompts", default="512,4096")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3, help="of generate")
    parser.add_argument("--no-file", action="store_true", help="print only")
    arguments = parser.parse_args()
    encodings = arguments.encodings.split(",")
    torch.set_grad_enabled(False)
    steps, generate = [], []
    if arguments.only != "generate":
        for keys in map(int, arguments.keys.split(",")):
            best = time_steps(keys, encodings, arguments.steps if keys <= 4096 else max(1, arguments.steps // 4))
            for name, seconds in best.items():
                steps.append({"keys": keys, "what": name, "seconds": seconds, "ratio": seconds / best[SDPA]})
                print(f"{keys:6} keys  {name:16} {seconds * 1e6:9.0f} µs {seconds / best[SDPA]:6.2f}", flush=True)
    if arguments.only != "steps":
        for prompt in map(int, arguments.prompts.split(",")):
            for batch in map(int, arguments.batches.split(",")):
                times = time_generate(prompt, batch, arguments.new, encodings, arguments.rounds)
                for name, seconds in times.items():
                    rate = batch * arguments.new / statistics.median(seconds)
                    ratio = statistics.median(times[TRANSFORMERS]) / statistics.median(seconds)
                    row = {"prompt": prompt, "batch": batch, "new": arguments.new, "what": name}
                    generate.append(row | {"seconds": seconds, "tokens per second": rate, "ratio": ratio})
                    size = f"{prompt:5} + {arguments.new} × {batch}"
                    print(f"{size}  {name:26} {rate:7.1f} tokens/s {ratio:6.2f}", flush=True)
    machine = {"cpu": cpu(), "instruction set": native.isa(), "threads": torch.get_num_threads()}
    machine["torch"] = torch.__version__
    if not arguments.no_file:
        RESULTS.mkdir(exist_ok=True)
        file = RESULTS / "decode.json"
        before = json.loads(file.read_text()) if file.exists() else {}
        if before.get("machine") == machine:
            steps = merged(before["steps"], steps, ("keys", "what"))
            generate = merged(before["generate"], generate, ("prompt", "batch", "what"))
        file.write_text(json.dumps({"machine": machine, "steps": steps, "generate": generate}, indent=1))
        (RESULTS / "decode.md").write_text(report(machine, steps, generate))


def report(machine: dict, steps: list[dict], generate: list[dict]) -> str:
    """Both tables as Markdown."""
    line = ", ".join(f"{key}: {value}" for key, value in machine.items())
    lines = [f"Made by `benchmarks/decode.py` ({line}).", ""]
    if steps:
        sizes = sorted({row["keys"] for row in steps})
        title = " | ".join(map(str, sizes))
        lines += [f"| one decoding step: time, SDPA = 1 | {title} |", "|---" * (len(sizes) + 1) + "|"]
        for name in dict.fromkeys(row["what"] for row in steps):
            cells = {row["keys"]: row for row in steps if row["what"] == name}
            numbers = (f"{cells[n]['ratio']:.2f} ({cells[n]['seconds'] * 1e6:.0f} µs)" for n in sizes)
            lines.append(f"| {name} | {' | '.join(numbers)} |")
        lines.append("")
    if generate:
        sizes = sorted({(row["prompt"], row["batch"]) for row in generate})
        rounds = {(row["prompt"], row["batch"]): len(row["seconds"]) for row in generate}
        title = " | ".join(f"prompt {size[0]}, batch {size[1]}, median of {rounds[size]}" for size in sizes)
        lines += [f"| `generate`: tokens/s (transformers = 1) | {title} |", "|---" * (len(sizes) + 1) + "|"]
        for name in dict.fromkeys(row["what"] for row in generate):
            cells = {(row["prompt"], row["batch"]): row for row in generate if row["what"] == name}
            numbers = (f"{cells[n]['tokens per second']:.1f} ({cells[n]['ratio']:.2f})" for n in sizes)
            lines.append(f"| {name} | {' | '.join(numbers)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
