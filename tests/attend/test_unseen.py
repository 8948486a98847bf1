"""What a query may not see does not count, whatever it holds: NaN and infinite numbers stay where they are."""

import math

import pytest
import torch
from flex_on_cpu import flex_on_cpu
from torch.testing import assert_close

import relpos
from relpos.attend import native

HEADS, KEY_HEADS, HEAD_DIM, VALUE_DIM, LENGTH = 4, 2, 8, 12, 150
BAD = [70, 71, 100]  # keys that hold no numbers; 70 and 100 lie in different tiles of the kernel
BACKENDS = ["native", "chunks", "reference"]
INDEX = torch.arange(LENGTH)


def padding():
    seen = torch.ones(2, LENGTH, dtype=torch.bool)
    seen[:, BAD] = False
    return seen


def left_padding():
    return (INDEX >= 101).expand(2, -1).contiguous()


def documents():
    """The bad keys are all tokens of documents of their own."""
    return ((INDEX >= 70).long() + (INDEX >= 72) + (INDEX >= 100) + (INDEX >= 101)).expand(2, -1).contiguous()


CASES = {  # what hides the bad keys: from all queries, or from some
    "padding": lambda: {"padding": padding()},
    "padding in both directions": lambda: {"padding": padding(), "causal": False},
    "padding on the left": lambda: {"padding": left_padding()},
    "padding, capped, with sinks": lambda: {"padding": padding(), "softcap": 5.0, "sinks": torch.randn(HEADS)},
    "padding, dropout": lambda: {"padding": padding(), "dropout": 0.3, "seed": 3},
    "causal": dict,
    "window": lambda: {"window": 20},
    "window in both directions": lambda: {"window": (9, 30), "causal": False},
    "documents": lambda: {"documents": documents()},
    "documents in both directions": lambda: {"documents": documents(), "causal": False},
}


def visible(causal=True, window=None, documents=None, padding=None, mask=None, **_):
    """(batch, queries, keys), by the words of the documentation."""
    i, j = INDEX[:, None], INDEX
    seen = torch.ones(2, LENGTH, LENGTH, dtype=torch.bool)
    if causal:
        seen &= j <= i
    if window is not None:
        before, after = (window, window) if isinstance(window, int) else window
        seen &= (j >= i - before) & (j <= i + after)
    if documents is not None:
        seen &= documents[:, :, None] == documents[:, None]
    if padding is not None:
        seen &= padding[:, None]
    return seen if mask is None else seen & mask


def inputs():
    torch.manual_seed(0)
    q = torch.randn(2, HEADS, LENGTH, HEAD_DIM)
    k, v = torch.randn(2, KEY_HEADS, LENGTH, HEAD_DIM), torch.randn(2, KEY_HEADS, LENGTH, VALUE_DIM)
    return q, k, v, torch.randn(2, LENGTH, HEADS * HEAD_DIM)


def spoil(x, number, columns=slice(2, 5)):
    x = x.clone()
    x[:, :, BAD, columns] = number
    return x


def without(x):
    """The same with 0 in place of the bad keys."""
    x = x.clone()
    x[:, :, BAD] = 0.0
    return x


def run(tensors, position, backend, hidden, options):
    """Output, log-sum-exp, and the gradients of q, k, v and of the encoding's parameters."""
    q, k, v = (x.clone().requires_grad_() for x in tensors)
    names = [] if position is None else list(position.parameters())
    given = {"hidden": hidden.to(q.dtype)} if position is not None and position.needs_hidden else {}
    options = {name: x.to(q.dtype) if name == "sinks" else x for name, x in options.items()}
    out, lse = relpos.attention(q, k, v, position, backend=backend, return_lse=True, **given, **options)
    torch.manual_seed(1)
    d_out, d_lse = torch.randn(out.shape), torch.randn(lse.shape)
    # A row that sees nothing has no log-sum-exp to differentiate.
    grads = torch.autograd.grad(
        [out, lse],
        [q, k, v, *names],
        [d_out.to(q.dtype), d_lse.to(q.dtype).where(lse.isfinite(), 0.0)],
        allow_unused=True,
    )
    return out, lse, grads


def encoding(name, dtype=torch.float32):
    torch.manual_seed(2)
    if name is None:
        return None
    options = {"parts": ["alibi", "cable"]} if name == "sum" else {}
    return relpos.encoding(name, HEADS, HEAD_DIM, **options).to(dtype)


