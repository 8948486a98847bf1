"""The special tokens that a model was trained to see around a text: BOS of a causal model, CLS and SEP of an encoder.

The rule, for every model that other people trained (a run of `relpos train` reads text alone, as it was trained):

1. What the tokenizer itself puts around a text is put around each window. Of a causal model only what stands before the
   text: a window is cut somewhere, and a token of the end would say that the text ends there.
2. Otherwise a causal model gets the token `bos_token_id` of its configuration, if its tokenizer has it.
3. An explicit `add_bos_token: false`, in tokenizer_config.json or in the metadata of a GGUF file, wins over both.

These tokens count in the length of a window, which is what the model reads, so that limits of positions hold. They are
not scored.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from relpos.pretrained.source import Source, read_metadata
from relpos.system.files import read_json

SAMPLE = "the"  # a text to look at what a tokenizer puts around it


class SpecialToken(NamedTuple):
    """A special token."""

    id: int
    name: str  # as in "<bos>"


@dataclass(frozen=True)
class Framing:
    """The special tokens at the beginning and at the end of each window of text."""

    before: tuple[SpecialToken, ...] = ()
    after: tuple[SpecialToken, ...] = ()

    def __len__(self) -> int:
        return len(self.before) + len(self.after)

    @property
    def sentence(self) -> str:
        """What a reader of numbers and pictures must know; empty if windows are text alone."""
        parts = [
            f"{verb} with {' '.join(token.name for token in tokens)}"
            for verb, tokens in (("begins", self.before), ("ends", self.after))
            if tokens
        ]
        return f"Each window {' and '.join(parts)}." if parts else ""

    def as_json(self) -> dict[str, list[str]]:
        """The names of the tokens."""
        return {"before": [token.name for token in self.before], "after": [token.name for token in self.after]}

    def room(self, length: int) -> int:
        """How many tokens of text a window of `length` tokens has, these included."""
        if length <= len(self):
            names = " and ".join(token.name for token in (*self.before, *self.after))
            raise ValueError(
                f"a window of {length} tokens has no room for text beside {names}: give a length of at least "
                f"{len(self) + 1}, or leave special tokens out (--no-bos, bos=False)."
            )
        return length - len(self)

    def around(self, ids: Tensor) -> Tensor:
        """A text with the special tokens before and after it: (length,) to (length + special tokens,)."""
        before, after = (ids.new_tensor([token.id for token in tokens]) for tokens in (self.before, self.after))
        return torch.cat([before, ids, after])

    def over(self, ids: Tensor) -> Tensor:
        """Windows whose first and last tokens give way to the special tokens, (batch, length)."""
        framed = ids.clone()
        for place, token in (*enumerate(self.before), *enumerate(self.after, -len(self.after))):
            framed[:, place] = token.id
        return framed


NO_FRAMING = Framing()


def framing_of(
    source: Source, tokenizer: PreTrainedTokenizerFast | None, config: PreTrainedConfig, causal: bool
) -> Framing:
    """The special tokens around each window of a model that other people trained, by the rule above."""
    if tokenizer is None:
        return NO_FRAMING
    before, after = _put_by(tokenizer)
    if causal:
        after = []
        bos = getattr(config.get_text_config(), "bos_token_id", None)
        if _refuses_bos(source):
            before = [token for token in before if token not in (bos, tokenizer.bos_token_id)]
        elif not before and isinstance(bos, int) and tokenizer.convert_ids_to_tokens(bos) is not None:
            before = [bos]
    name = tokenizer.convert_ids_to_tokens
    return Framing(*(tuple(SpecialToken(token, str(name(token))) for token in tokens) for tokens in (before, after)))


def _put_by(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and after a text."""
    plain: list[int] = tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]
    framed: list[int] = tokenizer(SAMPLE)["input_ids"]
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            return framed[:start], framed[start + len(plain) :]
    return [], []


def _refuses_bos(source: Source) -> bool:
    """Whether the files say explicitly that BOS is not put before a text."""
    if source.gguf is not None:
        return read_metadata(source.folder / source.gguf)[0].get("tokenizer.ggml.add_bos_token") is False
    file = source.folder / "tokenizer_config.json"
    return file.exists() and read_json(file).get("add_bos_token") is False
