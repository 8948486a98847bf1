"""The report of a comparison as HTML and Markdown, made from the records of its trials after each of them."""

import shlex
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from relpos.lab.compare.comparison import Comparison, Trial, load_plan
from relpos.lab.compare.paired_test import DRAWS, LEVEL, Standing
from relpos.lab.compare.summary import (
    Perplexities,
    Records,
    Standings,
    findings,
    make_bits,
    make_standings,
    make_table,
    marking,
    notes,
    read_records,
    rows_of,
    several,
)
from relpos.lab.compare.trial import finished
from relpos.models.registry import entry
from relpos.system.files import write_text
from relpos.view.blocks import Block, Code, Heading, Image, Items, Table, Text, to_html, to_markdown
from relpos.view.contact_sheet import draw_sheet
from relpos.view.curves import draw_curves, draw_position_panels
from relpos.view.figures import save
from relpos.view.picture import draw

FIGURES = "figures"  # folder of the images, in the comparison's folder


def write_report(out: Path) -> tuple[Path, Path]:
    """Write report.html and report.md into a comparison's folder, and return their paths."""
    plan = load_plan(out)
    records = read_records(plan, out)
    blocks = make_report(plan, records, out)
    html, markdown = out / "report.html", out / "report.md"
    write_text(html, to_html(blocks))
    write_text(markdown, to_markdown(blocks, out))
    return html, markdown


def make_report(plan: Comparison, records: Records, out: Path) -> list[Block]:
    """The blocks of the report; its images are drawn into the folder."""
    table, standings = make_table(plan, records), make_standings(plan, records)
    done = sum(finished(record, plan, part) for part, record in records.items())
    state = [] if done == len(records) else [Text(f"{done} of {len(records)} parts are finished; the rest is to come.")]
    return [
        Heading(f"{len(plan.encodings)} positional encodings, trained at {plan.length}", 1),
        Text(_what(plan, out)),
        *state,
        Heading("Perplexity by length"),
        Text(
            "Held-out text in windows of each length, every token scored (`windows`); up to "
            f"{plan.eval_tokens:,} tokens, the same at every length. Mean ± sample deviation over "
            f"{several(plan.seeds, 'seed')}; {plan.length} is the trained length."
        ),
        *(Text(sentence) for sentence in marking(standings)),
        perplexities(plan, table, standings),
        *_listed("What the table leaves open:", notes(plan, records)),
        *_listed("What is seen in it:", findings(plan, table, standings)),
        *_differences(plan, standings),
        *_bits(plan, records),
        *_curves(plan, table, out),
        *_positions(plan, records, out),
        *_last_layers(plan, records, out),
        Heading("What each costs"),
        Text(_cost_text(records)),
        costs(plan, records),
        Heading("How it was made"),
        *_making(plan, records, out),
    ]


def _listed(title: str, items: list[str]) -> list[Block]:
    return [Text(title), Items(items)] if items else []


def perplexities(plan: Comparison, table: Perplexities, standings: Standings) -> Table:
    """The table in the paper's layout: one row per encoding, one column per length."""
    rows = {encoding: [str(cell) for cell in row.values()] for encoding, row in table.items()}
    bold = {
        (row, column)
        for row, encoding in enumerate(plan.encodings)
        for column, length in enumerate(plan.lengths, start=1)
        if length in standings and encoding in standings[length].marked
    }
    return _by_length(plan, rows, bold)


def _by_length(plan: Comparison, rows: dict[str, list[str]], bold: set[tuple[int, int]] | None = None) -> Table:
    head = [f"{length} (trained)" if length == plan.length else str(length) for length in plan.lengths]
    cells = [[f"`{encoding}`", *row] for encoding, row in rows.items()]
    return Table(["encoding", *head], cells, bold or set(), 1 + plan.lengths.index(plan.length))


def _differences(plan: Comparison, standings: Standings) -> list[Block]:
    """The paired differences from the lowest of each length."""
    if not any(at_length.differences for at_length in standings.values()):
        return []
    rows = {
        encoding: [_difference(standings.get(length), encoding) for length in plan.lengths]
        for encoding in plan.encodings
    }
    comparisons = max(len(at_length.differences) for at_length in standings.values())
    each = (
        f", which is {100 - 100 * (1 - LEVEL) / comparisons:.2f} % for each of {comparisons}" if comparisons > 1 else ""
    )
    text = (
        "Loss per token minus that of the lowest of the length, on the same documents and with the same seeds, and its "
        f"interval ({LEVEL * 100:.0f} % for all comparisons at a length together{each}). Documents are drawn {DRAWS:,} "
        "times with replacement; where there are several seeds, their variation is added as Student's t. `*`: the "
        "interval does not hold 0."
    )
    if plan.seeds == 1:
        text += " With one seed it is a difference between two trained models, and says little of the encodings."
    return [Heading("Differences between encodings"), Text(text), replace(_by_length(plan, rows), wrapped=True)]


