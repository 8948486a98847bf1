"""Decoding by the Triton kernels, in Triton's interpreter, gives the rows of the definition in float64."""

import copy
import math
from dataclasses import dataclass

import contract_settings
import pytest
import torch

import relpos
from relpos.attend import native, triton
from relpos.forms.bias import RankOne, Scaled

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not triton.available()[0], reason=triton.available()[1]),
]


def some(cases, quick):
    """The cases, of which all but the quick ones run in `make test-all` only: the interpreter takes its time."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


LENGTH = 75  # tokens: tiles have 16 keys, and nothing is a multiple of that
SIZE = 5  # of the vectors of Projected


@dataclass(frozen=True)
class Layer:
    """Random tensors of a whole sequence, in float64 but exact in float32, of which the last queries are decoded."""

    batch: int = 1
    key_heads: int = 2
    group: int = 2
    head_dim: int = 8
    value_dim: int = 8
    length: int = LENGTH

    @property
    def heads(self) -> int:
        return self.key_heads * self.group

    def draw(self, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum((n + 1) * 7**place for place, n in enumerate(shape)))
        return torch.randn(shape, generator=generator).double()

    def attend(self, form: str, queries: int, dtype: torch.dtype, **options):
        """Output and log-sum-exp of the last queries: by the definition in float64, by the kernels otherwise."""
        first, arguments = self.length - queries, {"backend": "reference"}
        wide = torch.promote_types(dtype, torch.float32)
        q = self.draw(self.batch, self.heads, self.length, self.head_dim)
        k = self.draw(self.batch, self.key_heads, self.length, self.head_dim)
        v = self.draw(self.batch, self.key_heads, self.length, self.value_dim)
        rows = slice(0, self.length)
        if dtype != torch.float64:
            arguments, rows = {"backend": "triton"}, slice(first, self.length)
        bias = None if form == "none" else sum_of([FORMS[name](self, rows, wide) for name in form.split(" + ")])
        options = {name: x.to(wide) if name == "sinks" else x for name, x in options.items()}
        q, k, v = (x.to(dtype) for x in (q[:, :, rows], k, v))
        out, lse = relpos.attention(
            q, k, v, bias, start=rows.start, return_lse=True, **({"scale": 0.3} | arguments | options)
        )
        return out[:, :, -queries:], lse[:, :, -queries:]

    def check(self, form: str, queries: int, dtype: torch.dtype = torch.float32, atol: float = 3e-6, **options):
        """The kernels' rows are those of the definition, and the same bits in two runs."""
        expected = self.attend(form, queries, torch.float64, **options)
        ours = self.attend(form, queries, dtype, **options)
        again = self.attend(form, queries, dtype, **options)
        for x, same, y in zip(ours, again, expected, strict=True):
            assert torch.equal(x, same)
            torch.testing.assert_close(x.double(), y, rtol=0, atol=atol)
        return ours


def sum_of(forms):
    return sum(forms[1:], forms[0])


def toeplitz(layer, rows, dtype):
    table = layer.draw(layer.heads, 2 * layer.length)
    return relpos.Toeplitz(table.to(dtype), layer.length)


def rank_one(layer, rows, dtype):
    shape = (layer.batch, layer.heads, layer.length)
    total = 1e4 + (0.1 * layer.draw(*shape).abs()).cumsum(-1)  # far from 0, as after many tokens
    return RankOne(total, layer.draw(*shape).abs().to(dtype), dtype)


def scaled(layer, rows, dtype):
    units = 12
    distance = torch.arange(layer.length, dtype=torch.float64)
    row = torch.log1p(0.3 * distance[rows].clamp(min=20.5))[None]
    slope, shift = layer.draw(units), layer.draw(units + 1)[1:]
    numbers = (torch.log1p(0.3 * distance), row, slope, shift, layer.draw(layer.heads, units), layer.draw(layer.heads))
    return Scaled(*(x.to(dtype) for x in numbers), rows.start)


def query_vectors(layer, rows, dtype, tables=None):
    vectors = layer.draw(layer.batch, layer.heads, layer.length, SIZE)[:, :, rows]
    table = layer.draw(tables or layer.heads, 2 * layer.length, SIZE)
    return relpos.Projected(vectors.to(dtype), table.to(dtype), layer.length)


def key_vectors(layer, rows, dtype):
    vectors = layer.draw(layer.batch, layer.heads, layer.length, SIZE + 1)[..., 1:]
    table = layer.draw(layer.heads, 9, SIZE)
    row = torch.arange(2 * layer.length) % 9
    return relpos.Projected(vectors.to(dtype), table.to(dtype), layer.length, row, of_keys=True)


FORMS = {
    "toeplitz": toeplitz,
    "rank one": rank_one,
    "scaled": scaled,
    "query vectors": query_vectors,
    "query vectors, one table": lambda *arguments: query_vectors(*arguments, tables=1),
    "key vectors": key_vectors,
}
EVERY_FORM = ["none", *FORMS, "toeplitz + rank one", "toeplitz + scaled + query vectors + key vectors"]


