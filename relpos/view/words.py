"""What is said of a picture: how the model was trained, what it read, what was measured."""

import json
from typing import TYPE_CHECKING, Any

from relpos.view.maps import Map
from relpos.view.numbers import Share

if TYPE_CHECKING:
    from relpos.lab.runs import Run
    from relpos.lab.samples import Sample

SHOWN = {"bias": "the additive bias", "scores": "the attention scores", "weights": "the attention weights"}


def training(run: "Run") -> dict[str, Any]:
    """How long a model was trained, as far as its folder tells: steps, tokens, seconds and its held-out loss."""
    from relpos.lab.checkpoints import step_of
    from relpos.lab.log import read_log
    from relpos.lab.runs import ABOUT
    from relpos.lab.trainer import CLOCK

    settings, folder = run.settings, run.folder
    if settings is None:
        return {}
    told: dict[str, Any] = {"corpus": run.about.get("corpus", {}).get("name"), "versions": run.about.get("versions")}
    told |= {key: getattr(settings.optimizer, key) for key in ("rate", "position_rate", "table_rate", "table_epsilon")}
    if (folder / ABOUT).exists():
        result = run.result
        kept = ("tokens", "seconds", "loss", "heldout", "heldout_at_start")
        return {"steps": result.get("step"), **{key: result.get(key) for key in kept}, **told}
    step = step_of(folder)  # a checkpoint: what was known then
    losses = [entry["heldout"] for entry in read_log(folder.parent) if entry["step"] == step and "heldout" in entry]
    seconds = round(json.loads((folder / CLOCK).read_text(encoding="utf-8"))["seconds"], 1)
    tokens = step * settings.run.batch * settings.data.length
    return {"steps": step, "tokens": tokens, "seconds": seconds, "heldout": losses[-1] if losses else None, **told}


def training_sentence(told: dict[str, Any]) -> str:
    """The same in words."""
    if told.get("steps") is None:
        return ""
    seconds, tokens = told["seconds"], told["tokens"]
    many = f"{tokens / 1e6:,.1f} M" if tokens >= 1e6 else f"{tokens:,}"
    long = f"{seconds:.0f} s" if seconds < 180 else f"{seconds / 60:.0f} min"
    loss = f"; held-out loss {told['heldout']:.2f}" if told.get("heldout") is not None else ""
    return f"Trained {told['steps']:,} steps, {many} tokens, {long}{loss}."


def input_words(sample: "Sample") -> dict[str, Any]:
    """What was read."""
    return {
        "document": sample.document,
        "offset": sample.offset,
        "tokens": len(sample.ids),
        "first_words": sample.words,
    }


def measured(found: Map, ticks: dict[int, list[float]]) -> dict[str, Any]:
    """The numbers of one layer: of each head, and overall. `ticks` are those of the heads' colour bars."""
    heads = []
    for head in range(found.heads):
        low, high = found.range(head)
        entry: dict[str, Any] = {"head": head + 1, "minimum": low + 0.0, "maximum": high + 0.0}  # no −0
        if head in ticks:
            entry["ticks"] = [tick + 0.0 for tick in ticks[head]]
        entry["uniformity"] = found.uniformity.heads[head]
        entry["context_dependence"] = None if found.context is None else found.context.heads[head]
        heads.append(entry)
    return {
        "layer": found.layer,
        "uniformity": found.uniformity.overall,
        "context_dependence": None if found.context is None else found.context.overall,
        "heads": heads,
    }


def measured_sentence(maps: list[Map]) -> str:
    """Uniformity and context dependence in words, from the smallest to the largest of the layers."""
    uniform = _span([found.uniformity for found in maps])
    contexts = [found.context for found in maps if found.context is not None]
    context = f", context dependence {_span(contexts)}" if contexts else ""
    return f"Uniformity along diagonals {uniform}{context}."


def _span(shares: list[Share]) -> str:
    low, high = min(share.overall for share in shares), max(share.overall for share in shares)
    return _number(low) if _number(low) == _number(high) else f"{_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    """Three places; what is exactly 0 or 1 has none."""
    return f"{value:.0f}" if value in (0.0, 1.0) else f"{value:.3f}"
