"""Figure 3 of the CABLE paper: tokens per second and memory of every encoding, at the paper's sizes, on this machine.

Training is a step of AdamW on windows of the trained length. Generation is the authors' own measurement: four sequences
from a short prompt up to 512 tokens, without a cache.
"""

import time
from collections.abc import Sequence
from typing import Any, TypedDict

import torch

from relpos.model_catalogue import preset
from relpos.models.family import get_family
from relpos.paper.catalogue import Cell
from relpos.runs.settings import load_settings
from relpos.system.memory import begin_peak, peak
from relpos.training.trainer import parameter_groups

PROMPT, SEQUENCES, GENERATED = 7, 4, 512  # tokens of "Hello, I'm a language model,", and what is made from them
ROUNDS = 3
VOCABULARY = 50304


class Speed(TypedDict):
    """The speed of one encoding."""

    row: str
    encoding: str
    training_tokens_per_second: float
    training_bytes: int  # at most at a time: of tensors on a GPU, of the process on a CPU
    generated_tokens_per_second: float
    generation_bytes: int


def measure(cell: Cell, length: int, batch: int, generated: int = GENERATED, rounds: int = ROUNDS) -> Speed:
    """Measure one row: the best of some steps, and one generation."""
    settings = load_settings(None, {**cell.settings, "data.length": length, "run.out": "unused"})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    family, size = get_family("gpt2"), preset(str(settings.model.preset))
    torch.manual_seed(0)
    config = family.config(size, settings.model.position(), vocab_size=VOCABULARY)
    model: Any = family.model_class(config).to(device)
    tokens = torch.randint(0, 50257, (batch, length), device=device)
    optimizer = torch.optim.AdamW(parameter_groups(model, settings.optimizer))
    begin_peak(device)
    seconds = min(_step(model, optimizer, tokens, device) for _ in range(rounds + 1))
    trained = peak(device)
    optimizer.zero_grad(set_to_none=True)
    model.eval()
    begin_peak(device)
    began = time.perf_counter()
    _generate(model, tokens[:1, :PROMPT].repeat(SEQUENCES, 1), generated)
    taken = time.perf_counter() - began
    return {
        "row": cell.row,
        "encoding": str(settings.model.encoding),
        "training_tokens_per_second": batch * length / seconds,
        "training_bytes": trained,
        "generated_tokens_per_second": SEQUENCES * (generated - PROMPT) / taken,
        "generation_bytes": peak(device),
    }


def _step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, device: torch.device) -> float:
    began = time.perf_counter()
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


@torch.inference_mode()
def _generate(model: Any, tokens: torch.Tensor, length: int) -> torch.Tensor:
    """Draw from the 50 likeliest tokens until there are `length`; the whole sequence is read for every token."""
    while tokens.shape[1] < length:
        likeliest, ids = model(input_ids=tokens).logits[:, -1].softmax(-1).topk(50)
        tokens = torch.cat([tokens, ids.gather(-1, torch.multinomial(likeliest, 1))], dim=1)
    return tokens


def measure_all(cells: Sequence[Cell], length: int, batch: int, **more: int) -> list[Speed]:
    """Measure all rows, one after the other."""
    return [measure(cell, length, batch, **more) for cell in cells]
