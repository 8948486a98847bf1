"""The figures of the paper's appendix (CABLE, arXiv 2503.08067): train missing models, draw, and write a page."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relpos.encodings.registry import encoding
from relpos.forms.encoding import Encoding
from relpos.model_catalogue import preset as preset_of
from relpos.paper.options import STEPS, FigureOptions
from relpos.paper.page import PAGE, write_page
from relpos.pictures.draw import draw
from relpos.runs.settings import TABLES, load_settings
from relpos.system.files import write_text
from relpos.system.options import takes

LENGTH = 512  # tokens, as in the paper
BATCH = 2  # windows per step: a short training learns more from many small steps
# Evaluate at the start and at the end only, and write few checkpoints: both take time.
QUIET = {"run.eval_every": 10**6, "run.save_every": 100}
# The few parameters of a curve over distances hardly change at the learning rate of the weights.
CURVE = {"optimizer.position_lr": 0.03}
# A tenth of nano's learning rate. At the full rate, AdamW moves the gates along the direction that all tokens have in
# common faster than the inputs change, until the ReLU is 0 for every token: several heads of the last layer end with a
# bias of exactly 0. docs/figures.md has the experiments.
GATES = {"optimizer.position_lr": 2e-4}


@dataclass(frozen=True, eq=False)
class PaperFigure:
    """A figure of the paper."""

    number: int  # in the paper
    encoding: str
    title: str  # the encoding's name in the paper
    training: Mapping[str, float] = field(default_factory=dict)  # settings for the encoding's own parameters

    @property
    def stem(self) -> str:
        """The names of its files, without suffix."""
        return f"figure{self.number}-{self.encoding}"


FIGURES = [  # in the order of drawing: first the figure that needs no training
    PaperFigure(12, "alibi", "ALiBi"),
    PaperFigure(10, "kerple_log", "Kerple", CURVE),
    PaperFigure(13, "fire", "FIRE", CURVE),
    PaperFigure(14, "clipped", "T5-bias", TABLES),
    PaperFigure(15, "rope", "RoPE"),
    PaperFigure(8, "cable", "CABLE", GATES),
]


def choose(numbers: Iterable[int]) -> list[PaperFigure]:
    """The figures with these numbers, or all if there are none."""
    known = {figure.number: figure for figure in FIGURES}
    wanted = set(numbers)
    for number in sorted(wanted - set(known)):
        raise ValueError(f"there is no figure {number}: give some of {', '.join(map(str, sorted(known)))}.")
    return [figure for figure in FIGURES if not wanted or figure.number in wanted]


@takes(FigureOptions)
def draw_figures(options: FigureOptions) -> list[str]:
    """Make figures of the CABLE paper: train the missing models, draw, and put all figures on one page.

    `relpos.figures` is this function, and the command `relpos figures` calls it.

    Returns:
        What went wrong, in sentences; empty if all figures were made.

    Raises:
        ValueError: There is no such figure or preset, or a number or setting is not allowed.

    Example:
        >>> draw_figures("figures", [12], say=lambda message: None)
        []
    """
    out, runs, preset, say = Path(options.out), Path(options.runs), options.preset, options.say
    minutes, steps, settings = options.minutes, options.steps, options.settings or {}
    chosen = choose(options.figure)
    heads, head_dim = preset_of(preset).heads, preset_of(preset).head_dim
    learned = [each for each in chosen if needs_training(encoding(each.encoding, heads, head_dim))]
    for each in learned:  # settings are refused here, before anything is drawn, and not by each training's process
        load_settings(None, {**_training(each, preset, runs, minutes, steps), **settings})
    album = Album(out, options.seed, say)
    trainings = {}
    for each in chosen:
        folder = runs / f"figures-{each.encoding}-{preset}"
        if each not in learned:
            album.add(each, each.encoding, heads=heads, head_dim=head_dim)
        elif _trained(folder) and minutes is None and steps is None:
            say(f"{folder} has been trained and is reused.")
            album.add(each, folder)
        else:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                album.miss(each, f"the folder {folder} cannot be created: {error.strerror}.")
                continue
            trainings[each] = {**_training(each, preset, folder, minutes, steps), **settings}
    if trainings:
        cores = os.cpu_count() or 1
        workers = options.workers or (cores if preset == "nano" else 1)
        _train(trainings, min(workers, len(trainings)), max(1, cores // workers), album)
    if len(album.failed) < len(chosen):
        say(f"All figures on one page: {out / PAGE}")
    return album.failed


@dataclass
class Album:
    """The folder of the figures: their files, the page, and the figures that failed."""

    out: Path
    seed: int
    say: Callable[[str], None]
    failed: list[str] = field(default_factory=list)

    def add(self, figure: PaperFigure, what: str | Path, **size: Any) -> None:
        """Draw a figure and write its files and the page."""
        out, title = self.out, f"Figure {figure.number} ({figure.title}). "
        try:
            picture = draw(what, length=LENGTH, seed=self.seed, title=title, **size)
        except (ValueError, TypeError, OSError, RuntimeError) as error:
            self.miss(figure, error)
            return
        for suffix in (".png", ".pdf"):
            picture.save(out / f"{figure.stem}{suffix}")
        numbers = {"figure": figure.number, "caption": picture.caption, **picture.numbers}
        write_text(out / f"{figure.stem}.json", json.dumps(numbers, indent=1, ensure_ascii=False) + "\n")
        write_page(out, [listed.stem for listed in sorted(FIGURES, key=lambda listed: listed.number)])
        self.say(f"{out / figure.stem}.png: {picture.caption}")

    def miss(self, figure: PaperFigure, why: object) -> None:
        """Record that a figure could not be made."""
        self.failed.append(f"Figure {figure.number} ({figure.encoding}) was not made: {why}")
        self.say(self.failed[-1])


def needs_training(position: Encoding) -> bool:
    """Whether training changes the encoding's picture: it has parameters, or the picture shows a model's scores."""
    return not position.static_bias or any(True for _ in position.parameters())


def _trained(folder: Path) -> bool:
    from relpos.runs.results import RESULT

    return (folder / RESULT).exists()


def _training(
    figure: PaperFigure, preset: str, folder: Path, minutes: float | None, steps: int | None
) -> dict[str, Any]:
    """The training settings of a figure's model, by dotted key."""
    ends = {"run.minutes": minutes, "run.steps": STEPS if minutes is None and steps is None else steps}
    return {
        "model.encoding": figure.encoding,
        "model.preset": preset,
        "data.length": LENGTH,
        "run.batch_size": BATCH,
        "run.out": str(folder),
        **{key: value for key, value in ends.items() if value is not None},
        **QUIET,
        **figure.training,
    }


def _train(trainings: Mapping[PaperFigure, dict[str, Any]], workers: int, threads: int, album: Album) -> None:
    """Train the missing models, and draw each as soon as it has been trained."""
    from relpos.runs.results import RESULT
    from relpos.system.files import read_json
    from relpos.training.parallel import train_in_parallel

    named = {figure.encoding: figure for figure in trainings}
    together = f"{workers} at a time, " if workers > 1 else ""
    album.say(f"Training {', '.join(named)} ({together}{threads} thread{'s' * (threads > 1)} each).")
    settings = {figure.encoding: own for figure, own in trainings.items()}
    with contextlib.closing(train_in_parallel(settings, workers, threads)) as ended:
        for name, error in ended:
            if error is None:
                folder = Path(settings[name]["run.out"])
                if warning := read_json(folder / RESULT).get("warning"):
                    album.say(f"warning: {name}: {warning}")
                album.add(named[name], folder)
            else:
                album.miss(named[name], error)
