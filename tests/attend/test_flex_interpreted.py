"""The backend "flex" by PyTorch's own Triton kernels, forward, backward and decoding, against the definition.

Triton's interpreter runs them on CPU tensors. It knows no threads, so races, layouts and speed are not tested, and its
products of bfloat16 are wrong, so float32 and float16 are.
"""

from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    ARGUMENTS,
    FAMILIES,
    OF_TOKENS,
    SHARED,
    Family,
    assert_close,
    compare,
    normal,
    options_of,
    random_numbers,
)

pytest.importorskip("triton", reason="Triton is for Linux")

from flex_in_interpreter import flex_in_interpreter

from relpos.attend import flex
from relpos.forms.bias import locate

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def both_directions(numbers, call):
    position = torch.maximum(call.key_positions.to(call.dtype), numbers["threshold"])
    column = torch.log1p(numbers["log_c"].exp() * position)
    return replace(FAMILIES["scaled"].form(numbers, call), column=column)


def located(family):
    """The family with the positions of the call, where these have gaps."""

    def form(numbers, call):
        bias = family.form(numbers, call)
        return None if bias is None else locate(bias, call)

    return Family(family.numbers, form)


FORMS = {
    name: located(family)
    for name, family in {
        **FAMILIES,
        "scaled, both directions": Family(FAMILIES["scaled"].numbers, both_directions),
    }.items()
}
# batch, heads, key heads, queries, keys, head_dim, value_dim: blocks of 128 that are not full; few queries are decoded
SHAPE, FEW, ONE = (2, 2, 1, 150, 170, 24, 40), (2, 4, 1, 5, 170, 16, 16), (1, 2, 2, 1, 170, 16, 16)
MODES = {"causal": (SHAPE, True), "both directions": (SHAPE, False), "few queries": (FEW, True)}
MOST = ("plain", "all of them")  # arguments that every form is run with; the others take turns
QUICK = {
    ("none", "window", "causal"),
    ("rank one, weighted", "plain", "both directions"),
    ("sum", "all of them", "causal"),
    ("sum", "all of them", "few queries"),
    ("scaled", "plain", "causal"),
    ("toeplitz", "full blocks"),
    ("scaled", "one query"),
}


def is_defined(family, causal):
    return not family.startswith("scaled") or (family == "scaled") == causal


def every_argument():
    arguments = [argument for argument in ARGUMENTS if argument != "dropout"]
    for mode, (_, causal) in MODES.items():
        families = [family for family in FORMS if is_defined(family, causal)]
        for turn, argument in enumerate(arguments):
            chosen = families if argument in MOST else [families[turn % len(families)], "toeplitz"]
            yield from ((family, argument, mode) for family in dict.fromkeys(chosen))


def marked(cases):
    cases = set(cases) | {case for case in QUICK if len(case) == len(next(iter(cases)))}
    return [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in sorted(cases)]


def check(family, shape, options, dtype=torch.float32):
    torch.manual_seed(0)
    tensors = [x.to(dtype).double() for x in normal(*shape)]
    options = {name: x for name, x in options.items() if name not in ("dropout", "seed")}
    numbers = random_numbers(FORMS[family], tensors, options)
    compared = compare(tensors, FORMS[family], numbers, options, dtype=dtype, kernel=flex.attention)
    unit = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    # If a query sees its own token only, all rows share one number of a table.
    shared = (*SHARED, "gradient of table by") if options.get("window") == (0, 0) else SHARED
    assert_close(compared, unit=unit, steps=tensors[3].numel(), shared=shared)


@pytest.mark.parametrize(("family", "argument", "mode"), marked(list(every_argument())))
def test_values_and_gradients_are_those_of_the_definition(family, argument, mode):
    shape, causal = MODES[mode]
    torch.manual_seed(0)
    with flex_in_interpreter() as templates:
        check(family, shape, {"causal": causal, **options_of(argument, shape)})
    assert templates == {"decoding" if mode == "few queries" else "forward", "backward"}


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


CALLS = {  # what FlexAttention runs besides
    "full blocks": ((1, 1, 1, 512, 512, 16, 16), {"window": (300, 0)}),
    "one query": (ONE, {}),
    "a mask per head": (SHAPE, {"mask": drawn(2, 150, 170) > 0}),
    "a mask function": (SHAPE, {"mask": lambda b, h, i, j: (i + j + h) % 3 != b, "causal": False}),
    "positions with gaps": (SHAPE, {"token_positions": torch.arange(170)[None] * 3 // 2}),
    "beyond the keys": (SHAPE, {"causal": False, "start": 90, "window": (60, 5), "grad_lse": drawn(2, 2, 150)}),
}


@pytest.mark.parametrize(
    ("family", "call"),
    marked(
        [
            (family, call)
            for call, (_, options) in CALLS.items()
            for family in FORMS
            if is_defined(family, options.get("causal", True))
            and not (call == "beyond the keys" and family.startswith(OF_TOKENS))
        ]
    ),
)
def test_masks_positions_and_full_blocks(family, call):
    with flex_in_interpreter() as templates:
        check(family, *CALLS[call])
    assert templates == {"decoding" if call == "one query" else "forward", "backward"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mode"), [(family, mode) for family in FORMS for mode in MODES if is_defined(family, MODES[mode][1])]
)
def test_half_precision(family, mode):
    shape, causal = MODES[mode]
    with flex_in_interpreter():
        check(family, shape, {"causal": causal}, dtype=torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, None])
@pytest.mark.parametrize("family", ["toeplitz", "sum", "scaled"])
def test_kernels_for_any_length(family, queries):
    """From the second length on, sizes are arguments of the kernels."""
    with flex_in_interpreter():
        for keys in (150, 170, 256, 131):
            check(family, (1, 2, 2, queries or keys, keys, 16, 16), {"window": (99, 0)})
