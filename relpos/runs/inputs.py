"""Inputs for pictures: windows of held-out text, or the user's own text."""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from relpos.pretrained.framing import NO_FRAMING, Framing
from relpos.runs.run import Run
from relpos.text.tokens import tokenize

WORDS = 12  # how many words `first_words` returns


@dataclass(frozen=True)
class ModelInput:
    """Token ids and where they come from.

    Attributes:
        ids: Token ids (length,), with the special tokens of the run around those of the text.
        document: The name of the document.
        offset: The position in the document of the first token of the text.
        words: The first words of the text.
        framing: The special tokens around the text.
    """

    ids: Tensor
    document: str
    offset: int
    words: str
    framing: Framing = NO_FRAMING


def heldout_samples(run: Run, length: int, seed: int, count: int = 2) -> list[ModelInput]:
    """Draw windows of a run's held-out text at random.

    The windows do not overlap, and each lies in one document, unless no document is long enough.

    Args:
        run: The run.
        length: Tokens per window, the special tokens of the run included.
        seed: The seed of the draw.
        count: The number of windows; fewer are returned if the text has fewer.

    Raises:
        ValueError: The held-out text is shorter than one window, or a window has no room for text.
    """
    room = run.framing.room(length)
    corpus = run.corpus()
    tokens = tokenize(corpus, run.tokenizer)["heldout"]
    ends = np.append(tokens.starts[1:], len(tokens)) - 1  # the separators are left out
    windows = [
        (document, offset)
        for document, (start, end) in enumerate(zip(tokens.starts, ends, strict=True))
        for offset in range(0, int(end - start) - room + 1, room)
    ] or [(0, offset) for offset in range(0, len(tokens) - room + 1, room)]
    if not windows:
        raise ValueError(f"the held-out text of {corpus.name} has {len(tokens)} tokens, fewer than {room}.")
    chosen = np.random.default_rng(seed).permutation(len(windows))[:count]
    samples = []
    for document, offset in (windows[place] for place in chosen):
        start = int(tokens.starts[document]) + offset
        ids = torch.from_numpy(tokens.ids[start : start + room].astype(np.int64))
        name = next(itertools.islice(corpus.portion("heldout"), document, None)).name
        samples.append(ModelInput(run.framing.around(ids), name, offset, first_words(run, ids), run.framing))
    return samples


def text_sample(run: Run, text: str, name: str, length: int | None) -> ModelInput:
    """Tokenize the user's own text.

    Args:
        run: The run whose tokenizer is used.
        text: The text.
        name: What to call the text in captions and errors.
        length: How many tokens to take, special tokens included: the first ones of the text. All by default.

    Raises:
        ValueError: The text has no tokens, or fewer than `length`.
    """
    ids = torch.tensor(run.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)
    if len(ids) == 0:
        raise ValueError(f"{name} has no tokens: give some text.")
    room = None if length is None else run.framing.room(length)
    if room is not None and room > len(ids):
        raise ValueError(f"{name} has {len(ids)} tokens, fewer than the length {room}.")
    return ModelInput(run.framing.around(ids[:room]), name, 0, first_words(run, ids), run.framing)


def first_words(run: Run, ids: Tensor) -> str:
    """The first words of an input, on one line."""
    return " ".join(run.tokenizer.decode(ids[: 4 * WORDS].tolist()).split()[:WORDS])
