"""What every encoding promises. A new one joins by being registered. (Its arguments: argument_contracts.py.)

Each contract is a function of `make`, which makes the encoding, and of a setting: the backend, the dtype it is checked
in and how close is equal there. It is run for every name in the registry and for the variants below.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from argument_contracts import ARGUMENT_CONTRACTS
from contract_settings import (
    EVERY_ARGUMENT,
    HEAD_DIM,
    HEADS,
    SETTINGS,
    Layer,
    Make,
    Setting,
    build,
    directions,
    runs,
    tokens,
)
from torch import Tensor

import relpos
from relpos.forms.encoding import Encoding

SCALINGS = {
    "linear": {"factor": 4.0},
    "ntk": {"factor": 4.0},
    "dynamic": {"factor": 2.0, "length": 8},
    "yarn": {"factor": 4.0, "length": 16},
    "llama3": {"factor": 8.0, "length": 64},
    "longrope": {
        "length": 64,
        "rope_parameters": {
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 4.0, 8.0],
            "original_max_position_embeddings": 8,
            "factor": 8.0,
        },
    },
    "proportional": {"factor": 2.0, "fraction": 0.5},
}
BASES = [name for name in relpos.names() if relpos.card(name).place == "score" and not name.startswith("dape")]
VARIANTS: list[tuple[str, dict[str, object]]] = [
    *((name, {}) for name in relpos.names()),
    ("alibi", {"slopes": "press"}),
    ("t5", {"buckets": 8, "max_distance": 12}),
    ("clipped", {"limit": 5}),
    ("clipped", {"limit": 5, "divisor": "width"}),
    ("kerple_log", {"clamped": True}),
    ("kerple_power", {"clamped": True}),
    ("fire", {"length": 7, "units": 5}),
    ("fire", {"length": 7, "units": 5, "leak": 0.3}),
    ("fire", {"length": 7, "units": 5, "symmetric": True}),
    ("fire", {"length": 7, "units": 5, "absolute": True, "initial_std": 0.5}),
    ("fire", {"length": 7, "units": 5, "absolute": True, "symmetric": True}),
    ("sandwich", {"dim": 6}),
    ("cable", {"step": "softplus"}),
    ("cable_nw", {"step": "softplus"}),
    ("kcable", {"weighted": True}),
    ("cope", {"npos": 4}),
    ("cope", {"scaled": False}),
    ("sinusoidal", {"amplitude": 0.1}),
    ("sum", {"parts": ["rope", "forgetting"]}),
    ("sum", {"parts": ["xpos", "alibi"]}),
    ("sum", {"parts": ["ssmax", "alibi"]}),
    ("sum", {"parts": ["sinusoidal", "cable", "t5", "forgetting"]}),
    ("sum", {"parts": ["kerple_log", "cable"], "part_options": {"cable": {"step": "softplus"}}}),
    ("sum", {"parts": ["fire", "dape"]}),
    ("sum", {"parts": ["fire", "alibi"], "part_options": {"fire": {"length": 7, "symmetric": True}}}),
    ("temperature", {"length": 3, "strength": 0.7}),
    ("temperature", {"rule": "ministral3", "length": 3, "strength": 0.7}),
    ("temperature", {"rule": "inkling", "length": 3, "strength": 0.7}),
    ("sum", {"parts": ["rope", "ssmax"]}),
    ("sum", {"parts": ["temperature", "rope", "t5"], "part_options": {"temperature": {"length": 3}}}),
    ("rope", {"layout": "interleaved"}),
    ("rope", {"fraction": 0.5}),
    ("rope", {"sections": [2, 1, 1]}),
    ("rope", {"sections": [2, 1, 1], "section_order": "interleaved"}),
    *(("rope", {"scaling": scaling, **options}) for scaling, options in SCALINGS.items()),
    *((name, {"base": base}) for name in ("dape", "dapev2") for base in BASES if base != "kerple_log"),
]


def decoding_step_by_step_is_the_whole_sequence(make: Make, setting: Setting) -> None:
    position = build(make, setting)
    layer, x = Layer(position, backend=setting.backend), tokens(13, setting)
    for step in (1, 5):
        decoded = layer.decode(x, step)
        for end in (step, 2 * step, 13):  # a dynamic scaling sees the length so far, so compare with that prefix
            last = layer(x[:, :end])[:, :, -1]
            setting.close(decoded[:, :, end - 1], last)
        if not position.depends_on_length:
            setting.close(decoded, layer(x))


def a_cache_changes_nothing(make: Make, setting: Setting) -> None:
    position = build(make, setting)
    layer, x = Layer(position, key_heads=2, backend=setting.backend), tokens(21, setting)
    documents = torch.tensor([[5] * 9 + [6] * 12, [1] * 2 + [2] * 19])
    padding = torch.ones(2, 21, dtype=torch.bool)
    padding[0, :3] = padding[1, 12] = False
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            for step in (1, 5):
                setting.close(layer.decode_with_cache(x, step), layer.decode(x, step))
            if not position.depends_on_length:
                setting.close(layer.decode_with_cache(x, 9), layer(x))
                setting.close(layer.decode_with_cache(x, 4, documents), layer(x, documents))
                setting.close(layer.decode_with_cache(x, 4, padding=padding), layer(x, padding=padding))


def packed_documents_are_separate_documents(make: Make, setting: Setting) -> None:
    position = build(make, setting)
    x, lengths = tokens(17, setting), ([5, 1, 11], [9, 8, 0])
    documents = torch.stack([torch.repeat_interleave(torch.tensor([7, 3, 9]), torch.tensor(row)) for row in lengths])
    for causal in directions(position, setting):
        layer = Layer(position, backend=setting.backend, causal=causal)
        packed = layer(x, documents=documents)
        if causal and not position.depends_on_length:
            setting.close(layer.decode(x, 4, documents=documents), packed)
        for row, sizes in enumerate(lengths):
            start = 0
            for size in filter(None, sizes):
                alone = layer(x[row : row + 1, start : start + size])
                setting.close(packed[row : row + 1, :, start : start + size], alone)
                start += size


def padding_hides_keys_and_nothing_else(make: Make, setting: Setting) -> None:
    position = build(make, setting)
    layer, x = Layer(position, backend=setting.backend), tokens(11, setting)
    padding = torch.ones(2, 11, dtype=torch.bool)
    padding[0, 8:] = False  # right padding: the rows before it must not notice
    if not position.depends_on_length:
        setting.close(layer(x, padding=padding)[0, :, :8], layer(x[:1, :8])[0])
    changed = x.clone()
    changed[0, 8:] += 1.0
    before, after = layer(x, padding=padding), layer(changed, padding=padding)
    setting.close(after[0, :, :8], before[0, :, :8])
    padding[1] = False
    alone = layer(x, padding=padding)
    assert alone[1].abs().max() == 0  # a query that sees nothing gets 0
    assert alone[0].isfinite().all()


def every_length_works_also_past_the_trained_one(make: Make, setting: Setting) -> None:
    position = build(make, setting)
    layer = Layer(position, backend=setting.backend)
    for length in (1, 2, 3, 67, 300):
        out = layer(tokens(length, setting, batch=1))
        assert out.shape == (1, HEADS, length, HEAD_DIM)
        assert out.isfinite().all()


def later_tokens_change_nothing_earlier(make: Make, setting: Setting) -> None:
    position = build(make, setting)
    layer, x = Layer(position, backend=setting.backend), tokens(12, setting)
    changed = x.clone()
    changed[:, 9] += 1.0
    before, after = layer(x), layer(changed)
    setting.close(after[:, :, :9], before[:, :, :9])
    assert (after[:, :, 9:] - before[:, :, 9:]).abs().amax() > 1e-3


def gradients_are_those_of_finite_differences(make: Make, setting: Setting) -> None:
    position = build(make, setting)
    names_ = [name for name, _ in position.named_parameters()]
    parameters = tuple(p.detach().clone().requires_grad_() for p in position.parameters())
    x = tokens(6, setting, batch=1).requires_grad_()
    for causal in directions(position, setting):
        layer = Layer(position, backend=setting.backend, causal=causal)

        def run(x: Tensor, *values: Tensor, layer: Layer = layer) -> Tensor:
            return torch.func.functional_call(
                _Wrapped(layer), {f"position.{n}": v for n, v in zip(names_, values, strict=True)}, (x,)
            )

        assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True, atol=1e-6, rtol=1e-4)


class _Wrapped(torch.nn.Module):
    """A Layer whose encoding's parameters can be passed from outside."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.position, self.layer = layer.position, layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def values_and_gradients_are_those_of_the_reference(make: Make, setting: Setting) -> None:
    exact = SETTINGS["reference"]
    documents = torch.tensor([[5] * 9 + [6] * 4, [1] * 2 + [2] * 11])
    padding = torch.ones(2, 13, dtype=torch.bool)
    padding[0, 3:5] = padding[1, 12] = False
    for options in ({}, {"documents": documents}, {"padding": padding}):
        for causal in directions(build(make, exact), setting):
            results = []
            for way in (exact, setting):
                position, x = build(make, exact).to(way.dtype), tokens(13, exact).to(way.dtype).requires_grad_()
                out = Layer(position, key_heads=2, backend=way.backend, causal=causal)(x, **options)
                weights = torch.sin(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape)
                grads = torch.autograd.grad((out * weights.to(way.dtype)).sum(), (x, *position.parameters()))
                results.append((out.double(), [grad.double() for grad in grads]))
            (out, grads), (our_out, our_grads) = results
            setting.close(our_out, out)
            for ours, theirs in zip(our_grads, grads, strict=True):
                torch.testing.assert_close(
                    ours, theirs, rtol=0.0, atol=setting.grad_atol * max(1.0, theirs.abs().max())
                )


