"""In deterministic mode on CUDA no running sum is left to PyTorch. There is no GPU here: the choice is made by hand."""

import itertools

import pytest
import torch

import relpos
from relpos.forms.bias import blockwise_running_sum

LENGTH = 150
CASES = [  # the encodings with running sums
    *itertools.product(("cable", "cable_nw", "fire", "forgetting"), ("triton", "native", "chunks", "reference")),
    *itertools.product(("cope", "kcable"), ("chunks", "reference")),
]


@pytest.fixture
def as_on_cuda(monkeypatch):
    """A cumsum of floats is an error."""
    cumsum = torch.Tensor.cumsum

    def integers_only(x, *arguments, **options):
        assert not x.is_floating_point(), "a running sum whose bits may vary"
        return cumsum(x, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "cumsum", integers_only)
    monkeypatch.setattr(torch, "cumsum", integers_only)
    monkeypatch.setattr("relpos.forms.bias.sums_vary", lambda x: True)


def output_and_gradients(name, backend):
    torch.manual_seed(0)
    encoding = relpos.encoding(name, 2, 8)
    q, k, v = torch.randn(3, 1, 2, LENGTH, 8)
    hidden = torch.randn(1, LENGTH, 16)
    out = relpos.attention(q, k, v, encoding, hidden=hidden, backend=backend)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), list(encoding.parameters()))]


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_encodings_with_running_sums_train_without_cumsum(name, backend, request):
    expected = output_and_gradients(name, backend)
    request.getfixturevalue("as_on_cuda")
    for ours, theirs in zip(output_and_gradients(name, backend), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 5000])
def test_running_sums_by_products_are_exact(length):
    x = torch.randint(-9, 9, (2, 3, length)).double()
    assert torch.equal(blockwise_running_sum(x), x.cumsum(-1))
