"""relpos.Cache: growing, cropping, reordering, refusals, and tables that never outlive what they were made of."""

import copy
import pickle

import pytest
import torch
from contract_settings import Layer

import relpos
from relpos.attend import native
from relpos.attend.cache import TensorMark

HEADS, HEAD_DIM, WIDTH = 4, 8, 32
BIASES = ["nope", "alibi", "kerple_log", "t5", "fire"]
KINDS = [*BIASES, "cable", "cable_nw", "forgetting", "rope", "xpos", "cope", "kcable"]


def tokens(length, batch=2, dtype=torch.float32):
    drawn = torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return drawn.to(dtype)


def encoding(name, **options):
    torch.manual_seed(3)
    position = relpos.encoding(name, HEADS, HEAD_DIM, **options)
    with torch.no_grad():
        for parameter in position.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return position


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", KINDS)
def test_hundreds_of_tokens_through_every_growth_of_memory_and_tables(name, monkeypatch):
    monkeypatch.setattr("relpos.attend.cache.LEAST_CAPACITY", 32)
    layer, x = Layer(encoding(name)), tokens(300)
    cache = relpos.Cache(capacity=3)
    parts = [x[:, :7], *x[:, 7:].split(1, dim=1)]
    out = torch.cat([layer.step(part, cache) for part in parts], dim=2)
    assert len(cache) == cache.length == 300
    torch.testing.assert_close(out, layer(x), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", KINDS)
def test_cropped_tokens_are_forgotten(name):
    layer, x, other = Layer(encoding(name)), tokens(30), tokens(30).flip(1)
    cache = relpos.Cache()
    layer.step(x[:, :20], cache)
    for i in range(10):
        layer.step(other[:, i : i + 1], cache)  # a draft that is rejected
    cache.crop(20)
    out = [layer.step(x[:, i : i + 1], cache) for i in range(20, 25)]
    layer.step(other[:, :3], cache)
    cache.crop(-3)
    out += [layer.step(x[:, 25:30], cache)]
    torch.testing.assert_close(torch.cat(out, dim=2), layer(x)[:, :, 20:], rtol=0, atol=2e-5)
    cache.crop(0)
    torch.testing.assert_close(layer.step(x[:, :1], cache), layer(x)[:, :, :1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", KINDS)
def test_reordered_rows_follow_their_beams(name):
    layer, x = Layer(encoding(name)), tokens(12, batch=3)
    cache, beams = relpos.Cache(), torch.tensor([2, 0, 2, 1])
    layer.step(x[:, :8], cache)
    layer.step(x[:, 8:9], cache)
    cache.reorder(beams)
    chosen = x[beams]
    out = torch.cat([layer.step(chosen[:, i : i + 1], cache) for i in range(9, 12)], dim=2)
    torch.testing.assert_close(out, layer(chosen)[:, :, 9:], rtol=0, atol=2e-5)


def test_a_reset_cache_is_a_new_one():
    layer, x = Layer(encoding("cable")), tokens(12)
    cache = relpos.Cache()
    layer.step(x, cache)
    cache.reset()
    assert len(cache) == 0
    torch.testing.assert_close(layer.step(x[:1, :4], cache), layer(x[:1, :4]), rtol=0, atol=2e-5)


@pytest.mark.parametrize("change", ["in place", "data", "new data", "load", "attribute"])
@pytest.mark.parametrize("name", ["alibi", "kerple_log", "t5", "fire", "rope"])
def test_tables_follow_the_encoding(name, change):
    position = encoding(name)
    layer, x, cache = Layer(position), tokens(12), relpos.Cache()
    for i in range(8):
        layer.step(x[:, i : i + 1], cache)
    parameters = list(position.parameters())
    if change == "attribute":
        if name == "alibi":
            position.slopes[1] = 0.9
        elif name == "t5":
            position.max_distance = 40
        else:
            pytest.skip("it has no attribute whose change would keep the meaning of earlier keys")
    elif not parameters:
        pytest.skip("it has no parameters")
    elif change == "in place":
        parameters[-1].mul_(2.0)
    elif change == "data":
        parameters[-1].data.mul_(2.0)
    elif change == "new data":
        parameters[-1].data = parameters[-1].data * 2.0
    else:
        position.load_state_dict({key: 2.0 * value for key, value in position.state_dict().items()})
    out = layer.step(x[:, 8:9], cache)
    torch.testing.assert_close(out, layer(x[:, :9])[:, :, 8:], rtol=0, atol=2e-5)


@pytest.mark.parametrize("by_value", [True, False])
def test_changes_to_a_tensor_are_detected(by_value):
    x = torch.nn.Parameter(torch.arange(4.0))
    mark = TensorMark(x, by_value)
    assert mark.holds(x)
    assert not mark.holds(None)
    assert not mark.holds(x.double())
    x.mul_(2.0)
    assert not mark.holds(x)
    mark = TensorMark(x, by_value)
    x.data = x.data + 1.0
    assert not mark.holds(x)
    mark = TensorMark(x, by_value)
    x.data.mul_(2.0)
    assert mark.holds(x) == (not by_value)  # what an accelerator does not notice


def test_tables_are_used_between_steps_and_not_made_again(monkeypatch):
    made = []
    for name, place in (("alibi", "bias"), ("rope", "rotation"), ("fire", "bias")):
        position = encoding(name)
        layer, x, cache = Layer(position), tokens(40), relpos.Cache()
        layer.step(x[:, :8], cache)
        layer.step(x[:, 8:9], cache)
        monkeypatch.setattr(type(position), place, lambda self, call: made.append(call))
        for i in range(9, 40):
            layer.step(x[:, i : i + 1], cache)
        monkeypatch.undo()
    assert not made or not native.available()[0]


def test_gradients_flow_through_the_steps():
    for name in ("kerple_log", "cable", "rope"):
        position = encoding(name).double()
        layer, x = Layer(position), tokens(9, dtype=torch.float64).requires_grad_()
        with torch.enable_grad():
            cache = relpos.Cache()
            steps = torch.cat([layer.step(part, cache) for part in [x[:, :4], *x[:, 4:].split(1, dim=1)]], dim=2)
            parameters = [x, *position.parameters()]
            ours = torch.autograd.grad((steps**2).sum(), parameters)
            expected = torch.autograd.grad((layer(x) ** 2).sum(), parameters)
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_steps_with_gradients_may_follow_steps_without():
    position = encoding("rope")
    layer, x, cache = Layer(position), tokens(6), relpos.Cache()
    layer.step(x[:, :4], cache)
    with torch.enable_grad():
        new = x[:, 4:5].clone().requires_grad_()
        out = layer.step(new, cache)
        assert torch.autograd.grad(out.sum(), new)[0].abs().max() > 0
    torch.testing.assert_close(layer.step(x[:, 5:], cache), layer(x)[:, :, 5:], rtol=0, atol=2e-5)


def test_a_step_without_gradients_leaves_alone_what_a_backward_reads():
    layer, x, cache = Layer(encoding("alibi")), tokens(7), relpos.Cache()
    layer.step(x[:, :4], cache)
    q, k, v = layer.project(x[:, 4:5])
    with torch.enable_grad():
        q.requires_grad_()  # the keys and values of the graph do not
        loss = relpos.attention(q, k, v, layer.position, cache=cache).sum()
    layer.step(x[:, 5:6], cache)
    cache.crop(5)
    layer.step(x[:, 6:7], cache)
    ours = torch.autograd.grad(loss, q)[0]
    with torch.enable_grad():
        _, keys, values = layer.project(x[:, :5])
        expected = torch.autograd.grad(relpos.attention(q, keys, values, layer.position).sum(), q)[0]
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-5)


def test_memory_is_written_in_place_and_anew_after_inference_mode():
    layer, x, cache = Layer(encoding("cable")), tokens(40), relpos.Cache()
    with torch.inference_mode():
        layer.step(x[:, :10], cache)
    layer.step(x[:, 10:11], cache)
    memory = cache.tensor("k").data_ptr()
    out = [layer.step(x[:, i : i + 1], cache) for i in range(11, 40)]
    assert cache.tensor("k").data_ptr() == memory
    assert not cache.tensor("k").is_inference()
    torch.testing.assert_close(torch.cat(out, dim=2), layer(x)[:, :, 11:], rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["alibi", "cable", "rope"])
def test_half_precision(name, dtype):
    layer, x, cache = Layer(encoding(name)), tokens(20, dtype=dtype), relpos.Cache()
    out = torch.cat([layer.step(x[:, i : i + 1], cache) for i in range(20)], dim=2)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), layer(x).float(), rtol=0.03, atol=0.03)