def _difference(at_length: Standing | None, encoding: str) -> str:
    if at_length is not None and encoding == at_length.lowest:
        return "lowest"
    if at_length is None or encoding not in at_length.differences:
        return "–"
    found = at_length.differences[encoding]
    bounds = f"({found.low:+.3f} to {found.high:+.3f})".replace(" ", "\N{NO-BREAK SPACE}")
    return f"{found.mean:+.3f}{'*' if found.passes else ''} {bounds}"


def _bits(plan: Comparison, records: Records) -> list[Block]:
    """Bits per byte, where the evaluations have them."""
    rows = make_bits(plan, records)
    text = Text(
        "The same losses as bits per byte of the scored text: mean ± sample deviation over the seeds. Unlike "
        "perplexities, these can be compared between tokenizers."
    )
    return [Heading("Bits per byte"), text, _by_length(plan, rows)] if rows else []


def _curves(plan: Comparison, table: Perplexities, out: Path) -> list[Block]:
    """Perplexity over length: the mean, and a band from the lowest seed to the highest."""
    series: dict[str, list[dict[str, Any]]] = {}
    for encoding, row in table.items():
        if row[plan.length].values:
            series[encoding] = [
                {
                    "length": length,
                    "perplexity": cell.mean,
                    "low": min(cell.values) if len(cell.values) > 1 else None,
                    "high": max(cell.values) if len(cell.values) > 1 else None,
                    "error": None if cell.values else cell.missing,
                }
                for length, cell in row.items()
            ]
    if not series:
        return []
    file = save(draw_curves(series, plan.length), out / FIGURES / "curves.png")
    return [Heading("Past the trained length"), Image(file, "Perplexity by length; the band spans the seeds.")]


def _positions(plan: Comparison, records: Records, out: Path) -> list[Block]:
    """Loss over position, of the first seed."""
    found = {encoding: records[Trial(encoding, 0)].get("positions") for encoding in plan.encodings}
    series = {encoding: one["bins"] for encoding, one in found.items() if one is not None and one["bins"]}
    if not series:
        return []
    file = save(draw_position_panels(series, plan.length), out / FIGURES / "positions.png")
    text = (
        f"Loss at each position of windows of {plan.positions} tokens (`positions`, seed 0); dashed, the same tokens "
        f"read by the same model in windows of {plan.length}. Where the two part, the length itself does harm, or good."
        " The band is the 95 % interval over documents."
    )
    known = dict.fromkeys(sentence for one in found.values() for sentence in (one or {}).get("warnings", ()))
    text = " ".join([text, *known])
    return [Heading("Loss by position"), Text(text), Image(file, f"Loss by position in windows of {plan.positions}.")]


def _last_layers(plan: Comparison, records: Records, out: Path) -> list[Block]:
    """One strip of heat maps per encoding: the last layer of its first seed, drawn once after the training."""
    found: list[Block] = []
    for encoding in plan.encodings:
        part = Trial(encoding, 0)
        file, weights = out / FIGURES / f"{part.name}.png", out / part.name / "model.safetensors"
        if "training" not in records[part] or not weights.exists():
            continue
        if not file.exists() or file.stat().st_mtime < weights.stat().st_mtime:
            try:
                drawn = draw(out / part.name)
            except (ValueError, OSError) as error:
                found.append(Text(f"`{encoding}`: {error}"))
                continue
            save(draw_sheet(drawn.maps, caption=drawn.caption), file)
        found.append(Image(file, f"{encoding}: the last layer of seed 0, one panel per head."))
    text = Text(
        "The bias that each head adds to the scores, or the scores if an encoding adds no bias, on held-out text: "
        "queries down, keys across. Each panel has its own range, printed below it."
    )
    return [Heading("The last layer"), text, *found] if found else []


