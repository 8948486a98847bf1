"""Bad input is refused with a sentence that says what was given, what is allowed and what to do: tables of cases."""

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


WITHOUT_A_BIAS = [
    *((name, "query and key") for name in ("rope", "xpos", "ssmax", "temperature")),
    *((name, "embedding") for name in ("learned", "sinusoidal")),
]


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


OPTIONS = [
    *(("t5", {"buckets": n}, "buckets must be a multiple of 4", f"not {n}") for n in (5, 6, 30)),
    ("t5", {"max_distance": 16}, "max_distance must be over buckets / 2 = 16", "not 16"),
    *(
        ("fire", {"leak": x}, "leak must be a number from 0 (ReLU) to 1", f"not {x!r}")
        for x in (-0.01, 1.5, NAN, "0.01", True)
    ),
    ("cope", {"npos": 1}, "npos must be an integer of at least 2", "not 1"),
    ("rope", {"head_dim": 7}, "pairs", "7 of head_dim 7"),
    ("xpos", {"head_dim": 7}, "head_dim must be even", "not 7"),
    ("sandwich", {"head_dim": 7}, "must be even", "not 7"),
    ("rope", {"head_dim": 6, "fraction": 0.5}, "pairs", "3 of head_dim 6"),
    ("rope", {"fraction": 0.1}, "pairs", "0 of head_dim 8"),
    *(
        ("rope", {"head_dim": 2, "scaling": x}, f"{x!r} needs at least 4 rotated dimensions", "not 2")
        for x in ("ntk", "dynamic")
    ),
    ("sinusoidal", {"heads": 3, "head_dim": 5}, "the width must be even", "not 15"),
    ("sinusoidal", {"width": 33}, "the width must be even", "not 33"),
    *(
        (name, {"base": base}, "adapts a bias on the scores", repr(base), place)
        for name in ("dape", "dapev2")
        for base, place in (*WITHOUT_A_BIAS, ("nope", "nowhere"))
    ),
]


@pytest.mark.parametrize(("name", "options", "sentence"), [(case[0], case[1], case[2:]) for case in OPTIONS])
def test_options_that_make_no_sense_are_refused(name, options, sentence):
    with pytest.raises(ValueError, match=says(*sentence)):
        build(name, **options)


# The arguments of attention: what is replaced in a call that runs, the error, and the parts of its sentence

Q, K, V = qkv()
FROM_HIDDEN = ["cable", "cable_nw", "kcable", "forgetting"]
SHAPES = {"rank 3": (HEADS, LENGTH, HEAD_DIM), "rank 5": (1, 2, HEADS, LENGTH, HEAD_DIM), "rank 1": (3,)}


def zeros(*shape, dtype=torch.long):
    return torch.zeros(shape, dtype=dtype)


def refused_tensors():
    for name, x in (("q", Q), ("k", K), ("v", V)):
        for shape in SHAPES.values():
            yield {name: normal(*shape)}, ValueError, f"{name} must be (batch, heads, length, head_dim)", shape
        yield {name: [[1.0]]}, TypeError, f"{name} must be a tensor, not list"
        for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
            yield {name: x.to(dtype)}, TypeError, f"{name} must have a floating-point dtype, not {dtype}"
        if name != "q":
            mixed = {name: x.bfloat16()}
            yield mixed, ValueError, f"{name} is torch.bfloat16", "q is torch.float32", "must agree"
    for axis in range(4):
        empty = torch.zeros([0 if at == axis else size for at, size in enumerate(Q.shape)])
        yield {"q": empty, "k": empty, "v": empty}, ValueError, "is empty"
    yield {"v": V[:, :, :5]}, ValueError, "v must have the batch, heads and length of k", "not (2, 4, 5)"
    yield {"k": K[:1], "v": V[:1]}, ValueError, "k has batch 1, but q has batch 2"
    yield {"k": K[..., :6], "v": V[..., :6]}, ValueError, "k has head_dim 6, but q has head_dim 8"
    yield {"k": K[:, :3], "v": V[:, :3]}, ValueError, "the 4 heads of q are not a multiple of the 3 heads of k"
    yield {"q": Q[:, :2]}, ValueError, "the 2 heads of q are not a multiple of the 4 heads of k"
    yield {"k": K[:, :, :5], "v": V[:, :, :5]}, ValueError, "there are 6 queries but 5 keys", "Give start="


