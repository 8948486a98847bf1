"""The report of a comparison in HTML and Markdown, from the records of its trials. Written again after every trial."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from relpos.comparison.comparison import Comparison, Trial, load_comparison
from relpos.comparison.paired_test import DRAWS, LEVEL, Standing
from relpos.comparison.summary import (
    Perplexities,
    Records,
    Standings,
    cost_text,
    costs,
    findings,
    make_bits,
    make_standings,
    make_table,
    marking,
    mebibytes,
    notes,
    read_records,
    several,
)
from relpos.comparison.trial import finished
from relpos.pictures.blocks import Block, Code, Heading, Image, Items, Table, Text, to_html, to_markdown
from relpos.pictures.curves import draw_curves, draw_position_panels
from relpos.pictures.draw import draw
from relpos.pictures.map_figures import draw_sheet
from relpos.pictures.printed_page import Look, save
from relpos.system.files import write_text
from relpos.text.masking import MASKED_EVERY

FIGURES = "figures"  # the folder of the pictures in the comparison's folder


def write_report(out: Path) -> tuple[Path, Path]:
    """Write the report of a comparison.

    Args:
        out: The comparison's folder; trials may be missing.

    Returns:
        The paths of report.html and report.md in that folder.
    """
    comparison = load_comparison(out)
    records = read_records(comparison, out)
    blocks = make_report(comparison, records, out)
    html, markdown = out / "report.html", out / "report.md"
    write_text(html, to_html(blocks))
    write_text(markdown, to_markdown(blocks, out))
    return html, markdown


def make_report(comparison: Comparison, records: Records, out: Path) -> list[Block]:
    """The blocks of the report; draws its pictures into the folder."""
    table, standings = make_table(comparison, records), make_standings(comparison, records)
    done = sum(finished(record, comparison, trial) for trial, record in records.items())
    state = [] if done == len(records) else [Text(f"{done} of {len(records)} trials are finished.")]
    return [
        Heading(f"{len(comparison.encodings)} positional encodings, trained at {comparison.length}", 1),
        Text(_what(comparison, out)),
        *state,
        Heading(f"{comparison.family.metric.capitalize()} by length"),
        Text(
            f"Held-out text in windows of each length, {_scored(comparison)} (`windows`); up to "
            f"{comparison.eval_tokens:,} tokens, the same at every length. Mean ± sample deviation over "
            f"{several(comparison.seeds, 'seed')}; {comparison.length} is the trained length."
        ),
        *(Text(sentence) for sentence in marking(standings)),
        perplexities(comparison, table, standings),
        *_listed("What the table does not show:", notes(comparison, records)),
        *_listed("What the table shows:", findings(comparison, table, standings)),
        *_differences(comparison, standings),
        *_bits(comparison, records),
        *_curves(comparison, table, out),
        *_positions(comparison, records, out),
        *_last_layers(comparison, records, out),
        Heading("What each costs"),
        Text(cost_text(records)),
        costs(comparison, records),
        Heading("How it was made"),
        *_making(comparison, records, out),
    ]


def _scored(comparison: Comparison) -> str:
    """Which tokens are scored, in words."""
    if comparison.family.causal:
        return "every token scored"
    return f"one token in {MASKED_EVERY} masked and scored, the same ones at every length"


def _listed(title: str, items: list[str]) -> list[Block]:
    return [Text(title), Items(items)] if items else []


def perplexities(comparison: Comparison, table: Perplexities, standings: Standings) -> Table:
    """The table in the paper's layout: one row per encoding, one column per length."""
    rows = {encoding: [str(cell) for cell in row.values()] for encoding, row in table.items()}
    bold = {
        (row, column)
        for row, encoding in enumerate(comparison.encodings)
        for column, length in enumerate(comparison.lengths, start=1)
        if length in standings and encoding in standings[length].marked
    }
    return _by_length(comparison, rows, bold)


