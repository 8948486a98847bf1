"""What relpos does with each family of transformers: opened, drawn, used, equal, and the memory of a long forward.

    python benchmarks/families.py                        every family of small_models.py and speech models
    python benchmarks/families.py --families t5,bloom    these rows anew, the others as they are

Each family is a small random model (2 layers, 4 heads), saved to a folder with a tokenizer. "Opened": `relpos.open`,
and what it found. "Equal": the largest difference of logits and of gradients between the model on relpos
(`relpos.use`) and transformers' "eager", padded inputs, relative to the largest logit, and to each parameter's
largest gradient. "Drawn": the largest difference between the weights that `relpos.draw` shows and those that "eager"
returns. Memory is the peak of one forward of 2,048 tokens, beyond what stood before. Writes
benchmarks/results/families.{json,md}.
"""

import json
import logging
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import option_parser, peak_bytes, read, table, write

import relpos

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from senses_models import SPEECH, long_sound, senses_batch, senses_model, states_and_gradients
from small_models import (
    FAMILIES,
    KINDS,
    TEXT,
    batch,
    kind_of,
    logits_and_gradients,
    saved,
    small_model,
    word_tokenizer,
)

LONG = 2048
NOTES = {
    "granite_swa": 'its "eager" returns the weights before the sink takes its share; ours are those that are used',
    "falcon alibi": 'its "eager" adds the bias twice; all but the weights is compared with "sdpa", which adds it once',
    "inkling_text": "its bias is materialised by the model, and added as it is",
    "seamless_m4t_v2 relative_key": 'its "eager" adds a boolean mask to the scores; compared with "sdpa"',
    "longt5": "its local encoder keeps its own code, and returns no weights of this shape",
}
ALL = [*FAMILIES, *SPEECH]
LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len")  # settings that would stop a long input


def largest(ours: torch.Tensor, theirs: torch.Tensor, scale: float) -> float:
    return float((ours - theirs).abs().max()) / scale


def equality(family: str) -> dict[str, Any]:
    """Differences from "eager", or why `relpos.use` refuses the family."""
    if family in SPEECH:
        model, inputs, compute = senses_model(family), senses_batch(family), states_and_gradients
    else:
        model, inputs, compute = small_model(family), batch(family), logits_and_gradients
    logits, gradients = compute(model, inputs)
    try:
        relpos.use(model)
    except (ValueError, TypeError) as error:
        return {"refused": str(error)}
    ours, our_gradients = compute(model, inputs)
    most = max(float(gradient.abs().max()) for gradient in gradients.values())
    by_parameter = [
        largest(our_gradients[name], gradient, max(float(gradient.abs().max()), 0.01 * most))
        for name, gradient in gradients.items()
    ]
    return {"logits": largest(ours, logits, float(logits.abs().max())), "gradients": max(by_parameter)}


def opening(family: str, folder: Path) -> dict[str, Any]:
    """What was opened, and whether what is drawn is what "eager" returns."""
    model = small_model(family)
    run = relpos.open(saved(model, folder))
    run = replace(run, tokenizer=word_tokenizer())  # some families have a tokenizer of their own, which reads no "w05"
    row: dict[str, Any] = {"opened": run.encoding}
    picture = relpos.draw(run, text=TEXT, layer=1, show="weights")
    drawn = torch.from_numpy(picture.maps[0].mean).nan_to_num().float()
    ids = torch.tensor([word_tokenizer()(TEXT)["input_ids"]])
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids[:, :-1]} if kind_of(family) == "seq2seq" else {})
    model = type(model).from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    weights = out.get("encoder_attentions") or out.attentions
    expected = next((each[0] for each in weights if each is not None and each.shape[-2:] == drawn.shape[-2:]), None)
    return row | {"drawn": None if expected is None else largest(drawn, expected, 1.0)}


def memory(family: str, ours: bool) -> float:
    """Peak of one long forward in MB."""
    if family in SPEECH:
        model, inputs = senses_model(family), long_sound(family, LONG)
    else:
        known, kind = KINDS[kind_of(family)][family], kind_of(family)
        model = small_model(family, **{name: 2 * LONG for name in LIMITS if name in known})
        ids = torch.randint(4, 60, (1, LONG))
        inputs = {"input_ids": ids, **({"use_cache": False} if kind != "encoder" else {})}
        inputs |= {"decoder_input_ids": ids} if kind == "seq2seq" else {}
    if ours:
        relpos.use(model)
    with torch.no_grad():
        return peak_bytes(lambda: model(**inputs)) / 1e6


def about(family: str) -> dict[str, Any]:
    row: dict[str, Any] = {"family": family} | equality(family)
    if family in SPEECH:
        row["opened"] = "–"
    else:
        with tempfile.TemporaryDirectory() as folder:
            row |= opening(family, Path(folder))
    for whose, ours in (("ours", True), ("eager", False)):
        row[f"MB, {whose}"] = None if ours and "refused" in row else memory(family, ours)
    return row


def report(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """The table as Markdown, and notes."""
    header = ["family", "opened: its positions", "used: logits off by", "gradients off by", "drawn: weights off by"]
    header += [f"MB at {LONG:,} tokens", "the same, eager"]
    lines = []
    for row in rows:
        if "error" in row:
            lines.append([row["family"], row["error"], *[""] * 5])
            continue
        off = [f"{row[name]:.0e}" if row.get(name) is not None else "–" for name in ("logits", "gradients", "drawn")]
        if "refused" in row:
            off[0] = "refused"
        ours = "–" if row["MB, ours"] is None else f"{row['MB, ours']:.0f}"
        lines.append([row["family"], row["opened"], *off, ours, f"{row['MB, eager']:.0f}"])
    notes = [f"- {family}: {NOTES[family]}." for family in (row["family"] for row in rows) if family in NOTES]
    if any(row["family"] in SPEECH for row in rows):
        notes.append(f"- {', '.join(SPEECH)}: states in place of logits, frames in place of tokens; they read no text.")
    return table(header, lines), "\n".join(notes)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--families", default=",".join(ALL))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = []
    for family in arguments.families.split(","):
        try:
            rows.append(about(family))
        except Exception as error:  # a table with a gap that says why
            rows.append({"family": family, "error": f"{type(error).__name__}: {error}".splitlines()[0]})
        print(json.dumps(rows[-1]), flush=True)
    if not arguments.no_file:
        known = {row["family"]: row for row in [*(read("families") or []), *rows]}
        rows = [known[family] for family in ALL if family in known]
        write("families", rows, "Made by `benchmarks/families.py`, which says what the columns mean.", *report(rows))


if __name__ == "__main__":
    main()
