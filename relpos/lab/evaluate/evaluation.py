"""What a trained model does at lengths it never saw. If interrupted, call it again to resume."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relpos.encodings.checks import integer_at_least
from relpos.errors import unknown
from relpos.lab.data.tokenizers import token_bytes
from relpos.lab.data.tokens import Tokens, tokenize
from relpos.lab.evaluate import protocols
from relpos.lab.evaluate.bootstrap import bootstrap, interval
from relpos.lab.evaluate.file_names import question_stem
from relpos.lab.evaluate.protocols import LAST, TOKENS, ScoredWindows, Window
from relpos.lab.evaluate.scaled_rope import check_scaling, scaled_run
from relpos.lab.evaluate.scoring import Losses, Scorer
from relpos.lab.evaluate.units import Units, unit_sums, units_of, warnings
from relpos.lab.runs.model_card import refresh_card
from relpos.lab.runs.run import EVALUATION, Run
from relpos.system.files import write_text
from relpos.system.progress import Countdown
from relpos.system.versions import versions

FIRST_BIN = 16  # positions; from there on two bins an octave
NUMBERS = ("loss", "perplexity", "low", "high", "bits_per_byte", "windows", "documents", "blocks", "tokens", "bytes")
EMPTY = dict.fromkeys((*NUMBERS, "seconds", "tokens_per_second", "peak_memory_bytes", "units", "error"))


def evaluate(
    run: Run,
    lengths: Sequence[int],
    protocol: str = "windows",
    *,
    corpus: str | None = None,
    split: str | None = None,
    stride: int | None = None,
    last: int | None = None,
    tokens: int | None = None,
    rope_scaling: str | None = None,
    out: Path | None = None,
    say: Callable[[str], None] = print,
    seed: int = 0,
) -> dict[str, Any]:
    """The loss of a text's tokens at each length, with what it cost; also kept as JSON in `out`.

    Args:
        run: from `relpos.lab.runs.run.open_run`.
        lengths: in tokens. One that the encoding or the text does not allow has a sentence under "error" in its row.
        protocol: windows, last, sliding or positions; see docs/evaluation.md.
        corpus: another than the run's own: a name, file or folder.
        split: "heldout" or "all" of the corpus; heldout of the one that the run was trained on, all of another.
        stride: of `sliding` (half the length by default), and of the control of `positions` (a quarter).
        last: how many tokens `last` scores in a window: by default 256, or the shortest length.
        tokens: how many tokens are scored at most at a length, spread over the text; `TOKENS` by default.
        rope_scaling: a scaling of RoPE to try without training: yarn, or yarn:4; see scaled_rope.py.
        out: a folder; RUN/evaluation by default, and then the run's model card is brought up to date.
        say: is called every few seconds with a line on the progress.
        seed: of the draws that give the intervals.

    Returns:
        The question, one row per length, "warnings" (sentences that a reader of the numbers must know), and "file",
        the name of the JSON file: it names the question, so that another question never overwrites it.

    Raises:
        ValueError: an option does not fit the protocol, the run or the corpus.
        OSError: there is no such corpus.
    """
    lengths = check_lengths(lengths)
    if rope_scaling is not None:
        check_scaling(run, rope_scaling)
    usual = default_split(run, corpus)
    split = usual if split is None else split
    source = run.corpus(corpus, split)
    text = tokenize(source, run.tokenizer)["heldout"]
    plan = make_plan(text, lengths, protocol, stride, last, tokens)
    units = units_of(text, max(plan.windows, default=lengths[-1]))
    folder = run.folder / EVALUATION if out is None else Path(out)
    stem = question_stem(
        protocol,
        rope_scaling=rope_scaling,
        corpus=corpus,
        corpus_hash=source.hash,
        split=None if split == usual else split,
        lengths=() if lengths == _usual_lengths(run, text, protocol) else lengths,
        stride=stride,
        last=last,
        tokens=tokens,
        seed=seed or None,
    )
    result: dict[str, Any] = {
        "protocol": protocol,
        "encoding": run.encoding,
        "rope_scaling": rope_scaling,
        "position": run.model.config.position,
        "trained_length": run.trained_length,
        "run": str(run.folder),
        "step": run.result.get("step"),
        "corpus": {"name": source.name, "hash": source.hash, "documents": len(text.starts), "tokens": len(text)},
        "split": split,
        "options": {"stride": stride, "last": last, "tokens": tokens, "seed": seed},
        "intervals": {"over": units.name, "block": units.block},
        "warnings": [],
        "rows": [],
    }
    beside: list[Window] = []
    shorter = 0
    if protocol == "positions":
        result["bins"] = []
        shorter, beside = _control(run, plan, stride)
    rules = hashlib.sha256(run.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    identity = {"corpus": source.hash, "tokenizer": rules, "versions": versions()}
    work = sum(length * len(found) for length, found in plan.windows.items()) + shorter * len(beside)
    countdown = Countdown(work, say)

    def scorer(model: Run) -> Scorer:
        return Scorer(model, text, units, identity, folder / "parts", countdown)

    own, sizes = scorer(run), token_bytes(run.tokenizer)
    for length in lengths:
        row: dict[str, Any] = {"length": length, **EMPTY, "error": plan.refused.get(length)}
        result["rows"].append(row)
        if row["error"] is None:
            windows, words = plan.windows[length], f"{protocol}, length {length}"
            try:
                # Of a scaled rope, every length has a model of its own.
                scores = own if rope_scaling is None else scorer(scaled_run(run, rope_scaling, length))
                edges = bin_edges(length) if protocol == "positions" else None
                found = scores.score(windows, length, words, edges)
                read = None if sizes is None else scores.bytes_of(windows, length, sizes)
                row |= {**_numbers(found, units, read, seed), "windows": len(windows)}
                if edges is not None:
                    control = own.score(beside, shorter, f"{words}, control", edges)
                    result["bins"] = _bins(edges, found, control, seed)
                    row["control_loss"] = control.mean
            except ValueError as error:
                row["error"] = str(error)
                countdown.skip(length * len(windows))
        say(f"{protocol}, length {length}: {row['error'] or 'perplexity {:.2f}'.format(row['perplexity'])}")
    result["versions"] = versions()
    result["warnings"] = [*_on_training_text(run, usual, split), *warnings(units, _unit_counts(result["rows"]))]
    result["file"] = f"{stem}.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / result["file"], json.dumps(result, indent=1))
    refresh_card(run, folder)
    return result


def default_split(run: Run, corpus: str | None = None) -> str:
    """All of a corpus that was not trained on, as a test file is meant; else what training has not seen."""
    return "heldout" if corpus is None or run.trained_on(corpus) else "all"


def default_lengths(run: Run, corpus: str | None = None, split: str | None = None) -> list[int]:
    """1, 2, 4, 8 and 16 times the trained length, as far as the longest document goes."""
    if run.trained_length is None:
        raise ValueError(f"{run.folder} does not say how long it was trained: give lengths.")
    source = run.corpus(corpus, default_split(run, corpus) if split is None else split)
    return _multiples(run.trained_length, tokenize(source, run.tokenizer)["heldout"])


def _multiples(trained: int, text: Tokens) -> list[int]:
    longest = int(np.diff([*text.starts, len(text)]).max())
    return [trained, *(length for length in (2 * trained, 4 * trained, 8 * trained, 16 * trained) if length < longest)]


def _usual_lengths(run: Run, text: Tokens, protocol: str) -> list[int]:
    """The lengths that the command takes by itself, which a file's name does not repeat."""
    usual = [] if run.trained_length is None else _multiples(run.trained_length, text)
    return usual[-1:] if protocol == "positions" else usual


