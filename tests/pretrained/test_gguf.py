"""A small Llama in a GGUF file: it opens as the model that was written, and `relpos train --from` starts from it."""

import json

import gguf
import pytest
import torch
from small_models import GROUPED, shaken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import relpos
from relpos.cli import app
from relpos.pretrained.framing import SpecialToken
from relpos.pretrained.source import read_config

TOKENS = [*sorted(ByteLevel.alphabet()), "th", "<|endoftext|>"]
END = len(TOKENS) - 1
NAMES = {
    **{"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"},
    **{"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"},
    **{"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    **{"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"},
}


def write(model: LlamaForCausalLM, path) -> None:
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    for name, value in {
        **{"context_length": config.max_position_embeddings, "embedding_length": config.hidden_size},
        **{"block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size},
        **{"head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads},
        **{"layer_norm_rms_eps": config.rms_norm_eps, "rope_dimension_count": config.head_dim},
        **{"rope_freq_base": 10000.0, "vocab_size": config.vocab_size, "tokenizer_model": "gpt2", "token_list": TOKENS},
        **{"token_types": [1] * END + [3], "token_merges": ["t h"], "bos_token_id": END, "eos_token_id": END},
    }.items():
        getattr(writer, f"add_{name}")(value)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        owner, block = name.removesuffix(".weight"), ""
        if owner.startswith("model.layers."):
            number, _, owner = owner.removeprefix("model.layers.").partition(".")
            block = f"blk.{number}."
        values = tensor.numpy()
        if NAMES[owner] in heads:  # the rows in the order of the format, which rotates neighbouring dimensions
            pairs = values.reshape(heads[NAMES[owner]], 2, -1, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(f"{block}{NAMES[owner]}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    sizes = {**GROUPED, "vocab_size": len(TOKENS), "rms_norm_eps": 1e-5, "bos_token_id": END, "eos_token_id": END}
    model = shaken(LlamaForCausalLM(LlamaConfig(**sizes))).eval()
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write(model, path)
    return path, model


def listed(path):
    return json.loads(CliRunner().invoke(app, ["ls", str(path), "--json"]).stdout)


@torch.no_grad()
def test_a_gguf_file_opens_as_the_model_that_was_written(written):
    path, model = written
    run = relpos.open(path)
    ids = run.tokenizer("the theory, thus", return_tensors="pt")["input_ids"]
    assert END - 1 in ids  # "th"
    torch.testing.assert_close(run.model(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert run.framing.before == (SpecialToken(END, "<|endoftext|>"),)  # of its configuration


def test_ls_reads_the_configuration_alone_as_transformers_does(written, tmp_path):
    path, model = written
    known = listed(path)
    assert (known["layers"], known["heads"], known["trained_length"]) == (2, 4, 64)
    header = tmp_path / path.name  # without its last tensors
    header.write_bytes(path.read_bytes()[: -model.lm_head.weight.nbytes])
    assert {**listed(header), "name": ""} == {**known, "name": ""}
    assert read_config(path).to_dict() == AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()


@pytest.mark.parametrize("size", [4, 20, 100, 700, 2000])
def test_ls_of_a_damaged_file_is_a_sentence(written, size, tmp_path):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(written[0].read_bytes()[:size])
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
