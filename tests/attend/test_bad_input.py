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


# Making an encoding: name, options, and the parts of the sentence

LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 2.0}
SWAPPED = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}
SEQUENCE = "parts must be a list of encodings' names, not "


def refused_names():
    for misspelt, nearest in (("kerpel_log", "kerple_log"), ("Alibi", "alibi"), ("alibi2", "alibi"), ("ropee", "rope")):
        said = f"unknown encoding {misspelt!r}", f"Did you mean {nearest!r}?", "Allowed: alibi, cable,"
        yield misspelt, {}, *said
    yield "zzz", {}, "unknown encoding 'zzz'. Allowed: alibi", "xpos."
    for name, misspelt, nearest, allowed in (
        ("alibi", "slope", "slopes", "slopes"),
        ("rope", "layouts", "layout", "base, factor, fraction, layout"),
        ("t5", "bucket", "buckets", "buckets, max_distance"),
        ("cable", "widths", "width", "step, width"),
    ):
        said = f"unknown option of {name} {misspelt!r}", f"Did you mean {nearest!r}?", f"Allowed: {allowed}"
        yield name, {misspelt: 1}, *said
    yield "nope", {"width": 3}, "unknown option of nope 'width'", "Allowed: none"
    yield "dape", {"base": "alibi", "base_options": {"slope": "press"}}, "unknown option of alibi 'slope'", "'slopes'"
    yield "dape", {"base": "alibbi"}, "unknown encoding 'alibbi'", "'alibi'"
    yield "dape", {"base": ["alibi"]}, "unknown encoding ['alibi']", "Allowed: alibi"
    listed = {"base": "alibi", "base_options": ["press"]}
    yield "dape", listed, "base_options must be a dictionary", "of 'alibi', not ['press']"
    yield "alibi", {"slopes": "pres"}, "unknown slopes 'pres'", "'press'", "geometric, press"
    yield "rope", {"layout": "halves"}, "unknown layout 'halves'", "half, interleaved"
    yield "xpos", {"layout": "half"}, "unknown option of xpos 'layout'", "base, scale_base"
    yield "rope", {"scaling": "yarm"}, "unknown scaling 'yarm'", "'yarn'", "default, dynamic, linear"
    yield "rope", {"scaling": None}, "unknown scaling None", "default, dynamic, linear"
    llama4, tetha = {"rope_type": "llama4"}, {"rope_tetha": 1e4}
    yield "rope", {"rope_parameters": llama4}, "unknown RoPE scaling 'llama4'", "'llama3'", "longrope"
    said = "unknown key of rope_parameters 'rope_tetha'", "'rope_theta'", "partial_rotary_factor"
    yield "rope", {"rope_parameters": tetha}, *said
    yield "cable", {"step": "gelu"}, "unknown step 'gelu'", "relu, softplus"
    yield "cable_nw", {"step": "softplsu"}, "unknown step 'softplsu'", "'softplus'"
    yield "kcable", {"step": "gelu"}, "unknown step 'gelu'", "relu, softplus"
    yield "temperature", {"rule": "llama"}, "unknown rule 'llama'", "'llama4'", "inkling, llama4, ministral3"


