"""relpos.use of what wraps a model of transformers: the model inside is switched, the wrapper is returned."""

import pytest
import torch
from small_models import batch, small_model

import relpos
from relpos.pretrained.use import NAME, unwrap


class Peft(torch.nn.Module):
    """As peft's PeftModel: the model is what get_base_model returns."""

    def __init__(self, model):
        super().__init__()
        self.base_model = torch.nn.ModuleDict({"model": model})

    def get_base_model(self):
        return self.base_model["model"]

    def forward(self, **inputs):
        return self.get_base_model()(**inputs)


class Transformer(torch.nn.Module):
    """As the first part of a SentenceTransformer."""

    def __init__(self, model):
        super().__init__()
        self.auto_model = model

    def forward(self, inputs):
        return self.auto_model(**inputs)


class Reranker(torch.nn.Module):
    """A module of somebody's own."""

    def __init__(self, model):
        super().__init__()
        self.encoder = model


WRAPPERS = {
    "PeftModel": Peft,
    "DataParallel": torch.nn.DataParallel,
    "PeftModel in DataParallel": lambda model: torch.nn.DataParallel(Peft(model)),
    "SentenceTransformer": lambda model: torch.nn.Sequential(Transformer(model), torch.nn.Identity()),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_model_inside_a_wrapper_is_switched_and_back(name):
    model, inputs = small_model("bert"), batch("bert")
    wrapper = WRAPPERS[name](model)
    theirs = model(**inputs).logits
    assert relpos.use(wrapper) is wrapper
    assert unwrap(wrapper) is model
    assert model.config._attn_implementation == NAME
    out = wrapper(inputs) if name == "SentenceTransformer" else wrapper(**inputs)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(out.logits[real], theirs[real], rtol=1e-4, atol=1e-4)
    assert relpos.use(wrapper, off=True) is wrapper
    assert model.config._attn_implementation == "eager"


def test_an_unknown_wrapper_is_refused_with_the_attribute_that_holds_the_model():
    with pytest.raises(TypeError, match=r"not Reranker: give its \.encoder\."):
        relpos.use(Reranker(small_model("bert")))
    with pytest.raises(TypeError, match=r"not dict\.$"):
        relpos.use({})