def _by_length(comparison: Comparison, rows: dict[str, list[str]], bold: set[tuple[int, int]] | None = None) -> Table:
    head = [f"{length} (trained)" if length == comparison.length else str(length) for length in comparison.lengths]
    cells = [[f"`{encoding}`", *row] for encoding, row in rows.items()]
    return Table(["encoding", *head], cells, bold or set(), 1 + comparison.lengths.index(comparison.length))


def _differences(comparison: Comparison, standings: Standings) -> list[Block]:
    """The paired differences from the lowest of each length."""
    if not any(at_length.differences for at_length in standings.values()):
        return []
    rows = {
        encoding: [_difference(standings.get(length), encoding) for length in comparison.lengths]
        for encoding in comparison.encodings
    }
    comparisons = max(len(at_length.differences) for at_length in standings.values())
    each = (
        f", which is {100 - 100 * (1 - LEVEL) / comparisons:.2f} % for each of {comparisons}" if comparisons > 1 else ""
    )
    text = (
        "Loss per token minus that of the lowest of the length, on the same documents and with the same seeds, and its "
        f"interval ({LEVEL * 100:.0f} % for all comparisons at a length together{each}). Documents are drawn {DRAWS:,} "
        "times with replacement; where there are several seeds, their variation is added as Student's t. `*`: the "
        "interval does not contain 0."
    )
    if comparison.seeds == 1:
        text += " With one seed it is a difference between two trained models, and says little about the encodings."
    return [Heading("Differences between encodings"), Text(text), replace(_by_length(comparison, rows), wrapped=True)]


def _difference(at_length: Standing | None, encoding: str) -> str:
    if at_length is not None and encoding == at_length.lowest:
        return "lowest"
    if at_length is None or encoding not in at_length.differences:
        return "–"
    difference = at_length.differences[encoding]
    bounds = f"({difference.low:+.3f} to {difference.high:+.3f})".replace(" ", "\N{NO-BREAK SPACE}")
    return f"{difference.mean:+.3f}{'*' if difference.significant else ''} {bounds}"


def _bits(comparison: Comparison, records: Records) -> list[Block]:
    """The table of bits per byte, if the evaluations have them."""
    rows = make_bits(comparison, records)
    text = Text(
        "The same losses as bits per byte of the scored text: mean ± sample deviation over the seeds. Unlike "
        "perplexities, these can be compared between tokenizers."
    )
    return [Heading("Bits per byte"), text, _by_length(comparison, rows)] if rows else []


def _curves(comparison: Comparison, table: Perplexities, out: Path) -> list[Block]:
    """Curves of perplexity by length: the mean, and a band from the lowest seed to the highest."""
    series: dict[str, list[dict[str, Any]]] = {}
    for encoding, row in table.items():
        if row[comparison.length].values:
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
    file = save(draw_curves(series, comparison.length, comparison.family.metric), out / FIGURES / "curves.png")
    return [
        Heading("Past the trained length"),
        Image(file, f"{comparison.family.metric.capitalize()} by length; the band spans the seeds."),
    ]


def _positions(comparison: Comparison, records: Records, out: Path) -> list[Block]:
    """Curves of loss by position, for the first seed."""
    measured: dict[str, Any] = {
        encoding: records[Trial(encoding, 0)].get("positions") or {} for encoding in comparison.encodings
    }
    series = {encoding: result["bins"] for encoding, result in measured.items() if result.get("bins")}
    if not series:
        return []
    file = save(draw_position_panels(series, comparison.length), out / FIGURES / "positions.png")
    text = (
        f"Loss at each position of windows of {comparison.positions} tokens (`positions`, seed 0); dashed, the same "
        f"tokens read by the same model in windows of {comparison.length}. Where the two separate, the length itself "
        "raises or lowers the loss. The band is the 95 % interval over documents."
    )
    warnings = dict.fromkeys(sentence for result in measured.values() for sentence in result.get("warnings", ()))
    text = " ".join([text, *warnings])
    return [
        Heading("Loss by position"),
        Text(text),
        Image(file, f"Loss by position in windows of {comparison.positions}."),
    ]


