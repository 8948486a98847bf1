"""A bias of one's own as a form, without a class: `relpos.attention(q, k, v, relpos.Toeplitz(table))`."""

import inspect
import re

import pytest
import torch

import relpos
from relpos.attend import native
from relpos.attend.arguments import ELSEWHERE

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 3, 37, 8
CALLS = {
    "causal": {},
    "both directions": {"causal": False},
    "a window": {"window": 5},
    "packed": {"documents": torch.arange(LENGTH).div(20, rounding_mode="floor").expand(BATCH, -1)},
    "gaps": {"positions": torch.arange(LENGTH)[None] * 2},
}


def random(*shape):
    return torch.randn(shape, dtype=torch.float64)


def distances(call):
    """How many columns a table has, and that of distance 0."""
    reach = 2 * LENGTH if call == "gaps" else LENGTH
    return (2 * reach - 1, reach - 1) if call == "both directions" else (reach, 0)


def toeplitz(call, table):
    return relpos.Toeplitz(table, distances(call)[1])


def rank_one(call, step, weight):
    return relpos.RankOne(step.double().cumsum(-1), weight, symmetric=call == "both directions")


def scaled(call, scale, slope, shift, out, offset, column):
    table = torch.arange(2.0 * LENGTH).log1p().to(slope.dtype)
    column = column.exp() if call == "both directions" else None
    return relpos.Scaled(table, scale.exp(), slope, shift, out, offset, column=column)


def projected(call, vectors, table):
    return relpos.Projected(vectors, table, distances(call)[1])


def scored(call, factor):
    return relpos.Scored(lambda i, j, scores, visible: factor[:, None, None] * scores.sin(), {"factor": factor})


def total(call, table, step, weight):
    return toeplitz(call, table) + rank_one(call, step, weight)


FORMS = {
    toeplitz: lambda columns: [random(HEADS, columns)],
    rank_one: lambda columns: [random(BATCH, HEADS, LENGTH).abs(), random(BATCH, HEADS, LENGTH).abs()],
    scaled: lambda columns: [
        *(random(1, LENGTH), random(4), random(4), random(HEADS, 4), random(HEADS), random(1, LENGTH))
    ],
    projected: lambda columns: [random(BATCH, HEADS, LENGTH, 4), random(1, columns, 4)],
    scored: lambda columns: [random(HEADS)],
    total: lambda columns: [
        *(random(HEADS, columns), random(BATCH, HEADS, LENGTH).abs(), random(BATCH, HEADS, LENGTH).abs())
    ],
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_form_gives_the_values_and_gradients_of_the_reference_in_float64(form, call):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, HEAD_DIM, dtype=torch.float64)
    numbers = FORMS[form](distances(call)[0])
    grad = torch.randn(BATCH, HEADS, LENGTH, HEAD_DIM, dtype=torch.float64)
    results = []
    for dtype, backend in ((torch.float64, "reference"), (torch.float32, None)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, *numbers)]
        out = relpos.attention(*leaves[:3], form(call, *leaves[3:]), backend=backend, **CALLS[call])
        gradients = torch.autograd.grad(out, leaves, grad.to(dtype), allow_unused=True)
        results.append([out, *gradients])
    for expected, ours in zip(*results, strict=True):
        assert (expected is None) == (ours is None)
        if ours is not None:
            torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_scores_and_mass_take_a_form(form):
    torch.manual_seed(0)
    q, k = torch.randn(2, BATCH, HEADS, LENGTH, HEAD_DIM)
    bias = form("causal", *(x.float() for x in FORMS[form](LENGTH)))
    plain, scores = relpos.scores(q, k), relpos.scores(q, k, bias)
    i = torch.arange(LENGTH)
    expected = plain + bias.block(i, i, plain.masked_fill(plain.isinf(), 0.0), plain.isfinite())
    torch.testing.assert_close(scores, expected)
    mass, weights = relpos.mass(q, k, bias), scores.softmax(-1)
    torch.testing.assert_close(mass.first_key, weights[..., 0].mean(-1))
    torch.testing.assert_close(mass.by_distance[..., 0], weights.diagonal(dim1=2, dim2=3)[..., 1:].sum(-1) / LENGTH)


def test_a_learned_table_runs_in_the_native_kernel_and_decodes_with_a_cache():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, HEAD_DIM)
    form = relpos.Toeplitz(torch.randn(1, 100))  # for all heads, longer than needed
    out = relpos.attention(q, k, v, form, backend="native" if native.available()[0] else None)
    cache = relpos.Cache()
    steps = [relpos.attention(*(x[:, :, i : i + 1] for x in (q, k, v)), form, cache=cache) for i in range(LENGTH)]
    torch.testing.assert_close(torch.cat(steps, dim=2), out, rtol=0, atol=1e-5)


