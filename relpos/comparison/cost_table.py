"""What each encoding of a comparison costs: size, speed and memory."""

import statistics
from collections.abc import Callable

from relpos.comparison.comparison import Comparison, Trial
from relpos.comparison.summary import Records, rows_of
from relpos.pictures.blocks import Table


def cost_text(records: Records) -> str:
    """What the numbers of the table are."""
    threads = sorted({record["machine"]["threads"] for record in records.values() if "machine" in record})
    differ = " They differ between trials: speeds are not comparable." if len(threads) > 1 else ""
    return (
        "Means over the seeds. Training: the median speed over the run, the seconds with its evaluations and "
        "checkpoints, the peak memory of the process. "
        f"Threads per trial: {', '.join(map(str, threads)) or '–'}.{differ}"
    )


def costs(comparison: Comparison, records: Records) -> Table:
    """Size, speed and memory of each encoding: means over its seeds."""
    longest = comparison.lengths[-1]
    head = ["encoding", "parameters", "steps", "tokens", "training tokens/s", "training seconds", "training memory"]
    head += [f"evaluating tokens/s at {comparison.length}", f"at {longest}", f"memory at {longest}"]
    rows = []
    for encoding in comparison.encodings:
        of_encoding = [records[Trial(encoding, seed)] for seed in range(comparison.seeds)]
        trained = [record["training"] for record in of_encoding if "training" in record]
        sizes = [record["about"]["parameters"] for record in of_encoding if "about" in record]
        home, far = (
            [row for record in of_encoding for row in rows_of(record, comparison) if row["length"] == length]
            for length in (comparison.length, longest)
        )
        rows.append(
            [
                f"`{encoding}`",
                _mean(sizes, "{:,.0f}".format),
                _mean([result["step"] for result in trained], "{:,.0f}".format),
                _mean([result["tokens"] for result in trained], "{:,.0f}".format),
                _mean([result["tokens_per_second"] for result in trained], "{:,.0f}".format),
                _mean([result["seconds"] for result in trained], "{:,.0f}".format),
                _mean([result["peak_memory_bytes"] for result in trained], mebibytes),
                _mean([row["tokens_per_second"] for row in home], "{:,.0f}".format),
                _mean([row["tokens_per_second"] for row in far], "{:,.0f}".format),
                _mean([row["peak_memory_bytes"] for row in far], mebibytes),
            ]
        )
    return Table(head, rows)


def _mean(numbers: list[float | None], form: Callable[[float], str]) -> str:
    known = [number for number in numbers if number is not None]
    return form(statistics.fmean(known)) if known else "–"


def mebibytes(number: float) -> str:
    """A number of bytes as text."""
    return f"{number / 2**20:,.0f} MiB"
