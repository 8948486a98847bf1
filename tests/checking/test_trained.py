"""Whether weights were trained with the positions that run: a small model is trained, and then converted wrongly."""

import pytest
import torch
from small_models import saved, small_model
from torch.nn import functional as F

import relpos
from relpos.checking.report import FAILED, PASSED
from relpos.checking.subject import ModelSubject
from relpos.checking.trained import Text, trained

pytestmark = pytest.mark.heavy
LENGTH = 48


def texts(rows, seed):
    """Each token repeats the one 3 places before it, with some noise: a task that needs positions."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 60, (rows, LENGTH), generator=generator)
    for place in range(3, LENGTH):
        ids[:, place] = ids[:, place - 3]
    noise = torch.rand(ids.shape, generator=generator) < 0.05
    return torch.where(noise, torch.randint(4, 60, ids.shape, generator=generator), ids)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = small_model("llama", hidden_size=64, head_dim=16, intermediate_size=96)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(400):
        ids = texts(16, step)
        logits = model(ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def outcome_of(model):
    subject = ModelSubject(model)
    subject.text = Text(texts(8, 10_000))
    with subject.prepared():
        return trained(subject)


def test_a_model_as_it_was_trained_has_no_better_variant(model):
    outcome = outcome_of(model)
    assert not outcome.wrong, outcome.words
    losses = {words: gap for words, _, gap, _ in outcome.evidence["losses"]}
    assert len(losses) >= 7
    assert losses["the pairs of dimensions that are turned together are those of the other layout"] > 0.1


def test_weights_of_the_other_layout_are_noticed(model):
    order = torch.arange(16).view(2, 8).T.flatten()  # the two halves become neighbours, as the conversion forgot
    kept = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                weight = projection.weight.view(-1, 16, projection.weight.shape[1])
                projection.weight.copy_(weight[:, order].flatten(0, 1))
    try:
        outcome = outcome_of(model)
    finally:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(kept[name])
    assert outcome.wrong
    assert "the other layout" in outcome.words


def test_the_command_measures_on_text(tmp_path):
    folder = saved(small_model("llama"), tmp_path / "model")
    words = [" ".join(f"w{(7 * i + j * j) % 50 + 5:02}" for j in range(80)) for i in range(6)]
    (tmp_path / "text").mkdir()
    for number, text in enumerate(words):
        (tmp_path / "text" / f"{number}.txt").write_text(text)
    report = relpos.check(folder, only=["trained"], data=str(tmp_path / "text"))
    assert report.findings[0].status in (PASSED, FAILED), report.findings[0].words
    assert len(report.findings[0].losses) >= 7


def test_the_loss_by_position_is_one_line(tmp_path):
    folder = saved(small_model("qwen3", max_position_embeddings=32), tmp_path / "model")
    (tmp_path / "text").mkdir()
    for number in range(12):
        words = " ".join(f"w{(7 * number + j * j) % 50 + 5:02}" for j in range(200))
        (tmp_path / "text" / f"{number}.txt").write_text(words)
    report = relpos.check(folder, only=["lengths"], data=str(tmp_path / "text"))
    assert [finding.status for finding in report.findings] == [PASSED], report.findings
    assert "64 tokens" in report.findings[0].words or "beyond the trained 32" in report.findings[0].words
