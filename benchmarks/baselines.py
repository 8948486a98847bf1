"""How much each suspected reason changes the growth of a baseline's loss with the length: docs/baselines.md.

    python benchmarks/baselines.py [--runs runs/baselines]

Reads the records of the comparisons (by default those of the repository) and prints, for each pair, the change of the
loss per token from the trained to the longest length, without and with, and the paired difference of the two changes:
its mean over the seeds and the 95 % interval of Student's t.
"""

from pathlib import Path

import numpy as np
from measure import RESULTS, option_parser, table

from relpos.comparison.comparison import Trial, load_comparison, read_record

DRAWS = 1_000_000  # of Student's t, for its quantile


def changes(folder: Path, encoding: str, seeds: int) -> np.ndarray:
    """Loss at the longest length minus loss at the shortest, of each seed."""
    losses = []
    for seed in range(seeds):
        rows = sorted(read_record(folder, Trial(encoding, seed))["windows"]["rows"], key=lambda row: row["length"])
        losses.append(rows[-1]["loss"] - rows[0]["loss"])
    return np.array(losses)


def interval(values: np.ndarray) -> str:
    """The mean of paired differences and its 95 % interval."""
    quantile = np.quantile(np.random.default_rng(0).standard_t(len(values) - 1, DRAWS), 0.975)
    half = quantile * values.std(ddof=1) / np.sqrt(len(values))
    mark = "" if abs(values.mean()) < half else "*"
    return f"{values.mean():+.3f}{mark} ({values.mean() - half:+.3f} to {values.mean() + half:+.3f})"


def main() -> None:
    parser = option_parser(__doc__, file=False)
    parser.add_argument("--runs", type=Path, default=RESULTS / "baselines")
    lines = []
    for folder in sorted(file.parent for file in parser.parse_args().runs.glob("*/comparison.yaml")):
        comparison = load_comparison(folder)
        without, with_it = (changes(folder, name, comparison.seeds) for name in comparison.encodings)
        name = f"`{comparison.encodings[1]}`"
        lines.append([name, f"{without.mean():+.3f}", f"{with_it.mean():+.3f}", interval(with_it - without)])
    print(table(["", "change without", "change with", "paired difference"], lines))


if __name__ == "__main__":
    main()