@pytest.mark.parametrize("queries", some([1, 5, 8], quick=[5]))
@pytest.mark.parametrize("form", EVERY_FORM)
def test_every_form(form, queries):
    Layer().check(form, queries)


@pytest.mark.parametrize("queries", some([1, 3, 8], quick=[1, 8]))
@pytest.mark.parametrize("group", some([1, 3, 8], quick=[3]))
def test_heads_that_share_keys_have_biases_of_their_own(group, queries):
    Layer(key_heads=1, group=group).check("toeplitz + rank one", queries)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 3e-6), (torch.float16, 4e-3)])
def test_more_rows_than_a_tile_has(dtype, atol):
    layer = Layer(key_heads=1, group=9, length=40)  # 72 rows: 16 in a tile, or 64 in half precision
    for ours, expected in zip(*(layer.attend("toeplitz + scaled", 8, x) for x in (dtype, torch.float64)), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize(("length", "splits"), [(316, 20), (40, 20), (40, 1)])
def test_many_splits_and_splits_that_see_nothing(length, splits, monkeypatch):
    """20 parts are combined 16 at a time, and rank one favours the last; of 40 keys, 3 tiles, 17 splits see none."""
    monkeypatch.setattr("relpos.attend.triton.decoding_kernel.key_splits", lambda *arguments: splits)
    Layer(key_heads=1, length=length).check("rank one", 2, sinks=torch.tensor([1.0, -2.0]).double())


def test_a_batch_in_which_every_entry_has_totals_of_its_own():
    Layer(batch=3).check("rank one + query vectors", 2)


ARGUMENTS = {
    "window": {"window": 20},
    "window that ends inside a tile": {"window": 3},
    "no window to the left": {"window": 0},
    "both directions": {"causal": False, "window": (30, 2)},
    "both directions, no window": {"causal": False},
    "sinks": {"sinks": torch.tensor([1.0, -2.0, 9.0, -torch.inf]).double()},
    "softcap": {"softcap": 2.0},
    "padding": {"padding": torch.arange(LENGTH)[None] % 5 > 1},
    "padding of whole splits": {"padding": torch.arange(LENGTH)[None] > 50},
    "padding of everything": {"padding": torch.zeros(1, LENGTH, dtype=torch.bool)},
    "documents": {"documents": (torch.arange(LENGTH)[None] > 12).long() + (torch.arange(LENGTH)[None] > 71)},
    "dropout": {"dropout": 0.4, "seed": 7},
}
MANY = ("window", "sinks", "softcap", "padding", "dropout")
ARGUMENTS["many"] = {name: x for key in MANY for name, x in ARGUMENTS[key].items()}


QUICK = ["window", "both directions", "sinks", "documents", "padding of everything", "many"]


@pytest.mark.parametrize("argument", some(ARGUMENTS, quick=QUICK))
def test_every_argument(argument):
    form = "rank one" if "documents" in argument or "both" in argument else "toeplitz + rank one"
    _, lse = Layer().check(form, 5, **ARGUMENTS[argument])
    assert bool((lse == -torch.inf).all()) == (argument == "padding of everything")


def test_a_value_of_another_size_than_a_key():
    Layer(head_dim=20, value_dim=12).check("toeplitz", 3)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_half_precision(dtype, atol):
    layer = Layer()
    ours, _ = layer.attend("toeplitz + rank one", 5, dtype)
    expected, _ = layer.attend("toeplitz + rank one", 5, torch.float64)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=atol)


def test_the_backward_reads_what_decoding_wrote():
    layer, gradients = Layer(length=40), []
    for dtype, name in ((torch.float64, "reference"), (torch.float32, "triton")):
        q, k, v = (layer.draw(1, 4, n, 8).to(dtype).requires_grad_() for n in (5, 40, 41))
        table = layer.draw(4, 40).to(dtype).requires_grad_()
        out, lse = relpos.attention(q, k, v[:, :, 1:], relpos.Toeplitz(table), return_lse=True, backend=name)
        (out.square().sum() + lse.sum()).backward()
        gradients.append([x.grad.double() for x in (q, k, v, table)])
    for ours, expected in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_splits_follow_from_shapes_and_the_gpu():
    from relpos.attend.triton.decoding_kernel import key_splits

    assert key_splits(programs=8, keys=100_000, processors=108, BN=64) == 27  # two programs per multiprocessor
    assert key_splits(programs=8, keys=300, processors=108, BN=64) == 3  # not less than two tiles each
    assert key_splits(programs=1, keys=100_000, processors=132, BN=64) == 128
    assert key_splits(programs=1000, keys=100_000, processors=108, BN=64) == 1


ENCODINGS = ["nope", "alibi", "kerple_log", "t5", "fire", "cable", "cable_nw", "forgetting", "rope"]


def encoding(name):
    torch.manual_seed(3)
    # The factor of fire changes with the query beyond its length.
    position = relpos.encoding(name, 4, 8, **({"length": 6} if name == "fire" else {}))
    with torch.no_grad():
        for parameter in position.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return position