def refused_encodings():
    alibi, rope = build("alibi", heads=8), build("rope", head_dim=16)
    yield {"position": alibi}, ValueError, "Alibi was made for 8 heads, head_dim 8, but q has 4 heads, head_dim 8"
    yield {"position": rope}, ValueError, "Rope was made for 4 heads, head_dim 16, but q has 4 heads, head_dim 8"
    yield {"position": "alibi"}, TypeError, "position must be an encoding (relpos.encoding(name, …))", "not 'alibi'"
    for name in FROM_HIDDEN:
        for position in (build(name), build("dape", base=name)):
            yield {"position": position}, ValueError, f"give hidden= of shape (2, {LENGTH}, {WIDTH}), or", "gates="
        for shape in ((2, LENGTH, 5), (2, 1, WIDTH), (1, LENGTH, WIDTH), (LENGTH, WIDTH)):
            expected = f"hidden must be (2, {LENGTH}, {WIDTH}), not {shape}"
            yield {"position": build(name), "hidden": normal(*shape)}, ValueError, expected, "gates="
    for shape in ((2, HEADS, LENGTH), (2, HEADS, 1, 1), (1, HEADS, LENGTH, 1), (2, 3, LENGTH, 1)):
        expected = f"gates of Forgetting must be (2, {HEADS}, {LENGTH}, 1), not {shape}"
        yield {"position": build("forgetting"), "gates": normal(*shape)}, ValueError, expected
    for name, other in (("cable", "cable_nw"), ("cable_nw", "cable"), ("forgetting", "cable")):
        gates = build(other).gates(normal(2, LENGTH, WIDTH))
        yield {"position": build(name), "gates": gates}, ValueError, "gates of", "must be", f"not {tuple(gates.shape)}"


def refused_options():
    for scale in (0, 0.0, -1.0, NAN, INF, True, "1"):
        yield {"scale": scale}, ValueError, "scale must be a positive number", f"not {scale!r}"
    for shape in ((LENGTH,), (1, LENGTH), (2, LENGTH - 1), (2, LENGTH, 1)):
        yield {"documents": zeros(*shape)}, ValueError, f"documents must be (2, {LENGTH}), not {shape}"
        yield {"padding": zeros(*shape, dtype=torch.bool)}, ValueError, f"padding must be (2, {LENGTH}), not {shape}"
    for dtype in (torch.float32, torch.complex64):
        yield {"documents": zeros(2, LENGTH, dtype=dtype)}, TypeError, "documents must be integers", f"not {dtype}"
    for dtype in (torch.float32, torch.int64):
        expected = "padding must be boolean, True for the keys that count", f"not {dtype}: use padding.bool()"
        yield {"padding": zeros(2, LENGTH, dtype=dtype)}, TypeError, *expected
    back = torch.tensor([[0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 0, 0]])
    yield {"documents": back}, ValueError, "each document must be contiguous", "in row 1 an id occurs again"
    for causal in ("no", 0, 1, None, torch.tensor(True)):
        yield {"causal": causal}, TypeError, f"causal must be True or False, not {causal!r}"
    for cache in ({}, [], True):
        yield {"cache": cache}, TypeError, f"cache must be a relpos.Cache(), not {cache!r}"
    expected = "the function mask must return booleans, True where a query may see a key, not "
    for backend in ("chunks", "reference", None):
        for function, kind in (
            (lambda b, h, i, j: (i >= j).long(), "torch.int64"),
            (lambda b, h, i, j: (i >= j).float(), "torch.float32"),
            (lambda b, h, i, j: 1, "<class 'int'>"),
        ):
            yield {"mask": function, "backend": backend}, TypeError, expected + kind


