"""Tasks of retrieval: a passage at a depth, and values by their keys."""

import re
from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from relpos.tasks.task import DIGITS, Example, Task, with_answers

FILLER = "the grass is green . the sky is blue . the sun is yellow . here we go . there and back again ."
NEEDLE = "the pass key is"
AFTER = ". remember it ."
QUESTION = "what is the pass key ? the pass key is"
KEY = 5  # digits of the pass key
PAIRS = 16  # to recall, at every length: only their distance grows
ASKED = 12  # of these. With 4 of 8 the task was not learned (docs/tasks.md); if all were asked, elimination would help
KEYS = tuple(f"k{i}" for i in range(16))
VALUES = tuple(f"v{i}" for i in range(16))


class Passkey(Task):
    """Five digits hidden in filler text, asked for at the end."""

    measures = "finding one short passage at a chosen depth"
    layout = "filler, the pass key is 5 digits, filler, the question, the 5 digits"
    paper = "Mohtashami and Jaggi 2023 (Landmark Attention), arXiv 2305.16300"
    words = tuple(dict.fromkeys([*f"{FILLER} {NEEDLE} {AFTER} {QUESTION}".split(), *DIGITS]))
    shortest = len(f"{NEEDLE} {AFTER} {QUESTION}".split()) + 2 * KEY
    chance = 1 / len(DIGITS)
    has_depth = True

    def sample(self, rng: Generator, length: int, depth: float | None = None) -> Example:
        key = rng.choice(self.ids(DIGITS), KEY)
        depth = float(rng.random()) if depth is None else depth
        room = length - self.shortest
        sentences = self.ids(FILLER.split())
        filler = np.resize(np.roll(sentences, rng.integers(len(sentences))), room)  # repeated, starting anywhere in it
        before = round(depth * room)
        needle, after, question = (self.ids(text.split()) for text in (NEEDLE, AFTER, QUESTION))
        ids = np.concatenate([filler[:before], needle, key, after, filler[before:], question, key])
        return with_answers(ids, slice(-KEY, None), depth)

    def solve(self, context: Sequence[str]) -> str:
        passage = re.search(r"the pass key is ((?:\d ){5})\. remember", " ".join(context))
        assert passage is not None
        question_end = max(i for i, word in enumerate(context) if word == "is")
        answered = len(context) - 1 - question_end  # digits of the answer so far
        return passage[1].split()[answered]


class Recall(Task):
    """Key-value pairs among dots, then most of the keys are followed by their values."""

    measures = "finding a token by its content and reading the token after it, however far back"
    layout = "16 pairs of key and value anywhere among dots, ?, then 12 of the keys in any order, each with its value"
    paper = "multi-query associative recall: Arora et al. 2023 (Zoology), arXiv 2312.04927"
    words = (".", "?", *KEYS, *VALUES)
    shortest = 2 * (PAIRS + ASKED) + 1
    chance = 1 / len(VALUES)

    def sample(self, rng: Generator, length: int, depth: float | None = None) -> Example:
        keys = rng.choice(self.ids(KEYS), PAIRS, replace=False)
        values = rng.choice(self.ids(VALUES), PAIRS)
        ids, body = self.filler(length), length - 2 * ASKED - 1
        # Drawn as if each pair took one place, then shifted by the pairs before it, so that no two overlap.
        places = np.sort(rng.choice(body - PAIRS, PAIRS, replace=False)) + np.arange(PAIRS)
        ids[places], ids[places + 1] = keys, values
        order = rng.permutation(PAIRS)[:ASKED]
        ids[body] = self.vocabulary["?"]
        ids[body + 1 :: 2], ids[body + 2 :: 2] = keys[order], values[order]
        return with_answers(ids, slice(body + 2, None, 2))

    def solve(self, context: Sequence[str]) -> str:
        pairs = context[: context.index("?")]
        return pairs[pairs.index(context[-1]) + 1]
