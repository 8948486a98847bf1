"""GPT-2 with any encoding: GPT-2's own numbers, one cache for all, and folders that everybody opens."""

import copy
import itertools
import subprocess
import sys

import pytest
import torch
import transformers
from torch.nn import functional as F

import relpos
from relpos.forms.encoding import Encoding
from relpos.model_catalogue import FAMILIES
from relpos.models import RelposGPT2Config, RelposGPT2ForCausalLM, RelposGPT2Model
from relpos.models.base import read_position_ids
from relpos.models.loss import masked_token_loss, next_token_loss, token_losses

pytestmark = pytest.mark.heavy

VOCABULARY = 61
POSITIONS: list[dict[str, object]] = [
    *({"name": name} for name in relpos.names()),
    {"name": "dape", "base": "cable"},
    {"name": "rope", "scaling": "yarn", "factor": 2.0, "length": 8},
    # Not dynamic NTK: past its length it changes what earlier tokens were, which no cache of keys can follow.
]


def label(position: dict[str, object]) -> str:
    return "-".join(str(value) for value in position.values())


def build(position: dict[str, object] | str | None = None, **entries: object) -> RelposGPT2ForCausalLM:
    """A small model whose parameters are moved off their start (some start at 0, where nothing can be seen)."""
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": VOCABULARY}
    model = RelposGPT2ForCausalLM(RelposGPT2Config(**{**sizes, "position": position, **entries})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape)


def greedy(model: RelposGPT2ForCausalLM, prompt: torch.Tensor, **options: object) -> torch.Tensor:
    return model.generate(prompt, max_new_tokens=9, do_sample=False, pad_token_id=0, **options)


@pytest.mark.parametrize("position", POSITIONS, ids=label)
class TestEveryEncoding:
    def test_gives_step_by_step_the_logits_of_the_whole(self, position):
        model, tokens = build(position).double(), ids(2, 12)
        cache, steps = None, []
        for start, end in ((0, 5), (5, 6), (6, 9), (9, 10), (10, 11), (11, 12)):
            out = model(tokens[:, start:end], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
        torch.testing.assert_close(torch.cat(steps, dim=1), model(tokens).logits, rtol=0, atol=1e-9)

    def test_does_not_notice_padding_on_the_left(self, position):
        model, prompt = build(position), ids(2, 7)
        prompt[0, :3] = 0
        mask = (prompt != 0).long()
        padded = greedy(model, prompt, attention_mask=mask)
        assert torch.equal(padded[0, 3:], greedy(model, prompt[:1, 3:])[0])
        assert torch.equal(padded[1:], greedy(model, prompt[1:]))

    def test_comes_back_from_its_folder_the_same(self, position, tmp_path):
        model, tokens = build(position), ids(2, 12)
        model.save_pretrained(tmp_path)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(again) is RelposGPT2ForCausalLM
        assert [path.suffix for path in tmp_path.iterdir() if "json" not in path.suffix] == [".safetensors"]
        assert torch.equal(again(tokens).logits, model(tokens).logits)

    def test_can_be_shared_by_the_layers(self, position):
        own, shared = build(position), build(position, share_position=True)
        count = sum(isinstance(module, Encoding) for module in shared.modules())
        embeds = relpos.card(position["name"]).place == "embedding"
        each = sum(isinstance(module, Encoding) for module in own.config.make_position().modules())
        assert count == each
        assert sum(isinstance(module, Encoding) for module in own.modules()) == each * (1 if embeds else 2)
        tokens = ids(1, 9)
        assert torch.equal(greedy(shared, tokens), greedy(shared, tokens, use_cache=False))

    def test_starts_where_the_encoding_starts(self, position):
        """transformers' rule for linear layers must not reach into the encoding."""
        torch.manual_seed(5)
        model = RelposGPT2ForCausalLM(RelposGPT2Config(n_layer=1, n_head=4, n_embd=64, position=position))
        encodings = [module for module in model.modules() if isinstance(module, Encoding)]
        reference = [
            torch.stack([p.detach().flatten() for p in params])
            for params in zip(*(model.config.make_position().parameters() for _ in range(40)), strict=True)
        ]
        for own, many in zip(encodings[0].parameters(), reference, strict=True):
            low, high = many.amin(), many.amax()
            slack = 0.5 * (high - low) + 1e-6
            assert low - slack <= own.min()
            assert own.max() <= high + slack
            if many[0].numel() >= 32:
                assert own.std().item() == pytest.approx(many.std().item(), rel=0.5, abs=1e-6)


@pytest.mark.parametrize(("preset", "millions"), [("nano", 1.8), ("small", 85.1), ("medium", 302.3), ("large", 708.4)])
def test_the_presets_have_gpt2s_sizes(preset, millions):
    """Without embeddings: GPT-2's 124, 355 and 774 million, less 38.6, 51.5 and 64.3 of vocabulary and positions."""
    config = RelposGPT2Config.preset(preset, position="nope", vocab_size=1)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in RelposGPT2Model(config).parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.06)


