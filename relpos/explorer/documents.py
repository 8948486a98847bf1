"""What a model can read: documents of its held-out text, a text, what it has written itself, or random tokens."""

import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from relpos.explorer import limits
from relpos.maps.computing import all_cores

if TYPE_CHECKING:
    from relpos.runs.run import Run
    from relpos.text.tokens import Tokens

MOST_DOCUMENTS = 50


@dataclass(frozen=True)
class Reading:
    """Token ids, and where they come from."""

    ids: Tensor  # (length,)
    name: str  # as in "on 512 tokens of …"
    notes: tuple[str, ...] = ()


class Inputs:
    """The inputs of a model.

    Args:
        run: The model.
        lock: Held while the model runs: one computation at a time.
    """

    def __init__(self, run: "Run", lock: threading.Lock) -> None:
        self.run, self.lock = run, lock

    @cached_property
    def heldout(self) -> "tuple[Tokens, list[str]] | None":
        """The held-out tokens and the titles of the first documents; None if there are none."""
        from relpos.text.tokens import tokenize

        try:
            corpus = self.run.corpus()
            tokens = tokenize(corpus, self.run.tokenizer)["heldout"]
        except (ValueError, OSError, ImportError):  # a task, or a corpus that is not on this machine
            return None
        titles = [Path(each.name).name for each in itertools.islice(corpus.portion("heldout"), MOST_DOCUMENTS)]
        return tokens, titles

    def documents(self) -> list[dict[str, Any]]:
        """The documents that can be chosen: id, title, tokens."""
        if self.heldout is None:
            return []
        _, titles = self.heldout
        return [{"id": place, "title": title, "tokens": self._size(place)} for place, title in enumerate(titles)]

    def _size(self, place: int) -> int:
        assert self.heldout is not None
        tokens, _ = self.heldout
        ends = np.append(tokens.starts[1:], len(tokens))
        return int(ends[place] - tokens.starts[place]) - 1  # without the separator

    def default(self, length: int) -> dict[str, Any]:
        """The input that is read at first: the first document that is long enough, or the longest."""
        documents = self.documents()
        if not documents:
            return {"kind": "none"}
        enough = [each for each in documents if each["tokens"] + len(self.run.framing) >= length]
        chosen = enough[0] if enough else max(documents, key=lambda each: int(each["tokens"]))
        return {"kind": "document", "id": chosen["id"]}

    def check(self, given: Any) -> dict[str, Any]:
        """Check the description of an input.

        Raises:
            ValueError: It is another thing, or too long, or not Unicode.
        """
        kind = given.get("kind") if isinstance(given, Mapping) else None
        match kind:
            case "none":
                return {"kind": "none"}
            case "document":
                count = len(self.documents())
                place = given.get("id")
                if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place < count:
                    raise ValueError(f"there is no document {str(place)[:40]}: give a number below {count}.")
                return {"kind": "document", "id": place}
            case "text":
                return {"kind": "text", "text": check_text(given.get("text"), self.run)}
            case "written":
                return {
                    "kind": "written",
                    "of": self.check(given.get("of") if _plain(given.get("of")) else None),
                    "length": _count(given.get("length"), limits.ENTRY_LENGTH),
                    "tokens": _count(given.get("tokens"), limits.WRITTEN_IN_ALL),
                }
        raise ValueError(
            'an input is {"kind": "none"}, {"kind": "document", "id": …} or {"kind": "text", "text": …}, not '
            f"{str(given)[:80]}."
        )

    def read(self, given: Mapping[str, Any], length: int, seed: int) -> Reading:
        """The tokens of a checked input, at most `length` of them, with the model's special tokens around the text."""
        if given["kind"] == "written":
            before = self.read(given["of"], given["length"], seed)
            ids = self.write(before.ids, given["tokens"])
            written = len(ids) - len(before.ids)
            note = f"The last {written} tokens were written by the model, the most likely token at each step."
            return Reading(ids[:length], before.name, (*before.notes, note))
        framing = self.run.framing
        text = self._text(given, framing.room(length), seed)
        special = (framing.sentence,) if len(framing) else ()
        return Reading(framing.around(text.ids), text.name, (*text.notes, *special))

    def _text(self, given: Mapping[str, Any], length: int, seed: int) -> Reading:
        """The tokens of a text, at most `length` of them."""
        match given["kind"]:
            case "document":
                assert self.heldout is not None
                tokens, titles = self.heldout
                size, start = self._size(given["id"]), int(tokens.starts[given["id"]])
                ids = torch.from_numpy(tokens.ids[start : start + min(size, length)].astype(np.int64))
                return Reading(ids, titles[given["id"]], _shorter("the document", size, length))
            case "text":
                ids = torch.tensor(self.run.tokenizer(given["text"], add_special_tokens=False)["input_ids"])
                if len(ids) == 0:
                    raise ValueError("the text has no tokens: give some text.")
                return Reading(ids[:length].long(), "the text", _shorter("the text", len(ids), length))
        generator = torch.Generator().manual_seed(seed)
        size = int(self.run.model.config.get_text_config().vocab_size)
        ids = torch.randint(size, (length,), generator=generator)
        return Reading(ids, "random tokens", ("The tokens were drawn at random: there is no text to read.",))

    @torch.no_grad()
    def write(self, ids: Tensor, count: int) -> Tensor:
        """The ids, and up to `count` more that the model writes, the most likely at each step."""
        model = self.run.model
        with self.lock, all_cores():
            out: Tensor = model.generate(
                ids[None].to(model.device),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=model.device),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        return out[0].cpu()


def check_text(text: Any, run: "Run") -> str:
    """A text that the model can read.

    Raises:
        ValueError: It is too long, or not Unicode, or the model reads no text.
    """
    if not isinstance(text, str) or not text:
        raise ValueError("the text is missing: give some text.")
    if run.tokenizer is None:
        raise ValueError("this model reads no text.")
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is not Unicode: it has half a surrogate pair at {error.start}.") from None
    if size > limits.TEXT_BYTES:
        raise ValueError(f"the text has {size:,} bytes: give at most {limits.TEXT_BYTES:,}.")
    return text


def _plain(given: Any) -> bool:
    """Whether an input is not itself written by the model: inputs do not nest."""
    return isinstance(given, Mapping) and given.get("kind") != "written"


def _count(value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"give a number of tokens from 1 to {most:,}, not {str(value)[:40]}.")
    return value


def _shorter(what: str, size: int, length: int) -> tuple[str, ...]:
    return () if size >= length else (f"{what.capitalize()} has {size:,} tokens, fewer than {length:,}.",)
