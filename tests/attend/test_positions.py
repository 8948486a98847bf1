"""Given positions: gaps, left padding and several axes, against transformers' rotary modules and Llama's layers."""

import pytest
import torch
from plain import CLOSE, HEAD_DIM, HEADS, LENGTH, SEEN, build, normal, qkv
from torch.testing import assert_close
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen3_vl import modeling_qwen3_vl
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.t5.modeling_t5 import T5Attention

import relpos
from relpos.forms.call import Call

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
QWEN = {  # rotary module, rotation, configuration
    "blocks": (modeling_qwen2_vl.Qwen2VLRotaryEmbedding, modeling_qwen2_vl.apply_rotary_pos_emb, Qwen2VLTextConfig),
    "interleaved": (
        modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding,
        modeling_qwen3_vl.apply_rotary_pos_emb,
        Qwen3VLTextConfig,
    ),
}


def rope(heads=HEADS, head_dim=HEAD_DIM, **options):
    return relpos.encoding("rope", heads, head_dim, **options)


def image(rows, columns, before, after):
    """Positions of text, an image and text again, as Qwen2-VL counts them: (1, tokens, 3)."""
    text = [[n] * 3 for n in range(before)]
    grid = [[before, before + y, before + x] for y in range(rows) for x in range(columns)]
    end = before + max(rows, columns)
    return torch.tensor([*text, *grid, *([end + n] * 3 for n in range(after))])[None]


# Several axes


@pytest.mark.parametrize(
    ("order", "sections"),
    [
        ("blocks", [16, 24, 24]),  # Qwen2-VL
        ("blocks", [64, 0, 0]),
        ("interleaved", [24, 20, 20]),  # Qwen3-VL
        ("interleaved", [22, 21, 21]),
        ("interleaved", [60, 1, 3]),
    ],
)
@pytest.mark.parametrize("parameters", [DEFAULT, YARN], ids=["default", "yarn"])
def test_sections_rotate_like_qwen(order, sections, parameters):
    rotary, rotate, config_class = QWEN[order]
    q, k = normal(2, 4, 60, 128, dtype=torch.float32), normal(2, 2, 60, 128, seed=1, dtype=torch.float32)
    positions = torch.randint(0, 200, (2, 60, 3), generator=torch.Generator().manual_seed(0))
    given = {**parameters, "mrope_section": sections, "mrope_interleaved": order == "interleaved"}
    config = config_class(hidden_size=512, num_attention_heads=4, head_dim=128, rope_parameters=dict(given))
    cos, sin = rotary(config)(q, positions.permute(2, 0, 1))
    theirs = rotate(q, k, cos, sin)
    position = relpos.encoding("rope", 4, 128, rope_parameters=given)
    assert position.axes == 3
    for ours, expected in zip(position.rotate(q, k, Call(60, 60, token_positions=positions)), theirs, strict=True):
        assert_close(ours, expected, rtol=0.0, atol=1e-4)  # angles up to 200, values up to 4


def test_options_of_our_own_mean_the_same_as_the_dictionary():
    given = {**DEFAULT, "mrope_section": [2, 1, 1]}
    assert rope(rope_parameters=given).rope == rope(sections=[2, 1, 1]).rope
    assert rope(rope_parameters={**given, "rope_type": "mrope"}).rope == rope(sections=[2, 1, 1]).rope
    interleaved = rope(head_dim=12, rope_parameters={**DEFAULT, "mrope_section": [2, 2, 2], "mrope_interleaved": True})
    assert interleaved.rope == rope(head_dim=12, sections=[2, 2, 2], section_order="interleaved").rope
    assert rope(rope_parameters={"mrope_interleaved": False}).rope == rope().rope


def test_pairs_are_dealt_out_to_the_axes():
    blocks = rope(head_dim=16, sections=[4, 2, 2])
    interleaved = rope(head_dim=16, sections=[4, 2, 2], section_order="interleaved")
    assert blocks.rope.axis_of_pair == [0, 0, 0, 0, 1, 1, 2, 2]
    assert interleaved.rope.axis_of_pair == [0, 1, 2, 0, 1, 2, 0, 0]


