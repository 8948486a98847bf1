"""attn_implementation="relpos": models on transformers' interface give eager's numbers, the others are refused."""

import pytest
import torch
from small_models import (
    assert_same,
    assert_same_generation,
    batch,
    generated,
    kind_of,
    logits_and_gradients,
    saved,
    small_model,
)
from torch import nn
from torch.nn.modules import module as module_hooks
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, MambaConfig, PreTrainedConfig

import relpos
from relpos.models import named_attention
from relpos.models.attention_interface import LISTENER
from relpos.models.named_attention import BY_NAME, calls_interface, named_mask

relpos.register()
ON_THE_INTERFACE = ["llama", "gpt2", "qwen3", "gemma3_text", "gpt_oss", "bert", "modernbert", "t5", "bart"]
MISREAD_MASKS = ["bloom", "mpt", "mpnet"]  # outside the interface: they ask for a mask, and would misread ours
CHOOSE_LAYERS_BY_NAME = ["falcon", "gptj", "gpt_neo", "git"]  # transformers alone raises KeyError: 'relpos'
READ_NO_NAME = ["deberta", "deberta-v2", "xlnet", "xlm", "openai-gpt"]  # they would run without relpos, silently
REFUSED = r"cannot run the model type .*does not call transformers' attention interface.*relpos\.use\(model\)"


def by_name(family: str) -> nn.Module:
    """The small model of a family, built with attn_implementation="relpos"."""
    eager = small_model(family)
    model = type(eager)._from_config(eager.config, attn_implementation=BY_NAME)
    model.load_state_dict(eager.state_dict())
    return model.eval()


def layers_that_call(model: nn.Module, inputs: dict[str, torch.Tensor]) -> set[str]:
    """The classes of the layers that run on relpos in one forward."""
    classes: set[str] = set()
    for module in model.modules():
        vars(module)[LISTENER] = lambda layer, *_: classes.add(type(layer).__name__)
    with torch.no_grad():
        model(**inputs)
    return classes


@pytest.mark.parametrize("family", ON_THE_INTERFACE)
@pytest.mark.parametrize("side", ["right", "left"])
def test_logits_and_gradients_equal_eager_with_padding(family, side):
    inputs = batch(family, side)
    theirs = logits_and_gradients(small_model(family), inputs)
    model = by_name(family)
    assert_same(logits_and_gradients(model, inputs), theirs)
    assert layers_that_call(model, inputs)


@pytest.mark.parametrize("family", [name for name in ON_THE_INTERFACE if kind_of(name) != "encoder"])
def test_generation_equals_eager_with_padding(family):
    assert_same_generation(generated(by_name(family), family), generated(small_model(family), family))


@pytest.mark.parametrize("name", MISREAD_MASKS + CHOOSE_LAYERS_BY_NAME + READ_NO_NAME)
def test_a_model_outside_the_interface_is_refused_when_it_is_built(name):
    with torch.device("meta"), pytest.raises(ValueError, match=REFUSED):
        AutoModel.from_config(CONFIG_MAPPING[name](), attn_implementation="relpos")


@pytest.mark.parametrize("family", ["bloom", "mpt"])
@pytest.mark.parametrize("tokens", [1, 21])
def test_a_model_whose_code_cannot_be_read_is_refused_when_it_asks_for_its_mask(monkeypatch, family, tokens):
    monkeypatch.setattr(named_attention, "has_own_attention", lambda module: False)
    inputs = {name: x[:, -tokens:] for name, x in batch(family).items()}
    with pytest.raises(ValueError, match=REFUSED):
        by_name(family)(**inputs)


def test_from_pretrained_refuses_a_model_outside_the_interface(tmp_path):
    folder = saved(small_model("bloom"), tmp_path / "bloom")
    with pytest.raises(ValueError, match=REFUSED):
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="relpos")
    assert relpos.use(AutoModelForCausalLM.from_pretrained(folder))


def test_a_model_without_attention_keeps_the_name():
    config = MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="relpos")
    assert model(input_ids=torch.zeros(1, 3, dtype=torch.long)).logits.isfinite().all()


def test_registering_again_adds_no_second_hook():
    before = len(module_hooks._global_module_registration_hooks)
    relpos.register()
    assert len(module_hooks._global_module_registration_hooks) == before


def test_code_from_elsewhere_is_refused_for_only_use_can_check_it():
    class Elsewhere(PreTrainedConfig):
        model_type = "elsewhere"

    assert not calls_interface(Elsewhere())
    with pytest.raises(ValueError, match="model type 'elsewhere'"):
        named_mask(Elsewhere(), batch_size=1, q_length=1, kv_length=1)


def test_from_pretrained_takes_the_name_and_use_takes_the_model(tmp_path):
    folder = saved(small_model("llama"), tmp_path / "llama")
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="relpos").eval()
    expected = theirs(**batch("llama")).logits
    torch.testing.assert_close(model(**batch("llama")).logits, expected, rtol=0, atol=1e-4)
    relpos.use(model)  # checks it, and is no other
    torch.testing.assert_close(model(**batch("llama")).logits, expected, rtol=0, atol=1e-4)
    assert relpos.use(model, off=True).config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="favourite_keys, which relpos does not know"):
        by_name("llama")(**batch("llama"), favourite_keys=torch.zeros(1))


def test_our_own_models_take_the_name_too(tmp_path):
    from relpos.models import RelposGPT2Config

    config = RelposGPT2Config.preset("nano", vocab_size=64, position="alibi")
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config).eval()
    plain.save_pretrained(tmp_path)
    named = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="relpos").eval()
    ids = batch("llama")["input_ids"]
    assert torch.equal(named(input_ids=ids).logits, plain(input_ids=ids).logits)
