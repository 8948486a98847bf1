"""relpos.use on speech models: their positions reach attention as vectors and a table, never as queries × keys."""

import copy

import pytest
import torch
from largest_tensor import LargestTensor
from small_models import shaken
from test_use import assert_same
from transformers import CONFIG_MAPPING, AutoModel
from transformers.models.seamless_m4t.modeling_seamless_m4t import SeamlessM4TSpeechEncoder
from transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2 import SeamlessM4Tv2SpeechEncoder

import relpos
from relpos.attend.arguments import make_call
from relpos.forms.bias import Projected, terms
from relpos.pretrained.attention_interface import captured_calls

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SOUND = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
}
SEAMLESS = {
    "hidden_size": 32,
    "speech_encoder_layers": 2,
    "speech_encoder_attention_heads": 4,
    "speech_encoder_intermediate_size": 48,
    "feature_projection_input_dim": 16,
    "add_adapter": False,
}
ENCODERS = {"seamless_m4t": SeamlessM4TSpeechEncoder, "seamless_m4t_v2": SeamlessM4Tv2SpeechEncoder}  # of larger models
SPEECH = {  # model type and the rest of its name: settings, the main input with its shape, and the length of its mask
    "wav2vec2-conformer relative": (
        {**SMALL, **SOUND, "position_embeddings_type": "relative", "max_source_positions": 30},
        ("input_values", (3, 900), 900),
    ),
    "wav2vec2-conformer rotary": (
        {**SMALL, **SOUND, "position_embeddings_type": "rotary"},
        ("input_values", (3, 900), 900),
    ),
    "wav2vec2-bert relative": (
        {**SMALL, "position_embeddings_type": "relative", "feature_projection_input_dim": 16, "mask_time_prob": 0.0},
        ("input_features", (3, 45, 16), 45),
    ),
    "wav2vec2-bert relative_key": (
        {
            **SMALL,
            "position_embeddings_type": "relative_key",
            "left_max_position_embeddings": 7,
            "right_max_position_embeddings": 3,
            "feature_projection_input_dim": 16,
            "mask_time_prob": 0.0,
        },
        ("input_features", (3, 45, 16), 45),
    ),
    "parakeet_encoder": (
        {
            **SMALL,
            "num_mel_bins": 16,
            "subsampling_conv_channels": 8,
            "layerdrop": 0.0,
            "dropout": 0.0,
            "scale_input": False,
        },
        ("input_features", (3, 200, 16), 200),
    ),
    "seamless_m4t relative": (
        {**SEAMLESS, "position_embeddings_type": "relative"},
        ("input_features", (3, 45, 16), 45),
    ),
    "seamless_m4t_v2 relative_key": (
        {**SEAMLESS, "left_max_position_embeddings": 7, "right_max_position_embeddings": 3},
        ("input_features", (3, 45, 16), 45),
    ),
}
FORMS = {name: "rotary" not in name for name in SPEECH}  # whether their bias is Projected


def speech_model(name: str, **settings):
    torch.manual_seed(0)
    kind = name.split(maxsplit=1)[0]
    config = CONFIG_MAPPING[kind](**{**SPEECH[name][0], **settings})
    make = ENCODERS[kind]._from_config if kind in ENCODERS else AutoModel.from_config
    implementation = "sdpa" if kind == "seamless_m4t_v2" else "eager"  # there, eager adds a boolean mask to the scores
    return shaken(make(config, attn_implementation=implementation)).eval()


def speech_batch(name: str) -> dict[str, torch.Tensor]:
    """Three rows, of which two are padded at their end, as speech models want it."""
    main, shape, length = SPEECH[name][1]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    mask = torch.ones(3, length, dtype=torch.long)
    for row, share in ((1, 0.3), (2, 0.6)):
        mask[row, length - int(share * length) :] = 0
    return {main: values, "attention_mask": mask}


