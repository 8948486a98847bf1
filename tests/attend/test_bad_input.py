"""Bad input is refused with a sentence that says what was passed and what is allowed: one test per kind."""

import re

import pytest
import torch

import relpos
from relpos.forms.encoding import Encoding

HEADS, HEAD_DIM, LENGTH = 4, 8, 6
WIDTH = HEADS * HEAD_DIM
NAN, INF = float("nan"), float("inf")


def build(name, heads=HEADS, head_dim=HEAD_DIM, **options):
    return relpos.encoding(name, heads, head_dim, **options)


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def qkv(batch=2, heads=HEADS, length=LENGTH, head_dim=HEAD_DIM):
    return normal(batch, heads, length, head_dim), *(normal(batch, heads, length, head_dim) for _ in "kv")


def says(*parts):
    """A pattern for a message that has these parts, in this order."""
    return "(?s)" + ".*".join(re.escape(str(part)) for part in parts)


# Names


@pytest.mark.parametrize(
    ("misspelt", "nearest"), [("kerpel_log", "kerple_log"), ("Alibi", "alibi"), ("alibi2", "alibi"), ("ropee", "rope")]
)
def test_an_unknown_encoding_suggests_the_nearest(misspelt, nearest):
    pattern = says(f"unknown encoding {misspelt!r}", f"Did you mean {nearest!r}?", "Allowed: alibi, cable,")
    with pytest.raises(ValueError, match=pattern):
        build(misspelt)
    with pytest.raises(ValueError, match=pattern):
        relpos.card(misspelt)


def test_an_unknown_encoding_like_no_other_lists_what_there_is():
    with pytest.raises(ValueError, match=says("unknown encoding 'zzz'. Allowed: alibi", "xpos.")):
        build("zzz")


@pytest.mark.parametrize(
    ("name", "misspelt", "nearest", "allowed"),
    [
        ("alibi", "slope", "slopes", "slopes"),
        ("rope", "layouts", "layout", "base, factor, fraction, layout"),
        ("t5", "bucket", "buckets", "buckets, max_distance"),
        ("cable", "widths", "width", "step, width"),
    ],
)
def test_an_unknown_option_suggests_the_nearest(name, misspelt, nearest, allowed):
    pattern = says(f"unknown option of {name} {misspelt!r}", f"Did you mean {nearest!r}?", f"Allowed: {allowed}")
    with pytest.raises(ValueError, match=pattern):
        build(name, **{misspelt: 1})


def test_an_option_where_there_are_none_says_so():
    with pytest.raises(ValueError, match=says("unknown option of nope 'width'", "Allowed: none")):
        build("nope", width=3)


def test_an_unknown_option_of_dapes_base_is_named():
    with pytest.raises(ValueError, match=says("unknown option of alibi 'slope'", "'slopes'")):
        build("dape", base="alibi", base_options={"slope": "press"})
    with pytest.raises(ValueError, match=says("unknown encoding 'alibbi'", "'alibi'")):
        build("dape", base="alibbi")
    with pytest.raises(ValueError, match=says("unknown encoding ['alibi']", "Allowed: alibi")):
        build("dape", base=["alibi"])
    with pytest.raises(ValueError, match=says("base_options must be a dictionary", "of 'alibi', not ['press']")):
        build("dape", base="alibi", base_options=["press"])


@pytest.mark.parametrize(
    ("name", "options", "pattern"),
    [
        ("alibi", {"slopes": "pres"}, says("unknown slopes 'pres'", "'press'", "geometric, press")),
        ("rope", {"layout": "halves"}, says("unknown layout 'halves'", "half, interleaved")),
        ("xpos", {"layout": "half"}, says("unknown option of xpos 'layout'", "base, scale_base")),
        ("rope", {"scaling": "yarm"}, says("unknown scaling 'yarm'", "'yarn'", "default, dynamic, linear")),
        ("rope", {"scaling": None}, says("unknown scaling None", "default, dynamic, linear")),
        (
            "rope",
            {"rope_parameters": {"rope_type": "llama4"}},
            says("unknown RoPE scaling 'llama4'", "'llama3'", "longrope"),
        ),
        (
            "rope",
            {"rope_parameters": {"rope_tetha": 1e4}},
            says("unknown key of rope_parameters 'rope_tetha'", "'rope_theta'", "partial_rotary_factor"),
        ),
        ("cable", {"step": "gelu"}, says("unknown step 'gelu'", "relu, softplus")),
        ("cable_nw", {"step": "softplsu"}, says("unknown step 'softplsu'", "'softplus'")),
        ("kcable", {"step": "gelu"}, says("unknown step 'gelu'", "relu, softplus")),
        ("temperature", {"rule": "llama"}, says("unknown rule 'llama'", "'llama4'", "inkling, llama4, ministral3")),
    ],
)
def test_an_unknown_choice_names_the_choices(name, options, pattern):
    with pytest.raises(ValueError, match=pattern):
        build(name, **options)