def compare(case, number, backend, name, spoiled="kv"):
    """Rows that do not see what is bad, and keys that only such rows see, are as without it."""
    options = CASES[case]() if isinstance(case, str) else case
    q, k, v, hidden = inputs()
    bad = [q, spoil(k, number) if "k" in spoiled else k, spoil(v, number) if "v" in spoiled else v]
    out, lse, grads = run(bad, encoding(name), backend, hidden, options)
    exact = [
        q.double(),
        *(without(x).double() if letter in spoiled else x.double() for letter, x in (("k", k), ("v", v))),
    ]
    expected, expected_lse, expected_grads = run(exact, encoding(name, torch.float64), "reference", hidden, options)
    seen = visible(**options)
    hit = seen[:, :, BAD].any(-1)  # (batch, queries): rows that see what is bad
    touched = (seen & hit[..., None]).any(1)  # (batch, keys): keys that such rows see
    close = {"rtol": 1e-4, "atol": 1e-4}
    rows, keys = (~hit)[:, None].expand(-1, HEADS, -1), (~touched)[:, None].expand(-1, KEY_HEADS, -1)
    assert rows.any()
    assert_close(out[rows], expected[rows].float(), **close)
    assert_close(lse[rows], expected_lse[rows].float(), **close)
    assert_close(grads[0][rows], expected_grads[0][rows].float(), **close)
    clean = keys.clone()
    clean[:, :, BAD] = False  # of the bad ones the reference had others
    for ours, theirs in zip(grads[1:3], expected_grads[1:3], strict=True):
        assert_close(ours[clean], theirs[clean].float(), **close)
    if not hit.any():
        assert not any(x[:, :, BAD].any() for x in grads[1:3])
        for ours, theirs in zip(grads[3:], expected_grads[3:], strict=True):
            if theirs is not None:
                assert_close(ours, theirs.float(), rtol=1e-3, atol=1e-3)
    elif "v" in spoiled:
        of_rows = out[hit[:, None].expand(-1, HEADS, -1)]
        assert not of_rows[:, 2:5].isfinite().any()  # and what is seen is not hidden


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_nan_in_unseen_keys_and_values_stays_there(case, backend):
    compare(case, math.nan, backend, None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [math.inf, -math.inf])
@pytest.mark.parametrize("spoiled", ["k", "v"])
@pytest.mark.parametrize("case", ["padding", "causal"])
def test_so_do_infinite_numbers_in_keys_or_values(case, spoiled, number, backend):
    compare(case, number, backend, None, spoiled)


@pytest.mark.parametrize("name", [name for name in relpos.names() if name not in ("learned", "sinusoidal", "nope")])
def test_so_it_is_with_every_encoding(name):
    compare("padding", math.nan, None, name)
    compare("padding", math.nan, "chunks", name)


@pytest.mark.parametrize("backend", ["chunks", "reference", None])
def test_a_mask_hides_nan(backend):
    torch.manual_seed(3)
    mask = torch.rand(LENGTH, LENGTH) < 0.5
    mask[:, INDEX] |= torch.eye(LENGTH, dtype=torch.bool)
    compare({"mask": mask}, math.nan, backend, "alibi")


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("case", ["padding", "causal", "documents"])
def test_every_instruction_set_keeps_nan_away(isa, case):
    chosen = native.isa()
    native.library.use(isa)
    try:
        compare(case, math.nan, "native", "kerple_log")
    finally:
        native.library.use(chosen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_keeps_nan_away_too(backend, dtype):
    q, k, v, _ = (x.to(dtype) for x in inputs())
    bad = relpos.attention(q, spoil(k, math.nan), spoil(v, math.nan), padding=padding(), backend=backend)
    clean = relpos.attention(q, without(k), without(v), padding=padding(), backend=backend)
    assert torch.equal(bad, clean)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("queries", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value_dim", [3, 12, 64])
def test_few_queries_keep_nan_away(queries, dtype, value_dim, backend):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, d).to(dtype) for n, d in ((queries, 8), (1300, 8), (1300, value_dim)))
    seen = torch.rand(2, 1300) < 0.7
    seen[:, 1290:] = True
    bad_k, bad_v = (x.masked_fill(~seen[:, None, :, None], math.nan) for x in (k, v))
    out, lse = relpos.attention(q, bad_k, bad_v, padding=seen, backend=backend, return_lse=True)
    clean_k, clean_v = (x.masked_fill(~seen[:, None, :, None], 0.0).double() for x in (k, v))
    expected, expected_lse = relpos.attention(q.double(), clean_k, clean_v, padding=seen, return_lse=True)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_several_queries_only_those_that_see_a_nan_have_it(backend):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 200, 8), torch.randn(1, 2, 200, 16)
    v[:, :, 198] = math.nan  # seen by the last two of four queries
    out = relpos.attention(q, k, v, backend=backend)
    assert_close(out[:, :, :2], relpos.attention(q.double(), k.double(), v.double().nan_to_num())[:, :, :2].float())
    assert out[:, :, 2:].isnan().all()


