"""One question about a run and a text: the windows to score, their losses, and the result, which is written as JSON.

The losses of each batch are kept in a file, so that other processes can answer pieces of the question.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relpos.encodings.registry import card
from relpos.evaluation import protocols
from relpos.evaluation.estimate import PROBE, reading_seconds
from relpos.evaluation.evaluate_options import (
    ALL,
    MULTIPLES,
    PROTOCOLS,
    EvaluateOptions,
    ProtocolName,
    default_eval_tokens,
)
from relpos.evaluation.intervals import bin_edges, bins_of, row_of, units_of, warnings
from relpos.evaluation.protocols import ScoredWindows, Window
from relpos.evaluation.scoring import Losses, Processes, Scorer
from relpos.forms.rotation import SCALINGS
from relpos.models.family import Family
from relpos.models.plan import layer_encodings, make_encoding
from relpos.runs.results import Row, TextResult, refresh_card, refused_row
from relpos.runs.run import Run, open_run
from relpos.system.errors import unknown
from relpos.system.files import Entries, write_text
from relpos.system.options import check_options
from relpos.system.progress import Countdown
from relpos.system.versions import versions
from relpos.text import SplitName
from relpos.text.tokenizers import token_bytes
from relpos.text.tokens import MASKED_EVERY, Tokens, tokenize

LONGEST = 150  # characters of a name; file systems allow 255 bytes
CONTROL = "control"  # a piece of a question beside its lengths: the control of the protocol positions


def evaluate(
    run: Run,
    lengths: Sequence[int],
    protocol: ProtocolName = PROTOCOLS[0],
    *,
    rope_scaling: str | None = None,
    out: Path | None = None,
    say: Callable[[str], object] = print,
    **more: Any,
) -> TextResult:
    """Measure the loss of one run with at most one scaling of RoPE; `more` are options of `relpos.evaluate`."""
    options = EvaluateOptions(run, lengths=lengths, protocol=protocol, **more)
    check_options(options)
    return Question(run, options, rope_scaling, out, say).answer()


class Question:
    """What is asked of a run with at most one scaling of RoPE, and the windows that answer it.

    The result is written into `folder`; by default into RUN/evaluation, and the run's model card is then updated too.
    """

    def __init__(
        self,
        run: Run,
        options: EvaluateOptions,
        scaling: str | None = None,
        folder: Path | None = None,
        say: Callable[[str], object] = print,
        processes: Processes | None = None,
    ) -> None:
        self.options, self.scaling, self.say, self.processes = options, scaling, say, processes or Processes()
        if not options.lengths:
            raise ValueError("give at least one length.")
        self.lengths = sorted(set(options.lengths))
        self.run = run.reading(options.bos)
        self.run.family.check_scoring(run.model)
        if scaling is not None:
            check_scaling(self.run, scaling)
        data = None if options.data is None else str(options.data)
        self.usual_split = default_split(self.run, data)
        self.split = options.split or self.usual_split
        self.corpus = self.run.corpus(data, self.split)
        with self.processes.in_turn():
            self.text = tokenize(self.corpus, self.run.tokenizer)["heldout"]
        self.tokens = eval_tokens(options, run, len(self.text))
        self.plan = protocols.plan_windows(self.text, self.lengths, options, self.tokens)
        self.units = units_of(self.text, max(self.plan.windows, default=self.lengths[-1]))
        self.control_length, self.control_windows = 0, list[Window]()
        if options.protocol == "positions":
            self.control_length, self.control_windows = _control(self.run, self.plan, options.stride)
        usual = _multiples(self.run.trained_length, self.text, options.protocol)
        stem = question_stem(
            options.protocol,
            rope_scaling=scaling,
            data=data,
            data_hash=self.corpus.hash,
            split=None if self.split == self.usual_split else self.split,
            lengths=() if self.lengths == usual else self.lengths,
            stride=options.stride,
            last=options.last,
            eval_tokens=self.tokens if options.quick else options.eval_tokens,
            seed=options.seed or None,
            bos=0 if not options.bos and len(run.framing) else None,
        )
        self.folder = run.evaluation if folder is None else Path(folder)
        self.file = self.folder / f"{stem}.json"

    @property
    def pieces(self) -> list[int | str]:
        """Into what the question can be divided; the control is always the model as it was trained."""
        control = [CONTROL] if self.options.protocol == "positions" and self.scaling is None else []
        return [*self.lengths, *control]

    def answer_piece(self, piece: int | str) -> None:
        """Keep the losses of one piece in a file; a ValueError if the encoding or the text does not allow it."""
        if isinstance(piece, str):
            self._control_losses(self.lengths[0])
        elif piece in self.plan.windows:
            self._losses(piece, self._scorer(piece))

    def answer(self) -> TextResult:
        run, options = self.run, self.options
        result: TextResult = {
            "protocol": options.protocol,
            "family": run.family.name,
            "metric": run.family.metric,
            "encoding": run.encoding,
            "rope_scaling": self.scaling,
            "position": run.family.position_entry(run.model),
            "trained_length": run.trained_length,
            "run": str(run.folder),
            "step": run.result.get("step"),
            "corpus": {
                "name": self.corpus.name,
                "hash": self.corpus.hash,
                "documents": len(self.text.starts),
                "tokens": len(self.text),
            },
            "split": self.split,
            "special_tokens": run.framing.as_json(),
            "options": {
                "stride": options.stride,
                "last": options.last,
                "eval_tokens": None if options.eval_tokens is None else self.tokens,
                "seed": options.seed,
            },
            "intervals": {"over": self.units.name, "block": self.units.block},
            "warnings": [],
            "rows": [],
        }
        if options.protocol == "positions":
            result["bins"] = []
        for length in self.lengths:
            row = self._row(length, result)
            result["rows"].append(row)
            number = row["error"] or f"{result['metric']} {row['perplexity']:.2f}"
            self.say(f"{self._words(length)}: {number}")
        result["versions"] = versions()
        # How many documents or blocks were scored, for each length that was measured.
        counts = [row["blocks"] or row["documents"] for row in result["rows"] if row["error"] is None]
        result["warnings"] = [*self._cautions(), *warnings(self.units, counts)]
        result["file"] = self.file.name
        if self.processes.writes:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(self.file, json.dumps(result, indent=1))
            refresh_card(run, self.folder)
        return result

    def _row(self, length: int, result: TextResult) -> Row:
        """The row of a length; its bins go into the result. One that cannot be measured has the reason."""
        row = refused_row(length, self.plan.refused.get(length))
        if row["error"] is not None:
            return row
        windows, seed = self.plan.windows[length], self.options.seed
        try:
            scorer = self._scorer(length)
            losses = self._losses(length, scorer)
            sizes = token_bytes(self.run.tokenizer)
            size = None if sizes is None else scorer.bytes_of(windows, length, sizes)
            row = row_of(length, len(windows), losses, self.units, size, seed)
            if (edges := self._edges(length)) is not None:
                control = self._control_losses(length)
                result["bins"] = bins_of(edges, losses, control, seed)
                row["control_loss"] = control.mean
        except ValueError as error:
            row["error"] = str(error)
            self.countdown.skip(length * len(windows))
        return row

    def _cautions(self) -> list[str]:
        """What a reader of the numbers must know, beside their intervals."""
        run, sentences = self.run, []
        if len(run.framing):
            sentences.append(
                f"{run.framing.sentence} Special tokens count in the length, and are not scored; --no-bos leaves them "
                "out."
            )
        if not run.family.causal:
            sentences.append(
                f"{run.family.title} predicts masked tokens, so this is the pseudo-perplexity: one token in "
                f"{MASKED_EVERY} is masked, the same ones at every length, and predicted from the rest of its window. "
                "It cannot be compared with the perplexity of a family that predicts the next token."
            )
        if self.split == "all" != self.usual_split and run.settings is not None:
            sentences.append(
                "The run was trained on most of this text: the numbers of the split all are not those of unseen text. "
                "For these, evaluate the split heldout."
            )
        return sentences

    def _words(self, length: int) -> str:
        return f"{self.options.protocol}, length {length}"

    def _edges(self, length: int) -> NDArray[np.int64] | None:
        """The borders of the bins of positions; None for a protocol without bins."""
        return bin_edges(length) if self.options.protocol == "positions" else None

    def _losses(self, length: int, scorer: Scorer) -> Losses:
        return scorer.score(self.plan.windows[length], length, self._words(length), self._edges(length))

    def _control_losses(self, length: int) -> Losses:
        """The losses of the same tokens by the model as it was trained, in windows of that length."""
        words = f"{self._words(length)}, control"
        return self._plain_scorer.score(self.control_windows, self.control_length, words, self._edges(length))

    def _scorer(self, length: int) -> Scorer:
        """What scores the windows of a length: the factor of a scaling may depend on the length."""
        if self.scaling is None:
            return self._plain_scorer
        return Scorer(replace(scaled_run(self.run, self.scaling, length), framing=self.run.framing), self)

    @cached_property
    def _plain_scorer(self) -> Scorer:
        return Scorer(self.run, self)

    def work(self) -> dict[int, int]:
        """The tokens that are left to read at each length; those of earlier calls are in files."""
        if self.scaling is not None:
            return {length: length * len(windows) for length, windows in self.plan.windows.items()}
        left = {
            length: self._plain_scorer.left(windows, length, self._edges(length))
            for length, windows in self.plan.windows.items()
        }
        if self.control_windows:
            edges = self._edges(self.lengths[0])
            control = self._plain_scorer.left(self.control_windows, self.control_length, edges)
            left[self.control_length] = left.get(self.control_length, 0) + control
        return left

    def seconds(self) -> float | None:
        """About how long the answer takes; None if there is too little to read to measure that first."""
        return reading_seconds(self.work(), self._plain_scorer.probe, min(PROBE, len(self.text) - 1))

    def sentence(self) -> str:
        """What will be measured."""
        lengths = f"length {self.lengths[0]:,}"
        if len(self.lengths) > 1:
            lengths = f"{len(self.lengths)} lengths from {self.lengths[0]:,} to {self.lengths[-1]:,}"
        tokens = f"{min(self.tokens, len(self.text)):,} of {len(self.text):,} tokens"
        return f"{self.options.protocol}, {lengths}, {tokens} of {self.corpus.name} ({self.split})"

    @cached_property
    def countdown(self) -> Countdown:
        """The time that is left, from the first window on."""
        work = sum(length * len(windows) for length, windows in self.plan.windows.items())
        return Countdown(work + self.control_length * len(self.control_windows), self.say)

    @cached_property
    def identity(self) -> dict[str, object]:
        """What the losses depend on, beside the model and the windows."""
        rules = hashlib.sha256(self.run.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
        return {"corpus": self.corpus.hash, "tokenizer": rules, "versions": versions()}


# -- What is asked


def question_stem(
    subject: str,
    *,
    rope_scaling: str | None = None,
    data: str | None = None,
    data_hash: str = "",
    split: str | None = None,
    lengths: Iterable[int] = (),
    **options: int | str | None,
) -> str:
    """The name, without its suffix, of the files that answer a question about a protocol or a task.

    The name leaves out what is None or empty, and so at its default: `windows`, `last-yarn-4`,
    `windows-wiki.test-3fa9c1d2`. Two files of data may have the same name: a part of their hash follows it.

    Example:
        >>> question_stem("windows", lengths=[512, 2048], eval_tokens=4096)
        'windows-lengths-512-2048-eval-tokens-4096'
    """
    words = [subject, rope_scaling or ""]
    if data is not None:
        words += [Path(data).name.removesuffix(".txt"), data_hash[:8]]
    words.append(split or "")
    if lengths := list(lengths):
        words += ["lengths", *map(str, lengths)]
    for name, value in options.items():
        if value is not None:
            words += [name.replace("_", "-"), str(value)]
    return joined(words)


def joined(words: Iterable[str]) -> str:
    """Join words to one file name; if it is too long, a hash of it replaces its end."""
    stem = re.sub(r"[^\w.+=-]+", "-", "-".join(word for word in words if word))
    if len(stem) <= LONGEST:
        return stem
    return f"{stem[: LONGEST - 9]}-{hashlib.sha256(stem.encode()).hexdigest()[:8]}"


def eval_tokens(options: EvaluateOptions, run: Run, available: int) -> int:
    """How many tokens to score at each length, of those that are available."""
    if options.eval_tokens == ALL:
        return available
    if options.eval_tokens is not None:
        return int(options.eval_tokens)
    return default_eval_tokens(options.protocol, run.result.get("tokens"), options.quick)


def default_split(run: Run, data: str | None = None) -> SplitName:
    """The split to evaluate by default: heldout of the data that the run was trained on, all of other data."""
    return "heldout" if data is None or run.trained_on(data) else "all"


def default_lengths(
    run: Run,
    data: str | None = None,
    split: SplitName | None = None,
    protocol: ProtocolName = PROTOCOLS[0],
    multiples: Sequence[int] = MULTIPLES,
) -> list[int]:
    """The lengths to evaluate by default: 1, 2, 4, 8 and 16 times the trained one, up to the longest document."""
    if run.trained_length is None:
        raise ValueError(f"{run.folder} does not say at which length it was trained: give lengths.")
    corpus = run.corpus(data, default_split(run, data) if split is None else split)
    return _multiples(run.trained_length, tokenize(corpus, run.tokenizer)["heldout"], protocol, multiples)


def _multiples(
    trained: int | None, text: Tokens, protocol: ProtocolName, multiples: Sequence[int] = MULTIPLES
) -> list[int]:
    if trained is None:
        return []
    longest = int(np.diff([*text.starts, len(text)]).max())
    lengths = [trained * times for times in multiples if times == 1 or trained * times < longest]
    return lengths[-1:] if protocol == "positions" else lengths


def _control(run: Run, plan: ScoredWindows, stride: int | None) -> tuple[int, list[Window]]:
    """The length of the control's windows, and the windows."""
    if run.trained_length is None:
        raise ValueError(f"{run.folder} does not say at which length it was trained, which the control needs.")
    for length, windows in plan.windows.items():
        trained = min(run.trained_length, length)
        step = max(1, trained // 4) if stride is None else stride
        if step > trained:
            raise ValueError(f"a control of {trained} tokens that moves by {step} would leave tokens out.")
        return trained, protocols.control(windows, length, trained, step)
    return 0, []


# -- Scalings of RoPE on a model that was trained without them: the same weights, other angles


def scaled_run(run: Run, scaling: str, length: int) -> Run:
    """Open a run again with a scaled RoPE (yarn, yarn:4); the default factor depends on the length it will read."""
    return open_run(run.folder, _position(run, scaling, length))


def check_scaling(run: Run, scaling: str) -> None:
    """Check that a scaling can be applied to a run, before anything is computed."""
    config = run.model.config
    ours = isinstance(run.family, Family)
    if not ("rope_parameters" in card(run.encoding).options if ours else "rotary" in run.encoding):
        raise ValueError(f"a RoPE scaling is for models with rope, and {run.folder} has {run.encoding}.")
    if run.trained_length is None:
        raise ValueError(f"{run.folder} does not say at which length it was trained, which a scaling needs.")
    if not ours:  # transformers checks what it reads
        scaled_run(run, scaling, run.trained_length)
        return
    for position in layer_encodings(_position(run, scaling, run.trained_length), config.num_hidden_layers):
        make_encoding(position, config.num_attention_heads, config.size_of_head, config.hidden_size)


def _position(run: Run, scaling: str, length: int) -> Entries:
    """The run's encoding with a scaling, also in the layers that a plan gives a rope of their own.

    The default factor is length / trained length, and 1 up to the trained length. That of dynamic is 1, because dynamic
    reads the length itself.
    """
    name, colon, text = scaling.partition(":")
    if name not in SCALINGS:
        raise unknown("RoPE scaling", name, SCALINGS)
    trained = run.trained_length
    assert trained is not None
    try:
        factor = float(text) if colon else max(1.0, length / trained) if name != "dynamic" else 1.0
    except ValueError:
        raise ValueError(f"a scaling is a name or name:factor, as in yarn:4, not {scaling!r}.") from None
    scaled = {"rope_type": name, "factor": factor}
    scaled |= {"max_position_embeddings": trained, "original_max_position_embeddings": trained}

    def with_scaling(position: Mapping[str, Any]) -> Entries:
        return {**position, "rope_parameters": {**(position.get("rope_parameters") or {}), **scaled}}

    if not isinstance(run.family, Family):
        return with_scaling({"name": "rope"})
    position = with_scaling(run.model.config.position)
    if position.get("plan"):
        position["plan"] = [
            with_scaling(rule) if "name" in rule and "rope_parameters" in card(rule["name"]).options else rule
            for rule in position["plan"]
        ]
    return position
