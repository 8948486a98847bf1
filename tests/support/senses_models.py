"""Small random models of images and sound, and what is compared of them."""

from typing import Any

import torch
from small_models import shaken
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedModel
from transformers.models.seamless_m4t.modeling_seamless_m4t import SeamlessM4TSpeechEncoder
from transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2 import SeamlessM4Tv2SpeechEncoder

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
IMAGE = {**SMALL, "image_size": 16, "patch_size": 4}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
WAVES = {
    **{**SMALL, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
    **{"apply_spec_augment": False, "mask_time_prob": 0.0},
}
WHISPER = {
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_source_positions": 20, "num_mel_bins": 8},
}
SEAMLESS = {
    **{"hidden_size": 32, "speech_encoder_layers": 2, "speech_encoder_attention_heads": 4},
    **{"speech_encoder_intermediate_size": 48, "feature_projection_input_dim": 16, "add_adapter": False},
}
PARAKEET = {
    **{**SMALL, "num_mel_bins": 16, "subsampling_conv_channels": 8, "layerdrop": 0.0, "dropout": 0.0},
    "scale_input": False,
}
FRAMES = {**SMALL, "feature_projection_input_dim": 16, "mask_time_prob": 0.0}
CLIPPED = {"left_max_position_embeddings": 7, "right_max_position_embeddings": 3}
RELATIVE, KEYS = {"position_embeddings_type": "relative"}, {"position_embeddings_type": "relative_key"}
OTHERS: dict[str, tuple[dict[str, Any], tuple[str, tuple[int, ...]]]] = {  # settings, the main input with its shape
    "vit": (IMAGE, ("pixel_values", (2, 3, 16, 16))),
    "dinov2": (IMAGE, ("pixel_values", (2, 3, 16, 16))),
    "siglip_vision_model": (IMAGE, ("pixel_values", (2, 3, 16, 16))),
    "beit": ({**IMAGE, "use_relative_position_bias": True}, ("pixel_values", (2, 3, 16, 16))),
    "swin": (SWIN, ("pixel_values", (2, 3, 32, 32))),
    "wav2vec2": (WAVES, ("input_values", (2, 900))),
    "whisper": (WHISPER, ("input_features", (2, 8, 40))),
}
SPEECH: dict[str, tuple[dict[str, Any], tuple[str, tuple[int, ...]]]] = {  # the same, by model type and further words
    "wav2vec2-conformer relative": ({**WAVES, **RELATIVE, "max_source_positions": 30}, ("input_values", (3, 900))),
    "wav2vec2-conformer rotary": ({**WAVES, "position_embeddings_type": "rotary"}, ("input_values", (3, 900))),
    "wav2vec2-bert relative": ({**FRAMES, **RELATIVE}, ("input_features", (3, 45, 16))),
    "wav2vec2-bert relative_key": ({**FRAMES, **KEYS, **CLIPPED}, ("input_features", (3, 45, 16))),
    "parakeet_encoder": (PARAKEET, ("input_features", (3, 200, 16))),
    "seamless_m4t relative": ({**SEAMLESS, **RELATIVE}, ("input_features", (3, 45, 16))),
    "seamless_m4t_v2 relative_key": ({**SEAMLESS, **CLIPPED}, ("input_features", (3, 45, 16))),
}
ENCODERS = {"seamless_m4t": SeamlessM4TSpeechEncoder, "seamless_m4t_v2": SeamlessM4Tv2SpeechEncoder}  # of larger models
ALL = {**OTHERS, **SPEECH}


def senses_model(name: str, **settings: Any) -> PreTrainedModel:
    """A model in evaluation mode; "eager" unless that is wrong."""
    torch.manual_seed(0)
    kind = name.split(maxsplit=1)[0]
    config = CONFIG_MAPPING[kind](**{**ALL[name][0], **settings})
    make = ENCODERS[kind]._from_config if kind in ENCODERS else AutoModel.from_config
    implementation = "sdpa" if kind == "seamless_m4t_v2" else "eager"  # there, eager adds a boolean mask to the scores
    return shaken(make(config, attn_implementation=implementation)).eval()


def senses_batch(name: str) -> dict[str, Tensor]:
    """Random inputs; of speech three rows, of which two are padded at their end, as speech models want it."""
    main, shape = ALL[name][1]
    generator = torch.Generator().manual_seed(2)
    inputs = {main: torch.randn(shape, generator=generator)}
    if name == "whisper":
        inputs["decoder_input_ids"] = torch.randint(4, 60, (2, 7), generator=generator)
    if name in SPEECH:
        inputs["attention_mask"] = mask = torch.ones(shape[:2], dtype=torch.long)
        for row, share in ((1, 0.3), (2, 0.6)):
            mask[row, shape[1] - int(share * shape[1]) :] = 0
    return inputs


def long_sound(name: str, frames: int) -> dict[str, Tensor]:
    """One row that attention sees as about so many tokens."""
    main, shape = SPEECH[name][1]
    length = frames * (20 if main == "input_values" else 8 if name == "parakeet_encoder" else 1)
    return {main: torch.randn(1, length, *shape[2:], generator=torch.Generator().manual_seed(0))}


def real_frames(model: Any, states: Tensor, mask: Tensor) -> Tensor:
    """The states that are not of padding."""
    if hasattr(model, "_get_output_attention_mask"):
        mask = model._get_output_attention_mask(mask, target_length=states.shape[1])
    elif mask.shape[1] != states.shape[1]:
        mask = model._get_feature_vector_attention_mask(states.shape[1], mask)
    return states[mask.bool()]


def states_and_gradients(model: PreTrainedModel, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The last states without padding, and all gradients under a random weighting of them."""
    model.zero_grad()
    out = model(**inputs).last_hidden_state
    if "attention_mask" in inputs:
        out = real_frames(model, out, inputs["attention_mask"])
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(3))).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return out.detach(), gradients