def _on_training_text(run: Run, usual: str, split: str) -> list[str]:
    if split in (usual, "heldout") or run.settings is None:
        return []
    return [
        "The run was trained on most of this text: the numbers of the split all are not those of unseen text. "
        "For these, evaluate the split heldout."
    ]


def _unit_counts(rows: Sequence[dict[str, Any]]) -> list[int]:
    """How many documents or blocks were scored at each length that has a number."""
    return [row["documents"] if row["blocks"] is None else row["blocks"] for row in rows if row["error"] is None]


def check_lengths(lengths: Sequence[int]) -> list[int]:
    """The lengths in order, each once."""
    if not lengths:
        raise ValueError("give at least one length.")
    return sorted({integer_at_least("a length", length, least=2) for length in lengths})


def make_plan(
    text: Tokens, lengths: list[int], protocol: str, stride: int | None, last: int | None, tokens: int | None
) -> ScoredWindows:
    """The windows of a protocol; options that are not its own are refused."""
    if protocol not in TOKENS:
        raise unknown("protocol", protocol, TOKENS)
    if stride is not None and protocol not in ("sliding", "positions"):
        raise ValueError(f"a stride is for the protocols sliding and positions, not for {protocol}.")
    if last is not None and protocol != "last":
        raise ValueError(f"how many last tokens are scored is for the protocol last, not for {protocol}.")
    tokens = TOKENS[protocol] if tokens is None else integer_at_least("tokens", tokens)
    if protocol == "windows":
        return protocols.windows(text, lengths, tokens)
    if protocol == "last":
        last = min(LAST, lengths[0]) if last is None else integer_at_least("last", last)
        if last > lengths[0]:
            raise ValueError(f"the last {last} tokens of a window cannot be scored at length {lengths[0]}.")
        return protocols.last(text, lengths, tokens, last)
    if protocol == "sliding":
        if stride is not None and integer_at_least("stride", stride) > lengths[0]:
            raise ValueError(f"windows of {lengths[0]} that move by {stride} would leave tokens out.")
        return protocols.sliding(text, lengths, tokens, stride)
    if len(lengths) > 1:
        raise ValueError(f"the protocol positions takes one length, not {len(lengths)}.")
    return protocols.positions(text, lengths[0], tokens)


