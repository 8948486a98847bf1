"""What a model can read in the explorer: held-out documents, a text, what it has written itself, or random tokens."""

import itertools
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from relpos.explorer.explore_options import ENTRY_LENGTH, MOST_WRITTEN, TEXT_BYTES
from relpos.explorer.replies import DocumentTitle, Input
from relpos.maps.model_subject import ModelSubject
from relpos.runs.run import ModelInput

if TYPE_CHECKING:
    from relpos.runs.run import Run
    from relpos.text.tokens import Tokens

MOST_DOCUMENTS = 50


class ModelInputs:
    """The inputs of a model."""

    def __init__(self, subject: ModelSubject) -> None:
        self.subject, self.run = subject, subject.run

    @cached_property
    def heldout(self) -> "tuple[Tokens, list[str]] | None":
        """The held-out tokens and the titles of the first documents; None if there are none."""
        from relpos.text.tokens import tokenize

        if self.run.tokenizer is None:
            return None
        try:
            corpus = self.run.corpus()
            tokens = tokenize(corpus, self.run.tokenizer)["heldout"]
        except (ValueError, OSError, ImportError):  # a task, or a corpus that is not on this machine
            return None
        portion = itertools.islice(corpus.portion("heldout"), MOST_DOCUMENTS)
        return tokens, [Path(document.name).name for document in portion]

    @cached_property
    def documents(self) -> list[DocumentTitle]:
        """The documents that can be chosen."""
        if self.heldout is None:
            return []
        tokens, titles = self.heldout
        sizes = np.diff(np.append(tokens.starts, len(tokens))) - 1  # without the separator
        return [{"id": n, "title": title, "tokens": int(sizes[n])} for n, title in enumerate(titles)]

    def default(self, length: int) -> Input:
        """The input that is read at first: the first document that is long enough, or the longest."""
        if not self.documents:
            return {"kind": "none"}
        enough = [document for document in self.documents if document["tokens"] + len(self.run.framing) >= length]
        chosen = enough[0] if enough else max(self.documents, key=lambda document: document["tokens"])
        return {"kind": "document", "id": chosen["id"]}

    def check(self, reading: Any) -> Input:
        """Check the description of an input."""
        match reading.get("kind") if isinstance(reading, Mapping) else None:
            case "none":
                return {"kind": "none"}
            case "document":
                place, count = reading.get("id"), len(self.documents)
                if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place < count:
                    raise ValueError(f"there is no document {str(place)[:40]}: give a number below {count}.")
                return {"kind": "document", "id": place}
            case "text":
                return {"kind": "text", "text": check_text(reading.get("text"), self.run)}
            case "written":
                of = self.check(reading.get("of"))
                if of["kind"] != "written":  # inputs do not nest
                    length, tokens = (
                        _count(reading.get("length"), ENTRY_LENGTH),
                        _count(reading.get("tokens"), MOST_WRITTEN),
                    )
                    return {"kind": "written", "of": of, "length": length, "tokens": tokens}
        raise ValueError(
            'an input is {"kind": "none"}, {"kind": "document", "id": …} or {"kind": "text", "text": …}, not '
            f"{str(reading)[:80]}."
        )

    def read(self, reading: Input, length: int, seed: int) -> tuple[ModelInput, list[str]]:
        """At most `length` tokens of a checked input with the model's special tokens, and notes for the reader."""
        if reading["kind"] == "written":
            before, notes = self.read(reading["of"], reading["length"], seed)
            ids = self.write(before.ids, reading["tokens"])
            written = len(ids) - len(before.ids)
            note = f"The last {written} tokens were written by the model, the most likely token at each step."
            return ModelInput(ids[:length], before.document, 0, ""), [*notes, note]
        framing = self.run.framing
        ids, name, notes = self._text(reading, framing.room(length), seed)
        notes += [framing.sentence] if len(framing) else []
        return ModelInput(framing.around(ids), name, 0, ""), notes

    def _text(self, reading: Input, length: int, seed: int) -> tuple[Tensor, str, list[str]]:
        """At most `length` tokens of a text, its name, and notes."""
        if reading["kind"] == "document":
            assert self.heldout is not None
            tokens, titles = self.heldout
            start, size = int(tokens.starts[reading["id"]]), self.documents[reading["id"]]["tokens"]
            ids = torch.from_numpy(tokens.ids[start : start + min(size, length)].astype(np.int64))
            return ids, titles[reading["id"]], _shorter("The document", size, length)
        if reading["kind"] == "text":
            ids = torch.tensor(self.run.tokenizer(reading["text"], add_special_tokens=False)["input_ids"])
            if len(ids) == 0:
                raise ValueError("the text has no tokens: give some text.")
            return ids[:length].long(), "the text", _shorter("The text", len(ids), length)
        generator = torch.Generator().manual_seed(seed)
        size = int(self.run.model.config.get_text_config().vocab_size)
        ids = torch.randint(size, (length,), generator=generator)
        return ids, "random tokens", ["The tokens were drawn at random: there is no text to read."]

    @property
    def can_write(self) -> bool:
        """Whether the model predicts the next token, so that it can write on."""
        return bool(self.run.family.causal and self.run.tokenizer is not None and self.run.model.can_generate())

    @torch.no_grad()
    def write(self, ids: Tensor, count: int) -> Tensor:
        """The ids, and up to `count` more that the model writes, the most likely at each step."""
        model = self.run.model
        with self.subject.lock, self.subject.cores():
            out: Tensor = model.generate(
                ids[None].to(model.device),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=model.device),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        return out[0].cpu()


def check_text(text: Any, run: "Run") -> str:
    """A text that the model can read."""
    if not isinstance(text, str) or not text:
        raise ValueError("the text is missing: give some text.")
    if run.tokenizer is None:
        raise ValueError("this model reads no text.")
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is not Unicode: it has half a surrogate pair at {error.start}.") from None
    if size > TEXT_BYTES:
        raise ValueError(f"the text has {size:,} bytes: give at most {TEXT_BYTES:,}.")
    return text


def _count(value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"give a number of tokens from 1 to {most:,}, not {str(value)[:40]}.")
    return value


def _shorter(what: str, size: int, length: int) -> list[str]:
    return [] if size >= length else [f"{what} has {size:,} tokens, fewer than {length:,}."]