def long_sound(name: str, frames: int) -> dict[str, torch.Tensor]:
    """One row that attention sees as about so many tokens."""
    main, shape, _ = SPEECH[name][1]
    length = frames * (20 if main == "input_values" else 8 if name == "parakeet_encoder" else 1)
    return {main: torch.randn(1, length, *shape[2:], generator=torch.Generator().manual_seed(0))}


def states_and_gradients(model, inputs):
    """The last states of the tokens that are no padding, and all gradients under a random weighting of them."""
    model.zero_grad()
    out = model(**inputs).last_hidden_state
    short = model._get_feature_vector_attention_mask if hasattr(model, "_get_feature_vector_attention_mask") else None
    mask = inputs["attention_mask"]
    if hasattr(model, "_get_output_attention_mask"):
        mask = model._get_output_attention_mask(mask, target_length=out.shape[1])
    elif mask.shape[1] != out.shape[1]:
        mask = short(out.shape[1], mask)
    out = out[mask.bool()]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    (out * weights).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return out.detach(), found


@pytest.mark.parametrize("name", SPEECH)
def test_states_and_all_gradients_equal_eager_and_off_restores_the_bits(name):
    model = speech_model(name)
    inputs = speech_batch(name)
    theirs = states_and_gradients(model, inputs)
    attributes = {each: set(vars(module)) for each, module in model.named_modules()}
    relpos.use(model)
    assert_same(states_and_gradients(model, inputs), theirs)
    twin = copy.deepcopy(model)
    for each in (twin, model):
        relpos.use(each, off=True)
        assert {key: set(vars(module)) for key, module in each.named_modules()} == attributes
        again = states_and_gradients(each, inputs)
        assert torch.equal(again[0], theirs[0])
        assert all(torch.equal(again[1][key], gradient) for key, gradient in theirs[1].items())


@pytest.mark.parametrize("name", SPEECH)
def test_the_bias_reaches_attention_as_vectors_and_a_table(name):
    model = relpos.use(speech_model(name))
    positions = []
    with captured_calls(model, lambda module, q, k, position, arguments: positions.append((position, q))):
        model(**speech_batch(name))
    assert len(positions) >= 2
    for position, q in positions:
        parts = [] if position is None else terms(position.bias(make_call(q, q, position, causal=False)))
        assert [type(part) for part in parts] == ([Projected] if FORMS[name] else [])


LINEAR = [name for name in FORMS if FORMS[name] and not name.startswith("seamless_m4t_v2")]  # it has a mask of its own


@pytest.mark.parametrize("name", LINEAR)
def test_no_tensor_of_a_long_forward_and_backward_has_queries_by_keys_values(name):
    model = relpos.use(speech_model(name))
    frames = 1200
    with LargestTensor() as largest:
        model(**long_sound(name, frames)).last_hidden_state.square().mean().backward()
    assert largest.values < 4 * frames**2 / 4  # of 4 heads


def test_dropped_positions_of_parakeet_are_those_of_eager():
    """Each sequence then has a table of its own, so the layer keeps its code; the random numbers are the same."""
    states = []
    for ours in (False, True):
        model = speech_model("parakeet_encoder", dropout_positions=0.4, attention_dropout=0.0, activation_dropout=0.0)
        model.train()
        if ours:
            relpos.use(model)
        torch.manual_seed(0)
        states.append(model(**speech_batch("parakeet_encoder")).last_hidden_state)
    mask = model._get_output_attention_mask(speech_batch("parakeet_encoder")["attention_mask"], states[0].shape[1])
    torch.testing.assert_close(states[1][mask.bool()], states[0][mask.bool()], rtol=1e-4, atol=1e-4)


def test_torch_compile_makes_one_graph():
    model = speech_model("wav2vec2-bert relative")
    inputs = {"input_features": speech_batch("wav2vec2-bert relative")["input_features"]}
    with torch.no_grad():
        theirs = model(**inputs).last_hidden_state
        compiled = torch.compile(relpos.use(model), fullgraph=True, backend="aot_eager")
        ours = compiled(**inputs).last_hidden_state
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