@pytest.mark.parametrize("order", QWEN)
@pytest.mark.parametrize("causal", [True, False])
def test_text_is_rotated_as_by_plain_rope(order, causal):
    q, k, v = qkv()
    several = rope(sections=[2, 1, 1], section_order=order)
    plain = relpos.attention(q, k, v, rope(), causal=causal)
    assert torch.equal(relpos.attention(q, k, v, several, causal=causal), plain)
    one = torch.arange(LENGTH)[None]
    for positions in (one, one[..., None].expand(-1, -1, 3)):
        assert_close(relpos.attention(q, k, v, several, causal=causal, positions=positions), plain, **CLOSE)


@pytest.mark.parametrize("order", QWEN)
def test_each_axis_alone_is_rope_with_its_pairs(order):
    """Only differences along an axis matter, and only to the pairs of that axis."""
    q, k, _ = qkv()
    position = rope(sections=[2, 1, 1], section_order=order)
    positions = torch.randint(0, 30, (2, LENGTH, 3), generator=torch.Generator().manual_seed(1))
    moved = positions + torch.tensor([5, 70, 900])
    scores = relpos.scores(q, k, position, causal=False, positions=positions)
    assert_close(relpos.scores(q, k, position, causal=False, positions=moved), scores, rtol=0.0, atol=1e-9)
    total = torch.zeros_like(scores)
    for axis in range(3):
        pairs = [pair for pair, of_axis in enumerate(position.rope.axis_of_pair) if of_axis == axis]
        dims = [*pairs, *(pair + HEAD_DIM // 2 for pair in pairs)]
        alone = torch.zeros_like(q)
        alone[..., dims] = q[..., dims]
        total += relpos.scores(alone, k, rope(), causal=False, positions=positions[..., axis])
    assert_close(scores, total, rtol=0.0, atol=1e-10)


def test_decoding_over_an_image_is_the_whole_sequence():
    q, k, v = qkv(20, batch=1)
    positions = image(3, 4, 3, 5)
    position = rope(sections=[2, 1, 1])
    whole = relpos.attention(q, k, v, position, positions=positions)
    for end in (1, 7, 20):
        step = relpos.attention(
            q[:, :, end - 1 : end], k[:, :, :end], v[:, :, :end], position, positions=positions[:, :end]
        )
        assert_close(step, whole[:, :, end - 1 : end], **CLOSE)


def test_parts_with_one_axis_count_tokens_where_positions_have_three():
    q, k, v = qkv(20)
    positions = image(3, 4, 3, 5)
    options = {"rope": {"sections": [2, 1, 1]}, "temperature": {"length": 3}}
    position = build("sum", parts=["rope", "temperature", "alibi", "ssmax"], part_options=options)
    rest = build("sum", parts=["temperature", "alibi", "ssmax"], part_options={"temperature": {"length": 3}})
    assert (position.axes, rest.axes) == (3, 1)
    call = Call(20, 20, dtype=torch.float64, token_positions=positions)
    turned = position.parts[0].rotate(q, k, call)
    expected = relpos.attention(*turned, v, rest)
    assert_close(relpos.attention(q, k, v, position, positions=positions), expected, rtol=0.0, atol=1e-6)
    assert_close(relpos.scores(q, k, position, positions=positions), relpos.scores(*turned, rest), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sections": [2, 1, 2]}, r"must add up to the 4 pairs that are rotated, not to 5: \[2, 1, 2\]"),
        ({"sections": [2, 1, 1], "fraction": 0.5}, "must add up to the 2 pairs that are rotated, not to 4"),
        ({"sections": [4]}, r"number of pairs for each of 2 or more axes, not \[4\]"),
        ({"sections": "211"}, "number of pairs for each of 2 or more axes, not '211'"),
        ({"sections": 4}, "number of pairs for each of 2 or more axes, not 4"),
        ({"sections": [2.0, 1, 1]}, "each of the sections must be an integer of at least 0, not 2.0"),
        ({"sections": [5, -1]}, "each of the sections must be an integer of at least 0, not -1"),
        ({"sections": [0, 2, 2], "section_order": "interleaved"}, r"cannot be interleaved: the axes would get \[2, 1"),
        ({"sections": [2, 1, 1], "section_order": "mixed"}, "unknown section_order 'mixed'"),
    ],
)
def test_sections_that_do_not_divide_the_pairs_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        rope(**options)


def test_parts_with_different_axes_are_refused(monkeypatch):
    class Flat(relpos.Encoding):
        """Positions in the plane."""

        paper, formula, axes = "none", "none", 2

    monkeypatch.setattr("relpos.encodings.registry._registered", {"flat": Flat})
    with pytest.raises(ValueError, match=r"positions of different axes: \[3, 2\]"):
        build("sum", parts=["rope", "flat"], part_options={"rope": {"sections": [2, 1, 1]}})


# Gaps and left padding


def llama_layer(length):
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    config._attn_implementation = "eager"
    layer = modeling_llama.LlamaAttention(config, layer_idx=0).eval()
    x = normal(2, length, 64, dtype=torch.float32)
    q, k, v = (p(x).view(2, length, -1, 16).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    return layer, modeling_llama.LlamaRotaryEmbedding(config), x, (q, k, v)


GAPS = torch.tensor(
    [[*range(10), *range(40, 60)], [0, 3, 4, 5, 90, 91, 92, 93, 94, 95, *range(100, 140, 2)]]
)  # (2, 30)


@pytest.mark.parametrize("backend", ["reference", "chunks", None])
@torch.no_grad()
def test_positions_with_gaps_are_llamas_position_ids(backend):
    layer, rotary, x, (q, k, v) = llama_layer(30)
    mask = torch.full((30, 30), -torch.inf).triu(1)[None, None]
    expected = layer(x, position_embeddings=rotary(x, GAPS), attention_mask=mask)[0]
    out = relpos.attention(q, k, v, rope(4, 16), positions=GAPS, backend=backend)
    assert_close(layer.o_proj(out.transpose(1, 2).flatten(2)), expected, rtol=0.0, atol=1e-5)
    plain = relpos.attention(q, k, v, rope(4, 16))
    assert (layer.o_proj(plain.transpose(1, 2).flatten(2)) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("backend", ["reference", "chunks", None])
@torch.no_grad()
def test_left_padding_is_llamas_attention_mask_with_position_ids(backend):
    layer, rotary, x, (q, k, v) = llama_layer(30)
    padding = torch.ones(2, 30, dtype=torch.bool)
    padding[1, :12] = False
    ids = (padding.long().cumsum(1) - 1).clamp(min=0)  # as transformers' generate makes them
    seen = padding[:, None, None, :] & torch.ones(30, 30).tril().bool()
    mask = torch.zeros(2, 1, 30, 30).masked_fill(~seen, torch.finfo(torch.float32).min)
    expected = layer(x, position_embeddings=rotary(x, ids), attention_mask=mask)[0]
    out = relpos.attention(q, k, v, rope(4, 16), positions=ids, padding=padding, backend=backend)
    ours = layer.o_proj(out.transpose(1, 2).flatten(2))
    assert_close(ours[padding], expected[padding], rtol=0.0, atol=1e-5)
    alone = relpos.attention(*(t[1:, :, 12:] for t in (q, k, v)), rope(4, 16), backend=backend)
    assert_close(out[1:, :, 12:], alone, rtol=0.0, atol=1e-5)


def test_a_scaling_of_the_length_sees_the_largest_position_like_transformers():
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=50,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    )
    q = normal(2, 4, 30, 16, dtype=torch.float32)
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, GAPS[1:])  # up to 138, past 50
    theirs, _ = modeling_llama.apply_rotary_pos_emb(q, q, cos, sin)
    position = rope(4, 16, scaling="dynamic", factor=2.0, length=50)
    ours, _ = position.rotate(q, q, Call(30, 30, token_positions=GAPS[1:]))
    assert_close(ours, theirs, rtol=0.0, atol=1e-4)


# Positions that descend

DESCENDING = torch.tensor([[*range(13, -1, -1)], [3, 9, 0, 0, 7, 8, 2, 5, 40, 6, 1, 30, 4, 12]])  # (2, LENGTH)


@pytest.mark.parametrize("backend", ["reference", "chunks", None])
@pytest.mark.parametrize("name", ["alibi", "kerple_log", "kerple_power", "sandwich", "clipped", "window", "fire"])
@torch.no_grad()
def test_keys_of_later_positions_have_the_bias_of_both_directions(name, backend):
    q, k, v = qkv()
    position = build(name, **{"fire": {"symmetric": True}, "window": {"size": 6}}.get(name, {}))
    both = relpos.scores(q, k, position, causal=False, positions=DESCENDING)
    expected = both.masked_fill(~SEEN, -torch.inf)
    assert torch.equal(relpos.scores(q, k, position, positions=DESCENDING), expected)
    out = relpos.attention(q, k, v, position, positions=DESCENDING, backend=backend)
    assert_close(out, expected.softmax(-1) @ v, **CLOSE)


def test_clipped_reads_its_table_at_negative_distances():
    q, k, _ = qkv()
    position, none = build("clipped", limit=5), torch.zeros_like(q)
    scores = relpos.scores(none, k, position, positions=DESCENDING)
    assert_close(scores[1, :, 8, 0], position.table[:, 10])  # 40 − 3, clipped to 5
    assert_close(scores[1, :, 2, 1], position.table[:, 0])  # 0 − 9, clipped to −5
    assert_close(scores[1, :, 6, 0], position.table[:, 4])  # 2 − 3


def test_t5_has_one_bucket_for_all_later_positions_as_in_its_decoder():
    """Causal, T5 gives all buckets to the past, and later positions share that of distance 0."""
    position = build("t5")
    distance = DESCENDING[:, None] - DESCENDING[:, :, None]  # memory minus query, as T5 counts
    which = T5Attention._relative_position_bucket(distance, False, position.buckets, position.max_distance)
    expected = position.table[:, which].movedim(0, 1).masked_fill(~SEEN, -torch.inf)
    zero = torch.zeros(2, HEADS, LENGTH, HEAD_DIM, dtype=torch.float64)
    assert_close(relpos.scores(zero, zero, position, positions=DESCENDING), expected)


@pytest.mark.parametrize("backend", ["reference", "chunks", None])
def test_fire_refuses_keys_of_later_positions(backend):
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"the positions descend, .*fire with symmetric=True"):
        relpos.attention(q, k, v, build("fire"), positions=DESCENDING, backend=backend)
    ascending = DESCENDING.sort(dim=1).values
    relpos.attention(q, k, v, build("fire"), positions=ascending, backend=backend)
    apart = torch.arange(LENGTH).expand(2, -1)  # a document per token: nothing is seen but the token itself
    relpos.attention(q, k, v, build("fire"), positions=DESCENDING, documents=apart, backend=backend)


