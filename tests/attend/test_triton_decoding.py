"""Decoding by the Triton kernels, in Triton's interpreter, gives the rows of the definition in float64."""

from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch

import relpos
from relpos.forms.bias import RankOne, Scaled

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]
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
    table = layer.draw(layer.heads, 2 * LENGTH)
    return relpos.Toeplitz(table.to(dtype), LENGTH)


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
    table = layer.draw(tables or layer.heads, 2 * LENGTH, SIZE)
    return relpos.Projected(vectors.to(dtype), table.to(dtype), LENGTH)


def key_vectors(layer, rows, dtype):
    vectors = layer.draw(layer.batch, layer.heads, layer.length, SIZE + 1)[..., 1:]
    table = layer.draw(layer.heads, 9, SIZE)
    row = torch.arange(2 * LENGTH) % 9
    return relpos.Projected(vectors.to(dtype), table.to(dtype), LENGTH, row, of_keys=True)


FORMS = {
    "toeplitz": toeplitz,
    "rank one": rank_one,
    "scaled": scaled,
    "query vectors": query_vectors,
    "query vectors, one table": lambda *arguments: query_vectors(*arguments, tables=1),
    "key vectors": key_vectors,
}
EVERY_FORM = ["none", *FORMS, "toeplitz + rank one", "toeplitz + scaled + query vectors + key vectors"]


@pytest.mark.parametrize("queries", [1, 5, 8])
@pytest.mark.parametrize("form", EVERY_FORM)
def test_every_form(form, queries):
    Layer().check(form, queries)


@pytest.mark.parametrize("queries", [1, 3, 8])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_heads_that_share_keys_have_biases_of_their_own(group, queries):
    Layer(key_heads=1, group=group).check("toeplitz + rank one", queries)


def test_more_rows_than_a_tile_has():
    Layer(key_heads=1, group=11, length=40).check("toeplitz + scaled", 8)  # 88 rows, 64 in a tile


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


@pytest.mark.parametrize("argument", ARGUMENTS)
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
    from relpos.attend.triton.decoding_kernel import key_splits  # noqa: PLC0415  (Triton may be missing)

    assert key_splits(programs=8, keys=100_000, processors=108, BN=64) == 27  # two programs per multiprocessor
    assert key_splits(programs=8, keys=300, processors=108, BN=64) == 3  # not less than two tiles each
    assert key_splits(programs=1, keys=100_000, processors=132, BN=64) == 128
    assert key_splits(programs=1000, keys=100_000, processors=108, BN=64) == 1
