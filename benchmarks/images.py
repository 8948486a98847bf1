"""What Swin's and BEiT's tables of 2-D offsets cost on relpos: the bias that their own code materialises, and memory.

    python benchmarks/images.py

Models of the published sizes (Swin-T with windows of 7 × 7, BEiT-base with 14 × 14 patches and a class token) with
random weights, on one image of 224 × 224. "Bias" is the largest bias that reaches attention in one layer; "forward" is
the peak of memory of one forward beyond what stood before, on relpos and on "eager". Writes
benchmarks/results/images.{json,md}.
"""

import argparse
import ctypes
import gc
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from attention import RESULTS, _memory
from transformers import BeitConfig, BeitModel, PreTrainedModel, SwinConfig, SwinModel

import relpos
from relpos.attend.arguments import make_call
from relpos.forms.bias import terms
from relpos.pretrained.attention_interface import captured_calls

MODELS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "Swin-T": (SwinModel, SwinConfig()),
    "BEiT-base": (BeitModel, BeitConfig(use_relative_position_bias=True)),
}


def forward(model: PreTrainedModel) -> float:
    """Peak of one forward in MB."""
    image = torch.randn(1, 3, 224, 224)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    with torch.no_grad():
        model(pixel_values=image)
    return (_memory("VmHWM") - before) / 1e6


def biases(model: PreTrainedModel) -> list[float]:
    """MB of the bias that reaches attention in each layer."""
    sizes = []

    def listen(module: Any, q: torch.Tensor, k: torch.Tensor, position: Any, arguments: dict[str, Any]) -> None:
        form = position.bias(make_call(q, k, position, **arguments))
        sizes.append(sum(x.nbytes for part in terms(form) for _, x in part.tensors()) / 1e6)

    with captured_calls(model, listen), torch.no_grad():
        model(pixel_values=torch.randn(1, 3, 224, 224))
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-file", action="store_true", help="print only")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name, (kind, config) in MODELS.items():
        torch.manual_seed(0)
        model = kind._from_config(config, attn_implementation="eager").eval()
        forward(model)  # the first one also loads what PyTorch needs
        eager = forward(model)
        relpos.use(model)
        forward(model)
        ours = forward(model)
        sizes = biases(model)
        rows.append({"model": name, "bias, MB": max(sizes), "relpos, MB": ours, "eager, MB": eager, "layers": sizes})
        print(json.dumps(rows[-1]), flush=True)
    if arguments.no_file:
        return
    (RESULTS / "images.json").write_text(json.dumps(rows, indent=1))
    lines = [
        "Made by `benchmarks/images.py`, which says what the columns mean.",
        "",
        "| model | bias, MB | forward on relpos, MB | eager, MB |",
        "|---|---:|---:|---:|",
        *(f"| {r['model']} | {r['bias, MB']:.1f} | {r['relpos, MB']:.0f} | {r['eager, MB']:.0f} |" for r in rows),
    ]
    (RESULTS / "images.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