def test_positions_that_ascend_or_restart_make_no_longer_table():
    """Documents that restart and padding of any position do not count as descending."""
    restarting, ids = torch.tensor([[0, 2, 4, 0, 3, 6]]), torch.tensor([[0, 0, 0, 1, 1, 1]])
    assert Call(6, 6, token_positions=restarting, documents=ids).lowest == 0
    assert Call(6, 6, token_positions=restarting).lowest == -4
    assert Call(6, 6, token_positions=torch.tensor([[9, 9, 0, 2, 4, 6]]), padding=torch.arange(6)[None] > 1).lowest == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("name", ["alibi", "rope", "clipped", "t5", "kerple_log", "cable"])
@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_small_integer_types_are_the_same_positions(name, dtype, causal):
    q, k, v = qkv()
    positions = DESCENDING.clone()
    positions[1, 8] = 120
    given = {"hidden": normal(2, LENGTH, HEADS * HEAD_DIM)} if name == "cable" else {}
    ours, expected = (
        relpos.attention(q, k, v, build(name), positions=x, causal=causal, **given)
        for x in (positions.to(dtype), positions)
    )
    assert torch.equal(ours, expected)


# What is refused


@pytest.mark.parametrize("shape", [(2, 5), (3, LENGTH), (2, LENGTH, 1, 1), (2, LENGTH, 2), ()], ids=str)
def test_positions_of_a_wrong_shape_are_refused(shape):
    positions = torch.zeros(shape, dtype=torch.long)
    with pytest.raises(ValueError, match=r"positions must be \(2, 14\), or one row .* one position for each key\."):
        relpos.attention(*qkv(), rope(), positions=positions)
    with pytest.raises(ValueError, match=r"positions must be \(2, 14\) or \(2, 14, 3\), or one row .* of its axes\."):
        relpos.attention(*qkv(), rope(sections=[2, 1, 1]), positions=positions)


@pytest.mark.parametrize("name", ["alibi", "rope", "cable", "nope"])
def test_several_axes_are_refused_by_an_encoding_with_one(name):
    positions = torch.zeros(1, LENGTH, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"not \(1, 14, 3\): one position for each key"):
        relpos.attention(*qkv(), build(name), hidden=normal(2, LENGTH, HEADS * HEAD_DIM), positions=positions)
