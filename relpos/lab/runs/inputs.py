"""Inputs to look at: windows of held-out text, or a text of one's own."""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from relpos.lab.data.tokens import tokenize
from relpos.lab.runs.run import Run

WORDS = 12  # of an input that are told


@dataclass(frozen=True)
class ModelInput:
    """Token ids, and where they come from."""

    ids: Tensor  # (length,)
    document: str
    offset: int  # of the first token in the document
    words: str  # the first ones


def heldout_samples(run: Run, length: int, seed: int, count: int = 2) -> list[ModelInput]:
    """Windows of `length` tokens of the run's held-out text, at random: `count` of them, or as many as there are.

    They do not overlap, and each stands in one document; only if no document is so long do they run across documents.
    """
    corpus = run.corpus()
    tokens = tokenize(corpus, run.tokenizer)["heldout"]
    ends = np.append(tokens.starts[1:], len(tokens)) - 1  # without the separators
    windows = [
        (document, offset)
        for document, (start, end) in enumerate(zip(tokens.starts, ends, strict=True))
        for offset in range(0, int(end - start) - length + 1, length)
    ] or [(0, offset) for offset in range(0, len(tokens) - length + 1, length)]
    if not windows:
        raise ValueError(f"the held-out text of {corpus.name} has {len(tokens)} tokens, fewer than {length}.")
    chosen = np.random.default_rng(seed).permutation(len(windows))[:count]
    samples = []
    for document, offset in (windows[place] for place in chosen):
        start = int(tokens.starts[document]) + offset
        ids = torch.from_numpy(tokens.ids[start : start + length].astype(np.int64))
        name = next(itertools.islice(corpus.part("heldout"), document, None)).name
        samples.append(ModelInput(ids, name, offset, first_words(run, ids)))
    return samples


def text_sample(run: Run, text: str, name: str, length: int | None) -> ModelInput:
    """A text of one's own, its first `length` tokens; all of them unless given."""
    ids = torch.tensor(run.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)
    if len(ids) == 0:
        raise ValueError(f"{name} has no tokens: give some text.")
    if length is not None and length > len(ids):
        raise ValueError(f"{name} has {len(ids)} tokens, fewer than the length {length}.")
    return ModelInput(ids[:length], name, 0, first_words(run, ids))


def first_words(run: Run, ids: Tensor) -> str:
    """The beginning of an input, as text on one line."""
    return " ".join(run.tokenizer.decode(ids[: 4 * WORDS].tolist()).split()[:WORDS])
