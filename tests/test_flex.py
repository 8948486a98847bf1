"""FlexAttention's score and mask functions, in eager mode on the CPU, against the definition.

The compiled kernel needs CUDA and is not run here.
"""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import relpos
from relpos.attend import flex, reference
from relpos.encodings.call import Call

HEADS, HEAD_DIM, KEYS = 4, 8, 21
NAMES = [name for name in relpos.names() if relpos.card(name).form in ("Toeplitz", "RankOne", "Scaled")]


def build(name, queries=KEYS, causal=True, documents=None, padding=None):
    torch.manual_seed(2)
    position = relpos.encoding(name, heads=HEADS, head_dim=HEAD_DIM, **({"length": 9} if name == "fire" else {}))
    gates = position.gates(torch.randn(2, KEYS, HEADS * HEAD_DIM))
    call = Call(queries, KEYS, causal, documents, padding, gates)
    return position, call, position.bias(call)


def written_out(form, call):
    """The score function for every (b, h, query, key), as FlexAttention's eager mode evaluates it."""
    function = flex.score_function(form, call)
    for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=(0, *axes))
    index = (torch.arange(2), torch.arange(HEADS), torch.arange(call.queries), torch.arange(call.keys))
    return function(torch.zeros(2, HEADS, call.queries, call.keys), *index)


@pytest.mark.parametrize("queries", [KEYS, 5])
@pytest.mark.parametrize("name", NAMES)
def test_the_score_function_is_the_bias_with_its_gradients(name, queries):
    position, call, form = build(name, queries)
    visible = call.visible(call.i).expand(2, HEADS, -1, -1)
    weights = torch.randn(2, HEADS, queries, KEYS) * visible
    results = []
    for bias in (form.block(call.i, call.j).expand(2, HEADS, -1, -1), written_out(form, call)):
        wanted = list(position.parameters())
        grads = torch.autograd.grad((bias * weights).sum(), wanted, retain_graph=True) if wanted else []
        results.append([bias.masked_fill(~visible, 0.0), *grads])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.detach().abs().max()))


@pytest.mark.parametrize("name", [name for name in NAMES if relpos.card(name).directions == "both"])
def test_the_score_function_is_the_bias_in_both_directions(name):
    _, call, form = build(name, causal=False)
    torch.testing.assert_close(written_out(form, call), form.block(call.i, call.j).expand(2, HEADS, -1, -1))


def test_a_long_sum_keeps_its_differences():
    """The split into two float32 numbers; a plain float32 sum is off by more than 1 here."""
    position = relpos.encoding("forgetting", heads=1, head_dim=4)
    gates = torch.full((1, 1, 70000, 1), -1000.25) - torch.rand(1, 1, 70000, 1)
    call = Call(3, 70000, gates=gates)
    form = position.bias(call)
    function = flex.score_function(form, call)
    far = function(
        torch.zeros(3), torch.zeros(3).long(), torch.zeros(3).long(), torch.arange(3), torch.arange(3) + 69990
    )
    exact = form.block(call.i, call.j)[0, 0, torch.arange(3), torch.arange(3) + 69990]
    torch.testing.assert_close(far, exact, rtol=1e-6, atol=0.0)
    plain = form.total.float()[0, 0]
    assert ((plain[69990] - plain[69997]) - exact[0]).abs() > 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [KEYS, 5])
def test_the_mask_function_is_what_a_query_sees(causal, queries):
    documents = torch.tensor([[0] * 8 + [1] * 13, [3] * 20 + [2]])
    padding = torch.rand(2, KEYS) > 0.3
    call = Call(queries, KEYS, causal, documents, padding)
    function = flex.mask_function(call)
    b, query, key = torch.meshgrid(torch.arange(2), torch.arange(queries), torch.arange(KEYS), indexing="ij")
    assert torch.equal(function(b, torch.zeros_like(b), query, key), call.visible(call.i)[:, 0])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["kerple_log", "cable", "fire"])
def test_eager_flex_attention_gives_the_definition(name):
    documents = torch.tensor([[0] * 8 + [1] * 13, [3] * 20 + [2]])
    with torch.no_grad():
        _, call, form = build(name, queries=7, documents=documents)
    q, k, v = torch.randn(2, HEADS, 7, HEAD_DIM), *torch.randn(2, 2, 2, KEYS, HEAD_DIM)
    mask = create_block_mask(flex.mask_function(call), 2, None, 7, KEYS, device="cpu")
    with torch.no_grad():
        score = flex.score_function(form, call)
        out = flex_attention(q, k, v, score_mod=score, block_mask=mask, scale=call.scale, enable_gqa=True)
        torch.testing.assert_close(out, reference.attention(q, k, v, form, call)[0], rtol=0.0, atol=2e-6)


def test_asking_for_flex_on_a_cpu_says_why_not():
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="'flex' cannot run this: FlexAttention has a backward on CUDA only"):
        relpos.attention(q, q, q, backend="flex")