# Options

INTEGERS = [
    *((name, size) for name in relpos.names() for size in ("heads", "head_dim")),
    *(
        (name, key)
        for name in relpos.names()
        for key, option in relpos.card(name).options.items()
        if option.type.startswith("int")
    ),
]
POSITIVE = [
    ("fire", "c"),
    ("sandwich", "base"),
    ("rope", "base"),
    ("rope", "factor"),
    ("xpos", "base"),
    ("xpos", "scale_base"),
    ("sinusoidal", "amplitude"),
    ("sinusoidal", "base"),
    ("temperature", "strength"),
    ("ssmax", "start"),
]


@pytest.mark.parametrize("value", [0, -4, True, 8.0, "8"], ids=repr)
@pytest.mark.parametrize(("name", "option"), INTEGERS)
def test_a_size_must_be_a_positive_integer(name, option, value):
    sizes = {"heads": HEADS, "head_dim": HEAD_DIM, option: value}
    with pytest.raises(ValueError, match=says(f"{option} must be an integer of at least", f"not {value!r}")):
        relpos.encoding(name, **sizes)


@pytest.mark.parametrize("value", [0, -1.5, NAN, INF, True, "2"], ids=repr)
@pytest.mark.parametrize(("name", "option"), POSITIVE)
def test_an_amount_must_be_a_positive_number(name, option, value):
    with pytest.raises(ValueError, match=says(f"{option} must be a positive number", f"not {value!r}")):
        build(name, **{option: value})


@pytest.mark.parametrize("value", [0, -0.5, 1.5, NAN, INF, True, "half"], ids=repr)
def test_a_fraction_must_be_over_0_and_at_most_1(value):
    with pytest.raises(ValueError, match=says("fraction must be", "not", repr(value))):
        build("rope", fraction=value)


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}


@pytest.mark.parametrize(
    ("parameters", "pattern"),
    [
        ({"rope_theta": -1.0}, says("must be a positive number", "-1.0")),
        ({"rope_type": "linear", "factor": 0.0}, says("factor must be a positive number", "0.0")),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}, says("beta_fast must be a positive number", "-1")),
        ({"rope_type": "yarn", "factor": 2.0, "beta_slow": NAN}, says("beta_slow must be a positive number", "nan")),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
            says("original_max_position_embeddings must be an integer of at least 1", "0"),
        ),
        (
            {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
            says("high_freq_factor (1.0) must be over low_freq_factor (4.0)"),
        ),
        ({**LONG, "long_factor": [2.0] * 3}, says("4 numbers each", "not 4 and 3")),
        ({"rope_type": "longrope"}, says("short_factor and long_factor of 4 numbers each", "not 0 and 0")),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": -1.0}, says("attention_factor must be", "-1.0")),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": NAN}, says("attention_factor must be", "nan")),
        ({"rope_type": "yarn", "factor": 2.0, "mscale": -1.0, "mscale_all_dim": 1.0}, says("mscale must be", "-1.0")),
        ({**LONG, "short_factor": [1.0, 0.0, 1.0, 1.0]}, says("short_factor", "0.0")),
        ({**LONG, "long_factor": [1.0, NAN, 1.0, 1.0]}, says("long_factor", "nan")),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_rope_parameters_that_make_no_sense_are_refused(parameters, pattern):
    with pytest.raises(ValueError, match=pattern):
        build("rope", rope_parameters=parameters)


def test_t5_needs_buckets_that_can_be_halved_and_a_distance_over_the_exact_ones():
    assert "a multiple of 4" in relpos.card("t5").options["buckets"].meaning
    for buckets in (5, 6, 30):
        with pytest.raises(ValueError, match=says("buckets must be a multiple of 4", f"not {buckets}")):
            build("t5", buckets=buckets)
    with pytest.raises(ValueError, match=says("max_distance must be over buckets / 2 = 16", "not 16")):
        build("t5", max_distance=16)


