"""What Swin's and BEiT's tables of 2-D offsets cost on relpos: the bias that their own code materialises, and memory.

    python benchmarks/images.py

Models of the published sizes (Swin-T with windows of 7 × 7, BEiT-base with 14 × 14 patches and a class token) with
random weights, on one image of 224 × 224. "Bias" is the largest bias that reaches attention in one layer; "forward" is
the peak of memory of one forward beyond what stood before, on relpos and on "eager". Writes
benchmarks/results/images.{json,md}.
"""

import json
import warnings
from typing import Any

import torch
from measure import option_parser, peak_bytes, table, write
from transformers import BeitConfig, BeitModel, PreTrainedModel, SwinConfig, SwinModel

import relpos
from relpos.attend.arguments import make_call
from relpos.forms.bias import terms
from relpos.models.attention_interface import captured_calls

MODELS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "Swin-T": (SwinModel, SwinConfig()),
    "BEiT-base": (BeitModel, BeitConfig(use_relative_position_bias=True)),
}


def forward(model: PreTrainedModel) -> float:
    """Peak of one forward in MB."""
    image = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        return peak_bytes(lambda: model(pixel_values=image)) / 1e6


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
    arguments = option_parser(__doc__).parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name, (kind, config) in MODELS.items():
        torch.manual_seed(0)
        model = kind._from_config(config, attn_implementation="eager").eval()
        for key, parameter in model.named_parameters():
            if key.endswith("relative_position_bias_table"):
                torch.nn.init.normal_(parameter)  # of zeros, nothing would reach attention
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
    header = ("model", "bias, MB", "forward on relpos, MB", "eager, MB")
    lines = [
        [row["model"], f"{row['bias, MB']:.1f}", f"{row['relpos, MB']:.0f}", f"{row['eager, MB']:.0f}"] for row in rows
    ]
    write("images", rows, "Made by `benchmarks/images.py`, which says what the columns mean.", table(header, lines))


if __name__ == "__main__":
    main()
