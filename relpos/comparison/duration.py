"""What a comparison will do, and about how long that takes on this machine, from a step that is measured before it."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relpos.comparison.compare_options import SEARCH_SHARE
from relpos.comparison.comparison import Comparison, Trial, finished, read_record
from relpos.comparison.search import tries
from relpos.evaluation.estimate import PROBE, reading_seconds
from relpos.evaluation.evaluate_options import LAST
from relpos.system.executors import LocalExecutor
from relpos.system.progress import clock_time

START = 10.0  # seconds of a trial's process before it trains: imports, and opening the text
CONTROL = 5  # times that the protocol `positions` reads each of its tokens, with its control


def sentence(comparison: Comparison, out: Path, executor: LocalExecutor) -> str:
    """What each trial does, and about how long those that are left take together."""
    run = comparison.settings_of(comparison.trials()[0], out).run
    tokens = f"{run.steps * run.batch_size * comparison.length:,} tokens" if run.steps else f"{run.minutes:g} minutes"
    lengths = ", ".join(f"{length:,}" for length in comparison.lengths)
    text = f"each trains on {tokens} and is scored on {comparison.eval_tokens:,} tokens at {lengths}"
    seconds = remaining_seconds(comparison, out, executor.threads)
    if seconds is None:
        return text
    return f"{text}; about {clock_time(seconds / (executor.places or 1))} for what is left"


def remaining_seconds(comparison: Comparison, out: Path, threads: int) -> float | None:
    """About how long one worker needs for the trials that are not finished; None with a GPU, which is not measured."""
    import torch

    if torch.cuda.is_available():
        return None
    total = 0.0
    for encoding in comparison.encodings:
        records = {trial: read_record(out, trial) for trial in comparison.trials_of(encoding)}
        over = [record["seconds"] for trial, record in records.items() if finished(record, comparison, trial)]
        left = len(records) - len(over)
        if not left:
            continue
        if over:
            total += left * statistics.fmean(over)
            continue
        with _threads(threads):
            training, scoring, first = _measure(comparison, encoding, out)
        total += left * (START + training + scoring) + first
        if not comparison.settled(encoding):
            at_home = scoring / len(comparison.lengths)
            total += len(tries(comparison, encoding, out)) * (START + training / SEARCH_SHARE + at_home)
    return total


def _measure(comparison: Comparison, encoding: str, out: Path) -> tuple[float, float, float]:
    """About how long a trial trains and is scored, and how long seed 0 is scored by position, in seconds."""
    import torch

    from relpos.training.model_and_data import build_model, open_data

    settings = comparison.settings_of(Trial(encoding, 0), out)
    run, tokenizer = settings.run, open_data(settings).tokenizer
    model, micro = build_model(settings, tokenizer), min(run.micro_batch_size or run.batch_size, run.batch_size)

    def read(length: int, count: int) -> torch.Tensor:
        ids = torch.randint(len(tokenizer), (count, length))
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    def step() -> None:
        read(comparison.length, micro).backward()  # type: ignore[no-untyped-call]

    training = (run.minutes or 0.0) * 60
    if run.steps is not None:
        step()  # the first one loads libraries
        started = time.perf_counter()
        step()
        by_steps = (time.perf_counter() - started) * run.steps * run.batch_size / micro
        training = min(training or by_steps, by_steps)
    with torch.inference_mode():
        work = dict.fromkeys(comparison.lengths, comparison.eval_tokens)
        scoring = reading_seconds(work, read, PROBE) or 0.0
        if comparison.last:
            scored = min(LAST, comparison.lengths[0])
            number = max(1, comparison.scored("last") // scored)  # of windows, at every length
            scoring += reading_seconds({n: n * number for n in comparison.lengths}, read, PROBE) or 0.0
        by_position = {comparison.positions or comparison.length: CONTROL * comparison.scored("positions")}
        first = reading_seconds(by_position, read, PROBE) or 0.0
    return training, scoring, 0.0 if comparison.positions is None else first


def too_few_units(comparison: Comparison, out: Path) -> str | None:
    """A sentence if the text that is scored has too few documents for tests and ranks; None otherwise."""
    import numpy as np

    from relpos.evaluation.intervals import FEW, units_of
    from relpos.evaluation.protocols import windows
    from relpos.runs.run import heldout_corpus, training_corpus
    from relpos.text.tokenizers import load_tokenizer
    from relpos.text.tokens import tokenize

    data = comparison.settings_of(comparison.trials()[0], out).data
    assert data.tokenizer is not None
    tokenizer = load_tokenizer(data.tokenizer, training_corpus(data))
    text = tokenize(heldout_corpus(data, comparison.split), tokenizer)["heldout"]
    longest = max((length for length in comparison.lengths if length < len(text)), default=None)
    if longest is None:
        return None
    units = units_of(text, longest)

    def covered(tokens: int) -> int:
        scored = windows(text, [longest], tokens).windows[longest]
        ends = units.of(np.array([[window.first, window.start + longest] for window in scored]))
        return len({unit for first, last in ends.tolist() for unit in range(first, last + 1)})

    count = covered(comparison.eval_tokens)
    if count >= FEW:
        return None
    enough = (longest * number for number in range(1, len(text) // longest + 1))
    tokens = next((tokens for tokens in enough if tokens > comparison.eval_tokens and covered(tokens) >= FEW), None)
    advice = f"--eval-tokens {tokens} reads enough" if tokens else "a shorter longest length, or more text, has more"
    name = units.name if count > 1 else units.name.removesuffix("s")
    return (
        f"the {comparison.eval_tokens:,} tokens that are scored are from {count} {name}: fewer than {FEW}, so that the "
        f"report will have no tests and no ranks; {advice}"
    )


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """As many threads as a trial has."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
