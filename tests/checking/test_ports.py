"""Two ports of one model: mistakes of a newcomer are found and named, and what only looks different is not."""

import pytest
import torch
from llama_port import MISTAKES, LlamaPort
from small_models import small_model

import relpos
from relpos.checking.report import FAILED, NOT_TESTED, PASSED


def status(report):
    return {finding.test: finding.status for finding in report.findings}


def test_a_port_without_a_mistake_is_the_same():
    model = small_model("llama")
    report = relpos.check(LlamaPort(model), against=model)
    assert not report.failed, report.summary
    assert status(report)["ports"] == PASSED


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake):
    model = small_model("llama")
    report = relpos.check(LlamaPort(model, mistake), against=model)
    assert report.faults[0] == MISTAKES[mistake], [(f.test, f.words, f.begins) for f in report.findings]
    where = next(finding for finding in report.findings if finding.test == "ports")
    assert where.status == FAILED
    nearest = 0 if mistake.startswith("keys") else 1  # a query meets its own key at another angle
    assert where.begins.startswith(f"layer 1, head 1, distance {nearest}")


def test_permuted_weights_with_the_other_layout_are_the_same_model():
    model = small_model("llama")
    port = LlamaPort(model, "neighbouring pairs")
    order = torch.arange(8).view(2, 4).T.flatten()  # the two halves become neighbours
    for layer in port.layers:
        for projection in (layer.q_proj, layer.k_proj):
            weight = projection.weight.data.view(-1, 8, projection.weight.shape[1])
            projection.weight.data = weight[:, order].flatten(0, 1)
    report = relpos.check(port, against=model)
    assert not report.failed, report.summary
    assert status(report)["ports"] == PASSED


def test_other_weights_are_no_fault_of_positions():
    model = small_model("llama")
    port = LlamaPort(model)
    port.layers[0].q_proj.weight.data *= 1.1
    report = relpos.check(port, against=model)
    assert report.faults == []
    assert "before any position acts" in report.findings[0].diagnosis


def test_another_model_cannot_be_compared():
    report = relpos.check(small_model("llama"), against=small_model("llama", vocab_size=80))
    assert status(report)["ports"] == NOT_TESTED