@pytest.mark.parametrize("leak", [-0.01, 1.5, float("nan"), "0.01", True])
def test_fires_leak_is_a_slope_from_0_to_1(leak):
    with pytest.raises(ValueError, match=says("leak must be a number from 0 (ReLU) to 1", f"not {leak!r}")):
        build("fire", leak=leak)


def test_cope_needs_two_positions():
    with pytest.raises(ValueError, match=says("npos must be an integer of at least 2", "not 1")):
        build("cope", npos=1)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("rope", says("pairs", "7 of head_dim 7")),
        ("xpos", says("head_dim must be even", "not 7")),
        ("sandwich", says("must be even", "not 7")),
    ],
)
def test_an_odd_head_dim_cannot_be_paired(name, pattern):
    with pytest.raises(ValueError, match=pattern):
        build(name, head_dim=7)


def test_an_odd_part_of_a_head_cannot_be_paired():
    with pytest.raises(ValueError, match=says("pairs", "3 of head_dim 6")):
        build("rope", head_dim=6, fraction=0.5)
    with pytest.raises(ValueError, match=says("pairs", "0 of head_dim 8")):
        build("rope", fraction=0.1)


@pytest.mark.parametrize("scaling", ["ntk", "dynamic"])
def test_a_scaling_of_the_base_needs_two_pairs(scaling):
    with pytest.raises(ValueError, match=says(f"{scaling!r} needs at least 4 rotated dimensions", "not 2")):
        build("rope", head_dim=2, scaling=scaling)


def test_an_odd_width_cannot_be_paired():
    with pytest.raises(ValueError, match=says("the width must be even", "not 15")):
        build("sinusoidal", heads=3, head_dim=5)
    with pytest.raises(ValueError, match=says("the width must be even", "not 33")):
        build("sinusoidal", width=33)


@pytest.mark.parametrize(
    ("base", "place"),
    [
        ("rope", "query and key"),
        ("xpos", "query and key"),
        ("ssmax", "query and key"),
        ("temperature", "query and key"),
        ("learned", "embedding"),
        ("sinusoidal", "embedding"),
        ("nope", "nowhere"),
    ],
)
@pytest.mark.parametrize("name", ["dape", "dapev2"])
def test_dape_needs_a_base_with_a_bias(name, base, place):
    with pytest.raises(ValueError, match=says("adapts a bias on the scores", repr(base), place)):
        build(name, base=base)


# Queries, keys and values


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("shape", [(HEADS, LENGTH, HEAD_DIM), (1, 2, HEADS, LENGTH, HEAD_DIM), (3,)], ids=str)
def test_a_wrong_rank_is_refused(which, shape):
    tensors = dict(zip("qkv", qkv(), strict=True)) | {which: normal(*shape)}
    with pytest.raises(ValueError, match=says(f"{which} must be (batch, heads, length, head_dim)", shape)):
        relpos.attention(**tensors)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_is_no_tensor_is_refused(which):
    tensors = dict(zip("qkv", qkv(), strict=True)) | {which: [[1.0]]}
    with pytest.raises(TypeError, match=says(f"{which} must be a tensor, not list")):
        relpos.attention(**tensors)


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_a_dtype_without_a_point_is_refused(which, dtype):
    tensors = dict(zip("qkv", qkv(), strict=True))
    tensors[which] = tensors[which].to(dtype)
    with pytest.raises(TypeError, match=says(f"{which} must have a floating-point dtype, not {dtype}")):
        relpos.attention(**tensors)


@pytest.mark.parametrize("which", ["k", "v"])
def test_mixed_dtypes_are_refused(which):
    tensors = dict(zip("qkv", qkv(), strict=True))
    tensors[which] = tensors[which].bfloat16()
    with pytest.raises(ValueError, match=says(f"{which} is torch.bfloat16", "q is torch.float32", "must agree")):
        relpos.attention(**tensors)


def test_sizes_that_do_not_match_are_refused():
    q, k, v = qkv()
    with pytest.raises(
        ValueError, match=says("v must have the batch, heads and length of k", k.shape[0], "not (2, 4, 5)")
    ):
        relpos.attention(q, k, v[:, :, :5])
    with pytest.raises(ValueError, match="k has batch 1, but q has batch 2"):
        relpos.attention(q, k[:1], v[:1])
    with pytest.raises(ValueError, match="k has head_dim 6, but q has head_dim 8"):
        relpos.attention(q, k[..., :6], v[..., :6])
    with pytest.raises(ValueError, match="the 4 heads of q are not a multiple of the 3 heads of k"):
        relpos.attention(q, k[:, :3], v[:, :3])
    with pytest.raises(ValueError, match="the 2 heads of q are not a multiple of the 4 heads of k"):
        relpos.attention(q[:, :2], k, v)
    with pytest.raises(ValueError, match="there are 6 queries but 5 keys"):
        relpos.attention(q, k[:, :, :5], v[:, :, :5])


