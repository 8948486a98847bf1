"""One question to a run: a text, lengths and a protocol, with the windows to score, and their losses.

The losses of each batch are kept in a file, so that parts of a question can be answered by other processes.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from relpos.evaluation import protocols
from relpos.evaluation.intervals import Units, units_of
from relpos.evaluation.options import MULTIPLES, ProtocolName, SplitName
from relpos.evaluation.parts import FOLDER
from relpos.evaluation.processes import Processes
from relpos.evaluation.protocols import ScoredWindows, Window
from relpos.evaluation.scaled_rope import check_scaling, scaled_run
from relpos.evaluation.scoring import Losses, Scorer
from relpos.forms.checks import integer_at_least
from relpos.runs.run import Run
from relpos.system.progress import Countdown
from relpos.system.versions import versions
from relpos.text.corpus import Corpus
from relpos.text.tokens import Tokens, tokenize

LONGEST = 150  # characters of a name; file systems allow 255 bytes
FIRST_BIN = 16  # positions; from there on, two bins per octave


def question_stem(
    subject: str,
    *,
    rope_scaling: str | None = None,
    data: str | None = None,
    data_hash: str = "",
    split: str | None = None,
    lengths: Iterable[int] = (),
    **options: int | None,
) -> str:
    """The name, without its suffix, of the files that answer a question.

    The name leaves out what is None or empty, and so at its default: `windows`, `last-yarn-4`,
    `windows-wiki.test-3fa9c1d2`, `windows-lengths-512-2048-eval-tokens-4096`.

    Args:
        subject: The protocol, or task-NAME.
        rope_scaling: As in yarn:4.
        data: Other data than the run's own; the last part of its path becomes part of the name.
        data_hash: Hash of its content, since two files may have the same name.
        split: A split other than the default.
        lengths: Lengths other than the default.
        options: Further options of the question, by name.

    Returns:
        At most 150 characters.

    Example:
        >>> question_stem("windows", lengths=[512, 2048], eval_tokens=4096)
        'windows-lengths-512-2048-eval-tokens-4096'
    """
    words = [subject]
    if rope_scaling:
        words.append(rope_scaling)
    if data is not None:
        words += [Path(data).name.removesuffix(".txt"), data_hash[:8]]
    if split:
        words.append(split)
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


@dataclass(kw_only=True)
class Question:
    """What is asked of a run, and the windows that answer it.

    Attributes:
        run: The run.
        lengths: In tokens, sorted.
        protocol: Which tokens are scored, and with how much context.
        rope_scaling: A scaling of RoPE to apply; None for the model as it was trained.
        split: The split of the text.
        usual_split: The split that would be scored by default.
        corpus: The text.
        text: Its tokens.
        plan: The windows of each length.
        units: Over which the intervals are.
        folder: Where the result is written.
        stem: The name of its files, without a suffix.
        control_length: The length of the control's windows; 0 if there is none.
        control_windows: The control of the protocol `positions`.
        countdown: Reports the progress.
        processes: The processes that share every window.
    """

    run: Run
    lengths: list[int]
    protocol: ProtocolName
    rope_scaling: str | None
    split: SplitName
    usual_split: SplitName
    corpus: Corpus
    text: Tokens
    plan: ScoredWindows
    units: Units
    folder: Path
    stem: str
    control_length: int
    control_windows: list[Window]
    countdown: Countdown
    processes: Processes

    def scorer(self, length: int) -> Scorer:
        """What scores the windows of a length: the factor of a scaling may depend on the length.

        Raises:
            ValueError: The scaling cannot be applied at this length.
        """
        if self.rope_scaling is None:
            return self._own
        scaled = scaled_run(self.run, self.rope_scaling, length)
        return self._scorer_of(replace(scaled, framing=self.run.framing))

    def edges(self, length: int) -> NDArray[np.int64] | None:
        """The borders of the bins of positions; None for a protocol without bins."""
        return bin_edges(length) if self.protocol == "positions" else None

    def losses(self, length: int, scorer: Scorer) -> Losses:
        """The losses at a length.

        Raises:
            ValueError: The encoding refuses the length.
        """
        return scorer.score(self.plan.windows[length], length, self.words(length), self.edges(length))

    def control(self, length: int) -> Losses:
        """The losses of the control: the same tokens, by the model as it was trained, in windows of that length."""
        words = f"{self.words(length)}, control"
        return self._own.score(self.control_windows, self.control_length, words, self.edges(length))

    def words(self, length: int) -> str:
        """What is measured at a length, for messages."""
        return f"{self.protocol}, length {length}"

    @cached_property
    def _own(self) -> Scorer:
        return self._scorer_of(self.run)

    def _scorer_of(self, model: Run) -> Scorer:
        return Scorer(
            model, self.text, self.units, self._identity, self.folder / FOLDER, self.countdown, self.processes
        )

    @cached_property
    def _identity(self) -> dict[str, object]:
        rules = hashlib.sha256(self.run.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
        return {"corpus": self.corpus.hash, "tokenizer": rules, "versions": versions()}


def ask(
    run: Run,
    lengths: Sequence[int],
    protocol: ProtocolName,
    *,
    data: str | None = None,
    split: SplitName | None = None,
    stride: int | None = None,
    last: int | None = None,
    eval_tokens: int | None = None,
    rope_scaling: str | None = None,
    out: Path | None = None,
    say: Callable[[str], object] = print,
    seed: int = 0,
    processes: Processes | None = None,
    bos: bool = True,
) -> Question:
    """Read the text and choose the windows. The arguments are those of `evaluation.evaluate`.

    Raises:
        ValueError: An option does not fit the protocol, the run or the data.
        OSError: There is no such data.
    """
    lengths, processes = check_lengths(lengths), processes or Processes()
    left_out = not bos and len(run.framing) > 0
    run = run.reading(bos)
    run.family.check_scoring(run.model)
    if rope_scaling is not None:
        check_scaling(run, rope_scaling)
    usual_split = default_split(run, data)
    split = usual_split if split is None else split
    corpus = run.corpus(data, split)
    with processes.in_turn():
        text = tokenize(corpus, run.tokenizer)["heldout"]
    plan = protocols.plan_windows(text, lengths, protocol, stride, last, eval_tokens)
    units = units_of(text, max(plan.windows, default=lengths[-1]))
    stem = question_stem(
        protocol,
        rope_scaling=rope_scaling,
        data=data,
        data_hash=corpus.hash,
        split=None if split == usual_split else split,
        lengths=() if lengths == _usual_lengths(run, text, protocol) else lengths,
        stride=stride,
        last=last,
        eval_tokens=eval_tokens,
        seed=seed or None,
        bos=0 if left_out else None,
    )
    control_length, control_windows = _control(run, plan, stride) if protocol == "positions" else (0, [])
    work = sum(length * len(windows) for length, windows in plan.windows.items())
    return Question(
        run=run,
        lengths=lengths,
        protocol=protocol,
        rope_scaling=rope_scaling,
        split=split,
        usual_split=usual_split,
        corpus=corpus,
        text=text,
        plan=plan,
        units=units,
        folder=run.evaluation if out is None else Path(out),
        stem=stem,
        control_length=control_length,
        control_windows=control_windows,
        countdown=Countdown(work + control_length * len(control_windows), say),
        processes=processes,
    )


def default_split(run: Run, data: str | None = None) -> SplitName:
    """The split to evaluate by default: heldout of the data that the run was trained on, all of other data."""
    return "heldout" if data is None or run.trained_on(data) else "all"


def default_lengths(run: Run, data: str | None = None, split: SplitName | None = None) -> list[int]:
    """The lengths to evaluate by default: 1, 2, 4, 8 and 16 times the trained one, up to the longest document."""
    if run.trained_length is None:
        raise ValueError(f"{run.folder} does not say at which length it was trained: give lengths.")
    corpus = run.corpus(data, default_split(run, data) if split is None else split)
    return _multiples(run.trained_length, tokenize(corpus, run.tokenizer)["heldout"])


def check_lengths(lengths: Sequence[int]) -> list[int]:
    """Sort the lengths, and drop repeated ones.

    Raises:
        ValueError: There is no length, or one below 2.
    """
    if not lengths:
        raise ValueError("give at least one length.")
    return sorted({integer_at_least("a length", length, least=2) for length in lengths})


def bin_edges(length: int) -> NDArray[np.int64]:
    """The borders of the bins of positions: 0, 16, then two per octave, and the length."""
    steps = [round(FIRST_BIN * 2 ** (step / 2)) for step in range(2 * length.bit_length())]
    return np.array([0, *(step for step in steps if step < length), length])


def _multiples(trained: int, text: Tokens) -> list[int]:
    longest = int(np.diff([*text.starts, len(text)]).max())
    return [trained * times for times in MULTIPLES if times == 1 or trained * times < longest]


def _usual_lengths(run: Run, text: Tokens, protocol: ProtocolName) -> list[int]:
    """The default lengths, which the name of a file does not repeat."""
    usual = [] if run.trained_length is None else _multiples(run.trained_length, text)
    return usual[-1:] if protocol == "positions" else usual


def _control(run: Run, plan: ScoredWindows, stride: int | None) -> tuple[int, list[Window]]:
    """The control's length, and its windows."""
    if run.trained_length is None:
        raise ValueError(f"{run.folder} does not say at which length it was trained, which the control needs.")
    for length, windows in plan.windows.items():
        trained = min(run.trained_length, length)
        step = max(1, trained // 4) if stride is None else integer_at_least("stride", stride)
        if step > trained:
            raise ValueError(f"a control of {trained} tokens that moves by {step} would leave tokens out.")
        return trained, protocols.control(windows, length, trained, step)
    return 0, []