def bin_edges(length: int) -> NDArray[np.int64]:
    """Where the bins of positions begin, and the end of the last: 0, 16, then two an octave."""
    steps = [round(FIRST_BIN * 2 ** (step / 2)) for step in range(2 * length.bit_length())]
    return np.array([0, *(step for step in steps if step < length), length])


def _control(run: Run, plan: ScoredWindows, stride: int | None) -> tuple[int, list[Window]]:
    """The control's length, and its windows."""
    if run.trained_length is None:
        raise ValueError(f"{run.folder} does not say how long it was trained, which is the length of the control.")
    for length, windows in plan.windows.items():
        trained = min(run.trained_length, length)
        step = max(1, trained // 4) if stride is None else integer_at_least("stride", stride)
        if step > trained:
            raise ValueError(f"a control of {trained} tokens that moves by {step} would leave tokens out.")
        return trained, protocols.control(windows, length, trained, step)
    return 0, []


def _numbers(found: Losses, units: Units, read: int | None, seed: int) -> dict[str, Any]:
    """A row's numbers; `read` is the bytes of what is scored. Of one document or block alone there is no interval."""
    loss = found.mean
    if not loss < math.log(np.finfo(np.float64).max):
        raise ValueError(f"the loss is {loss}: the model is broken, or far out of what it can compute.")
    numbers = {"loss": loss, "perplexity": math.exp(loss), "low": None, "high": None}
    if len(found.counts) > 1:
        sums, counts = bootstrap(found.sums.sum(1), found.counts.sum(1), seed=seed)
        low, high = interval(np.exp(sums / counts))
        numbers |= {"low": low, "high": high}
    tokens = int(found.counts.sum())
    return {
        **numbers,
        "bits_per_byte": loss * tokens / math.log(2) / read if read else None,
        "documents": len(found.units) if units.block is None else 1,
        "blocks": None if units.block is None else len(found.units),
        "tokens": tokens,
        "bytes": read,
        "seconds": round(found.seconds, 3),
        "tokens_per_second": round(found.read / found.seconds, 1),  # read, which may be more than are scored
        "peak_memory_bytes": found.peak,
        "units": unit_sums(units, found.units, found.sums.sum(1), found.counts.sum(1)),
    }


def _bins(edges: NDArray[np.int64], found: Losses, control: Losses, seed: int) -> list[dict[str, Any]]:
    """Loss by position beside the control's, with the interval of the loss and of the difference."""
    drawn = bootstrap(found.sums, found.counts, control.sums, seed=seed) if len(found.counts) > 1 else None
    bins = []
    for number, (begin, end) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        tokens = int(found.counts[:, number].sum())
        loss, other = (float(one.sums[:, number].sum()) / tokens for one in (found, control))
        entry = {"from": begin, "to": end, "tokens": tokens, "loss": loss, "control": other, "difference": loss - other}
        entry |= dict.fromkeys(("low", "high", "difference_low", "difference_high"))
        if drawn is not None:
            sums, counts, others = (values[:, number] for values in drawn)
            entry["low"], entry["high"] = interval(sums / counts)
            entry["difference_low"], entry["difference_high"] = interval((sums - others) / counts)
        bins.append(entry)
    return bins
