"""Masked tokens: how many, which, and always the same for the same window and epoch."""

import numpy as np
import pytest
import torch

from relpos.text.tokenizers import gpt2_tokenizer
from relpos.text.tokens import MASKED_EVERY, MaskedWindows, Tokens, Windows, add_mask_token, begins_word, masked_places

TEXT = (
    "The presidential messages are read aloud, unquestionably; nobody interrupts extraordinarily long sentences. " * 40
)


@pytest.fixture(scope="module")
def tokenizer():
    return add_mask_token(gpt2_tokenizer())


@pytest.fixture(scope="module")
def windows(tokenizer):
    ids = np.array([*tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id] * 6, dtype=np.uint16)
    return Windows(Tokens(ids, np.arange(6) * (len(ids) // 6)), 128)


@pytest.fixture(scope="module")
def original(windows):
    return torch.stack([windows[index]["input_ids"] for index in range(len(windows))])


def masked(windows, tokenizer, **options):
    return MaskedWindows(windows, tokenizer, seed=3, **options)


def all_of(dataset):
    rows = [dataset[index] for index in range(len(dataset))]
    return torch.stack([row["input_ids"] for row in rows]), torch.stack([row["labels"] for row in rows])


class TestTraining:
    def test_predicts_and_replaces_the_shares_of_bert(self, windows, tokenizer, original):
        dataset = masked(windows, tokenizer)
        read, labels = all_of(dataset)
        chosen = labels != -100
        assert torch.equal(labels[chosen], original[chosen])
        assert torch.equal(read[~chosen], original[~chosen])
        assert float(chosen.double().mean()) == pytest.approx(0.15, abs=0.015)
        kinds = read[chosen] == tokenizer.mask_token_id, read[chosen] == original[chosen]
        assert float(kinds[0].double().mean()) == pytest.approx(0.8, abs=0.05)
        assert float(kinds[1].double().mean()) == pytest.approx(0.1, abs=0.04)
        assert float((~kinds[0] & ~kinds[1]).double().mean()) == pytest.approx(0.1, abs=0.04)

    def test_never_asks_for_a_separator_nor_puts_one_in(self, windows, tokenizer, original):
        read, labels = all_of(masked(windows, tokenizer, share=0.9))
        separators = original == tokenizer.eos_token_id
        assert separators.any()
        assert (labels[separators] == -100).all()
        assert torch.equal(read == tokenizer.eos_token_id, separators)

    def test_masks_whole_words_together(self, windows, tokenizer, original):
        _, labels = all_of(masked(windows, tokenizer, words=True))
        chosen = labels != -100
        assert float(chosen.double().mean()) == pytest.approx(0.15, abs=0.03)
        text = [tokenizer.convert_ids_to_tokens(row.tolist()) for row in original]
        split = 0
        for row, tokens in enumerate(text):
            for place, token in enumerate(tokens[1:], start=1):
                inside = token.isalpha() and token.isascii() and tokens[place - 1].lstrip("Ġ").isalpha()
                if inside:  # a word that began before
                    assert chosen[row, place] == chosen[row, place - 1]
                    split += int(chosen[row, place])
        assert split > 10

    def test_each_epoch_has_its_own_masks_and_a_window_always_the_same(self, windows, tokenizer):
        first, second, heldout = (masked(windows, tokenizer, fixed=fixed) for fixed in (False, False, True))
        assert torch.equal(first[2]["input_ids"], second[2]["input_ids"])
        before = heldout[2]["input_ids"]
        second.set_epoch(1)
        heldout.set_epoch(1)
        assert not torch.equal(first[2]["labels"], second[2]["labels"])
        assert torch.equal(heldout[2]["input_ids"], before)

    def test_a_window_has_at_least_one_masked_token_and_a_tokenizer_needs_a_mask(self, windows, tokenizer):
        _, labels = all_of(masked(windows, tokenizer, share=1e-9))
        assert ((labels != -100).sum(dim=1) == 1).all()
        with pytest.raises(ValueError, match="no mask token"):
            MaskedWindows(windows, gpt2_tokenizer(), seed=0)


def test_a_word_begins_with_a_blank_or_a_sign(tokenizer):
    begins = begins_word(tokenizer)
    for text, expected in (("Ġthe", True), ("ing", False), (",", True), ("Ċ", True), ("9", False), ("<|mask|>", True)):
        assert begins[tokenizer.convert_tokens_to_ids(text)] == expected, text


def test_one_place_in_seven_is_masked_in_evaluation_and_evenly():
    chosen = masked_places(np.arange(700_000))
    assert chosen.mean() == pytest.approx(1 / MASKED_EVERY, rel=0.01)
    gaps = np.diff(np.nonzero(chosen)[0])
    assert gaps.mean() == pytest.approx(MASKED_EVERY, rel=0.01)
    assert gaps.std() == pytest.approx((MASKED_EVERY**2 - MASKED_EVERY) ** 0.5, rel=0.03)  # as of independent draws
