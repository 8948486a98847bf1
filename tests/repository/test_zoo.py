"""The trained models in zoo/: small, opened without training, and as good as their cards say."""

import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.nn import functional as F

from relpos.runs.run import open_run

ZOO = Path(__file__).parents[2] / "zoo"
MODELS = sorted(file.parent for file in ZOO.glob("*/model.safetensors"))


def test_the_zoo_is_small_and_outside_the_package():
    sizes = [sum(file.stat().st_size for file in folder.rglob("*")) for folder in MODELS]
    assert 1 <= len(MODELS) <= 6
    assert max(sizes) < 5 * 2**20
    assert sum(sizes) < 40 * 2**20
    assert '"/zoo"' in (ZOO.parent / "pyproject.toml").read_text()


@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)
def test_a_model_opens_with_the_perplexity_of_its_card(folder):
    """The first of the windows that the card scores, by PyTorch: its loss lies near the mean of all."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}  # noqa: SIM118
    run = open_run(folder)
    assert run.encoding == folder.name
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
    ids = torch.from_numpy(run.heldout().ids[: 4 * run.trained_length].astype("int64")).view(4, -1)
    with torch.no_grad():
        loss = F.cross_entropy(run.model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()
    card = (folder / "README.md").read_text()
    row = re.search(rf"\| {run.trained_length} \(trained\) \| [0-9.]+ \| ([0-9.]+) – ([0-9.]+) \|", card)
    assert 0.7 * float(row[1]) < torch.tensor(loss).exp() < 1.3 * float(row[2])
    assert torch.tensor(loss).exp() < 40  # 1,024 for a model that has learned nothing
