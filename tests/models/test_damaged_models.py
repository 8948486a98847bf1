"""A saved model that does not fit its configuration is refused: it would be measured with start values in the gaps."""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from relpos.models import RelposGPT2Config, RelposGPT2ForCausalLM, RelposGPT2Model
from relpos.runs.run import open_run

pytestmark = pytest.mark.heavy

SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50257}
WEIGHTS = "model.safetensors"
OPENERS = [
    open_run,
    RelposGPT2ForCausalLM.from_pretrained,
    transformers.AutoModelForCausalLM.from_pretrained,
    transformers.AutoModel.from_pretrained,
]


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    RelposGPT2ForCausalLM(RelposGPT2Config(**SIZES, position="cable")).save_pretrained(tmp_path)
    return tmp_path


def change(folder, **tensors):
    """Replace tensors of the file; None removes one."""
    file = folder / WEIGHTS
    saved = {**load_file(file), **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}
    save_file({name: tensor for name, tensor in saved.items() if tensor is not None}, file, {"format": "pt"})


@pytest.mark.parametrize("opener", OPENERS)
class TestWeightsAreRefused:
    def test_that_lack_tensors(self, folder, opener, capfd):
        change(folder, transformer__h__1__attn__position__steps__bias=None, transformer__wte__weight=None)
        with pytest.raises(ValueError, match=r"the file lacks .*h\.1\.attn\.position\.steps\.bias, .*wte\.weight"):
            opener(folder)
        assert "MISSING" not in capfd.readouterr().err  # transformers' report stays out of the way

    def test_that_have_others(self, folder, opener):
        change(folder, transformer__h__1__attn__extra=torch.ones(3))
        with pytest.raises(ValueError, match=r"the file has unknown .*h\.1\.attn\.extra"):
            opener(folder)

    def test_of_more_layers_than_the_configuration(self, folder, opener):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "n_layer": 1}))
        with pytest.raises(ValueError, match=r"the file has unknown .*h\.1\..* and \d+ more"):
            opener(folder)

    def test_of_other_shapes(self, folder, opener):
        change(folder, transformer__ln_f__bias=torch.ones(5))
        with pytest.raises(ValueError, match=re.escape("ln_f.bias (5,), not (16,)")):
            opener(folder)

    @pytest.mark.parametrize("size", [0, 5, 1000, 100_000])
    def test_that_are_cut_short(self, folder, opener, size):
        file = folder / WEIGHTS
        file.write_bytes(file.read_bytes()[:size])
        with pytest.raises(ValueError, match=r"cannot be read: .*damaged or truncated"):
            opener(folder)


class TestWeightsAreTaken:
    def test_without_the_tied_output_matrix(self, folder):
        assert "lm_head.weight" not in load_file(folder / WEIGHTS)
        model = RelposGPT2ForCausalLM.from_pretrained(folder)
        assert model.lm_head.weight is model.transformer.wte.weight

    def test_without_the_language_models_head_by_the_model_that_has_none(self, tmp_path):
        model = RelposGPT2ForCausalLM(RelposGPT2Config(**SIZES, position="alibi", tie_word_embeddings=False))
        model.save_pretrained(tmp_path)
        assert "lm_head.weight" in load_file(tmp_path / WEIGHTS)
        inner = RelposGPT2Model.from_pretrained(tmp_path)
        assert torch.equal(inner.wte.weight, model.transformer.wte.weight)

    @pytest.mark.parametrize("prefix", ["transformer.", ""])  # files of OpenAI's own weights have none
    def test_with_the_masks_of_old_gpt2_files(self, tmp_path, prefix):
        theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, n_positions=32)).eval()
        theirs.save_pretrained(tmp_path)
        saved = {name.replace("transformer.", prefix): tensor for name, tensor in load_file(tmp_path / WEIGHTS).items()}
        for layer in range(2):
            saved[f"{prefix}h.{layer}.attn.bias"] = torch.ones(1, 1, 32, 32)
            saved[f"{prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
        save_file(saved, tmp_path / WEIGHTS, {"format": "pt"})
        tokens = torch.tensor([[1, 2, 3, 4]])
        ours = open_run(tmp_path).model(tokens).logits
        torch.testing.assert_close(ours, theirs(tokens).logits, rtol=1e-4, atol=1e-5)

    def test_of_other_shapes_where_that_is_asked_for(self, folder):
        change(folder, transformer__ln_f__bias=torch.ones(5))
        model, info = RelposGPT2ForCausalLM.from_pretrained(
            folder, ignore_mismatched_sizes=True, output_loading_info=True
        )
        assert model.transformer.ln_f.bias.shape == (16,)
        assert [name for name, *_ in info["mismatched_keys"]] == ["transformer.ln_f.bias"]
