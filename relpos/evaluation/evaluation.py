"""The loss of a trained model at lengths that it was not trained on. If interrupted, call it again to resume."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from relpos.evaluation.intervals import Units, bootstrap, interval, unit_sums, warnings
from relpos.evaluation.options import PROTOCOLS, ProtocolName, SplitName
from relpos.evaluation.processes import Processes
from relpos.evaluation.question import ask
from relpos.evaluation.scoring import Losses
from relpos.runs.results import Bin, Row, TextResult, refresh_card, refused_row
from relpos.runs.run import Run
from relpos.system.files import write_text
from relpos.system.versions import versions
from relpos.text.tokenizers import token_bytes
from relpos.text.tokens import MASKED_EVERY


def evaluate(
    run: Run,
    lengths: Sequence[int],
    protocol: ProtocolName = PROTOCOLS[0],
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
) -> TextResult:
    """Measure the loss of one run on a text at each length, and write the result as JSON.

    `relpos.evaluate` does the same for several runs and scalings, chooses the lengths, and draws the curve.

    Args:
        run: From `relpos.open`.
        lengths: In tokens. The row of a length that the encoding or the text does not allow has the reason in "error".
        protocol: windows, last, sliding or positions; see docs/evaluation.md.
        data: Another text than the run's own: a name, file or folder.
        split: "heldout" or "all". Default: heldout of the data that the run was trained on, all of other data.
        stride: Tokens by which windows move. For `sliding` (default: half the length), and for the control of
            `positions` (default: a quarter of the trained length).
        last: How many tokens at the end of each window the protocol `last` scores. Default: 256, or the shortest
            length if that is less.
        eval_tokens: Score at most this many tokens at each length, spread over the text. Default: `EVAL_TOKENS`.
        rope_scaling: A scaling of RoPE to apply without training: yarn, or yarn:4; see scaled_rope.py.
        out: Folder to write to. Default: RUN/evaluation; the run's model card is then updated too.
        say: Called with a line about the progress every few seconds.
        seed: Seed of the bootstrap resamples.
        processes: The processes that share every window; by default one.
        bos: Whether each window of a model that others trained begins as it was trained; see docs/evaluation.md.

    Returns:
        The question, one row per length, "warnings" (sentences that a reader of the numbers must know), and "file",
        the name of the JSON file. It is named by the question, so that another question never overwrites it.

    Raises:
        ValueError: An option does not fit the protocol, the run or the data.
        OSError: There is no such data.

    Example:
        >>> result = evaluate(relpos.open("runs/cable"), [512, 1024], "last", eval_tokens=4096)
        >>> [row["perplexity"] for row in result["rows"]]
    """
    processes = processes or Processes()
    question = ask(
        run,
        lengths,
        protocol,
        data=data,
        split=split,
        stride=stride,
        last=last,
        eval_tokens=eval_tokens,
        rope_scaling=rope_scaling,
        out=out,
        say=say,
        seed=seed,
        processes=processes,
        bos=bos,
    )
    run = question.run
    corpus, text, units, split = question.corpus, question.text, question.units, question.split
    result: TextResult = {
        "protocol": protocol,
        "family": run.family.name,
        "metric": run.family.metric,
        "encoding": run.encoding,
        "rope_scaling": rope_scaling,
        "position": run.family.position_entry(run.model),
        "trained_length": run.trained_length,
        "run": str(run.folder),
        "step": run.result.get("step"),
        "corpus": {"name": corpus.name, "hash": corpus.hash, "documents": len(text.starts), "tokens": len(text)},
        "split": split,
        "special_tokens": run.framing.as_json(),
        "options": {"stride": stride, "last": last, "eval_tokens": eval_tokens, "seed": seed},
        "intervals": {"over": units.name, "block": units.block},
        "warnings": [],
        "rows": [],
    }
    if protocol == "positions":
        result["bins"] = []
    sizes = token_bytes(run.tokenizer)
    for length in question.lengths:
        row = refused_row(length, question.plan.refused.get(length))
        result["rows"].append(row)
        if row["error"] is None:
            windows = question.plan.windows[length]
            try:
                scorer = question.scorer(length)
                losses = question.losses(length, scorer)
                size = None if sizes is None else scorer.bytes_of(windows, length, sizes)
                result["rows"][-1] = row = _row(length, len(windows), losses, units, size, seed)
                if (edges := question.edges(length)) is not None:
                    control = question.control(length)
                    result["bins"] = _bins(edges, losses, control, seed)
                    row["control_loss"] = control.mean
            except ValueError as error:
                row["error"] = str(error)
                question.countdown.skip(length * len(windows))
        number = row["error"] or f"{result['metric']} {row['perplexity']:.2f}"
        say(f"{question.words(length)}: {number}")
    result["versions"] = versions()
    result["warnings"] = [
        *_on_special_tokens(run),
        *_on_masking(run),
        *_on_training_text(run, question.usual_split, split),
        *warnings(units, _unit_counts(result["rows"])),
    ]
    result["file"] = f"{question.stem}.json"
    if processes.writes:
        _write(result, run, question.folder)
    return result


def _write(result: TextResult, run: Run, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / result["file"], json.dumps(result, indent=1))
    refresh_card(run, folder)


def _on_training_text(run: Run, usual_split: SplitName, split: SplitName) -> list[str]:
    if split in (usual_split, "heldout") or run.settings is None:
        return []
    return [
        "The run was trained on most of this text: the numbers of the split all are not those of unseen text. "
        "For these, evaluate the split heldout."
    ]


def _on_special_tokens(run: Run) -> list[str]:
    if not len(run.framing):
        return []
    return [f"{run.framing.sentence} Special tokens count in the length, and are not scored; --no-bos leaves them out."]


def _on_masking(run: Run) -> list[str]:
    if run.family.causal:
        return []
    return [
        f"{run.family.title} predicts masked tokens, so this is the pseudo-perplexity: one token in {MASKED_EVERY} is "
        "masked, the same ones at every length, and predicted from the rest of its window. It cannot be compared with "
        "the perplexity of a family that predicts the next token."
    ]


def _unit_counts(rows: Sequence[Row]) -> list[int]:
    """How many documents or blocks were scored, for each length that was measured."""
    return [row["documents"] if row["blocks"] is None else row["blocks"] for row in rows if row["error"] is None]


def _row(length: int, windows: int, losses: Losses, units: Units, size: int | None, seed: int) -> Row:
    """The numbers of a length. `size` is the number of bytes scored. A single document or block has no interval."""
    loss = losses.mean
    if not loss < math.log(np.finfo(np.float64).max):
        raise ValueError(f"the loss is {loss}: the model is damaged, or this length is far beyond what it can compute.")
    low, high = None, None
    if len(losses.counts) > 1:
        sums, counts = bootstrap(losses.sums.sum(1), losses.counts.sum(1), seed=seed)
        low, high = interval(np.exp(sums / counts))
    tokens = int(losses.counts.sum())
    return {
        "length": length,
        "loss": loss,
        "perplexity": math.exp(loss),
        "low": low,
        "high": high,
        "bits_per_byte": loss * tokens / math.log(2) / size if size else None,
        "windows": windows,
        "documents": len(losses.units) if units.block is None else 1,
        "blocks": None if units.block is None else len(losses.units),
        "tokens": tokens,
        "bytes": size,
        "seconds": round(losses.seconds, 3),
        "tokens_per_second": round(losses.read / losses.seconds, 1),  # tokens read, which may be more than those scored
        "peak_memory_bytes": losses.peak,
        "units": unit_sums(units, losses.units, losses.sums.sum(1), losses.counts.sum(1)),
        "error": None,
    }


def _bins(edges: NDArray[np.int64], losses: Losses, control: Losses, seed: int) -> list[Bin]:
    """Loss by position and that of the control, with intervals of the loss and of the difference."""
    resamples = bootstrap(losses.sums, losses.counts, control.sums, seed=seed) if len(losses.counts) > 1 else None
    bins: list[Bin] = []
    for number, (begin, end) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        tokens = int(losses.counts[:, number].sum())
        loss, other = (float(each.sums[:, number].sum()) / tokens for each in (losses, control))
        entry: Bin = {
            "from": begin,
            "to": end,
            "tokens": tokens,
            "loss": loss,
            "low": None,
            "high": None,
            "control": other,
            "difference": loss - other,
            "difference_low": None,
            "difference_high": None,
        }
        if resamples is not None:
            sums, counts, others = (values[:, number] for values in resamples)
            entry["low"], entry["high"] = interval(sums / counts)
            entry["difference_low"], entry["difference_high"] = interval((sums - others) / counts)
        bins.append(entry)
    return bins