def costs(plan: Comparison, records: Records) -> Table:
    """Size, speed and memory of each encoding: means over its seeds."""
    longest = plan.lengths[-1]
    head = ["encoding", "parameters", "steps", "tokens", "training tokens/s", "training seconds", "training memory"]
    head += [f"evaluating tokens/s at {plan.length}", f"at {longest}", f"memory at {longest}"]
    rows = []
    for encoding in plan.encodings:
        found = [records[Trial(encoding, seed)] for seed in range(plan.seeds)]
        trained = [record["training"] for record in found if "training" in record]
        sizes = [record["about"]["parameters"] for record in found if "about" in record]
        home, far = (
            [row for record in found for row in rows_of(record, plan) if row["length"] == length]
            for length in (plan.length, longest)
        )
        rows.append(
            [
                f"`{encoding}`",
                _mean(sizes, "{:,.0f}".format),
                _mean([one["step"] for one in trained], "{:,.0f}".format),
                _mean([one["tokens"] for one in trained], "{:,.0f}".format),
                _mean([one["tokens_per_second"] for one in trained], "{:,.0f}".format),
                _mean([one["seconds"] for one in trained], "{:,.0f}".format),
                _mean([one["peak_memory_bytes"] for one in trained], _bytes),
                _mean([row["tokens_per_second"] for row in home], "{:,.0f}".format),
                _mean([row["tokens_per_second"] for row in far], "{:,.0f}".format),
                _mean([row["peak_memory_bytes"] for row in far], _bytes),
            ]
        )
    return Table(head, rows)


def _mean(numbers: list[float | None], form: Callable[[float], str]) -> str:
    known = [number for number in numbers if number is not None]
    return form(statistics.fmean(known)) if known else "–"


def _bytes(number: float) -> str:
    return f"{number / 2**20:,.0f} MiB"


def _what(plan: Comparison, out: Path) -> str:
    settings = plan.settings_of(plan.parts()[0], out)
    run = settings.run
    ends = []
    if run.steps is not None:
        ends.append(f"{run.steps:,} steps ({run.steps * run.batch_size * plan.length:,} tokens)")
    if run.minutes is not None:
        ends.append(f"{run.minutes:g} minutes")
    text = (
        f"{entry(settings.model.family).title} {settings.model.preset}, {run.batch_size} windows of {plan.length} "
        "tokens per step, "
        f"{' or '.join(ends)} on `{settings.data.source}`, {several(plan.seeds, 'seed')}. With the "
        "same seed all encodings read the same windows in the same order and start from the same weights, wherever "
        "they have the same ones."
    )
    if run.minutes is not None:
        text += (
            " **Training ended by the clock: the faster encodings have seen more data** (the table of costs tells how "
            "much); for equal data give `--steps` or `--tokens`."
        )
    return text


def _cost_text(records: Records) -> str:
    threads = sorted({record["machine"]["threads"] for record in records.values() if "machine" in record})
    differ = " They differ between parts: speeds are not comparable." if len(threads) > 1 else ""
    return (
        "Means over the seeds. Training: the median speed over the run, the seconds with its evaluations and "
        f"checkpoints, the most memory of the process. Threads per part: {', '.join(map(str, threads)) or '–'}.{differ}"
    )


def _making(plan: Comparison, records: Records, out: Path) -> list[Block]:
    first = [Trial(encoding, 0) for encoding in plan.encodings]
    single = [plan.train_command(part, out) for part in first]
    lengths = ",".join(map(str, plan.lengths))
    tokens = f"--eval-tokens {plan.eval_tokens}"
    folder = shlex.quote(str(out / first[0].name))
    single += [
        f"relpos evaluate {folder} --lengths {lengths} {tokens}",
        f"relpos evaluate {folder} --protocol positions --lengths {plan.positions} {tokens}",
    ]
    return [
        Text("The commands as they were given, and the one that makes the same comparison:"),
        Code("\n".join([*plan.commands, "", plan.command(out)])),
        Text(f"Each part by itself: here with seed 0; the seeds are {', '.join(map(str, range(plan.seeds)))}."),
        Code("\n".join(single)),
        Items(_surroundings(records)),
    ]


def _surroundings(records: Records) -> list[str]:
    """Corpus, versions and machines; more than one of a kind only if parts ran in several places."""
    found: dict[str, None] = {}
    for record in records.values():
        about, machine = record.get("about"), record.get("machine")
        if about is not None:
            corpus = about["corpus"]
            found[f"Corpus: {corpus['name']}, SHA-256 of its texts `{corpus['hash']}`."] = None
            found[f"Tokens: {about['tokens']['train']:,} to train on, {about['tokens']['heldout']:,} held out."] = None
            found["Versions: " + ", ".join(f"{name} {one}" for name, one in about["versions"].items()) + "."] = None
        if machine is not None:
            found[
                f"Machine: {machine['cpu']}, {machine['cores']} cores, {_bytes(machine['memory_bytes'])}, "
                f"{machine['system']}; {several(machine['threads'], 'thread')} per part."
            ] = None
    return list(found)