def test_masks_and_options_of_attention_work_with_a_cache():
    torch.manual_seed(0)
    layer, x = Layer(encoding("kerple_log")), tokens(20)
    sinks, options = torch.randn(HEADS), {"window": 5, "softcap": 3.0, "scale": 0.7}
    hidden = layer.position.embed(x)
    q, k, v = layer.project(hidden)
    expected, lse = relpos.attention(q, k, v, layer.position, sinks=sinks, return_lse=True, **options)
    cache = relpos.Cache()
    steps = [layer.step(x[:, i : i + 1], cache, sinks=sinks, return_lse=True, **options) for i in range(20)]
    torch.testing.assert_close(torch.cat([out for out, _ in steps], 2), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(torch.cat([own for _, own in steps], 2), lse, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["alibi", "rope", "fire"])
def test_given_positions(name):
    layer, x = Layer(encoding(name)), tokens(12)
    given = torch.arange(12)[None] * 3 + 2
    hidden = layer.position.embed(x)
    q, k, v = layer.project(hidden)
    expected = relpos.attention(q, k, v, layer.position, positions=given)
    cache = relpos.Cache()
    steps = [layer.step(x[:, i : i + 2], cache, positions=given[:, : i + 2]) for i in range(0, 12, 2)]
    torch.testing.assert_close(torch.cat(steps, 2), expected, rtol=0, atol=2e-5)


def test_running_sums_of_huge_and_tiny_steps():
    position = encoding("cable_nw")
    gates = torch.tensor([1e-20, 0.0, 1e30, 3.0, 1e-3, 1e35, 2.0]).expand(1, HEADS, -1)[..., None].contiguous()
    q, k, v = (torch.randn(1, HEADS, 7, HEAD_DIM) for _ in range(3))
    expected = relpos.attention(q, k, v, position, gates=gates)
    cache = relpos.Cache()
    for i in range(7):
        now = slice(i, i + 1)
        out = relpos.attention(q[:, :, now], k[:, :, now], v[:, :, now], position, gates=gates[:, :, now], cache=cache)
        torch.testing.assert_close(out, expected[:, :, now], rtol=0, atol=1e-5)


def test_refusals_are_sentences_and_leave_the_cache_as_it_was():
    layer, x, cache = Layer(encoding("alibi")), tokens(6), relpos.Cache()
    layer.step(x[:, :4], cache)
    q, k, v = (torch.randn(2, HEADS, 1, HEAD_DIM) for _ in range(3))
    with pytest.raises(ValueError, match="leave start and cu_seqlens out"):
        relpos.attention(q, k, v, layer.position, start=3, cache=cache)
    with pytest.raises(ValueError, match="q has 1 and k has 2"):
        relpos.attention(q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1), layer.position, cache=cache)
    with pytest.raises(ValueError, match="only the number of tokens may differ"):
        relpos.attention(q[:1], k[:1], v[:1], layer.position, cache=cache)
    with pytest.raises(ValueError, match="another encoding"):
        relpos.attention(q, k, v, encoding("rope"), cache=cache)
    with pytest.raises(ValueError, match="padding must be"):
        relpos.attention(q, k, v, layer.position, padding=torch.ones(2, 3, dtype=torch.bool), cache=cache)
    with pytest.raises(ValueError, match="documents must be"):
        relpos.attention(q, k, v, layer.position, documents=torch.zeros(2, 4, dtype=torch.long), cache=cache)
    with pytest.raises(ValueError, match="softcap must be"):
        relpos.attention(q, k, v, layer.position, softcap=-1.0, cache=cache)
    with pytest.raises(ValueError, match="cannot be cropped to 9"):
        cache.crop(9)
    for length in (1.5, True, "2", None):
        with pytest.raises(ValueError, match="length must be an integer, the number of tokens to keep, not"):
            cache.crop(length)
    with pytest.raises(ValueError, match="capacity must be"):
        relpos.Cache(0)
    assert len(cache) == 4
    torch.testing.assert_close(layer.step(x[:, 4:], cache), layer(x)[:, :, 4:], rtol=0, atol=2e-5)