def every_parameter_gets_a_gradient(make: Make, setting: Setting) -> None:
    position = build(make, setting)
    names, parameters = zip(*position.named_parameters(), strict=True)
    layer, x = Layer(position, backend=setting.backend), tokens(12, setting)
    through_attention = torch.autograd.grad((layer(x) ** 2).sum(), parameters)
    # A value that is added to an entire row of scores changes no attention weight, but it changes the scores.
    scores = layer.scores(x)[..., torch.ones(12, 12).tril().bool()]
    through_scores = torch.autograd.grad((scores * torch.sin(torch.arange(scores.shape[-1]))).sum(), parameters)
    for name, gradient, of_scores in zip(names, through_attention, through_scores, strict=True):
        assert gradient.isfinite().all(), name
        assert of_scores.abs().max() > 1e-6, name


def grouped_key_heads_are_repeated_heads(make: Make, setting: Setting) -> None:
    position = build(make, setting)
    layer, x = Layer(position, backend=setting.backend, key_heads=2), tokens(9, setting)
    hidden = position.embed(x)
    q, k, v = layer.project(hidden)
    k, v = (t.repeat_interleave(HEADS // 2, dim=1) for t in (k, v))
    setting.close(layer(x), relpos.attention(q, k, v, position, hidden=hidden, backend=setting.backend))


def a_static_map_is_the_same_for_any_input(make: Make, setting: Setting) -> None:
    position = build(make, setting)
    q = torch.randn(2, 1, HEADS, 9, HEAD_DIM, dtype=torch.float64)
    k = torch.randn(2, 1, HEADS, 9, HEAD_DIM, dtype=torch.float64)
    for a, b in zip(q, k, strict=True):
        added = relpos.scores(a, b, position) - relpos.scores(a, b)
        seen = torch.ones(9, 9, dtype=torch.bool).tril()
        torch.testing.assert_close(added[0][:, seen], position.map(9)[:, seen].double(), rtol=1e-5, atol=1e-5)


def its_state_can_be_saved_and_loaded(make: Make, setting: Setting) -> None:
    position, other = build(make, setting), make().to(setting.dtype)
    other.load_state_dict(copy.deepcopy(position.state_dict()))
    x = tokens(8, setting)
    saved, loaded = (Layer(which, backend=setting.backend)(x) for which in (position, other))
    assert torch.equal(loaded, saved)


def half_precision_runs_in_float32_inside(make: Make, setting: Setting) -> None:
    torch.manual_seed(3)
    position = make()
    x = tokens(40, setting).float()
    exact = Layer(position, backend=setting.backend)(x.bfloat16().float())
    half = Layer(position, backend=setting.backend)(x.bfloat16())
    assert half.dtype == torch.bfloat16
    # q, k, v and the result are rounded to 8 bits, position is not: an error of the size of the inputs' rounding.
    torch.testing.assert_close(half.float(), exact, rtol=0.05, atol=0.05)


def both_directions_or_a_clear_refusal(make: Make, setting: Setting) -> None:
    position = build(make, setting)
    layer, x = Layer(position, backend=setting.backend, causal=False), tokens(10, setting)
    if not position.bidirectional:
        with pytest.raises(ValueError, match="causal attention only"):
            layer(x)
        return
    if not runs(position, setting, causal=False):
        with pytest.raises(ValueError, match=f"the backend '{setting.backend}' cannot run this"):
            layer(x)
        return
    changed = x.clone()
    changed[:, -1] += 1.0
    assert (layer(changed)[:, :, 0] - layer(x)[:, :, 0]).abs().max() > 1e-4  # the first token sees the last


def contracts_for(setting: Setting, position: Encoding) -> list[Callable[[Make, Setting], None]]:
    """The contracts that say something about this encoding in this setting."""
    # The definition is held to finite differences, every other way to the definition.
    left_out: set[Callable[[Make, Setting], None]] = {
        values_and_gradients_are_those_of_the_reference
        if setting.backend == "reference"
        else gradients_are_those_of_finite_differences
    }
    if not set(position.places) <= {"score"} or position.needs_hidden or position.needs_scores:
        left_out.add(a_static_map_is_the_same_for_any_input)
    if not list(position.parameters()):
        left_out.add(every_parameter_gets_a_gradient)
    if setting.backend not in EVERY_ARGUMENT:
        left_out.update(ARGUMENT_CONTRACTS)
    return [contract for contract in CONTRACTS if contract not in left_out]


CONTRACTS = [
    decoding_step_by_step_is_the_whole_sequence,
    a_cache_changes_nothing,
    packed_documents_are_separate_documents,
    padding_hides_keys_and_nothing_else,
    every_length_works_also_past_the_trained_one,
    later_tokens_change_nothing_earlier,
    gradients_are_those_of_finite_differences,
    values_and_gradients_are_those_of_the_reference,
    every_parameter_gets_a_gradient,
    grouped_key_heads_are_repeated_heads,
    a_static_map_is_the_same_for_any_input,
    its_state_can_be_saved_and_loaded,
    half_precision_runs_in_float32_inside,
    both_directions_or_a_clear_refusal,
    *ARGUMENT_CONTRACTS,
]
