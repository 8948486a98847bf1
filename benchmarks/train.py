"""How fast is a training step? Ratios in one interleaved run, on the CPU in float32 (`make bench WHAT=train`).

python benchmarks/train.py [--rounds 5] [--only nano] [--smoke]

The same GPT-2, the same step (forward, backward, clipping, AdamW), four attentions:
  relpos   relpos.attention with a learnable Kerple bias
  sdpa     PyTorch's F.scaled_dot_product_attention without any bias
  eager    the Kerple bias materialised, added to the scores, softmax
  hf       transformers' own GPT2LMHeadModel with SDPA (learned positions, its own loss)
Each case has a process of its own. And what the training loop adds to forward, backward, clipping and optimizer: the
rest of a step's wall time.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import transformers
from measure import option_parser
from torch import Tensor
from torch.nn import functional as F

from relpos.forms.encoding import Encoding
from relpos.model_catalogue import preset as preset_of
from relpos.models import RelposGPT2Config, RelposGPT2ForCausalLM, gpt2
from relpos.models import attention as attention_layer
from relpos.runs.settings import OptimizerSettings, load_settings
from relpos.text.tokens import Tokens, Windows
from relpos.training.trainer import Clock, RelposTrainer, parameter_groups

# preset, length, batch, vocabulary, and how many times its tokens/s ours must have: {other: ratio}
CASES = [
    ("small", 512, 2, 50257, {"sdpa": 0.97, "eager": 1.6, "hf": None}),
    ("small", 1024, 1, 50257, {"sdpa": 0.97, "eager": 2.4, "hf": None}),
    ("nano", 512, 8, 4096, {"sdpa": 1.1, "eager": 3.5, "hf": None}),
]
OVERHEAD = 0.03


def sdpa(q: Tensor, k: Tensor, v: Tensor, position: Encoding, **_: object) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def eager(q: Tensor, k: Tensor, v: Tensor, position: Encoding, *, scale: float, **_: object) -> Tensor:
    r1, r2 = position.r1(q.dtype)[:, None, None], position.r2(q.dtype)[:, None, None]  # (heads, 1, 1)
    i = torch.arange(q.shape[2])
    distance = (i[:, None] - i).clamp(min=0)  # (length, length)
    scores = q @ k.transpose(-1, -2) * scale - r1 * torch.log1p(r2 * distance)
    return scores.masked_fill(i[:, None] < i, -torch.inf).softmax(-1) @ v


ATTENTIONS = {"relpos": attention_layer.attention, "sdpa": sdpa, "eager": eager}


@contextmanager
def attention(name: str) -> Iterator[None]:
    attention_layer.attention = ATTENTIONS[name]
    try:
        yield
    finally:
        attention_layer.attention = ATTENTIONS["relpos"]


def stepper(model: torch.nn.Module, tokens: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(parameter_groups(model, OptimizerSettings(lr=1e-4)), fused=True, betas=(0.9, 0.95))

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def check_eager_is_the_same(model: RelposGPT2ForCausalLM, tokens: Tensor) -> None:
    losses = []
    for name in ("relpos", "eager"):
        with attention(name), torch.no_grad():
            losses.append(model(input_ids=tokens, labels=tokens).loss)
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)


def measure(preset: str, length: int, batch: int, vocabulary: int, rounds: int) -> dict[str, float]:
    """Median seconds a step of each, taken in turns."""
    torch.manual_seed(0)
    tokens = torch.randint(0, vocabulary, (batch, length))
    ours = RelposGPT2ForCausalLM(RelposGPT2Config.preset(preset, vocab_size=vocabulary, position="kerple_log")).train()
    config = transformers.GPT2Config(
        **gpt2.FAMILY.sizes(preset_of(preset)), vocab_size=vocabulary, attn_implementation="sdpa"
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.bos_token_id = config.eos_token_id = 0
    theirs = transformers.GPT2LMHeadModel(config).train()
    step_ours, step_theirs = stepper(ours, tokens), stepper(theirs, tokens)  # one model for the three: same everything
    check_eager_is_the_same(ours, tokens)
    times: dict[str, list[float]] = {name: [] for name in (*ATTENTIONS, "hf")}
    for turn in range(rounds + 1):
        for name, taken in times.items():
            with attention(name if name in ATTENTIONS else "relpos"):
                start = time.perf_counter()
                (step_theirs if name == "hf" else step_ours)()
                if turn:  # the first is for warming up
                    taken.append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


class Timed(RelposTrainer):
    """Adds up the time inside forward, backward, clipping and optimizer."""

    inside = 0.0

    def timed(self, function: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.inside += time.perf_counter() - start

        return run

    def _prepare_for_training(self, *args: object, **kwargs: object) -> object:
        found = super()._prepare_for_training(*args, **kwargs)
        self.model.forward = self.timed(self.model.forward)
        self.accelerator.backward = self.timed(self.accelerator.backward)
        self.optimizer.step = self.timed(self.optimizer.step)
        self._clip_grad_norm = self.timed(self._clip_grad_norm)
        return found


def loop_overhead(length: int, batch: int, steps: int) -> float:
    """The share of a training run's time that is not forward, backward, clipping or optimizer."""
    ids = np.random.default_rng(0).integers(0, 4096, size=steps * batch * length + 1).astype(np.uint16)
    windows = Windows(Tokens(ids, np.array([0])), length, multiple=batch)
    model = RelposGPT2ForCausalLM(RelposGPT2Config.preset("nano", vocab_size=4096, position="kerple_log"))
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            optim="adamw_torch_fused",
            logging_steps=10,
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
            remove_unused_columns=False,
        )
        settings = load_settings(None, {"optimizer.lr": 1e-3, "optimizer.warmup_steps": 1, "run.steps": steps})
        trainer = Timed(model=model, args=arguments, train_dataset=windows, settings=settings, clock=Clock(None))
        trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
        whole = trainer.train().metrics["train_runtime"]
        assert not list(Path(folder).glob("checkpoint-*"))
    return 1 - trainer.inside / whole


def main() -> None:
    parser = option_parser(__doc__, file=False)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="one preset")
    parser.add_argument("--smoke", action="store_true", help="tiny lengths: whether it runs, not how fast")
    given = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, float32, median of {given.rounds} steps taken in turns\n")
    print(f"{'':20} {'against':8} {'ours':>12} {'theirs':>12}   {'ratio':>6}  wanted")
    for preset, length, batch, vocabulary, wanted in CASES:
        if given.only not in (None, preset) or (given.smoke and preset != "nano"):
            continue
        tokens = 32 if given.smoke else length
        with multiprocessing.get_context("spawn").Pool(
            1
        ) as own:  # memory that other cases have left behind changes times
            seconds = own.apply(measure, (preset, tokens, batch, vocabulary, 1 if given.smoke else given.rounds))
        speed = {name: batch * tokens / taken for name, taken in seconds.items()}
        for other, least in wanted.items():
            ratio = speed["relpos"] / speed[other]
            verdict = "" if least is None or given.smoke else f"≥ {least}  {'yes' if ratio >= least else 'NO'}"
            title = f"{preset}, T = {tokens}"
            print(
                f"{title:20} {other:8} {speed['relpos']:8,.0f} t/s {speed[other]:8,.0f} t/s   {ratio:6.2f}  {verdict}",
                flush=True,
            )
    share = loop_overhead(32 if given.smoke else 512, 8, 3 if given.smoke else 30)
    print(f"\nthe loop beside forward, backward, clipping, optimizer: {share:.1%}  (wanted ≤ {OVERHEAD:.0%})")


if __name__ == "__main__":
    main()
