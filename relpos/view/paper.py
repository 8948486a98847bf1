"""The figures of the paper's appendix (CABLE, arXiv 2503.08067): trained where need be, drawn, put on a page."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relpos.encodings.encoding import Encoding
from relpos.encodings.registry import encoding
from relpos.lab.atomic import write_text
from relpos.lab.settings import TABLES
from relpos.models.presets import sizes
from relpos.view.page import INDEX, write_index
from relpos.view.picture import Picture, draw

LENGTH = 512  # tokens, as printed
MINUTES = 1.1  # a model is trained unless it is said how long
BATCH = 2  # windows a step: in so short a time, more steps of less
# The few numbers that make a curve of the distance hardly leave their start at the rate of the weights. Where the bias
# is made of the input, its parameters are weights like others, and have the rate of the others.
CURVE = {"optimizer.position_rate": 0.03}


@dataclass(frozen=True)
class PaperFigure:
    """A figure by its number in the paper."""

    number: int
    encoding: str
    title: str  # as the paper calls it
    training: Mapping[str, float] = field(default_factory=dict)  # settings of the encoding's own parameters

    @property
    def stem(self) -> str:
        """Of its files' names."""
        return f"figure{self.number}-{self.encoding}"


FIGURES = [  # in the order they are made: what needs no training first
    PaperFigure(12, "alibi", "ALiBi"),
    PaperFigure(10, "kerple_log", "Kerple", CURVE),
    PaperFigure(13, "fire", "FIRE", CURVE),
    PaperFigure(14, "clipped", "T5-bias", TABLES),
    PaperFigure(15, "rope", "RoPE"),
    PaperFigure(8, "cable", "CABLE"),
]


def choose(numbers: Iterable[int]) -> list[PaperFigure]:
    """The figures of these numbers, all of them if there are none."""
    known = {figure.number: figure for figure in FIGURES}
    wanted = set(numbers)
    for number in sorted(wanted - set(known)):
        raise ValueError(f"there is no figure {number}; those of encodings are {', '.join(map(str, sorted(known)))}.")
    return [figure for figure in FIGURES if not wanted or figure.number in wanted]


def draw_figures(
    out: Path,
    numbers: Iterable[int] = (),
    *,
    preset: str = "nano",
    runs: Path = Path("runs"),
    seed: int = 0,
    minutes: float | None = None,
    steps: int | None = None,
    settings: dict[str, Any] | None = None,
    say: Callable[[str], None] = print,
) -> list[str]:
    """Make the figures of these numbers, all unless given, in the folder `out`; gives what went wrong, in sentences.

    preset          size of the models
    runs            folder of their runs; those that have finished are taken as they are, unless minutes or steps ask
                    for more
    seed            of the window of held-out text
    minutes, steps  how long a model is trained
    settings        others of the training, by dotted key
    """
    failed = []
    shown = choose(numbers)
    for figure in shown:
        try:
            picture = _picture(figure, preset, runs, seed, minutes, steps, settings or {}, say)
        except (ValueError, TypeError, OSError, RuntimeError) as error:
            failed.append(f"Figure {figure.number} ({figure.encoding}) was not made: {error}")
            say(failed[-1])
            continue
        for suffix in (".png", ".pdf"):
            picture.save(out / f"{figure.stem}{suffix}")
        numbers_of = {"figure": figure.number, "caption": picture.caption, **picture.numbers}
        write_text(out / f"{figure.stem}.json", json.dumps(numbers_of, indent=1, ensure_ascii=False) + "\n")
        write_index(out, [one.stem for one in sorted(FIGURES, key=lambda one: one.number)])
        say(f"{out / figure.stem}.png: {picture.caption}")
    if len(failed) < len(shown):
        say(f"All of them on one page: {out / INDEX}")
    return failed


def needs_training(made: Encoding) -> bool:
    """Whether there is anything in its picture that training makes: parameters, or scores of a model."""
    static = made.place == "score" and not made.needs_hidden and not made.needs_scores
    return not static or any(True for _ in made.parameters())


def _picture(
    figure: PaperFigure,
    preset: str,
    runs: Path,
    seed: int,
    minutes: float | None,
    steps: int | None,
    settings: dict[str, Any],
    say: Callable[[str], None],
) -> Picture:
    size = sizes(preset)
    heads, head_dim = size["n_head"], size["n_embd"] // size["n_head"]
    title = f"Figure {figure.number} ({figure.title}). "
    made = encoding(figure.encoding, heads, head_dim)
    if not needs_training(made):
        return draw(figure.encoding, length=LENGTH, heads=heads, head_dim=head_dim, seed=seed, title=title)
    folder = runs / f"figures-{figure.encoding}-{preset}"
    own = {"model.encoding": figure.encoding, "model.preset": preset, **figure.training, **settings}
    _train(folder, own, minutes, steps, say)
    return draw(folder, length=LENGTH, seed=seed, title=title)


def _train(
    folder: Path, settings: dict[str, Any], minutes: float | None, steps: int | None, say: Callable[[str], None]
) -> None:
    from relpos.lab.runs import RESULT
    from relpos.lab.settings import load_settings
    from relpos.lab.train import silent, train

    if (folder / RESULT).exists() and minutes is None and steps is None:
        say(f"{folder} has been trained: taken as it is.")
        return
    given: dict[str, Any] = {
        "data.length": LENGTH,
        "run.batch": BATCH,
        "run.minutes": MINUTES if minutes is None and steps is None else minutes,
        "run.steps": steps,
        "run.out": str(folder),
        **settings,
    }
    say(f"Training {settings['model.preset']} with {settings['model.encoding']} in {folder}")
    result = train(load_settings(None, {key: value for key, value in given.items() if value is not None}), silent)
    if "warning" in result:
        say(f"warning: {result['warning']}")