def hidden(length, batch=2):
    return torch.randn(batch, length, 32, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def exact(position, x, **options):
    """The output for the whole sequence, by the definition in float64."""
    return contract_settings.Layer(copy.deepcopy(position).double(), backend="reference", **options)(x.double())


@torch.no_grad()
@pytest.mark.parametrize("name", some(ENCODINGS, quick=["t5", "fire", "cable"]))
def test_steps_with_a_cache_are_the_whole_sequence(name, monkeypatch):
    """Through a growth of memory and tables, tokens that are forgotten, and beams that change their order."""
    monkeypatch.setattr("relpos.attend.cache.LEAST_CAPACITY", 16)
    monkeypatch.setattr("relpos.attend.cache.LEAST_ROOM", 4)
    position, x, draft = encoding(name), hidden(30), hidden(30).flip(1)
    layer, cache = contract_settings.Layer(position, key_heads=2, backend="triton"), relpos.Cache(capacity=3)
    out = [layer.step(x[:, :9], cache), layer.step(x[:, 9:10], cache)]
    layer.step(draft[:, :3], cache)
    cache.crop(10)
    out += [layer.step(x[:, 10:13], cache)]
    cache.reorder(torch.tensor([1, 0]))
    out = [torch.cat(out, dim=2).flip(0)]
    out += [layer.step(x.flip(0)[:, i : i + 1], cache) for i in range(13, 25)]
    out += [layer.step(x.flip(0)[:, 25:30], cache)]
    expected = exact(position, x.flip(0), key_heads=2)
    torch.testing.assert_close(torch.cat(out, dim=2).double(), expected, rtol=0, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["alibi", "fire", "cable"])
def test_what_a_step_needs_of_the_bias_is_not_computed_again(name, monkeypatch):
    position, x, computed = encoding(name), hidden(14), []
    layer, cache = contract_settings.Layer(position, backend="triton"), relpos.Cache()
    layer.step(x[:, :8], cache)
    layer.step(x[:, 8:9], cache)
    for place in ("bias", "located_bias"):
        monkeypatch.setattr(type(position), place, lambda self, call: computed.append(call))
    monkeypatch.setattr("relpos.attend.triton.rank_one_tile.pack_totals", lambda *totals: computed.append(totals))
    layer.step(x[:, :3], cache)
    cache.crop(9)
    out = torch.cat([layer.step(x[:, i : i + 1], cache) for i in range(9, 14)], dim=2)
    monkeypatch.undo()
    assert not computed
    torch.testing.assert_close(out.double(), exact(position, x)[:, :, 9:], rtol=0, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", some(["alibi", "fire", "cable"], quick=["fire"]))
def test_steps_in_a_window_and_a_document(name):
    position, x = encoding(name), hidden(16)
    documents = torch.tensor([[0] * 5 + [1] * 11, [0] * 16])
    for options, masks in (({"window": 3}, {}), ({}, {"documents": documents})):
        layer, cache, out = contract_settings.Layer(position, backend="triton", **options), relpos.Cache(), []
        for end in (7, 8, 11, 16):
            seen = {name: mask[:, :end] for name, mask in masks.items()}
            out.append(layer.step(x[:, cache.length : end], cache, **seen))
        whole = contract_settings.Layer(copy.deepcopy(position).double(), backend="reference", **options)
        torch.testing.assert_close(torch.cat(out, dim=2).double(), whole(x.double(), **masks), rtol=0, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", some(["alibi", "cable"], quick=["cable"]))
def test_a_cache_may_change_its_backend(name):
    position, x, cache = encoding(name), hidden(12), relpos.Cache()
    layer = contract_settings.Layer(position)
    backends = ["triton", "native" if native.available()[0] else "chunks", "reference"] * 4
    out = [layer.step(x[:, i : i + 1], cache, backend=backend) for i, backend in enumerate(backends)]
    torch.testing.assert_close(torch.cat(out, dim=2).double(), exact(position, x), rtol=0, atol=2e-5)


@torch.no_grad()
def test_totals_stay_exact_over_many_tokens():
    from relpos.attend.triton.decoding_state import RunningTotals

    step = torch.rand(1, 3, 200, generator=torch.Generator().manual_seed(5)) * 100
    weight = torch.rand(1, 200, 3).transpose(1, 2)
    totals = RunningTotals(step[..., :90], weight[..., :90], 197)
    for first in range(90, 194, 8):
        assert totals.append(step[..., first : first + 8], weight[..., first : first + 8])
    assert not totals.append(step[..., 194:], weight[..., 194:])  # there is no room
    high, low, factor = totals.totals[..., :194].double()
    expected = step.double().cumsum(-1)[0, :, :194]
    torch.testing.assert_close(high + low, expected - expected[:, :1], rtol=1e-12, atol=0)
    torch.testing.assert_close(factor / math.log2(math.e), weight.double()[0, :, :194], rtol=1e-6, atol=0)
