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

import gc
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from attention import HEAD_DIM, HEADS, WIDTH
from measure import best_seconds, by_size, machine, made_by, merged, option_parser, read, seconds, write
from torch.nn import functional as F

import relpos

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
    return best_seconds({name: run for name, (run, _) in runs.items()}, rounds, after=lambda name: runs[name][1]())


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
    taken: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds):
        names = list(models)
        for name in names[number % len(names) :] + names[: number % len(names)]:  # nobody is always first
            gc.collect()
            more = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
            run = partial(models[name].generate, tokens, attention_mask=torch.ones_like(tokens), **more)
            taken[name].append(seconds(run))
    return taken


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--only", choices=("steps", "generate"))
    parser.add_argument("--encodings", default=",".join(ENCODINGS))
    parser.add_argument("--keys", default="1024,4096,16384")
    parser.add_argument("--steps", type=int, default=400, help="rounds of single steps; a quarter beyond 4096 keys")
    parser.add_argument("--prompts", default="512,4096")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3, help="of generate")
    arguments = parser.parse_args()
    encodings = arguments.encodings.split(",")
    torch.set_grad_enabled(False)
    steps, generate = [], []
    if arguments.only != "generate":
        for keys in map(int, arguments.keys.split(",")):
            best = time_steps(keys, encodings, arguments.steps if keys <= 4096 else max(1, arguments.steps // 4))
            for name, step in best.items():
                steps.append({"keys": keys, "what": name, "seconds": step, "ratio": step / best[SDPA]})
                print(f"{keys:6} keys  {name:16} {step * 1e6:9.0f} µs {step / best[SDPA]:6.2f}", flush=True)
    if arguments.only != "steps":
        for prompt in map(int, arguments.prompts.split(",")):
            for batch in map(int, arguments.batches.split(",")):
                times = time_generate(prompt, batch, arguments.new, encodings, arguments.rounds)
                for name, rounds in times.items():
                    rate = batch * arguments.new / statistics.median(rounds)
                    ratio = statistics.median(times[TRANSFORMERS]) / statistics.median(rounds)
                    row = {"prompt": prompt, "batch": batch, "new": arguments.new, "what": name}
                    generate.append(row | {"seconds": rounds, "tokens per second": rate, "ratio": ratio})
                    size = f"{prompt:5} + {arguments.new} × {batch}"
                    print(f"{size}  {name:26} {rate:7.1f} tokens/s {ratio:6.2f}", flush=True)
    if not arguments.no_file:
        facts, before = machine(), read("decode") or {}
        if before.get("machine") == facts:
            steps = merged(before["steps"], steps, ("keys", "what"))
            generate = merged(before["generate"], generate, ("prompt", "batch", "what"))
        numbers = {"machine": facts, "steps": steps, "generate": generate}
        write("decode", numbers, made_by("decode", facts), *report(steps, generate))


def report(steps: list[dict], generate: list[dict]) -> Iterator[str]:
    """Both tables as Markdown."""
    if steps:
        title = "one decoding step: time, SDPA = 1"
        yield by_size(title, steps, "keys", lambda row: f"{row['ratio']:.2f} ({row['seconds'] * 1e6:.0f} µs)")
    if generate:
        rounds = {(row["prompt"], row["batch"]): len(row["seconds"]) for row in generate}
        yield by_size(
            "`generate`: tokens/s (transformers = 1)",
            generate,
            ("prompt", "batch"),
            lambda row: f"{row['tokens per second']:.1f} ({row['ratio']:.2f})",
            lambda size: f"prompt {size[0]}, batch {size[1]}, median of {rounds[size]}",
        )


if __name__ == "__main__":
    main()
