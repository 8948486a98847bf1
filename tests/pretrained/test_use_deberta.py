"""relpos.use on DeBERTa, beyond what tests/pretrained/test_use.py asks of every family."""

from types import SimpleNamespace

import pytest
import torch
from largest_tensor import LargestTensor
from small_models import LENGTH, TEXT, assert_same, batch, logits_and_gradients, saved, small_model, word_tokenizer
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

import relpos
from relpos.attend import chunks
from relpos.pretrained.families.deberta import bucketed

FAMILIES = ["deberta", "deberta-v2"]


@pytest.mark.parametrize(("buckets", "longest"), [(256, 512), (32, 128), (6, 16), (8, 500), (64, 65), (4, 24), (2, 16)])
def test_the_buckets_are_the_models_own(buckets, longest):
    distances = torch.arange(-3000, 3001)
    layer = SimpleNamespace(position_buckets=buckets, max_relative_positions=longest)
    assert torch.equal(bucketed(layer, distances), make_log_bucket_position(distances, buckets, longest).long())


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_of_queries_and_keys_is_served(family):
    model = small_model(family)
    seen = torch.rand(3, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    states = model.deberta.embeddings(batch(family)["input_ids"])
    if family == "deberta-v2":
        model.deberta.encoder.conv = None  # it takes a mask of tokens alone
    theirs, ours = (
        relpos.use(model, off=off).deberta.encoder(states, seen.long(), output_hidden_states=False).last_hidden_state
        for off in (True, False)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_that_are_not_the_hidden_states_have_their_own_positions(family):
    """What the enhanced mask decoder of DeBERTa does; version 1 of transformers fails there by itself."""
    model = small_model(family)
    encoder = model.deberta.encoder
    layer = encoder.layer[0].attention.self
    hidden, queries = torch.randn(2, 2, 13, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 13)
    arguments = {"relative_pos": None, "rel_embeddings": encoder.get_rel_embedding()}
    relpos.use(model)
    ours = layer(hidden, encoder.get_attention_mask(mask), query_states=queries, **arguments)[0]
    same = layer(queries, encoder.get_attention_mask(mask), **arguments)[0]
    relpos.use(model, off=True)
    if family == "deberta-v2":
        arguments["relative_pos"] = encoder.get_rel_pos(hidden)
        theirs = layer(hidden, encoder.get_attention_mask(mask), query_states=queries, **arguments)[0]
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(ours, same, atol=1e-3)


def test_talking_heads_and_distances_of_the_callers_own_are_refused():
    with pytest.raises(ValueError, match=r"DebertaForMaskedLM .*talking heads mix the scores.*left as it was"):
        relpos.use(small_model("deberta", talking_head=True))
    model = relpos.use(small_model("deberta"))
    with pytest.raises(ValueError, match="leave relative_pos out"):
        model.deberta.encoder(torch.zeros(1, 4, 32), torch.ones(1, 4), relative_pos=torch.zeros(1, 4, 4))


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_queries_give_the_same_logits_and_gradients(family, monkeypatch):
    monkeypatch.setattr(chunks, "block_size", lambda *_: 8)
    theirs = logits_and_gradients(small_model(family), batch(family))
    assert_same(logits_and_gradients(relpos.use(small_model(family)), batch(family)), theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tensor_of_a_long_forward_and_backward_has_queries_by_keys_values(family):
    tokens = 1024
    model = relpos.use(small_model(family, max_position_embeddings=tokens))
    ids = torch.randint(4, 60, (1, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[:, -100:] = 0
    with LargestTensor() as largest:
        model(input_ids=ids, attention_mask=mask).logits.square().mean().backward()
    assert largest.values <= tokens**2  # of 4 heads


@torch.no_grad()
def test_the_bias_that_is_drawn_is_that_of_the_models_own_code(tmp_path, monkeypatch):
    model = small_model("deberta-v2")
    picture = relpos.draw(relpos.open(saved(model, tmp_path)), text=TEXT, layer=2)
    layer = model.deberta.encoder.layer[1].attention.self
    terms = []
    theirs = layer.disentangled_attention_bias
    monkeypatch.setattr(layer, "disentangled_attention_bias", lambda *args: terms.append(theirs(*args)) or terms[-1])
    model(torch.tensor([word_tokenizer()(TEXT)["input_ids"]]))
    torch.testing.assert_close(torch.from_numpy(picture.maps[0].mean), terms[0], rtol=1e-4, atol=1e-5)
    assert picture.numbers["shows"] == "bias"