Z, ONE = torch.zeros, [torch.ones(1, 5), torch.ones(4), torch.ones(4), torch.ones(3, 4), torch.ones(3)]
REFUSED = [
    (relpos.Toeplitz(Z(3, 4)), {}, "4 columns, for the distances 0 to 3, but the distances 0 to"),
    (relpos.Toeplitz(Z(3, 5)), {"causal": False}, "distances -4 to 4 occur in this call: give 9"),
    (relpos.Toeplitz(Z(2, 5)), {}, "the table of Toeplitz must be (1 or 3, distances), not (2, 5)"),
    (relpos.Toeplitz([1.0]), {}, "the table of Toeplitz must be a tensor, not list"),
    (relpos.Toeplitz(Z(3, 5).int()), {}, "floating-point numbers on cpu, as q does, not torch.int32"),
    (relpos.Toeplitz(torch.full((3, 5), torch.nan)), {}, "the table of the bias holds nan"),
    (relpos.RankOne(Z(2, 3, 4)), {}, "the total of RankOne must be (1 or 2, 1 or 3, 5), not (2, 3, 4)"),
    (relpos.RankOne(Z(2, 3, 5)), {"start": 3}, "the running sums of RankOne have values for keys only"),
    (relpos.Projected(Z(2, 3, 5, 4), Z(1, 5, 3)), {}, "(1 or 3, rows, 4), not (1, 5, 3)"),
    (relpos.Projected(Z(2, 3, 5, 4), Z(1, 3, 4)), {}, "distances 0 to 4 occur"),
    (relpos.Scored(3), {}, "the function of Scored must be callable, (i, j, scores, visible) -> bias, not 3"),
    (Z(3, 5), {}, "or a form of a bias such as relpos.Toeplitz(table), not tensor("),
    (relpos.Scaled(torch.ones(4), *ONE), {}, "has 4 entries, from distance 0 on, but the distance 4 occurs"),
    (relpos.Scaled(torch.ones(5), *ONE), {"causal": False}, "give column=, the scale of each key"),
    (relpos.Scaled(torch.ones(5), *ONE[:3], Z(2, 4), ONE[4]), {}, "the out of Scaled must be (3, 4), not (2, 4)"),
]


@pytest.mark.parametrize(("form", "options", "sentence"), REFUSED)
def test_a_form_that_does_not_fit_is_refused(form, options, sentence):
    q = torch.randn(2, 3, 5, 8)
    kind = any(words in sentence for words in ("not list", "not torch.int32", "callable", "not tensor("))
    with pytest.raises(TypeError if kind else ValueError) as caught:
        relpos.attention(q, q, q, form, **options)
    assert sentence in str(caught.value)


def test_arguments_that_scores_and_mass_do_not_have_are_refused():
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(TypeError, match=r"unknown argument of scores 'dropout'.*Allowed: causal"):
        relpos.scores(q, q, dropout=0.1)
    with pytest.raises(TypeError, match=r"unknown argument of mass 'windows'\. Did you mean 'window'"):
        relpos.mass(q, q, windows=3)
    with pytest.raises(
        TypeError, match=r"unknown argument of attention 'casual'\. Did you mean 'causal'.*backend, cache"
    ):
        relpos.attention(q, q, q, casual=True)


@pytest.mark.parametrize(
    ("argument", "ours"),
    [
        ("is_causal", "write causal="),
        ("attn_mask", "write mask= for a boolean mask"),
        ("dropout_p", "write dropout="),
        ("num_heads", "the heads are the second dimension of q"),
        ("theta", 'relpos.encoding("rope", heads, head_dim, base=)'),
        ("rope_theta", 'relpos.encoding("rope", heads, head_dim, base=)'),
    ],
)
@pytest.mark.parametrize("function", ["attention", "scores", "mass"])
def test_arguments_of_other_libraries_are_refused_with_the_right_name(function, argument, ours):
    q = torch.randn(1, 2, 4, 8)
    tensors = (q, q, q) if function == "attention" else (q, q)
    with pytest.raises(TypeError, match=rf"^{function} has no argument '{argument}': .*{re.escape(ours)}"):
        getattr(relpos, function)(*tensors, **{argument: None})


@pytest.mark.parametrize("argument", sorted(ELSEWHERE))
def test_an_argument_of_another_library_is_none_of_ours_and_what_is_named_instead_is(argument):
    parameters = inspect.signature(relpos.attention).parameters
    assert argument not in parameters
    named = re.findall(r"\b(?:write|or|position=|is) ?(\w+)=", ELSEWHERE[argument])
    assert set(named) <= set(parameters)


def test_lengths_before_heads_are_recognised():
    q = torch.randn(1, 16, 4, 8)
    words = r"\(1, 16, 4, 8\) looks like \(batch, length, heads, head_dim\).*give q\.transpose\(1, 2\)"
    for name in ("alibi", "rope"):
        position = relpos.encoding(name, heads=4, head_dim=8)
        with pytest.raises(ValueError, match=words):
            relpos.attention(q, q, q, position)
        turned = q.transpose(1, 2)
        assert relpos.attention(turned, turned, turned, position).shape == turned.shape
