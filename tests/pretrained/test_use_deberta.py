"""relpos.use on DeBERTa, beyond what tests/pretrained/test_use.py asks of every family."""

import pytest
import torch
from largest_tensor import LargestTensor
from small_models import LENGTH, batch, logits_and_gradients, small_model
from test_open import TEXT, saved, word_tokenizer
from test_use import assert_same
from transformers import DebertaConfig, DebertaModel
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

import relpos
from relpos.attend import chunks
from relpos.pretrained.families.deberta import bucketed

FAMILIES = ["deberta", "deberta-v2"]


class Layer:
    def __init__(self, buckets, longest):
        self.position_buckets, self.max_relative_positions = buckets, longest


@pytest.mark.parametrize(("buckets", "longest"), [(256, 512), (32, 128), (6, 16), (8, 500), (64, 65), (4, 24), (2, 16)])
def test_the_buckets_are_the_models_own(buckets, longest):
    distances = torch.arange(-3000, 3001)
    expected = make_log_bucket_position(distances, buckets, longest).long()
    assert torch.equal(bucketed(Layer(buckets, longest), distances), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_of_queries_and_keys_is_served(family):
    model = small_model(family)
    ids = batch(family)["input_ids"]
    seen = torch.rand(3, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    states = model.deberta.embeddings(ids)
    options = {"output_hidden_states": False}
    if family == "deberta-v2":
        model.deberta.encoder.conv = None  # it takes a mask of tokens alone
    with torch.no_grad():
        theirs = model.deberta.encoder(states, seen.long(), **options).last_hidden_state
        ours = relpos.use(model).deberta.encoder(states, seen.long(), **options).last_hidden_state
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_that_are_not_the_hidden_states_have_their_own_positions(family):
    """What the enhanced mask decoder of DeBERTa does; version 1 of transformers fails there by itself."""
    model = small_model(family)
    layer = model.deberta.encoder.layer[0].attention.self
    encoder = model.deberta.encoder
    hidden, queries = torch.randn(2, 2, 13, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 13)
    table = encoder.get_rel_embedding()
    relpos.use(model)
    arguments = {"relative_pos": None, "rel_embeddings": table}
    ours = layer(hidden, encoder.get_attention_mask(mask), query_states=queries, **arguments)[0]
    same = layer(queries, encoder.get_attention_mask(mask), **arguments)[0]
    relpos.use(model, off=True)
    if family == "deberta-v2":
        arguments["relative_pos"] = encoder.get_rel_pos(hidden)
        theirs = layer(hidden, encoder.get_attention_mask(mask), query_states=queries, **arguments)[0]
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(ours, same, atol=1e-3)


def test_talking_heads_are_refused():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    model = DebertaModel(DebertaConfig(vocab_size=64, talking_head=True, **sizes))
    with pytest.raises(ValueError, match=r"DebertaModel .*talking heads mix the scores.*left as it was"):
        relpos.use(model)


def test_distances_of_the_callers_own_are_refused():
    model = relpos.use(small_model("deberta"))
    with pytest.raises(ValueError, match="leave relative_pos out"):
        model.deberta.encoder(torch.zeros(1, 4, 32), torch.ones(1, 4), relative_pos=torch.zeros(1, 4, 4))


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_queries_give_the_same_logits_and_gradients(family, monkeypatch):
    monkeypatch.setattr(chunks, "block_size", lambda *_: 8)
    model = small_model(family)
    theirs = small_model(family)
    inputs = batch(family)
    assert_same(logits_and_gradients(relpos.use(model), inputs), logits_and_gradients(theirs, inputs))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_dropout_of_the_table_and_of_the_weights_acts_in_training_only(family):
    model = relpos.use(small_model(family, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3))
    rows = []
    for training, seed in ((True, 0), (True, 0), (True, 1), (False, 0), (False, 1)):
        torch.manual_seed(seed)
        rows.append(model.train(training)(**batch(family)).logits)
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    assert torch.equal(rows[3], rows[4])


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tensor_of_a_long_forward_and_backward_has_queries_by_keys_values(family):
    model = small_model(family, max_position_embeddings=2048)
    ids = torch.randint(4, 60, (1, 2048), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[:, -100:] = 0
    relpos.use(model)
    with LargestTensor() as largest:
        model(input_ids=ids, attention_mask=mask).logits.square().mean().backward()
    assert largest.values <= 2**20  # of 4 heads × 2,048² = 16 × 2^20


def test_the_bias_that_is_drawn_is_that_of_the_models_own_code(tmp_path, monkeypatch):
    model = small_model("deberta-v2")
    run = relpos.open(saved(model, tmp_path))
    picture = relpos.draw(run, text=TEXT, layer=2)
    layer = model.deberta.encoder.layer[1].attention.self
    terms = []
    theirs = layer.disentangled_attention_bias
    monkeypatch.setattr(layer, "disentangled_attention_bias", lambda *args: terms.append(theirs(*args)) or terms[-1])
    with torch.no_grad():
        model(torch.tensor([word_tokenizer()(TEXT)["input_ids"]]))
    drawn = torch.from_numpy(picture.maps[0].mean)
    torch.testing.assert_close(drawn, terms[0], rtol=1e-4, atol=1e-5)
    assert picture.numbers["shows"] == "bias"