def test_scores_refuse_what_attention_refuses():
    q, k, _ = qkv()
    with pytest.raises(ValueError, match="there are 6 queries but 5 keys"):
        relpos.scores(q, k[:, :, :5])
    with pytest.raises(ValueError, match="k has batch 1, but q has batch 2"):
        relpos.scores(q, k[:1])


@pytest.mark.parametrize("axis", range(4))
def test_empty_tensors_are_refused(axis):
    shape = [2, HEADS, LENGTH, HEAD_DIM]
    shape[axis] = 0
    empty = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"empty|the 0 heads of k"):
        relpos.attention(empty, empty, empty)


def test_an_encoding_of_other_sizes_is_refused():
    q, k, v = qkv()
    with pytest.raises(ValueError, match=says("Alibi was made for 8 heads, head_dim 8, but q has 4 heads, head_dim 8")):
        relpos.attention(q, k, v, build("alibi", heads=8))
    with pytest.raises(ValueError, match=says("Rope was made for 4 heads, head_dim 16, but q has 4 heads, head_dim 8")):
        relpos.attention(q, k, v, build("rope", head_dim=16))


def test_a_name_in_place_of_an_encoding_is_refused():
    with pytest.raises(TypeError, match=says("position must be an encoding", "not 'alibi'")):
        relpos.attention(*qkv(), "alibi")


@pytest.mark.parametrize("scale", [0, 0.0, -1.0, NAN, INF, True, "1"], ids=repr)
def test_a_scale_must_be_a_positive_number(scale):
    with pytest.raises(ValueError, match=says("scale must be a positive number", f"not {scale!r}")):
        relpos.attention(*qkv(), scale=scale)


# Hidden and gates

FROM_HIDDEN = ["cable", "cable_nw", "kcable", "forgetting"]


@pytest.mark.parametrize("name", FROM_HIDDEN)
def test_a_bias_from_the_input_needs_the_input(name):
    with pytest.raises(ValueError, match=says(f"give hidden= of shape (2, {LENGTH}, {WIDTH}), or", "gates=")):
        relpos.attention(*qkv(), build(name))
    over = build("dape", base=name)
    with pytest.raises(ValueError, match=says(f"give hidden= of shape (2, {LENGTH}, {WIDTH}), or", "gates=")):
        relpos.attention(*qkv(), over)


@pytest.mark.parametrize("shape", [(2, LENGTH, 5), (2, 1, WIDTH), (1, LENGTH, WIDTH), (LENGTH, WIDTH)], ids=str)
@pytest.mark.parametrize("name", FROM_HIDDEN)
def test_hidden_of_a_wrong_shape_is_refused(name, shape):
    pattern = says("hidden must be", f"(2, {LENGTH}, {WIDTH}), not {shape}", "gates=")
    with pytest.raises(ValueError, match=pattern):
        relpos.attention(*qkv(), build(name), hidden=normal(*shape))


@pytest.mark.parametrize("shape", [(2, HEADS, LENGTH), (2, HEADS, 1, 1), (1, HEADS, LENGTH, 1), (2, 3, LENGTH, 1)])
def test_gates_of_a_wrong_shape_are_refused(shape):
    with pytest.raises(ValueError, match=says(f"gates of Forgetting must be (2, {HEADS}, {LENGTH},", f"not {shape}")):
        relpos.attention(*qkv(), build("forgetting"), gates=normal(*shape))


@pytest.mark.parametrize(("name", "other"), [("cable", "cable_nw"), ("cable_nw", "cable"), ("forgetting", "cable")])
def test_gates_of_another_encoding_are_refused(name, other):
    gates = build(other).gates(normal(2, LENGTH, WIDTH))
    with pytest.raises(ValueError, match=says("gates of", "must be", f"not {tuple(gates.shape)}")):
        relpos.attention(*qkv(), build(name), gates=gates)


# Documents and padding


