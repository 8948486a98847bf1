"""Attention inside torch.func's transforms, forward-mode differentiation, compiled graphs, and without values."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jvp, vmap

import relpos

pytestmark = pytest.mark.heavy

NAMES = relpos.names()


class Layer(torch.nn.Module):
    """Attention with an encoding, as a function of q alone."""

    def __init__(self, name: str, length: int = 6) -> None:
        super().__init__()
        self.position = relpos.encoding(name, heads=2, head_dim=8)
        self.k, self.v = torch.randn(2, 1, 2, length, 8)
        self.hidden = torch.randn(1, length, 16)

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return relpos.attention(q, self.k, self.v, self.position, hidden=self.hidden)


def gradient_of_sum(layer: Layer, q: torch.Tensor) -> torch.Tensor:
    """By plain reverse mode, which the contracts hold to the reference."""
    leaf = q.clone().requires_grad_()
    layer(leaf).sin().sum().backward()
    return leaf.grad


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_is_the_derivative(name):
    layer, (q, direction) = Layer(name), torch.randn(2, 1, 2, 6, 8)
    expected = (gradient_of_sum(layer, q) * direction).sum()
    tangent = jvp(lambda q: layer(q).sin().sum(), (q,), (direction,))[1]
    torch.testing.assert_close(tangent, expected, rtol=1e-4, atol=1e-5)
    with forward_ad.dual_level():
        out = layer(forward_ad.make_dual(q, direction)).sin().sum()
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["alibi", "fire", "cable", "cope"])
def test_gradients_of_each_sample_and_jacobians(name):
    layer, q = Layer(name), torch.randn(3, 2, 6, 8)
    each = vmap(grad(lambda q: layer(q[None]).sin().sum()))(q)
    for ours, one in zip(each, q, strict=True):
        torch.testing.assert_close(ours, gradient_of_sum(layer, one[None])[0], rtol=1e-4, atol=1e-5)
    forward = jacfwd(lambda q: layer(q[None]).sin().sum())(q[0])
    torch.testing.assert_close(forward, each[0], rtol=1e-4, atol=1e-5)


def test_gradients_of_parameters_by_functional_call():
    layer, q = Layer("kerple_log"), torch.randn(1, 2, 6, 8)
    parameters = dict(layer.named_parameters())
    ours = grad(lambda p: functional_call(layer, p, (q,)).sin().sum())(parameters)
    layer(q).sin().sum().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-5)


def test_packed_documents_inside_a_transform():
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    documents = torch.tensor([[0, 0, 1, 1, 1, 1]])
    position = relpos.encoding("alibi", heads=2, head_dim=8)

    def loss(q: torch.Tensor) -> torch.Tensor:
        return relpos.attention(q, k, v, position, documents=documents).sin().sum()

    leaf = q.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(grad(loss)(q), leaf.grad, rtol=1e-4, atol=1e-5)


def test_asking_for_the_kernel_inside_a_transform_is_refused():
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    with pytest.raises(ValueError, match=r"native.*reverse-mode gradients only.*leave backend= out"):
        jvp(lambda q: relpos.attention(q, k, v, backend="native"), (q,), (q,))


def test_second_derivatives_of_the_kernel_are_refused_and_the_reference_has_them():
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    q.requires_grad_()

    def first(backend: str | None) -> torch.Tensor:
        out = relpos.attention(q, k, v, backend=backend).sin().sum()
        return torch.autograd.grad(out, q, create_graph=True)[0]

    with pytest.raises(RuntimeError, match=r"first derivatives only: .* backend='reference'"):
        torch.autograd.grad(first(None).square().sum(), q)
    second = torch.autograd.grad(first("reference").square().sum(), q)[0]
    step = 1e-3 * torch.randn_like(q)
    with torch.no_grad():
        q += step
    above = first("reference").square().sum()
    with torch.no_grad():
        q -= 2 * step
    below = first("reference").square().sum()
    torch.testing.assert_close((second * step).sum() * 2, above - below, rtol=1e-2, atol=1e-5)


# -- Compiled in one graph, and traced without values

EACH = [*((name, {}) for name in NAMES), ("sum", {"parts": ["rope", "cable"]})]


QUICK = ("alibi", "rope", "cable", "fire", "cope", "dape", "forgetting", "sum", "t5", "ssmax")  # one of each kind


@pytest.mark.parametrize(
    ("name", "options", "backend"),
    [
        *(
            pytest.param(n, o, "aot_eager", id=f"{n}{len(o) or ''}", marks=[] if n in QUICK else pytest.mark.slow)
            for n, o in EACH
        ),
        pytest.param("kerple_log", {}, "inductor", marks=pytest.mark.slow),
    ],
)
def test_every_encoding_compiles_in_one_graph(name, options, backend):
    position = relpos.encoding(name, heads=2, head_dim=8, **options)
    hidden = torch.randn(1, 20, 16)
    q, k, v = (torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3))

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return relpos.attention(q, k, v, position, hidden=hidden)

    torch.compiler.reset()
    leaves = (q, k, v, *position.parameters())
    plain, compiled = (
        torch.autograd.grad(f(q, k, v).sin().sum(), leaves, allow_unused=True)
        for f in (run, torch.compile(run, fullgraph=True, backend=backend))
    )
    for ours, expected in zip(compiled, plain, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_it_exports():
    layer, q = Layer("kerple_log"), torch.randn(1, 2, 6, 8)
    torch.testing.assert_close(torch.export.export(layer, (q,)).module()(q), layer(q))


@pytest.mark.parametrize("name", NAMES)
def test_meta_tensors_give_shapes(name):
    with torch.device("meta"):
        position = relpos.encoding(name, heads=4, head_dim=8)
        q, k, v, hidden = torch.empty(2, 4, 5, 8), *torch.empty(2, 2, 2, 9, 8), torch.empty(2, 9, 32)
        documents, padding = torch.zeros(2, 9, dtype=torch.long), torch.ones(2, 9, dtype=torch.bool)
    out = relpos.attention(q, k, v, position, hidden=hidden, documents=documents, padding=padding)
    assert out.shape == (2, 4, 5, 8)
    assert out.device.type == "meta"
