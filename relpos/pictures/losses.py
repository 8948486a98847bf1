"""The training curve of a run: losses against tokens."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure


def draw_losses(entries: Sequence[Mapping[str, float]], title: str) -> Figure:
    """Draw training and held-out loss against tokens.

    Args:
        entries: The lines of a run's log, from `relpos.runs.checkpoints.read_log`.
        title: Text above the curves.

    Returns:
        The figure.
    """
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, label in (("loss", "train"), ("heldout", "heldout")):
        points = [(entry["tokens"], entry[name]) for entry in entries if name in entry]
        if points:
            axes.plot(*zip(*points, strict=True), label=label)
    axes.set(xlabel="tokens", ylabel="loss", title=title)
    if axes.lines:
        axes.legend()
    return figure