def _last_layers(comparison: Comparison, records: Records, out: Path) -> list[Block]:
    """One strip of heat maps per encoding: the last layer of its first seed. Drawn once, after the training."""
    strips: list[Block] = []
    for encoding in comparison.encodings:
        trial = Trial(encoding, 0)
        file, weights = out / FIGURES / f"{trial.name}.png", out / trial.name / "model.safetensors"
        if "training" not in records[trial] or not weights.exists():
            continue
        if not file.exists() or file.stat().st_mtime < weights.stat().st_mtime:
            try:
                drawn = draw(out / trial.name)
            except (ValueError, OSError) as error:
                strips.append(Text(f"`{encoding}`: {error}"))
                continue
            save(draw_sheet(drawn.maps, Look(caption=drawn.caption)), file)
        strips.append(Image(file, f"{encoding}: the last layer of seed 0, one panel per head."))
    text = Text(
        "The bias that each head adds to the scores, or the scores themselves if an encoding adds no bias, on held-out "
        "text: queries down, keys across, each panel with its own range, printed below it."
    )
    return [Heading("The last layer"), text, *strips] if strips else []


def _what(comparison: Comparison, out: Path) -> str:
    settings = comparison.settings_of(comparison.trials()[0], out)
    run = settings.run
    ends = []
    if run.steps is not None:
        ends.append(f"{run.steps:,} steps ({run.steps * run.batch_size * comparison.length:,} tokens)")
    if run.minutes is not None:
        ends.append(f"{run.minutes:g} minutes")
    text = (
        f"{comparison.family.title} {settings.model.preset}, {run.batch_size} windows of "
        f"{comparison.length} tokens per step, "
        f"{' or '.join(ends)} on `{settings.data.source}`, {several(comparison.seeds, 'seed')}. With the "
        "same seed all encodings read the same windows in the same order, and the weights that they have in "
        "common start with the same values."
    )
    if run.minutes is not None:
        text += (
            " **Training ended by the clock: the faster encodings have seen more data** (the table of costs shows how "
            "much); for equal data give `--steps` or `--tokens`."
        )
    return text


def _making(comparison: Comparison, records: Records, out: Path) -> list[Block]:
    first = [Trial(encoding, 0) for encoding in comparison.encodings]
    single = [comparison.train_command(trial, out) for trial in first]
    lengths = ",".join(map(str, comparison.lengths))
    seeds = ", ".join(map(str, range(comparison.seeds)))
    tokens = f"--eval-tokens {comparison.eval_tokens}"
    folder = shlex.quote(str(out / first[0].name))
    single += [
        f"relpos evaluate {folder} --lengths {lengths} {tokens}",
        f"relpos evaluate {folder} --protocol positions --lengths {comparison.positions} {tokens}",
    ]
    return [
        Text("The commands that were run, and a single command that makes the same comparison:"),
        Code("\n".join([*comparison.commands, "", comparison.command(out)])),
        Text(f"The commands for single trials, with seed 0; the seeds are {seeds}."),
        Code("\n".join(single)),
        Items(_surroundings(records)),
    ]


def _surroundings(records: Records) -> list[str]:
    """Corpus, versions and machines; several of a kind only if trials ran on several machines."""
    lines: dict[str, None] = {}
    for record in records.values():
        about, machine = record.get("about"), record.get("machine")
        if about is not None:
            corpus = about["corpus"]
            lines[f"Corpus: {corpus['name']}, SHA-256 of its texts `{corpus['hash']}`."] = None
            lines[f"Tokens: {about['tokens']['train']:,} to train on, {about['tokens']['heldout']:,} held out."] = None
            lines[
                "Versions: " + ", ".join(f"{name} {version}" for name, version in about["versions"].items()) + "."
            ] = None
        if machine is not None:
            lines[
                f"Machine: {machine['cpu']}, {machine['cores']} cores, {mebibytes(machine['memory_bytes'])}, "
                f"{machine['system']}; {several(machine['threads'], 'thread')} per trial."
            ] = None
    return list(lines)
