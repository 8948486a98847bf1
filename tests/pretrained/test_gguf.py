"""A small Llama in a GGUF file: it opens as the model that was written, and `relpos train --from` starts from it."""

import json

import gguf
import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import relpos
from relpos.cli import app
from relpos.pretrained.source import read_config

TOKENS = [*sorted(ByteLevel.alphabet()), "th", "<|endoftext|>"]
END = len(TOKENS) - 1
SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": END,
    "eos_token_id": END,
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def in_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a projection in the order of the format, which rotates neighbouring dimensions."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(model: LlamaForCausalLM, path) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * END + [3])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(END)
    writer.add_eos_token_id(END)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        owner = name.removesuffix(".weight")
        if owner.startswith("model.layers."):
            number, _, part = owner.removeprefix("model.layers.").partition(".")
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(NAMES[part])
            writer.add_tensor(f"blk.{number}.{NAMES[part]}.weight", in_pairs(values, heads) if heads else values)
        else:
            writer.add_tensor(f"{OUTER[owner]}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write(model, path)
    return path, model


def test_a_gguf_file_opens_as_the_model_that_was_written(written):
    path, model = written
    run = relpos.open(path)
    ids = run.tokenizer("the theory, thus", return_tensors="pt")["input_ids"]
    assert END - 1 in ids  # "th"
    with torch.no_grad():
        torch.testing.assert_close(run.model(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_ls_reads_the_configuration_alone(written, tmp_path):
    path, model = written
    whole = CliRunner().invoke(app, ["ls", str(path), "--json"])
    known = json.loads(whole.stdout)
    assert (known["layers"], known["heads"], known["trained_length"]) == (2, 4, 64)
    header = tmp_path / path.name  # without its last tensors
    header.write_bytes(path.read_bytes()[: -model.lm_head.weight.nbytes])
    cut = json.loads(CliRunner().invoke(app, ["ls", str(header), "--json"]).stdout)
    assert {**cut, "name": ""} == {**known, "name": ""}


def test_the_configuration_from_the_header_is_that_of_transformers(written):
    path, _ = written
    expected = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    assert read_config(path).to_dict() == expected.to_dict()


@pytest.mark.parametrize("size", [4, 20, 100, 700, 2000])
def test_ls_of_a_damaged_file_is_a_sentence(written, size, tmp_path):
    path, _ = written
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(path.read_bytes()[:size])
    error = CliRunner().invoke(app, ["ls", str(damaged)]).exception
    assert isinstance(error, ValueError)
    assert f"{damaged} cannot be read" in str(error)
    assert "The file is damaged or truncated: copy it again." in str(error)


def test_relpos_train_from_a_gguf_file(written, tmp_path):
    path, model = written
    (tmp_path / "text").mkdir()
    for number in range(3):  # documents, one of which is held out
        (tmp_path / "text" / f"{number}.txt").write_text("the theory, thus, is that both things are thought of. " * 8)
    arguments = ["train", "--from", str(path), "--encoding", "kerple_log", "--data", str(tmp_path / "text")]
    arguments += ["--length", "32", "--batch-size", "1", "--steps", "2", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    run = relpos.open(tmp_path / "run")
    assert (run.family.name, run.encoding) == ("llama", "kerple_log")
    before, after = (each.state_dict()["model.layers.0.mlp.up_proj.weight"] for each in (model, run.model))
    assert 0 < (after - before).abs().max() < 1e-2  # the file's weights, after two steps