@pytest.mark.parametrize("shape", [(LENGTH,), (1, LENGTH), (2, LENGTH - 1), (2, LENGTH, 1)], ids=str)
def test_documents_of_a_wrong_shape_are_refused(shape):
    with pytest.raises(ValueError, match=says(f"documents must be (2, {LENGTH}), not {shape}")):
        relpos.attention(*qkv(), documents=torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_documents_that_are_no_integers_are_refused(dtype):
    with pytest.raises(TypeError, match=says("documents must be integers", f"not {dtype}")):
        relpos.attention(*qkv(), documents=torch.zeros(2, LENGTH, dtype=dtype))


def test_a_document_that_comes_back_is_refused():
    documents = torch.tensor([[0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 0, 0]])
    with pytest.raises(ValueError, match=says("each document must be contiguous", "in row 1 an id occurs again")):
        relpos.attention(*qkv(), documents=documents)
    relpos.attention(*qkv(), documents=documents[:1].expand(2, -1))  # in order, and so accepted


@pytest.mark.parametrize("shape", [(LENGTH,), (1, LENGTH), (2, LENGTH - 1), (2, 1, 1, LENGTH)], ids=str)
def test_padding_of_a_wrong_shape_is_refused(shape):
    with pytest.raises(ValueError, match=says(f"padding must be (2, {LENGTH}), not {shape}")):
        relpos.attention(*qkv(), padding=torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_padding_that_is_not_boolean_is_refused(dtype):
    with pytest.raises(TypeError, match=says("padding must be boolean, True for the keys that count", f"not {dtype}")):
        relpos.attention(*qkv(), padding=torch.ones(2, LENGTH, dtype=dtype))


# Directions


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fire", {}),
        ("cope", {}),
        ("forgetting", {}),
        ("xpos", {}),
        ("dape", {"base": "fire"}),
        ("dape", {"base": "forgetting"}),
        ("dapev2", {"base": "fire"}),
        ("dape", {"base": "dape", "base_options": {"base": "fire"}}),
    ],
)
def test_an_encoding_of_the_past_alone_refuses_both_directions(name, options):
    position = build(name, **options)
    x = normal(2, LENGTH, WIDTH)
    with pytest.raises(ValueError, match=says(type(position).__name__, "causal attention only")):
        relpos.attention(*qkv(), position, hidden=x, causal=False)
    with pytest.raises(ValueError, match=says(type(position).__name__, "causal attention only")):
        relpos.scores(*qkv()[:2], position, hidden=x, causal=False)


CAUSAL_ONLY = [name for name in relpos.names() if relpos.card(name).directions == "causal"]


def test_the_causal_encodings_are_known():
    assert CAUSAL_ONLY == ["cope", "fire", "forgetting", "xpos"]


@pytest.mark.parametrize("name", CAUSAL_ONLY)
def test_a_causal_encoding_names_alternatives_that_run_in_both_directions(name):
    position, x = build(name), normal(2, LENGTH, WIDTH)
    assert position.alternatives
    pattern = says("is defined for causal attention only. In both directions, use", *position.alternatives)
    with pytest.raises(ValueError, match=pattern):
        relpos.attention(*qkv(), position, hidden=x, causal=False)
    for alternative in position.alternatives:
        instead, _, options = alternative.partition(" with ")
        values = {"True": True}
        given = {key: values.get(value, value) for key, _, value in [options.partition("=")] if key}
        relpos.attention(*qkv(), build(instead, **given), hidden=x, causal=False)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("fire", {}, "use fire with symmetric=True, kerple_log or t5."),
        ("xpos", {}, "use rope."),
        ("dape", {"base": "forgetting"}, "use cable_nw with step=softplus as its base or cable as its base."),
        ("sum", {"parts": ["xpos", "alibi"]}, "use rope in place of xpos."),
        ("sum", {"parts": ["rope", "cope", "xpos"]}, "use cable in place of cope, dape in place of cope or rope in pl"),
    ],
)
def test_the_alternatives_are_a_sentence(name, options, sentence):
    with pytest.raises(ValueError, match=says("causal attention only. In both directions,", sentence)):
        relpos.attention(*qkv(), build(name, **options), hidden=normal(2, LENGTH, WIDTH), causal=False)


def test_a_causal_encoding_without_alternatives_says_where_to_look():
    class Onward(Own):
        @property
        def bidirectional(self):
            return False

    pattern = says(
        "Onward is defined for causal attention only. In both directions, use an encoding whose", "relpos ls"
    )
    with pytest.raises(ValueError, match=pattern):
        relpos.attention(*qkv(), Onward(HEADS, HEAD_DIM), causal=False)


