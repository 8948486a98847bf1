"""Encodings × tasks: trained at 64 tokens, scored at 1, 2, 4, 8 and 16 times that length.

    python benchmarks/tasks.py                          one seed of everything; about a minute of one core per model
    python benchmarks/tasks.py --seeds 3 --tasks copy,count
    python benchmarks/tasks.py --report                 only the tables, from the models that are there

Every model is trained with the defaults of `relpos train --task NAME --encoding ENCODING` and scored with those of
`relpos evaluate RUN --task NAME`. If interrupted, rerun the command to resume; start it twice to use two cores: a model
that another process trains is skipped. Writes benchmarks/results/tasks.{json,md}.
"""

import json
import os
import statistics
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from measure import cpu, made_by, option_parser, table, write

from relpos.runs.settings import load_settings
from relpos.system.files import HeldError, Lock, write_text
from relpos.tasks import names, task

ENCODINGS = ("rope", "alibi", "kerple_log", "nope", "forgetting", "cable", "fire", "t5")
TASKS = ("copy", "selective_copy", "count", "passkey", "flip_flop", "recall")
FILE = "scores.json"  # in a model's folder


def measure(folder: Path, name: str, encoding: str, seed: int) -> None:
    """Train and score one model."""
    import relpos
    from relpos.training.training import train

    overrides = {"data.task": name, "model.encoding": encoding, "run.seed": seed, "run.out": str(folder)}
    overrides |= {"run.save_every": 1000, "run.eval_every": 250}  # neither changes what is trained
    training = train(load_settings(None, overrides))
    evaluation = relpos.evaluate(folder, task=name)
    (result,) = evaluation.results.values()
    scores = {"task": name, "encoding": encoding, "seed": seed, "seconds": training["seconds"], "rows": result["rows"]}
    write_text(folder / FILE, json.dumps(scores, indent=1))


def cell(rows: list[dict]) -> str:
    """The mean over seeds with the lowest and highest; of one seed the bounds of 95 % (Wilson, counting sequences)."""
    if any(row["error"] for row in rows):
        return "refused"
    shares = [row["accuracy"] for row in rows]
    low, high = (min(shares), max(shares)) if len(rows) > 1 else (rows[0]["low"], rows[0]["high"])
    return f"{statistics.fmean(shares):.1%} ({100 * low:.0f}–{100 * high:.0f})"


def report(scores: list[dict]) -> None:
    blocks = [made_by("tasks", {"cpu": cpu(), "threads": 1}), cell.__doc__ or ""]
    for name in TASKS:
        models = [entry for entry in scores if entry["task"] == name]
        if not models:
            continue
        lengths = [row["length"] for row in models[0]["rows"]]
        lines = []
        for encoding in dict.fromkeys(entry["encoding"] for entry in models):
            group = [entry for entry in models if entry["encoding"] == encoding]
            cells = [cell([entry["rows"][i] for entry in group]) for i in range(len(lengths))]
            seconds = statistics.fmean(entry["seconds"] for entry in group)
            lines.append([encoding, str(len(group)), *cells, f"{seconds:.0f} s"])
        header = ["encoding", "seeds", *(f"{length:,}" for length in lengths), "training"]
        blocks += [f"## {name}: answers right by length, a guess {task(name).chance:.1%}", table(header, lines)]
    write("tasks", scores, *blocks)


def main() -> None:
    parser = option_parser(__doc__, file=False)
    parser.add_argument("--encodings", default=",".join(ENCODINGS))
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/tasks"))
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    chosen = options.tasks.split(",")
    assert set(chosen) <= set(names()), chosen
    for seed in range(0 if options.report else options.seeds):
        for encoding in options.encodings.split(","):
            for name in chosen:
                folder = options.runs / f"{name}-{encoding}-s{seed}"
                try:
                    with Lock(options.runs, f".{folder.name}.lock"):
                        if not (folder / FILE).exists():
                            measure(folder, name, encoding, seed)
                except HeldError:
                    continue
    files = sorted(options.runs.glob(f"*/{FILE}"))
    scores = [json.loads(file.read_text()) for file in files]
    order = [*ENCODINGS, *sorted({entry["encoding"] for entry in scores} - set(ENCODINGS))]
    report(sorted(scores, key=lambda entry: (order.index(entry["encoding"]), entry["seed"])))


if __name__ == "__main__":
    main()