def refused_numbers():
    for name in relpos.names():
        integers = [key for key, option in relpos.card(name).options.items() if option.type.startswith("int")]
        for option in ("heads", "head_dim", *integers):
            for value in (0, -4, True, 8.0, "8"):
                yield name, {option: value}, f"{option} must be an integer of at least", f"not {value!r}"
    for name, options in {
        "fire": ["c"],
        "sandwich": ["base"],
        "rope": ["base", "factor"],
        "xpos": ["base", "scale_base"],
        "sinusoidal": ["amplitude", "base"],
        "temperature": ["strength"],
        "ssmax": ["start"],
    }.items():
        for option in options:
            for value in (0, -1.5, NAN, INF, True, "2"):
                yield name, {option: value}, f"{option} must be a positive number", f"not {value!r}"
    for value in (0, -0.5, 1.5, NAN, INF, True, "half"):
        yield "rope", {"fraction": value}, "fraction must be", "not", repr(value)
    for parameters, *said in (
        ({"rope_theta": -1.0}, "must be a positive number", "-1.0"),
        ({"rope_type": "linear", "factor": 0.0}, "factor must be a positive number", "0.0"),
        (YARN | {"beta_fast": -1}, "beta_fast must be a positive number", "-1"),
        (YARN | {"beta_slow": NAN}, "beta_slow must be a positive number", "nan"),
        (YARN | {"original_max_position_embeddings": 0}, "original_max_position_embeddings must be an integer", "0"),
        (SWAPPED, "high_freq_factor (1.0) must be over low_freq_factor (4.0)"),
        (LONG | {"long_factor": [2.0] * 3}, "4 numbers each", "not 4 and 3"),
        ({"rope_type": "longrope"}, "short_factor and long_factor of 4 numbers each", "not 0 and 0"),
        (YARN | {"attention_factor": -1.0}, "attention_factor must be", "-1.0"),
        (YARN | {"attention_factor": NAN}, "attention_factor must be", "nan"),
        (YARN | {"mscale": -1.0, "mscale_all_dim": 1.0}, "mscale must be", "-1.0"),
        (LONG | {"short_factor": [1.0, 0.0, 1.0, 1.0]}, "short_factor", "0.0"),
        (LONG | {"long_factor": [1.0, NAN, 1.0, 1.0]}, "long_factor", "nan"),
    ):
        yield "rope", {"rope_parameters": parameters}, *said


def refused_combinations():
    for n in (5, 6, 30):
        yield "t5", {"buckets": n}, "buckets must be a multiple of 4", f"not {n}"
    yield "t5", {"max_distance": 16}, "max_distance must be over buckets / 2 = 16", "not 16"
    for x in (-0.01, 1.5, NAN, "0.01", True):
        yield "fire", {"leak": x}, "leak must be a number from 0 (ReLU) to 1", f"not {x!r}"
    yield "cope", {"npos": 1}, "npos must be an integer of at least 2", "not 1"
    yield "rope", {"head_dim": 7}, "pairs", "7 of head_dim 7"
    yield "xpos", {"head_dim": 7}, "head_dim must be even", "not 7"
    yield "sandwich", {"head_dim": 7}, "must be even", "not 7"
    yield "rope", {"head_dim": 6, "fraction": 0.5}, "pairs", "3 of head_dim 6"
    yield "rope", {"fraction": 0.1}, "pairs", "0 of head_dim 8"
    for x in ("ntk", "dynamic"):
        yield "rope", {"head_dim": 2, "scaling": x}, f"{x!r} needs at least 4 rotated dimensions", "not 2"
    yield "sinusoidal", {"heads": 3, "head_dim": 5}, "the width must be even", "not 15"
    yield "sinusoidal", {"width": 33}, "the width must be even", "not 33"
    for name in ("dape", "dapev2"):
        for base, place in (*WITHOUT_A_BIAS, ("nope", "nowhere")):
            yield name, {"base": base}, "adapts a bias on the scores", repr(base), place
    for parts in ([], "alibi", [["alibi"]], 3):
        yield "sum", {"parts": parts}, SEQUENCE + (repr(parts) if parts else "")
    yield "sum", {"parts": ["alibi", "cabel"]}, "Did you mean 'cable'?"
    unknown = {"parts": ["alibi"], "part_options": {"cable": {}}}
    yield "sum", unknown, "part_options names cable, not among the parts alibi"
    listed = {"parts": ["t5", "t5"], "part_options": [{"buckets": 8}, {}]}
    yield "sum", listed, "a dictionary of options by name of a part"
    yield "sum", {"parts": ["t5"], "part_options": {"t5": 8}}, "as in {'t5': {…}}, not {'t5': 8}"
    widths = {"parts": ["learned", "cable"], "part_options": {"cable": {"width": 5}}}
    yield "sum", widths, "inputs of different widths"


MADE = [(case[0], case[1], case[2:]) for case in (*refused_names(), *refused_numbers(), *refused_combinations())]


@pytest.mark.parametrize(("name", "options", "sentence"), MADE)
def test_an_encoding_that_cannot_be_is_refused(name, options, sentence):
    with pytest.raises(ValueError, match=says(*sentence)):
        build(name, **options)
    if name not in relpos.names():
        with pytest.raises(ValueError, match=says(*sentence)):
            relpos.card(name)


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