REFUSED = [*refused_tensors(), *refused_encodings(), *refused_options()]


@pytest.mark.parametrize(("changes", "error", "sentence"), [(case[0], case[1], case[2:]) for case in REFUSED])
def test_attention_scores_and_mass_refuse_the_same_with_the_same_sentence(changes, error, sentence):
    arguments = {"q": Q, "k": K, "v": V, "position": None} | changes
    with pytest.raises(error, match=says(*sentence)):
        relpos.attention(**arguments)
    if {"v", "cache", "backend"} & set(changes) and not {"q", "k"} & set(changes):
        return
    del arguments["v"]
    for function in (relpos.scores, relpos.mass):
        with pytest.raises(error, match=says(*sentence)):
            function(**arguments)


def test_documents_in_order_are_accepted():
    relpos.attention(Q, K, V, documents=torch.tensor([[0, 0, 1, 1, 2, 2]]).expand(2, -1))


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
def test_an_embedding_refuses_wrong_shapes_starts_and_documents(name):
    def refused(error, *sentence, x=None, **arguments):
        with pytest.raises(error, match=says(*sentence)):
            build(name).embed(normal(2, 6, WIDTH) if x is None else x, **arguments)

    for shape in ((2, 6, WIDTH + 2), (6, WIDTH), (2, HEADS, 6, HEAD_DIM)):
        expected = f"the input of embed must be (batch, length, {WIDTH}), not {shape}"
        refused(ValueError, expected, x=normal(*shape))
    for start in (-1, 2.0, True):
        refused(ValueError, "start must be an integer of at least 0", f"not {start!r}", start=start)
    for shape in ((6,), (2, 5), (3, 6), (2, 6, 1)):
        refused(ValueError, "documents must be (", f"not {shape}", documents=zeros(*shape))
    refused(TypeError, "documents must be integers", documents=torch.zeros(2, 6))
    back = torch.tensor([[0, 0, 1, 1, 0, 0]]).expand(2, -1)
    refused(ValueError, "an id occurs again", documents=back)


# Maps


def refused_maps():
    for name, place in WITHOUT_A_BIAS:
        yield name, {"length": LENGTH}, f"acts on the {place} and adds no bias", "relpos.scores"
    for name in FROM_HIDDEN:
        yield name, {"length": LENGTH}, f"give hidden= of shape (1, {LENGTH}, {WIDTH})"
    for name in ("cope", "dape", "dapev2"):
        for arguments in ({}, {"q": Q}, {"k": K}):
            expected = "give q=", "k=", f"(batch, {HEADS}, length, {HEAD_DIM})"
            yield name, {"length": LENGTH} | arguments, *expected
        for shape in ((HEADS, LENGTH, HEAD_DIM), (2, 3, LENGTH, HEAD_DIM), (2, HEADS, LENGTH, 6)):
            x = normal(*shape)
            yield name, {"q": x, "k": x}, f"q must be (batch, {HEADS}, length, {HEAD_DIM}), not {shape}"
    yield "alibi", {}, "map needs one length, not none"
    yield "cable", {"length": 5, "hidden": normal(2, LENGTH, WIDTH)}, "map needs one length", [5, LENGTH]
    yield "cope", {"q": Q, "k": K[:, :, :4]}, "map needs one length", [4, LENGTH]
    for value in (0, -3, 2.5, True):
        yield "alibi", {"length": value}, "length must be an integer of at least 1", value
    for shape in ((2, LENGTH, WIDTH + 1), (LENGTH, WIDTH), (1, 2, LENGTH, WIDTH)):
        yield "cable", {"hidden": normal(*shape)}, f"hidden must be (batch, length, {WIDTH}), not {shape}"


MAPS = [(case[0], case[1], case[2:]) for case in refused_maps()]


@pytest.mark.parametrize(("name", "arguments", "sentence"), MAPS)
def test_a_map_refuses_what_it_cannot_draw(name, arguments, sentence):
    with pytest.raises(ValueError, match=says(*sentence)):
        build(name).map(**arguments)


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
