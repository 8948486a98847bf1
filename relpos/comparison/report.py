"""The report of a comparison in HTML and Markdown, from the records of its trials. Written again after every trial."""

import shlex
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from relpos.comparison import summary
from relpos.comparison.compare_options import SEARCH_SHARE
from relpos.comparison.comparison import Comparison, Trial, finished, load_comparison
from relpos.comparison.search import LR, POSITION_LR, TABLE_LR, tries
from relpos.comparison.summary import Perplexities, Records, Standing
from relpos.evaluation.evaluate_options import LAST
from relpos.pictures.curves import Rows, draw_curves, draw_position_panels
from relpos.pictures.draw import draw
from relpos.pictures.map_figures import draw_sheet
from relpos.pictures.markdown import TRAINED, image, items, table, to_html, without_tags
from relpos.pictures.printed_page import Look, save
from relpos.system.files import write_text
from relpos.text.tokens import MASKED_EVERY

FIGURES = "figures"  # the folder of the pictures in the comparison's folder


def write_report(out: Path) -> tuple[Path, Path]:
    """Write report.html and report.md of a comparison into its folder; trials may be missing."""
    comparison = load_comparison(out)
    text = "\n\n".join(_paragraphs(comparison, summary.read_records(comparison, out), out)) + "\n"
    html, markdown = out / "report.html", out / "report.md"
    write_text(html, to_html(text, out))
    write_text(markdown, text)
    return html, markdown


def _paragraphs(comparison: Comparison, records: Records, out: Path) -> list[str]:
    """The report in Markdown; draws its pictures into the folder."""
    perplexities, standings = summary.make_table(comparison, records), summary.make_standings(comparison, records)
    done = sum(finished(record, comparison, trial) for trial, record in records.items())
    metric, causal = comparison.family.metric, comparison.family.causal
    text = {"heldout": "Held-out text"}.get(comparison.split, f"The {comparison.split} half of the held-out text")
    masked = f"one token in {MASKED_EVERY} masked and scored, the same ones at every length"
    return [
        f"# {len(comparison.encodings)} positional encodings, trained at {comparison.length}",
        _what(comparison, out),
        *([] if done == len(records) else [f"{done} of {len(records)} trials are finished."]),
        f"## {metric.capitalize()} by length",
        f"{text} in windows of each length, {'every token scored' if causal else masked} (`windows`); up to "
        f"{comparison.eval_tokens:,} tokens, the same at every length. Mean ± sample deviation over "
        f"{_several(comparison.seeds, 'seed')}; {comparison.length} is the trained length.",
        *summary.marking(standings),
        _perplexities(comparison, perplexities, standings),
        *_listed(
            "What the table does not show:",
            [*summary.cautions(comparison, records), *summary.notes(comparison, records)],
        ),
        *_listed("What the table shows:", summary.findings(comparison, perplexities, standings)),
        *_differences(comparison, standings),
        *_ranks(comparison, records),
        *_bits(comparison, records),
        *_curves(comparison, perplexities, out),
        *_last_tokens(comparison, records),
        *_positions(comparison, records, out),
        *_last_layers(comparison, records, out),
        *_search(comparison, out),
        "## What each costs",
        _cost_text(records),
        table(*summary.costs(comparison, records)),
        "## How it was made",
        *_making(comparison, records, out),
    ]