FIRE = "use fire with symmetric=True, kerple_log or t5."
CAUSAL_ONLY = [  # encoding, options, and what to use instead
    ("fire", {}, FIRE),
    ("cope", {}, "use cable or dape."),
    ("forgetting", {}, "use cable_nw with step=softplus or cable."),
    ("xpos", {}, "use rope."),
    ("dape", {"base": "fire"}, "use fire with symmetric=True as its base"),
    ("dape", {"base": "forgetting"}, "use cable_nw with step=softplus as its base or cable as its base."),
    ("dapev2", {"base": "fire"}, "use fire with symmetric=True as its base"),
    ("dape", {"base": "dape", "base_options": {"base": "fire"}}, "use fire with symmetric=True as its base"),
    ("sum", {"parts": ["xpos", "alibi"]}, "use rope in place of xpos."),
    ("sum", {"parts": ["rope", "cope", "xpos"]}, "use cable in place of cope, dape in place of cope or rope in place"),
]


def test_the_causal_encodings_are_known():
    causal = [name for name in relpos.names() if relpos.card(name).directions == "causal"]
    assert causal == sorted(name for name, options, _ in CAUSAL_ONLY if not options)


@pytest.mark.parametrize(("name", "options", "instead"), CAUSAL_ONLY)
def test_an_encoding_of_the_past_alone_refuses_both_directions_and_names_alternatives(name, options, instead):
    position, x, (q, k, v) = build(name, **options), normal(2, LENGTH, WIDTH), qkv()
    pattern = says(type(position).__name__, "is defined for causal attention only. In both directions", instead)
    with pytest.raises(ValueError, match=pattern):
        relpos.attention(q, k, v, position, hidden=x, causal=False)
    with pytest.raises(ValueError, match=pattern):
        relpos.scores(q, k, position, hidden=x, causal=False)
    if options:
        return
    if name != "xpos":
        with pytest.raises(ValueError, match="is defined for causal attention only"):
            position.map(LENGTH, hidden=x, q=q, k=k, causal=False)
    for alternative in position.alternatives:  # they run
        other, _, option = alternative.partition(" with ")
        given = {key: value == "True" or value for key, _, value in [option.partition("=")] if key}
        relpos.attention(q, k, v, build(other, **given), hidden=x, causal=False)


def test_a_causal_encoding_without_alternatives_says_where_to_look():
    class Onward(Own):
        @property
        def bidirectional(self):
            return False

    with pytest.raises(ValueError, match=says("In both directions, use an encoding whose directions", "relpos ls")):
        relpos.attention(*qkv(), Onward(HEADS, HEAD_DIM), causal=False)


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


INFINITE = """t5 table, clipped table, kerple_log r1.raw, kerple_power r1.raw, fire outer.bias, cable steps.bias,
cable weights.bias, cable_nw steps.bias, kcable steps.bias, cope table, dape second.bias, dapev2 second.bias"""


@pytest.mark.parametrize(
    ("name", "parameter", "value"),
    [*((*case, NAN) for case in PARAMETERS), *((*case.split(), INF) for case in INFINITE.split(","))],
)
def test_a_parameter_that_is_not_finite_is_refused(name, parameter, value):
    with pytest.raises(ValueError, match=BROKEN):
        attend_with(name, parameter, value)


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


def test_a_registered_name_is_taken(monkeypatch):
    monkeypatch.setattr("relpos.encodings.registry._registered", {})
    relpos.register("own", Own)
    relpos.register("own", Own)  # the same class again is no conflict: a module may be run twice
    for name in ("own", "alibi"):
        with pytest.raises(ValueError, match=says(f"the name {name!r} is taken")):
            relpos.register(name, type("Other", (Own,), {}))


@pytest.mark.parametrize(
    ("name", "thing", "error", "sentence"),
    [
        *(("own", x, TypeError, ["derived from relpos.Encoding, not", x]) for x in (torch.nn.Linear, "Own", None, 3)),
        *(
            (name, Own, ValueError, ["must be a Python identifier", f"not {name!r}"])
            for name in ("two words", "", "9lives", None, 3)
        ),
        *(
            ("own", type("Broken", (Own,), {field: None}), TypeError, [f"Broken must state its {field} as a string"])
            for field in ("paper", "formula")
        ),
    ],
)
def test_only_a_complete_encoding_class_with_an_identifier_can_be_registered(name, thing, error, sentence):
    with pytest.raises(error, match=says(*sentence)):
        relpos.register(name, thing)
    assert "own" not in relpos.names()