def test_decoding_with_a_padded_prompt_keeps_nan_away():
    q, k, v, _ = inputs()
    alibi, caches = encoding("alibi"), [relpos.Cache(), relpos.Cache()]
    for first, last in ((0, 148), (148, 149), (149, 150)):
        new = [x[:, :, first:last] for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))]
        hidden = left_padding()[:, :last]
        broken = [new[0], *(x.masked_fill(~hidden[:, None, first:, None], math.nan) for x in new[1:])]
        with torch.no_grad():
            ours = relpos.attention(*broken, alibi, padding=hidden, cache=caches[0])
            theirs = relpos.attention(*new, alibi, padding=hidden, cache=caches[1])
        assert_close(ours, theirs)


def test_queries_that_see_nothing_may_hold_nan():
    """Left padding: the first tokens see only padding, and hold whatever their layer has made of it."""
    for backend in BACKENDS:
        q, k, v, _ = inputs()
        grads = []
        for number in (math.nan, 0.0):
            tensors = [x.clone() for x in (q, k, v)]
            for x in tensors:
                x[:, :, :101] = number
                x.requires_grad_()
            out = relpos.attention(*tensors, padding=left_padding(), backend=backend)
            assert not out[:, :, :101].any()
            grads.append(torch.autograd.grad(out.square().sum(), tensors))
        for ours, theirs in zip(*grads, strict=True):
            assert_close(ours, theirs)


@pytest.mark.parametrize("queries", [150, 5])
def test_flex_keeps_nan_in_padding_away(monkeypatch, queries):
    flex_on_cpu(monkeypatch, "aot_eager")
    q, k, v, _ = inputs()
    results = []
    for letters in ((spoil(k, math.nan), spoil(v, math.nan)), (without(k), without(v))):
        tensors = [x.clone().requires_grad_() for x in (q[:, :, :queries], *letters)]
        options = {"padding": padding(), "causal": False, "start": 0}
        out = relpos.attention(*tensors, encoding("alibi"), backend="flex", **options)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["alibi", "cope", "dape", "kcable"])
def test_mass_and_scores_do_not_see_it_either(name):
    q, k, _, hidden = inputs()
    position = encoding(name)
    k = k.repeat_interleave(2, 1)
    given = {"padding": padding(), **({"hidden": hidden} if position.needs_hidden else {})}
    bad, clean = spoil(k, math.nan), without(k)
    assert_close(relpos.scores(q, bad, position, **given), relpos.scores(q, clean, position, **given))
    backends = ["chunks", "native"] if name == "alibi" else ["chunks"]
    for backend in backends:
        for ours, theirs in zip(
            *(relpos.mass(q, x, position, backend=backend, **given) for x in (bad, clean)), strict=True
        ):
            assert_close(ours, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sink", [2.3e38, 2.5e38, 3.4e38, -3.4e38])
@pytest.mark.parametrize("queries", [3, 70])
def test_the_largest_sinks_leave_nothing_or_everything(sink, queries, backend):
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, queries, 8, requires_grad=True) for _ in range(3)]
    sinks = torch.tensor([sink, 0.0], requires_grad=True)
    out, lse = relpos.attention(*tensors, sinks=sinks, backend=backend, return_lse=True)
    exact = [x.detach().double() for x in (*tensors, sinks)]
    expected, expected_lse = relpos.attention(*exact[:3], sinks=exact[3], return_lse=True)
    assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)
    assert all(x.isfinite().all() for x in torch.autograd.grad([out.sum() + lse.sum() / 1e30], [*tensors, sinks]))


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_a_sink_that_is_no_number_is_refused(number):
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"the vector of sinks holds (inf|nan)"):
        relpos.attention(q, q, q, sinks=torch.tensor([0.0, number]))
