"""Parts 3 and 5, on real text: whether the weights were trained with the positions that run, and how far they carry.

A variant is the model with one fault injected, or with another theta. If a variant predicts a text clearly better than
the model as it is, the checkpoint was trained that way.
"""

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.checking.check_subject import ModelSubject, NotApplicableError, NotTestableError, Subject, as_model
from relpos.checking.faults import faults
from relpos.checking.faults.fault import NotPossibleError, with_frequencies
from relpos.checking.outcomes import Outcome, Test
from relpos.pretrained.framing import NO_FRAMING, Framing
from relpos.runs.run import Run
from relpos.text.tokens import spread, tokenize

DOCUMENTS, LENGTH = 8, 257  # of the text: 2,048 predicted tokens
CLEAR = 0.02  # nats by which a variant must be better, beyond `ERRORS` standard errors of the paired differences
ERRORS = 3.0
THETAS = (2.0, 10.0, 0.5, 0.1)
TRIED = (  # faults whose injection is a variant
    *("layout", "fraction", "scaling missing", "factor missing", "factor twice", "window missing", "sinks missing"),
    *("slopes reversed", "bias sign", "bias scaled", "bucket direction", "bucket sides", "rotation missing"),
)
RISE = 0.1  # nats over the control: the loss of windows of the trained length
LONGEST = 2_048  # tokens of training up to which the loss by position is measured


@dataclass(frozen=True)
class Text:
    """Windows of different documents, and the special tokens that begin them."""

    ids: Tensor  # (documents, length), special tokens not included
    framing: Framing = NO_FRAMING
    run: Run | None = None  # for the loss by position
    data: str | None = None

    def framed(self, framing: Framing) -> Tensor:
        return torch.stack([framing.around(row) for row in self.ids])


def sample(run: Run, data: str | None) -> Text:
    """Windows of text for a model, one per document."""
    tokens = tokenize(run.corpus(data, split="heldout" if data is None else "all"), run.tokenizer)["heldout"]
    limit = min(LENGTH, (run.trained_length or LENGTH) - len(run.framing))
    ends = [*tokens.starts[1:].tolist(), len(tokens)]
    long = [int(start) for start, end in zip(tokens.starts, ends, strict=True) if end - start > limit]
    if len(long) < 4:
        raise ValueError(f"the text has {len(long)} documents of {limit} tokens; 4 are needed to compare losses.")
    rows = [
        torch.from_numpy(tokens.ids[long[number] : long[number] + limit].astype("int64"))
        for number in spread(len(long), DOCUMENTS)
    ]
    return Text(torch.stack(rows), run.framing, run, data)


def losses(subject: ModelSubject, ids: Tensor, skipped: int) -> Tensor:
    """The mean loss of each row, (rows,), of the tokens after the first `skipped` predictions."""
    found = []
    for row in ids:
        logits = subject.run(row[None].to(subject.device))[0]
        found.append(F.cross_entropy(logits[skipped:-1], row[skipped + 1 :].to(subject.device)))
    return torch.stack(found).double().cpu()


Inject = Callable[[ModelSubject], AbstractContextManager[None]]


def variants(subject: ModelSubject) -> Iterator[tuple[str, Inject]]:
    """What is tried, in words."""
    for fault in faults():
        if fault.name in TRIED:
            yield fault.title, fault.inject
    for ratio in THETAS:
        words = f"theta × {ratio:g}" if ratio > 1 else f"theta ÷ {1 / ratio:g}"

        def inject(model: ModelSubject, ratio: float = ratio) -> AbstractContextManager[None]:
            def change(frequencies: Tensor, module: Any, name: str) -> Tensor:
                return frequencies * ratio ** -(torch.arange(len(frequencies)) / len(frequencies))

            return with_frequencies(model, change)

        yield words, inject


def trained(subject: Subject) -> Outcome:
    """No variant may predict the text clearly better."""
    subject = as_model(subject)
    if not subject.causal or subject.two_stacks or subject.model.get_output_embeddings() is None:
        raise NotTestableError("only for causal models with a head")
    text: Text | None = subject.text
    if text is None:
        raise NotTestableError("there is no tokenizer: give a folder, a file, a hub name or a run")
    skipped = max(1, len(text.framing.before))
    ids = text.framed(Framing(text.framing.before))
    own = losses(subject, ids, skipped)
    rows = [("as configured", float(own.mean()), 0.0, 0.0)]
    best: tuple[float, str, float] | None = None

    def compare(words: str, values: Tensor) -> None:
        nonlocal best
        gaps = values - own
        error = float(gaps.std()) / math.sqrt(len(gaps))
        rows.append((words, float(values.mean()), float(gaps.mean()), error))
        if float(gaps.mean()) + ERRORS * error < -CLEAR and (best is None or float(gaps.mean()) < best[0]):
            best = float(gaps.mean()), words, error

    for words, inject in variants(subject):
        try:
            with inject(subject):
                values = losses(subject, ids, skipped)
        except NotPossibleError:
            continue
        compare(words, values)
    if text.framing.before:
        name = " ".join(token.name for token in text.framing.before)
        compare(f"without {name} before the text", losses(subject, text.ids, 1))
    if len(rows) == 1:
        raise NotTestableError("no variant of its positions can be tried")
    evidence = {"losses": rows}
    if best is None:
        words = f"loss {own.mean():.3f}; none of {len(rows) - 1} variants is better"
        return Outcome(False, float(own.mean()), words, "", evidence)
    gap, words, error = best
    diagnosis = f"This checkpoint behaves otherwise than the port: {words}. It was trained so, or converted wrongly."
    return Outcome(True, -gap, f"loss {gap:+.3f} ± {error:.3f} with: {words}", "", evidence, diagnosis)


def lengths(subject: Subject) -> Outcome:
    """Where the loss by position breaks: information, not a fault."""
    text: Text | None = getattr(subject, "text", None)
    if text is None or text.run is None:
        raise NotApplicableError
    trained_length = text.run.trained_length
    if isinstance(subject, ModelSubject) and "learned" in subject.kinds:
        raise NotTestableError(f"its table of positions ends at {trained_length:,} tokens")
    if trained_length is None or trained_length > LONGEST:
        raise NotTestableError(
            f"its trained length is {trained_length or 0:,} tokens: use relpos evaluate --protocol positions"
        )
    from relpos.evaluation.evaluate import evaluate

    with tempfile.TemporaryDirectory() as folder:
        result: Any = next(
            iter(
                evaluate(
                    text.run,
                    protocol="positions",
                    lengths=[2 * trained_length],
                    data=text.data,
                    eval_tokens=8 * trained_length,
                    out=folder,
                    say=lambda line: None,
                ).results.values()
            )
        )
    beyond = [each for each in result["bins"] if each["from"] >= trained_length]
    breaks = [each for each in beyond if (each["difference_low"] or 0) > RISE]
    if not breaks:
        return Outcome(False, None, f"the loss holds to {2 * trained_length:,} tokens", "", {"bins": result["bins"]})
    words = f"the loss rises by {breaks[0]['difference']:.2f} beyond the trained {trained_length:,} tokens"
    return Outcome(False, breaks[0]["difference"], words, f"position {breaks[0]['from']:,}", {"bins": result["bins"]})


TESTS = (
    Test(
        "trained",
        "as the weights were trained",
        trained,
        "Another variant predicts the text clearly better than the model as it is.",
        "Compare with the original code of the checkpoint, or check how the weights were converted.",
        3,
    ),
    Test("lengths", "loss by position", lengths, "", part=5),
)