@pytest.mark.parametrize("name", ["fire", "forgetting", "cope"])
def test_a_map_of_the_past_alone_refuses_both_directions(name):
    q, k, _ = qkv()
    with pytest.raises(ValueError, match="is defined for causal attention only"):
        build(name).map(LENGTH, hidden=normal(2, LENGTH, WIDTH), q=q, k=k, causal=False)


# Broken numbers

BROKEN = r"holds (nan|inf): a parameter or an input of the encoding is broken"
PARAMETERS = [
    (name, parameter)
    for name in relpos.names()
    if relpos.card(name).place == "score"
    for parameter, _ in build(name).named_parameters()
]


def attend_with(name, parameter, value):
    torch.manual_seed(0)
    position = build(name)
    with torch.no_grad():
        position.get_parameter(parameter).fill_(value)
    return relpos.attention(*qkv(), position, hidden=normal(2, LENGTH, WIDTH))


@pytest.mark.parametrize(("name", "parameter"), PARAMETERS)
def test_a_parameter_that_is_nan_is_refused(name, parameter):
    with pytest.raises(ValueError, match=BROKEN):
        attend_with(name, parameter, NAN)


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("t5", "table"),
        ("clipped", "table"),
        ("kerple_log", "r1.raw"),
        ("kerple_power", "r1.raw"),
        ("fire", "outer.bias"),
        ("cable", "steps.bias"),
        ("cable", "weights.bias"),
        ("cable_nw", "steps.bias"),
        ("kcable", "steps.bias"),
        ("cope", "table"),
        ("dape", "second.bias"),
        ("dapev2", "second.bias"),
    ],
)
def test_a_parameter_that_is_infinite_is_refused(name, parameter):
    with pytest.raises(ValueError, match=BROKEN):
        attend_with(name, parameter, INF)


@pytest.mark.parametrize("value", [NAN, INF], ids=repr)
@pytest.mark.parametrize("name", ["t5", "clipped"])
def test_one_broken_entry_of_a_table_is_refused(name, value):
    position = build(name)
    column = 2 if name == "t5" else position.limit + 2
    with torch.no_grad():
        position.table[1, column] = value
    with pytest.raises(ValueError, match=says(f"the table of the bias holds {value}")):
        relpos.attention(*qkv(), position)


@pytest.mark.parametrize("name", ["t5", "clipped"])
def test_minus_infinity_in_a_table_is_a_mask(name):
    position = build(name)
    column = 2 if name == "t5" else position.limit + 2  # distance 2
    with torch.no_grad():
        position.table[:, column] = -INF
    q, k, v = qkv()
    before = relpos.attention(q, k, v, position)
    changed_k, changed_v = k.clone(), v.clone()
    changed_k[:, :, 3] += 1.0
    changed_v[:, :, 3] += 1.0
    after = relpos.attention(q, changed_k, changed_v, position)
    assert before.isfinite().all()
    assert torch.equal(after[:, :, 5], before[:, :, 5])  # query 5 does not see key 3
    assert (after[:, :, 4] - before[:, :, 4]).abs().max() > 1e-3


@pytest.mark.parametrize("value", [NAN, INF], ids=repr)
@pytest.mark.parametrize("name", FROM_HIDDEN)
def test_a_broken_input_of_the_gates_is_refused(name, value):
    x = normal(2, LENGTH, WIDTH)
    x[1, 2] = value
    with pytest.raises(ValueError, match=BROKEN):
        relpos.attention(*qkv(), build(name), hidden=x)


# The embedding


def test_a_position_past_a_learned_table_is_refused():
    position = build("learned", length=10)
    x = normal(2, 6, WIDTH)
    with pytest.raises(ValueError, match=says("learned has 10 positions and cannot embed position 11")):
        position.embed(normal(2, 12, WIDTH))
    position.embed(x, start=4)  # positions 4 to 9: all there are
    with pytest.raises(ValueError, match=says("learned has 10 positions and cannot embed position 10")):
        position.embed(x, start=5)


def test_a_document_longer_than_a_learned_table_is_refused():
    position = build("learned", length=10)
    fits = torch.tensor([[0] * 10 + [1] * 10])
    position.embed(normal(1, 20, WIDTH), documents=fits)  # 20 tokens, but no document over 10
    longer = torch.tensor([[0] * 9 + [1] * 11])
    with pytest.raises(ValueError, match=says("learned has 10 positions and cannot embed position 10")):
        position.embed(normal(1, 20, WIDTH), documents=longer)
    with pytest.raises(ValueError, match=says("learned has 10 positions and cannot embed position 10")):
        position.embed(normal(1, 1, WIDTH), documents=longer)  # while decoding: its last token


