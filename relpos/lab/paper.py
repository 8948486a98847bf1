"""The figures of the paper's appendix (CABLE, arXiv 2503.08067): trained where need be, drawn, put on a page."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relpos.encodings.encoding import Encoding
from relpos.encodings.registry import encoding
from relpos.lab.runs.settings import TABLES
from relpos.models.presets import sizes
from relpos.system.files import write_text
from relpos.view.page import INDEX, write_index
from relpos.view.picture import draw
from relpos.view.subjects import static_bias

LENGTH = 512  # tokens, as printed
STEPS = 240  # a model is trained unless it is said how long: by steps, so that everyone gets the same picture
BATCH = 2  # windows per step: in so short a time, more steps of less
# Held-out loss at the start and at the end only, and few checkpoints: both take time from the training.
QUIET = {"run.eval_every": 10**6, "run.save_every": 100}
# The few numbers that make a curve of the distance hardly leave their start at the rate of the weights.
CURVE = {"optimizer.position_lr": 0.03}
# A tenth of nano's. At nano's own, AdamW moves the gates along the direction that all
# tokens have in common faster than the inputs change, until ReLU is 0 for every token: several heads of the last layer
# end with a bias of exactly 0. docs/figures.md has the experiments.
GATES = {"optimizer.position_lr": 2e-4}


@dataclass(frozen=True, eq=False)
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
    PaperFigure(8, "cable", "CABLE", GATES),
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
    workers: int | None = None,
    settings: dict[str, Any] | None = None,
    say: Callable[[str], None] = print,
) -> list[str]:
    """Make figures of the paper: train what is missing, draw, and put all on one page.

    Args:
        out: The folder to write to.
        numbers: Of the figures; all unless given.
        preset: Size of the models.
        runs: Folder of their runs; those that have finished are taken as they are, unless minutes or steps ask for
            more.
        seed: Of the window of held-out text.
        minutes: How long each model is trained.
        steps: How many steps each model is trained; 240 unless this or minutes is given.
        workers: How many models are trained at once; the cores are divided among them. One per core for nano, which a
            single core trains as fast as two, and one at a time for larger models, unless given.
        settings: Others of the training, by dotted key.
        say: Receives what happens, in sentences.

    Returns:
        What went wrong, in sentences.
    """
    shown = choose(numbers)
    album = Album(out, seed, say)
    size = sizes(preset)
    heads, head_dim = size["n_head"], size["n_embd"] // size["n_head"]
    trainings = {}
    for figure in shown:
        folder = runs / f"figures-{figure.encoding}-{preset}"
        if not needs_training(encoding(figure.encoding, heads, head_dim)):
            album.add(figure, figure.encoding, heads=heads, head_dim=head_dim)
        elif _trained(folder) and minutes is None and steps is None:
            say(f"{folder} has been trained: taken as it is.")
            album.add(figure, folder)
        else:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                album.miss(figure, f"the folder {folder} cannot be made: {error.strerror}.")
                continue
            trainings[figure] = {**_training(figure, preset, folder, minutes, steps), **(settings or {})}
    if trainings:
        cores = os.cpu_count() or 1
        workers = workers or (cores if preset == "nano" else 1)
        _train(trainings, min(workers, len(trainings)), max(1, cores // workers), album)
    if len(album.failed) < len(shown):
        say(f"All of them on one page: {out / INDEX}")
    return album.failed


@dataclass
class Album:
    """The folder of the figures: their files, the page of all, and what went wrong."""

    out: Path
    seed: int
    say: Callable[[str], None]
    failed: list[str] = field(default_factory=list)

    def add(self, figure: PaperFigure, what: str | Path, **size: Any) -> None:
        """Draw one figure, write its files and the page of all."""
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
        write_index(out, [one.stem for one in sorted(FIGURES, key=lambda one: one.number)])
        self.say(f"{out / figure.stem}.png: {picture.caption}")

    def miss(self, figure: PaperFigure, why: object) -> None:
        """A figure could not be made."""
        self.failed.append(f"Figure {figure.number} ({figure.encoding}) was not made: {why}")
        self.say(self.failed[-1])


def needs_training(made: Encoding) -> bool:
    """Whether there is anything in its picture that training makes: parameters, or scores of a model."""
    return not static_bias(made) or any(True for _ in made.parameters())


def _trained(folder: Path) -> bool:
    from relpos.lab.runs.run import RESULT

    return (folder / RESULT).exists()


def _training(
    figure: PaperFigure, preset: str, folder: Path, minutes: float | None, steps: int | None
) -> dict[str, Any]:
    """The settings of a figure's model, by dotted key."""
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
    """Train what is missing, and draw each model as soon as it is there."""
    from relpos.lab.runs.run import RESULT
    from relpos.lab.train.parallel import train_in_parallel
    from relpos.system.mappings import read_json

    named = {figure.encoding: figure for figure in trainings}
    together = f"{workers} at once, " if workers > 1 else ""
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