def _several(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _listed(title: str, sentences: list[str]) -> list[str]:
    return [title, items(sentences)] if sentences else []


def _what(comparison: Comparison, out: Path) -> str:
    settings = comparison.settings_of(comparison.trials()[0], out)
    run = settings.run
    steps = f"{run.steps:,} steps ({run.steps * run.batch_size * comparison.length:,} tokens)" if run.steps else ""
    minutes = f"{run.minutes:g} minutes" if run.minutes else ""
    text = (
        f"{comparison.family.title} {settings.model.preset}, {run.batch_size} windows of "
        f"{comparison.length} tokens per step, {' or '.join(filter(None, (steps, minutes)))} on "
        f"`{settings.data.source}`, {_several(comparison.seeds, 'seed')}. With the same seed all encodings read the "
        "same windows in the same order, and the weights that they have in common start with the same values."
    )
    if minutes:
        text += (
            " **Training ended by the clock: the faster encodings have seen more data** (the table of costs shows how "
            "much); for equal data give `--steps` or `--tokens`."
        )
    return text


def _by_length(
    comparison: Comparison, text_of: Callable[[str, int], str], bold: Collection[tuple[int, int]] = ()
) -> str:
    """A table in the paper's layout: one row per encoding, one column per length."""
    head = [f"{length} {TRAINED}" if length == comparison.length else str(length) for length in comparison.lengths]
    rows = [[f"`{name}`", *(text_of(name, length) for length in comparison.lengths)] for name in comparison.encodings]
    return table(["encoding", *head], rows, bold)


def _perplexities(comparison: Comparison, perplexities: Perplexities, standings: Mapping[int, Standing]) -> str:
    bold = {
        (row, column)
        for row, encoding in enumerate(comparison.encodings)
        for column, length in enumerate(comparison.lengths, start=1)
        if length in standings and encoding in standings[length].marked
    }
    return _by_length(comparison, lambda encoding, length: str(perplexities[encoding][length]), bold)


def _differences(comparison: Comparison, standings: Mapping[int, Standing]) -> list[str]:
    """The paired differences from the lowest of each length."""
    tested = max((len(at_length.differences) for at_length in standings.values()), default=0)
    if not tested:
        return []
    differences = _by_length(comparison, lambda encoding, length: _difference(standings.get(length), encoding))
    share = f", which is {100 - 100 * (1 - summary.LEVEL) / tested:.2f} % for each of {tested}" if tested > 1 else ""
    level = f"{summary.LEVEL * 100:.0f} % for all comparisons at a length together{share}"
    text = (
        "Loss per token minus that of the lowest of the length, on the same documents and with the same seeds, and its "
        f"interval ({level}). Documents are drawn {summary.DRAWS:,} times with replacement; where there are several "
        "seeds, their variation is added as Student's t. `*`: the interval does not contain 0."
    )
    if comparison.seeds == 1:
        text += " With one seed it is a difference between two trained models, and says little about the encodings."
    return ["## Differences between encodings", text, differences]


def _difference(at_length: Standing | None, encoding: str) -> str:
    if at_length is not None and encoding == at_length.lowest:
        return "lowest"
    if at_length is None or encoding not in at_length.differences:
        return "–"
    difference = at_length.differences[encoding]
    bounds = f"({difference.low:+.3f} to {difference.high:+.3f})".replace(" ", "\N{NO-BREAK SPACE}")
    return f"{difference.mean:+.3f}{'*' if difference.significant else ''} {bounds}"


def _ranks(comparison: Comparison, records: Records) -> list[str]:
    """The table of ranks with their intervals."""
    by_length = summary.make_ranks(comparison, records)
    if not by_length:
        return []
    text = (
        "Mean rank over the resamples of documents and seeds, 1 for the lowest loss, and the interval that holds 95 % "
        "of them. Encodings whose intervals overlap cannot be told apart by this comparison."
    )
    cells = _by_length(comparison, lambda encoding, length: str(by_length.get(length, {}).get(encoding, "–")))
    return ["## Ranks", text, cells]


def _bits(comparison: Comparison, records: Records) -> list[str]:
    """The table of bits per byte, if the evaluations have them."""
    rows = [row for record in records.values() for row in summary.rows_of(record, comparison)]
    if all(row["bits_per_byte"] is None for row in rows):
        return []
    text = (
        "The same losses as bits per byte of the scored text: mean ± sample deviation over the seeds. Unlike "
        "perplexities, these can be compared between tokenizers."
    )
    bits = _by_length(comparison, lambda encoding, length: summary.bits_per_byte(comparison, records, encoding, length))
    return ["## Bits per byte", text, bits]


def _curves(comparison: Comparison, perplexities: Perplexities, out: Path) -> list[str]:
    """Curves of perplexity by length: the mean, and a band from the lowest seed to the highest."""
    series: dict[str, Rows] = {
        encoding: [
            {
                "length": length,
                "perplexity": cell.mean,
                "low": min(cell.values) if len(cell.values) > 1 else None,
                "high": max(cell.values) if len(cell.values) > 1 else None,
                "error": None if cell.values else cell.missing,
            }
            for length, cell in row.items()
        ]
        for encoding, row in perplexities.items()
        if row[comparison.length].values
    }
    if not series:
        return []
    metric = comparison.family.metric
    save(draw_curves(series, comparison.length, metric), out / FIGURES / "curves.png")
    caption = f"{metric.capitalize()} by length; the band spans the seeds."
    return ["## Past the trained length", image(f"{FIGURES}/curves.png", caption)]


def _last_tokens(comparison: Comparison, records: Records) -> list[str]:
    """The table of the protocol `last`, if it was measured."""
    if not comparison.last:
        return []
    perplexities = summary.make_table(comparison, records, "last")
    standings = summary.make_standings(comparison, records, "last")
    scored = min(LAST, comparison.lengths[0])
    text = (
        f"The last {scored} tokens of windows inside one document, the same tokens at every length (`last`), "
        f"{comparison.scored('last'):,} of them: unlike above, no token at a longer length has less "
        "before it than at a shorter one."
    )
    title = f"## {comparison.family.metric.capitalize()} of the last tokens"
    return [title, text, *summary.marking(standings), _perplexities(comparison, perplexities, standings)]


def _positions(comparison: Comparison, records: Records, out: Path) -> list[str]:
    """Curves of loss by position, for the first seed."""
    first = {encoding: records[Trial(encoding, 0)] for encoding in comparison.encodings}
    measured = {encoding: record["positions"] for encoding, record in first.items() if "positions" in record}
    series = {encoding: result["bins"] for encoding, result in measured.items() if result.get("bins")}
    if not series:
        return []
    save(draw_position_panels(series, comparison.length), out / FIGURES / "positions.png")
    text = (
        f"Loss at each position of windows of {comparison.positions} tokens (`positions`, seed 0); dashed, the same "
        f"tokens read by the same model in windows of {comparison.length}. Where the two separate, the length itself "
        "raises or lowers the loss. The band is the 95 % interval over documents."
    )
    warnings = dict.fromkeys(sentence for result in measured.values() for sentence in result.get("warnings", ()))
    picture = image(f"{FIGURES}/positions.png", f"Loss by position in windows of {comparison.positions}.")
    return ["## Loss by position", " ".join([text, *warnings]), picture]


def _last_layers(comparison: Comparison, records: Records, out: Path) -> list[str]:
    """One strip of heat maps per encoding: the last layer of its first seed. Drawn once, after the training."""
    strips: list[str] = []
    for encoding in comparison.encodings:
        trial = Trial(encoding, 0)
        file, weights = out / FIGURES / f"{trial.name}.png", out / trial.name / "model.safetensors"
        if "training" not in records[trial] or not weights.exists():
            continue
        if not file.exists() or file.stat().st_mtime < weights.stat().st_mtime:
            try:
                picture = draw(out / trial.name)
            except (ValueError, OSError) as error:
                strips.append(without_tags(f"`{encoding}`: {error}"))
                continue
            save(draw_sheet(picture.maps, Look(caption=picture.caption)), file)
        strips.append(image(f"{FIGURES}/{file.name}", f"`{encoding}`: the last layer of seed 0, one panel per head."))
    text = (
        "The bias that each head adds to the scores, or the scores themselves if an encoding adds no bias, on held-out "
        "text: queries down, keys across, each panel with its own range, printed below it."
    )
    return ["## The last layer", text, *strips] if strips else []


def _search(comparison: Comparison, out: Path) -> list[str]:
    """What the search tried for each encoding, and what it chose."""
    if not comparison.search:
        return []
    rows: list[list[str]] = []
    bold: set[tuple[int, int]] = set()
    for encoding in comparison.encodings:
        attempts = tries(comparison, encoding, out)
        for attempt in attempts:
            loss, rates = attempt.loss(out), [attempt.settings.get(key) for key in (LR, POSITION_LR, TABLE_LR)]
            if attempt.settings == comparison.chosen.get(encoding):
                bold.add((len(rows), 4))
            words = ["–" if rate is None else f"{rate:g}" for rate in rates]
            rows.append([f"`{encoding}`", *words, "–" if loss is None else f"{loss:.4f}"])
    text = (
        "Before the trials above, every encoding was trained once with each of these settings, with seed 0 and "
        f"1/{SEARCH_SHARE} of the training. **Bold** is the lowest loss per token on the validation split at "
        f"{comparison.length} tokens, the trained length: that setting was then trained with all seeds. The tables "
        "above are of the test split, which the search never read. Settings that differ only in the learning rate of "
        "parameters that an encoding does not have are left out: they would give the same model. A choice at the end "
        "of the range may not be the best there is."
    )
    head = ["encoding", "learning rate", "of its parameters", "of its tables", "validation loss"]
    return ["## What was tried for each encoding", text, table(head, rows, bold)]


def _cost_text(records: Records) -> str:
    threads = sorted({record["machine"]["threads"] for record in records.values() if "machine" in record})
    differ = " They differ between trials: speeds are not comparable." if len(threads) > 1 else ""
    return (
        "Means over the seeds. Training: the median speed over the run, the seconds with its evaluations and "
        "checkpoints, the peak memory of the process. "
        f"Threads per trial: {', '.join(map(str, threads)) or '–'}.{differ}"
    )


def _making(comparison: Comparison, records: Records, out: Path) -> list[str]:
    trials = [Trial(encoding, 0) for encoding in comparison.encodings]
    lengths, tokens = ",".join(map(str, comparison.lengths)), f"--eval-tokens {comparison.eval_tokens}"
    split = "" if comparison.split == "heldout" else f" --split {comparison.split}"
    folder = shlex.quote(str(out / trials[0].name))
    single = [
        *(comparison.train_command(trial, out) for trial in trials),
        f"relpos evaluate {folder} --lengths {lengths} {tokens}{split}",
        *(
            []
            if comparison.positions is None
            else [
                f"relpos evaluate {folder} --protocol positions --lengths {comparison.positions} "
                f"--eval-tokens {comparison.scored('positions')}{split}"
            ]
        ),
    ]
    return [
        "The commands that were run, and a single command that makes the same comparison:",
        _code([*comparison.commands, "", comparison.command(out)]),
        f"The commands for single trials, with seed 0; the seeds are {', '.join(map(str, range(comparison.seeds)))}.",
        _code(single),
        items(_surroundings(records)),
    ]


def _code(lines: list[str]) -> str:
    return "\n".join(["```sh", *lines, "```"])


def _surroundings(records: Records) -> list[str]:
    """Corpus, versions and machines; several of a kind only if trials ran on several machines."""
    lines: list[str] = []
    for record in records.values():
        about, machine = record.get("about"), record.get("machine")
        if about is not None:
            versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
            lines += [
                f"Corpus: {about['corpus']['name']}, SHA-256 of its texts `{about['corpus']['hash']}`.",
                f"Tokens: {about['tokens']['train']:,} to train on, {about['tokens']['heldout']:,} held out.",
                f"Versions: {versions}.",
            ]
        if machine is not None:
            lines.append(
                f"Machine: {machine['cpu']}, {machine['cores']} cores, {summary.mebibytes(machine['memory_bytes'])}, "
                f"{machine['system']}; {_several(machine['threads'], 'thread')} per trial."
            )
    return list(dict.fromkeys(lines))