def test_tables_are_not_copied_with_a_cache():
    """They hold addresses of memory that belongs to the original."""
    layer, x, cache = Layer(encoding("kerple_log")), tokens(6), relpos.Cache()
    for i in range(4):
        layer.step(x[:, i : i + 1], cache)
    expected = layer.step(x[:, 4:5], copy.deepcopy(cache))
    copies = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    assert all(other._tables is None for other in copies)
    del cache
    for other in copies:
        torch.testing.assert_close(layer.step(x[:, 4:5], other), expected)


def test_a_first_step_that_failed_leaves_nothing():
    cache, x = relpos.Cache(), tokens(4)
    with pytest.raises(ValueError, match="padding must be"):
        Layer(encoding("cable")).step(x, cache, padding=torch.ones(2, 3, dtype=torch.bool))
    layer = Layer(encoding("alibi"))
    out = torch.cat([layer.step(x[:, i : i + 1], cache) for i in range(4)], dim=2)
    torch.testing.assert_close(out, layer(x), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "empty", [lambda cache: cache.crop(0), lambda cache: cache.crop(-5), lambda cache: cache.reset()]
)
@pytest.mark.parametrize(
    ("before", "after"), [("cable", "alibi"), ("alibi", "cable"), ("rope", "nope"), ("nope", "rope")]
)
def test_an_empty_cache_is_a_new_one(before, after, empty):
    """Also for an encoding of another kind, with other gates, and other sizes."""
    torch.manual_seed(0)
    cache = relpos.Cache()
    for name, head_dim in ((before, 8), (after, 16)):
        position = relpos.encoding(name, 2, head_dim)
        q, k, v = torch.randn(3, 1, 2, 5, head_dim).unbind()
        hidden = torch.randn(1, 5, 2 * head_dim)
        whole = relpos.attention(q, k, v, position, hidden=hidden if position.needs_hidden else None)
        for token in range(5):
            now = slice(token, token + 1)
            given = {"hidden": hidden[:, now]} if position.needs_hidden else {}
            out = relpos.attention(*(x[:, :, now] for x in (q, k, v)), position, cache=cache, **given)
            torch.testing.assert_close(out, whole[:, :, now])
        empty(cache)