@pytest.mark.parametrize("name", ["learned", "sinusoidal"])
def test_an_embedding_of_a_wrong_shape_is_refused(name):
    position = build(name)
    for shape in ((2, 6, WIDTH + 2), (6, WIDTH), (2, HEADS, 6, HEAD_DIM)):
        with pytest.raises(ValueError, match=says(f"the input of embed must be (batch, length, {WIDTH}), not {shape}")):
            position.embed(normal(*shape))


@pytest.mark.parametrize("name", ["learned", "sinusoidal"])
@pytest.mark.parametrize("start", [-1, 2.0, True])
def test_an_embedding_starts_at_an_integer_position(name, start):
    with pytest.raises(ValueError, match=says("start must be an integer of at least 0", f"not {start!r}")):
        build(name).embed(normal(2, 6, WIDTH), start=start)


@pytest.mark.parametrize("shape", [(6,), (2, 5), (3, 6), (2, 6, 1)], ids=str)
@pytest.mark.parametrize("name", ["learned", "sinusoidal"])
def test_documents_of_a_wrong_shape_are_refused_by_an_embedding(name, shape):
    with pytest.raises(ValueError, match=says("documents must be (", f"not {shape}")):
        build(name).embed(normal(2, 6, WIDTH), documents=torch.zeros(shape, dtype=torch.long))


def test_documents_refused_by_attention_are_refused_by_an_embedding():
    position = build("sinusoidal")
    with pytest.raises(TypeError, match="documents must be integers"):
        position.embed(normal(2, 6, WIDTH), documents=torch.zeros(2, 6))
    with pytest.raises(ValueError, match="an id occurs again"):
        position.embed(normal(1, 6, WIDTH), documents=torch.tensor([[0, 0, 1, 1, 0, 0]]))


# Maps


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("rope", "query and key"),
        ("xpos", "query and key"),
        ("ssmax", "query and key"),
        ("temperature", "query and key"),
        ("learned", "embedding"),
        ("sinusoidal", "embedding"),
    ],
)
def test_an_encoding_without_a_bias_has_no_map(name, place):
    with pytest.raises(ValueError, match=says(f"acts on the {place} and adds no bias", "relpos.scores")):
        build(name).map(LENGTH)


@pytest.mark.parametrize("name", FROM_HIDDEN)
def test_a_map_from_the_input_needs_the_input(name):
    with pytest.raises(ValueError, match=says(f"give hidden= of shape (1, {LENGTH}, {WIDTH})")):
        build(name).map(LENGTH)


@pytest.mark.parametrize("name", ["cope", "dape", "dapev2"])
def test_a_map_from_the_scores_needs_queries_and_keys(name):
    q, k, _ = qkv()
    for arguments in ({}, {"q": q}, {"k": k}):
        with pytest.raises(ValueError, match=says("give q=", "k=", f"(batch, {HEADS}, length, {HEAD_DIM})")):
            build(name).map(LENGTH, **arguments)


def test_a_map_has_one_length():
    with pytest.raises(ValueError, match=says("map needs one length, not none")):
        build("alibi").map()
    with pytest.raises(ValueError, match=says("map needs one length", [5, LENGTH])):
        build("cable").map(5, hidden=normal(2, LENGTH, WIDTH))
    q, k, _ = qkv()
    with pytest.raises(ValueError, match=says("map needs one length", [4, LENGTH])):
        build("cope").map(q=q, k=k[:, :, :4])
    for value in (0, -3, 2.5, True):
        with pytest.raises(ValueError, match=says("length must be an integer of at least 1", value)):
            build("alibi").map(value)


@pytest.mark.parametrize("shape", [(2, LENGTH, WIDTH + 1), (LENGTH, WIDTH), (1, 2, LENGTH, WIDTH)], ids=str)
def test_a_map_refuses_hidden_of_a_wrong_shape(shape):
    with pytest.raises(ValueError, match=says(f"hidden must be (batch, length, {WIDTH}), not {shape}")):
        build("cable").map(hidden=normal(*shape))


@pytest.mark.parametrize("shape", [(HEADS, LENGTH, HEAD_DIM), (2, 3, LENGTH, HEAD_DIM), (2, HEADS, LENGTH, 6)], ids=str)
@pytest.mark.parametrize("name", ["cope", "dape", "dapev2"])
def test_a_map_refuses_queries_of_a_wrong_shape(name, shape):
    q = normal(*shape)
    with pytest.raises(ValueError, match=r"\bq\b.*(heads|head_dim|\(batch, )"):
        build(name).map(q=q, k=q)


