"""The passkey task."""

import re
from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from relpos.tasks.task import Example, Task

FILLER = "the grass is green . the sky is blue . the sun is yellow . here we go . there and back again ."
NEEDLE = "the pass key is"
AFTER = ". remember it ."
QUESTION = "what is the pass key ? the pass key is"
DIGITS = tuple("0123456789")
KEY = 5  # digits


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
        answers = np.zeros(length, dtype=np.bool_)
        answers[-KEY:] = True
        return Example(ids, answers, depth)

    def solve(self, context: Sequence[str]) -> str:
        passage = re.search(r"the pass key is ((?:\d ){5})\. remember", " ".join(context))
        assert passage is not None
        question_end = max(i for i, word in enumerate(context) if word == "is")
        answered = len(context) - 1 - question_end  # digits of the answer so far
        return passage[1].split()[answered]
