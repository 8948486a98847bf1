"""What transformers itself does wrong is found: see `KNOWN` in benchmarks/check.py."""

import pytest
import torch
from small_models import small_model
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BambaConfig,
    BambaForCausalLM,
    ProphetNetConfig,
    ProphetNetForCausalLM,
    SeamlessM4Tv2Config,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2 import SeamlessM4Tv2SpeechEncoder

import relpos
from relpos.checking.findings import FAILED


def failed(report):
    return [finding.test for finding in report.findings if finding.status == FAILED]


def shaken(model):
    """With weights that let the positions matter."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.fixture
def registered():
    """An attention of the user's, with the masks of sdpa."""
    AttentionInterface.register("mine", sdpa_attention_forward)
    AttentionMaskInterface.register("mine", sdpa_mask)
    yield "mine"
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop("mine", None)


def test_bloom_with_a_registered_attention_adds_a_boolean_mask(registered):
    config = small_model("bloom").config
    model = type(small_model("bloom"))._from_config(config, attn_implementation=registered).eval()
    report = relpos.check(model, only=["mask", "causality", "right padding"])
    assert report.faults == ["boolean mask"]
    assert "causality" in failed(report)


def test_falcons_eager_adds_alibi_twice():
    model = type(small_model("falcon"))._from_config(small_model("falcon alibi").config, attn_implementation="eager")
    report = relpos.check(model.eval(), only=["bias"])
    assert report.faults == ["bias twice"]
    assert not relpos.check(small_model("falcon alibi"), only=["bias"]).failed  # on sdpa


@pytest.mark.parametrize(("implementation", "faults"), [("eager", ["boolean mask"]), ("sdpa", [])])
def test_seamless_m4t_v2_adds_its_mask_of_chunks_to_the_scores(implementation, faults):
    sizes = dict.fromkeys(("encoder", "decoder", "speech_encoder"), 4)
    config = SeamlessM4Tv2Config(
        hidden_size=32,
        speech_encoder_layers=2,
        speech_encoder_intermediate_size=48,
        feature_projection_input_dim=16,
        speech_encoder_chunk_size=8,
        speech_encoder_left_chunk_num=1,
        **{f"{part}_attention_heads": heads for part, heads in sizes.items()},
    )
    config._attn_implementation = implementation
    torch.manual_seed(0)
    report = relpos.check(SeamlessM4Tv2SpeechEncoder(config).eval(), only=["mask", "batch"])
    assert report.faults == faults
    assert report.tested


def test_bamba_counts_positions_from_0_in_every_call():
    torch.manual_seed(0)
    config = BambaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_chunk_size=8,
    )
    report = relpos.check(shaken(BambaForCausalLM(config)), only=["cache"])
    assert report.faults == ["cache restart"]


def test_prophetnet_mixes_rows_of_later_positions_in():
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "max_position_embeddings": 48,
        "num_decoder_layers": 2,
        "num_decoder_attention_heads": 4,
    }
    config = ProphetNetConfig(**sizes, decoder_ffn_dim=48, is_decoder=True, is_encoder_decoder=False)
    report = relpos.check(shaken(ProphetNetForCausalLM(config)), only=["causality", "cache"])
    assert failed(report) == ["causality", "cache"]
    assert "causal mask missing" not in report.faults