def test_a_sum_of_embeddings_alone_acts_once_before_the_layers():
    model, plain, tokens = build({"name": "sum", "parts": ["learned"]}), build("learned"), ids(2, 9)
    weights = {key.replace("wpe.parts.0.", "wpe."): value for key, value in model.state_dict().items()}
    plain.load_state_dict(weights)
    assert torch.equal(plain(tokens).logits, model(tokens).logits)


def test_a_sum_with_an_encoding_of_the_embedding_acts_in_both_places():
    position = {"name": "sum", "parts": ["learned", "alibi"]}
    with pytest.raises(ValueError, match="set share_position=True"):
        build(position)
    model, tokens = build(position, share_position=True), ids(2, 9)
    learned, alibi = build("learned"), build("alibi")
    table = model.transformer.position.parts[0].weight
    for other, wanted in ((learned, "learned"), (alibi, "alibi")):
        shared = {k: v for k, v in model.state_dict().items() if "position" not in k}
        if wanted == "learned":
            shared["transformer.wpe.weight"] = table
        other.load_state_dict(shared)
        assert (other(tokens).logits - model(tokens).logits).abs().max() > 1e-3
    with torch.no_grad():
        table.zero_()
    torch.testing.assert_close(model(tokens).logits, alibi(tokens).logits)


@pytest.mark.parametrize("position", ["cable", "learned", "rope"])
def test_gradient_checkpointing_changes_no_gradient(position):
    model, tokens = build(position).train(), ids(2, 10)
    model(tokens, labels=tokens).loss.backward()
    plain = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(tokens, labels=tokens).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name], rtol=0, atol=1e-7)