# Registering


class Own(Encoding):
    """An encoding of a user's own."""

    paper, formula = "none", "B_ij = 0"


def test_a_name_that_is_taken_cannot_be_registered():
    with pytest.raises(ValueError, match=says("the name 'alibi' is taken")):
        relpos.register("alibi", Own)


def test_a_registered_name_is_taken_too(monkeypatch):
    monkeypatch.setattr("relpos.encodings.registry._registered", {})
    relpos.register("own", Own)
    relpos.register("own", Own)  # the same class again is no conflict: a module may be run twice

    class Other(Own):
        pass

    with pytest.raises(ValueError, match=says("the name 'own' is taken")):
        relpos.register("own", Other)


@pytest.mark.parametrize("thing", [torch.nn.Linear, "Own", None, 3], ids=repr)
def test_only_an_encoding_class_can_be_registered(thing):
    with pytest.raises(TypeError, match=says("a class derived from relpos.Encoding, not", thing)):
        relpos.register("own", thing)
    assert "own" not in relpos.names()


@pytest.mark.parametrize("name", ["two words", "", "9lives", None, 3])
def test_a_name_must_be_an_identifier(name):
    with pytest.raises(ValueError, match=says("must be a Python identifier", f"not {name!r}")):
        relpos.register(name, Own)


@pytest.mark.parametrize("field", ["paper", "formula"])
def test_a_class_without_its_paper_or_formula_cannot_be_registered(field):
    broken = type("Broken", (Own,), {field: None})
    with pytest.raises(TypeError, match=says(f"Broken must state its {field} as a string on the class")):
        relpos.register("own", broken)
    assert "own" not in relpos.names()


# Sums


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"parts": []}, "parts must be a list of encodings' names"),
        ({"parts": "alibi"}, "parts must be a list of encodings' names, not 'alibi'"),
        ({"parts": [["alibi"]]}, "parts must be a list of encodings' names, not [['alibi']]"),
        ({"parts": 3}, "parts must be a list of encodings' names, not 3"),
        ({"parts": ["alibi", "cabel"]}, "Did you mean 'cable'?"),
        ({"parts": ["alibi"], "part_options": {"cable": {}}}, "part_options names cable, not among the parts alibi"),
        ({"parts": ["t5", "t5"], "part_options": [{"buckets": 8}, {}]}, "a dictionary of options by name of a part"),
        ({"parts": ["t5"], "part_options": {"t5": 8}}, "as in {'t5': {…}}, not {'t5': 8}"),
        ({"parts": ["learned", "cable"], "part_options": {"cable": {"width": 5}}}, "inputs of different widths"),
    ],
)
def test_a_sum_of_parts_that_do_not_fit_is_refused(options, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        relpos.encoding("sum", heads=2, head_dim=4, **options)


@pytest.mark.parametrize("causal", ["no", 0, 1, None, torch.tensor(True)], ids=str)
def test_causal_is_true_or_false(causal):
    q, k, v = qkv()
    sentence = says(f"causal must be True or False, not {causal!r}")
    for call in (lambda: relpos.attention(q, k, v, causal=causal), lambda: relpos.scores(q, k, causal=causal)):
        with pytest.raises(TypeError, match=sentence):
            call()
    with pytest.raises(TypeError, match=sentence):
        relpos.mass(q, k, causal=causal)


@pytest.mark.parametrize("cache", [{}, [], True], ids=str)
def test_another_cache_is_refused(cache):
    with pytest.raises(TypeError, match=says(f"cache must be a relpos.Cache(), not {cache!r}")):
        relpos.attention(*qkv(), cache=cache)


@pytest.mark.parametrize("backend", ["chunks", "reference", None])
@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (lambda b, h, i, j: (i >= j).long(), "torch.int64"),
        (lambda b, h, i, j: (i >= j).float(), "torch.float32"),
        (lambda b, h, i, j: 1, "<class 'int'>"),
    ],
    ids=["integers", "floats", "a number"],
)
def test_a_mask_function_returns_booleans(mask, kind, backend):
    with pytest.raises(
        TypeError, match=says(f"the function mask must return booleans, True where a query may see a key, not {kind}")
    ):
        relpos.attention(*qkv(), mask=mask, backend=backend)