def test_hidden_states_are_those_of_gpt2():
    config = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": VOCABULARY}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config, bos_token_id=0, eos_token_id=0)).eval()
    ours = RelposGPT2ForCausalLM(RelposGPT2Config(**config)).eval()
    ours.load_state_dict(theirs.state_dict())
    tokens = ids(1, 8)
    for a, b in zip(
        ours(tokens, output_hidden_states=True).hidden_states,
        theirs(tokens, output_hidden_states=True).hidden_states,
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class TestLoss:
    @pytest.mark.parametrize("kind", ["next", "masked", "masked with a bias", "every", "every with a bias"])
    def test_is_pytorchs_with_all_gradients(self, kind):
        hidden, weight, *bias = (
            torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 17, 8), (29, 8), (29,))
        )
        bias = bias if "bias" in kind else []
        labels = torch.randint(0, 29, (3, 17))
        labels[0, 4:9] = labels[2, 3:] = -100
        logits = F.linear(hidden, weight, *bias)
        if kind.startswith("every"):
            ours = token_losses(hidden, weight, labels, *bias, rows=7)
            torch.testing.assert_close(ours, F.cross_entropy(logits.transpose(1, 2), labels, reduction="none"))
            assert (ours == 0).sum() == 5 + 14
            return
        if kind == "next":
            ours = next_token_loss(hidden, weight, labels, rows=7)
            theirs = F.cross_entropy(logits[:, :-1].reshape(-1, 29), labels[:, 1:].reshape(-1))
        else:
            ours = masked_token_loss(hidden, weight, labels, *bias, rows=3)
            theirs = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        gradients = (torch.autograd.grad(3 * loss, (hidden, weight, *bias)) for loss in (ours, theirs))
        for a, b in zip((ours, *next(gradients)), (theirs, *next(gradients)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)

    @pytest.mark.parametrize("loss", [next_token_loss, masked_token_loss, token_losses])
    def test_refuses_labels_of_another_shape(self, loss):
        with pytest.raises(ValueError, match=r"(labels|targets) must be \(batch, length\) = \(3, 17\)"):
            loss(torch.randn(3, 17, 8), torch.randn(29, 8), torch.zeros(3, 9, dtype=torch.long))

    @pytest.mark.parametrize("label", [-1, -99, -101, 29, 2**40])
    @pytest.mark.parametrize("loss", [next_token_loss, masked_token_loss, token_losses])
    def test_refuses_a_label_that_is_no_token_as_pytorch_does(self, loss, label):
        hidden, weight = torch.randn(1, 6, 8), torch.randn(29, 8)
        labels = torch.tensor([[3, 4, label, -100, 5, 6]])
        with pytest.raises(IndexError, match="out of bounds"):
            F.cross_entropy((hidden @ weight.T)[0, :-1], labels[0, 1:])
        with pytest.raises(
            ValueError, match=f"the label {label} is not in the vocabulary of 29 tokens: labels are 0 to 28"
        ):
            loss(hidden, weight, labels)
        with pytest.raises(TypeError, match=r"labels must be torch\.int64, not torch\.float32"):
            loss(hidden, weight, labels.float())

    def test_refuses_a_negative_label_in_compiled_code_too(self):
        compiled = torch.compile(next_token_loss, backend="eager")
        hidden, weight = torch.randn(1, 4, 8), torch.randn(29, 8)
        good, bad = torch.tensor([[1, 2, -100, 3]]), torch.tensor([[1, 2, -7, 3]])
        torch.testing.assert_close(compiled(hidden, weight, good), next_token_loss(hidden, weight, good))
        with pytest.raises(RuntimeError, match="out of bounds"):
            compiled(hidden, weight, bad)

    def test_takes_the_token_after_the_last_too(self):
        model, tokens = build("alibi"), ids(2, 9)
        loss = model(tokens[:, :8], labels=tokens).loss
        expected = F.cross_entropy(model(tokens[:, :8]).logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        torch.testing.assert_close(loss, expected)

    def test_divides_by_the_count_that_trainer_gives(self):
        model, tokens = build("alibi"), ids(2, 9)
        mean, own = model(tokens, labels=tokens).loss, model(tokens, labels=tokens, num_items_in_batch=32).loss
        torch.testing.assert_close(own, mean * 16 / 32)

    @pytest.mark.slow
    def test_needs_a_fraction_of_the_logits_memory(self):
        """4,096 tokens × 50,257 entries are 0.8 GB in float32; what the loss adds to a process must be much less."""
        code = """
import resource, torch
torch.set_num_threads(1)
from relpos.models.loss import next_token_loss
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
hidden, weight = torch.randn(1, 4096, 16), torch.randn(50257, 16).requires_grad_()
before = peak()
loss = next_token_loss(hidden, weight, torch.randint(0, 50257, (1, 4096)))
loss.backward()
print(peak() - before, loss.item())
"""
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        gigabytes, loss = map(float, run.stdout.split())
        assert gigabytes < 0.5
        assert loss > 0

    @pytest.mark.slow
    def test_of_16384_tokens_with_gpt2s_vocabulary_stays_under_4_gigabytes(self):
        """The logits alone would be 3.3 GB, one head's scores 1.1 GB."""
        code = """
import resource, torch
torch.set_num_threads(1)
from relpos.models import RelposGPT2Config, RelposGPT2ForCausalLM
model = RelposGPT2ForCausalLM(RelposGPT2Config.preset("nano", position="kerple_log", vocab_size=50257)).eval()
tokens = torch.randint(0, 50257, (1, 16384))
with torch.no_grad():
    print(model(tokens, labels=tokens).loss.item(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        loss, gigabytes = map(float, run.stdout.split())
        assert gigabytes < 4
        assert loss == pytest.approx(10.82, abs=0.2)  # ln 50257: nothing has been learned

    def test_with_labels_there_are_logits_only_when_asked_for(self):
        model, tokens = build("alibi"), ids(2, 9)
        assert model(tokens, labels=tokens).logits is None
        assert model(tokens, labels=tokens, logits_to_keep=0).logits.shape == (2, 9, VOCABULARY)
        assert torch.equal(model(tokens, logits_to_keep=2).logits, model(tokens).logits[:, -2:])


@pytest.mark.parametrize(
    "imports",
    [
        "import relpos.models; from transformers import AutoModelForCausalLM",
        pytest.param("from transformers import AutoModelForCausalLM; import relpos.models", marks=pytest.mark.slow),
    ],
)
def test_after_import_relpos_models_the_auto_classes_open_our_folders(imports, tmp_path):
    build("alibi").save_pretrained(tmp_path)
    code = f"{imports}\nprint(type(AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})).__name__)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "RelposGPT2ForCausalLM", run.stderr


def test_every_family_of_the_catalogue_is_registered_with_the_auto_classes():
    for name, entry in FAMILIES.items():
        config = getattr(relpos.models, entry.classes["AutoConfig"])
        assert transformers.CONFIG_MAPPING[f"relpos_{name}"] is config
        for auto in ("AutoModel", entry.auto_class):
            assert getattr(transformers, auto)._model_mapping[config].__name__ == entry.classes[auto]


def test_import_relpos_changes_nothing_outside_relpos():
    code = "import sys; before = list(sys.meta_path), list(sys.path_hooks); import relpos\n"
    code += "assert before == (list(sys.meta_path), list(sys.path_hooks)); assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: build("kerpel_log"), "Did you mean 'kerple_log'?"),
        (lambda: build({"base": "alibi"}), "must name an encoding"),
        (lambda: build("alibi", n_head=5), "not a multiple of the 5 heads"),
        (lambda: RelposGPT2Config.preset("huge"), "unknown preset 'huge'"),
        (lambda: build("alibi", activation_function="relu"), "gelu_new"),
        (lambda: build("alibi")(ids(1, 4), output_attentions=True), "relpos.scores"),
        (lambda: build("alibi")(ids(1, 4), attention_mask=torch.ones(1, 3)), "attention_mask must be"),
        (lambda: build("alibi")(None), "give either input_ids or inputs_embeds"),
        (lambda: build("learned", n_positions=8)(ids(1, 9)), "learned has 8 positions"),
        (lambda: build("alibi")(ids(1, 4), labels=ids(1, 6)), "labels must be"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(make, sentence):
    with pytest.raises(ValueError, match="(?s)" + sentence.replace("?", r"\?").replace(".", r"\.")):
        make()


def test_a_model_can_be_copied_and_trained():
    model, tokens = build("fire").train(), ids(4, 16)
    before = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert before(tokens, labels=tokens).loss.item() == pytest.approx(losses[0])


class TestPositionIds:
    @pytest.mark.parametrize("position", POSITIONS, ids=label)
    def test_that_are_the_places_of_the_tokens_change_nothing(self, position):
        model, tokens = build(position), ids(2, 9)
        ordinary = torch.arange(9)
        expected = model(tokens).logits
        for given in (ordinary, ordinary[None].int(), ordinary.expand(2, -1)):
            assert torch.equal(model(tokens, position_ids=given).logits, expected)

    @pytest.mark.parametrize("position", POSITIONS, ids=label)
    def test_that_start_again_at_0_are_packed_documents(self, position):
        model, tokens = build(position).double(), ids(2, 12)
        places = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 0, 1, 2, 3, 0, 1, 2, 3]])
        packed = model(tokens, position_ids=places).logits
        for row in range(2):
            cuts = [*(places[row] == 0).nonzero()[:, 0].tolist(), 12]
            alone = [model(tokens[row : row + 1, a:b]).logits[0] for a, b in itertools.pairwise(cuts)]
            torch.testing.assert_close(packed[row], torch.cat(alone), rtol=0, atol=1e-9)

    @torch.no_grad()
    def test_continue_from_the_cache_and_may_begin_a_document_there(self):
        model, tokens = build("kerple_log").double(), ids(2, 9)
        cache = model(tokens[:, :5], use_cache=True).past_key_values
        step = model(tokens[:, 5:], past_key_values=copy.deepcopy(cache), position_ids=torch.arange(5, 9)).logits
        torch.testing.assert_close(step, model(tokens).logits[:, 5:], rtol=0, atol=1e-9)
        again = model(tokens[:, 5:], past_key_values=cache, position_ids=torch.arange(4)).logits
        torch.testing.assert_close(again, model(tokens[:, 5:]).logits, rtol=0, atol=1e-9)

    @pytest.mark.parametrize("filled", [0, 1])
    def test_beside_padding_on_the_left_are_those_of_transformers(self, filled):
        """transformers counts along the mask and writes 0 (or 1, in older versions) on the padding."""
        model, tokens = build("rope"), ids(2, 7)
        mask = torch.ones(2, 7, dtype=torch.long)
        mask[0, :3] = 0
        places = (mask.cumsum(-1) - 1).masked_fill(mask == 0, filled)
        logits = model(tokens, attention_mask=mask, position_ids=places).logits
        torch.testing.assert_close(logits[0, 3:], model(tokens[:1, 3:]).logits[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(logits[1], model(tokens[1:]).logits[0], rtol=0, atol=1e-5)
        cache = model(tokens, attention_mask=mask, use_cache=True).past_key_values
        longer = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        step = model(ids(2, 1), attention_mask=longer, past_key_values=cache, position_ids=places[:, -1:] + 1)
        assert step.logits.shape == (2, 1, VOCABULARY)

    def test_are_looked_at_only_where_the_mask_counts(self):
        model, tokens = build("alibi"), ids(1, 6)
        mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
        places = torch.tensor([[0, 1, 2, 3, 1, 1]])
        logits = model(tokens, attention_mask=mask, position_ids=places).logits
        assert torch.equal(logits[:, :4], model(tokens, attention_mask=mask).logits[:, :4])

    @pytest.mark.parametrize("position", ["alibi", "rope", "learned", "nope"])
    @pytest.mark.parametrize(
        ("places", "sentence"),
        [
            ([[0, 1, 3, 4]], "3 at row 0, token 2, where 2 is expected"),
            ([[1, 0, 2, 3]], "1 at row 0, token 0, where 0 is expected"),
            ([[5, 6, 7, 8]], "5 at row 0, token 0, where 0 is expected"),
            ([[0, 1, 2, 3], [0, 1, 0, 2]], "2 at row 1, token 3, where 1 is expected"),
            ([[0, 1, 2, -1]], "-1 at row 0, token 3, where 3 is expected"),
            ([[0, 1, 2]], r"position_ids must be \(batch, new tokens\) = \(2, 4\)"),
            ([[[0, 1, 2, 3]]], "position_ids must be"),
        ],
    )
    def test_with_gaps_or_out_of_order_are_refused(self, position, places, sentence):
        with pytest.raises(ValueError, match=sentence):
            build(position)(ids(2, 4), position_ids=torch.tensor(places))

    def test_against_the_documents_or_the_cache_are_refused(self):
        model, tokens = build("alibi"), ids(1, 4)
        with pytest.raises(ValueError, match="2 at row 0, token 2, where 0 is expected"):
            model(tokens, documents=torch.tensor([[0, 0, 1, 1]]), position_ids=torch.arange(4))
        cache = model(tokens, use_cache=True).past_key_values
        with pytest.raises(ValueError, match="continue from the 4 tokens in the cache"):
            model(tokens[:, :1], past_key_values=cache, position_ids=torch.tensor([[2]]))
        with pytest.raises(TypeError, match="must be integers"):
            model(tokens, position_ids=torch.arange(4.0))

    def test_given_to_generate_are_checked_and_none_are_made_up(self):
        model, prompt = build("alibi"), ids(1, 5)
        expected = greedy(model, prompt)
        assert torch.equal(greedy(model, prompt, position_ids=torch.arange(5)[None]), expected)
        with pytest.raises(ValueError, match="7 at row 0"):
            greedy(model, prompt, position_ids=torch.arange(7, 12)[None])
        right = torch.tensor([[1, 1, 1, 1, 0]])  # a gap in the mask moves no position, as without position_ids
        assert greedy(model, prompt, attention_mask=right).shape == (1, 14)

    def test_are_read_in_one_graph_by_the_compiler(self):
        read = torch.compile(read_position_ids, backend="eager", fullgraph=True)
        places = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
        documents = read(places, None, False, None, 2, 5, 5)
        assert documents.tolist() == [[1, 1, 1, 2, 2], [1, 2, 2, 2, 2]]


def test_dropout_of_the_weights_drops_while_training_and_repeats_with_the_seed():
    model, tokens = build("alibi", attn_pdrop=0.3), ids(2, 12)
    plain = model(tokens, use_cache=False).logits
    model.train()
    torch.manual_seed(5)
    first, second = (model(tokens, use_cache=False).logits for _ in range(2))
    torch.manual_seed(5)
    again = model(tokens, use_cache=False).logits
    assert torch.equal(again, first)
    assert not torch.allclose(first, second, atol=1e-3)
    assert not torch.allclose(first, plain, atol=1e-3)
    model.gradient_checkpointing_enable()
    torch.manual_seed(5)
    assert torch.equal(model(tokens, use_cache=False).logits, first)  # what is dropped is recomputed, not stored
