"""The figures of heads of the CABLE paper (arXiv 2503.08067): train what is missing, draw, write one page."""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relpos.encodings.registry import encoding
from relpos.forms.encoding import Encoding
from relpos.model_catalogue import preset
from relpos.paper.figures_options import STEPS, FigureOptions
from relpos.paper.pair_figure import join_pictures
from relpos.pictures.captions import NO_NUMBER, latex
from relpos.pictures.draw import draw
from relpos.pictures.markdown import escaped, image, table, to_html
from relpos.pictures.picture import LayerNumbers, Picture
from relpos.runs.results import RESULT
from relpos.runs.settings import TABLES, load_settings
from relpos.system.files import read_json, write_text
from relpos.system.options import takes

PAGE = "index.html"
TITLE = "Positional encodings: the figures"
INTRODUCTION = (
    "Figures 4, 5 and 8 to 15 of “Context-aware Biases for Length Extrapolation” "
    "([arXiv 2503.08067](https://arxiv.org/abs/2503.08067)), drawn by relpos. Uniformity is 1 if a map is constant "
    "along every diagonal. Context dependence is 0 if a map is the same for every input, and about 1 if the maps of "
    f"two inputs have nothing in common. A head that is exactly constant has neither number ({NO_NUMBER}). "
    "FIRE has uniformity 1 up to its learned threshold: it divides by the query’s position only in the rows beyond."
)
COLUMNS = ["head", "minimum", "maximum", "ticks here", "ticks in the paper", "uniformity", "context dependence", "note"]
PRINTED = Path(__file__).with_name("printed_ticks.json")  # the ticks of the paper's colour bars, by figure and head

LENGTH = 512  # tokens, as in the paper
BATCH = 2  # windows per step: a short training learns more from many small steps
# Evaluate at the start and at the end only, and write few checkpoints: both take time.
QUIET = {"run.eval_every": 10**6, "run.save_every": 100}
# K-CABLE and DAPEv2 have a bias that no fast kernel computes: a step takes many times as long.
SLOW_STEPS, FEW_WINDOWS = 60, {"run.eval_windows": 4}
# The few parameters of a curve over distances hardly change at the learning rate of the weights.
CURVE = {"optimizer.position_lr": 0.03}
# A tenth of nano's learning rate. At the full rate, AdamW moves the gates along the direction that all tokens have in
# common faster than the inputs change, until the ReLU is 0 for every token: several heads of the last layer end with a
# bias of exactly 0. docs/figures.md has the experiments.
GATES = {"optimizer.position_lr": 2e-4}


@dataclass(frozen=True, eq=False)
class PaperModel:
    """A model of the figures."""

    name: str  # in the name of its run's folder
    encoding: str
    title: str  # the encoding's name in the paper
    training: Mapping[str, Any] = field(default_factory=dict)  # settings for the encoding's own parameters
    steps: int = STEPS


@dataclass(frozen=True, eq=False)
class PaperFigure:
    """A figure of the paper."""

    number: int  # in the paper
    model: PaperModel
    beside: PaperModel | None = None  # a second model, some of whose heads are on the same page

    @property
    def models(self) -> list[PaperModel]:
        return [self.model] if self.beside is None else [self.model, self.beside]

    @property
    def title(self) -> str:
        return " and ".join(model.title for model in self.models)

    @property
    def encodings(self) -> list[str]:
        return list(dict.fromkeys(model.encoding for model in self.models))

    @property
    def stem(self) -> str:
        """The names of its files, without suffix."""
        return f"figure{self.number}-{'-'.join(model.name for model in self.models)}"


ALIBI = PaperModel("alibi", "alibi", "ALiBi")
CABLE = PaperModel("cable", "cable", "CABLE", GATES)
KERPLE = PaperModel("kerple_log", "kerple_log", "Kerple", CURVE)
KCABLE = PaperModel("kcable", "kcable", "K-CABLE", {**GATES, **FEW_WINDOWS}, SLOW_STEPS)
FIRE = PaperModel("fire", "fire", "FIRE", CURVE)
T5_BIAS = PaperModel("clipped", "clipped", "T5-bias", TABLES)
ROPE = PaperModel("rope", "rope", "RoPE")
OVER_CABLE, OVER_KERPLE = (
    PaperModel(f"dapev2-{base}", "dapev2", f"DAPEv2 + {title}", {"model.options.base": base, **FEW_WINDOWS}, SLOW_STEPS)
    for base, title in (("cable", "CABLE"), ("kerple_log", "Kerple"))
)
FIGURES = [  # in the order of drawing: first the figure that needs no training
    PaperFigure(12, ALIBI),
    PaperFigure(10, KERPLE),
    PaperFigure(13, FIRE),
    PaperFigure(14, T5_BIAS),
    PaperFigure(15, ROPE),
    PaperFigure(8, CABLE),
    PaperFigure(4, CABLE, ALIBI),
    PaperFigure(5, CABLE, KCABLE),
    PaperFigure(9, OVER_CABLE),
    PaperFigure(11, OVER_KERPLE),
]
# Figure 4 needs no model beyond these; the other three train one each, which takes longer than all of these together.
USUAL = (4, 8, 10, 12, 13, 14, 15)


def choose(numbers: Iterable[int]) -> list[PaperFigure]:
    """The figures with these numbers, or the usual ones if there are none."""
    known = {figure.number: figure for figure in FIGURES}
    wanted = set(numbers) or set(USUAL)
    for number in sorted(wanted - set(known)):
        raise ValueError(f"there is no figure {number}: give some of {', '.join(map(str, sorted(known)))}.")
    return [figure for figure in FIGURES if figure.number in wanted]


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
    chosen = choose(options.figure)
    size = {"heads": preset(options.preset).heads, "head_dim": preset(options.preset).head_dim}
    models = list(dict.fromkeys(model for figure in chosen for model in figure.models))
    learned = [model for model in models if needs_training(encoding(model.encoding, **size))]
    settings = {model: training_settings(model, options) for model in learned}
    for values in settings.values():  # refused here, before anything is drawn, and not by each training's process
        load_settings(None, values)
    album = Album(options, chosen, size)
    trainings = {}
    for model in models:
        if model not in learned:
            album.ready(model, model.encoding)
            continue
        folder = Path(settings[model]["run.out"])
        if (folder / RESULT).exists() and options.minutes is None and options.steps is None:
            options.say(f"{folder} has been trained and is reused.")
            album.ready(model, folder)
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            trainings[model] = settings[model]
        except OSError as error:
            album.miss(model, f"the folder {folder} cannot be created: {error.strerror}.")
    if trainings:
        cores = os.cpu_count() or 1
        workers = options.workers or (cores if options.preset == "nano" else 1)
        _train(trainings, min(workers, len(trainings)), max(1, cores // workers), album)
    if len(album.failed) < len(chosen):
        options.say(f"All figures on one page: {Path(options.out) / PAGE}")
    return album.failed


def needs_training(position: Encoding) -> bool:
    """Whether training changes the encoding's picture: it has parameters, or the picture shows a model's scores."""
    return not position.static_bias or any(True for _ in position.parameters())


def training_settings(model: PaperModel, options: FigureOptions) -> dict[str, Any]:
    """The training settings of a model, by dotted key."""
    steps = model.steps if options.minutes is None and options.steps is None else options.steps
    ends = {"run.minutes": options.minutes, "run.steps": steps}
    return {
        "model.encoding": model.encoding,
        "model.preset": options.preset,
        "data.length": LENGTH,
        "run.batch_size": BATCH,
        "run.out": str(Path(options.runs) / f"figures-{model.name}-{options.preset}"),
        **{key: value for key, value in ends.items() if value is not None},
        **QUIET,
        **model.training,
        **(options.settings or {}),
    }


class Album:
    """The folder of the figures: their files, the page, and the figures that failed."""

    def __init__(self, options: FigureOptions, figures: list[PaperFigure], size: Mapping[str, Any]) -> None:
        self.out, self.seed, self.say = Path(options.out), options.seed, options.say
        self.figures, self.size = figures, size
        self.sources: dict[PaperModel, str | Path] = {}  # of the models that are ready: a folder, or an encoding
        self.failed: list[str] = []
        self._missed: list[PaperFigure] = []

    def ready(self, model: PaperModel, source: str | Path) -> None:
        """Draw the figures that waited for this model."""
        self.sources[model] = source
        for figure in self.figures:
            if model in figure.models and all(each in self.sources for each in figure.models):
                self.add(figure)

    def add(self, figure: PaperFigure) -> None:
        """Draw a figure and write its files and the page."""
        number = f"Figure {figure.number}: "
        try:
            pictures = {model.title: self._draw(model, number) for model in figure.models}
            picture = next(iter(pictures.values())) if len(pictures) == 1 else join_pictures(pictures, number)
        except (ValueError, TypeError, OSError, RuntimeError) as error:
            self._fail(figure, error)
            return
        for suffix in (".png", ".pdf"):
            picture.save(self.out / f"{figure.stem}{suffix}")
        caption = latex(picture.caption.removeprefix(number))  # LaTeX numbers its figures itself
        numbers = {"figure": figure.number, **picture.about, "caption_latex": caption}
        write_text(self.out / f"{figure.stem}.json", json.dumps(numbers, indent=1, ensure_ascii=False) + "\n")
        write_text(self.out / f"{figure.stem}.txt", caption + "\n")
        write_page(self.out)
        self.say(f"{self.out / figure.stem}.png: {picture.caption}")

    def _draw(self, model: PaperModel, title: str) -> Picture:
        source = self.sources[model]
        size = self.size if isinstance(source, str) else {}
        return draw(source, length=LENGTH, seed=self.seed, title=title, name=model.title, **size)

    def miss(self, model: PaperModel, why: object) -> None:
        """Record that the figures of a model could not be made."""
        for figure in self.figures:
            if model in figure.models:
                self._fail(figure, why)

    def _fail(self, figure: PaperFigure, why: object) -> None:
        if figure in self._missed:  # both of its models failed
            return
        self._missed.append(figure)
        self.failed.append(f"Figure {figure.number} ({', '.join(figure.encodings)}) was not made: {why}")
        self.say(self.failed[-1])


def _train(trainings: Mapping[PaperModel, Mapping[str, Any]], workers: int, threads: int, album: Album) -> None:
    """Train the missing models, and draw each as soon as it has been trained."""
    from relpos.training.parallel import train_in_parallel

    models = {model.name: model for model in trainings}
    together = f"{workers} at a time, " if workers > 1 else ""
    album.say(f"Training {', '.join(models)} ({together}{threads} thread{'s' * (threads > 1)} each).")
    settings = {model.name: values for model, values in trainings.items()}
    with contextlib.closing(train_in_parallel(settings, workers, threads)) as ends:
        for name, error in ends:
            if error is not None:
                album.miss(models[name], error)
                continue
            folder = Path(settings[name]["run.out"])
            if warning := read_json(folder / RESULT).get("warning"):
                album.say(f"warning: {name}: {warning}")
            album.ready(models[name], folder)


def write_page(folder: Path) -> Path:
    """Write index.html with the figures that are in a folder, by their PNG, PDF and JSON files."""
    stems = [figure.stem for figure in sorted(FIGURES, key=lambda figure: figure.number)]
    present = [stem for stem in stems if (folder / f"{stem}.json").exists()]
    figures = {stem: json.loads((folder / f"{stem}.json").read_text(encoding="utf-8")) for stem in present}
    links = " · ".join(f"[Figure {numbers['figure']}](#{stem})" for stem, numbers in figures.items())
    titles = {
        figure.stem: f"{escaped(figure.title)} ({', '.join(f'`{name}`' for name in figure.encodings)})"
        for figure in FIGURES
    }
    paragraphs = [f"# {TITLE}", _training_words(list(figures.values())), INTRODUCTION, links]
    for stem, numbers in figures.items():
        words = numbers["input"]["first_words"] if numbers["input"] else None
        paragraphs += [
            f"## Figure {numbers['figure']}: {titles[stem]} {{#{stem}}}",
            image(f"{stem}.png", f"The input begins: “{escaped(words)} …”" if words else "", alt=numbers["caption"]),
            f"Files: [PDF]({stem}.pdf), [numbers as JSON]({stem}.json), [caption for LaTeX]({stem}.txt).",
            _ticks_words(numbers["layers"][0], printed := printed_ticks(numbers["figure"])),
            _head_table(numbers["layers"][0], printed),
        ]
    write_text(folder / PAGE, to_html("\n\n".join(filter(None, paragraphs)), folder))
    return folder / PAGE


def _training_words(figures: Iterable[Mapping[str, Any]]) -> str:
    """The sentence that says how small the models are and how short their training was; empty without a model."""
    trained = [numbers for numbers in figures if numbers.get("training")]
    models = sorted({f"{numbers['model']['preset']} ({numbers['model']['layers']} layers)" for numbers in trained})
    steps = sorted({numbers["training"]["steps"] for numbers in trained})
    if not trained:
        return ""
    listed = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
    return (
        f"**The trained models are {' and '.join(models)}, trained for {listed} steps.** Compare the kinds of "
        "patterns with the paper, not the values."
    )


def printed_ticks(figure: int) -> list[list[float]]:
    """The ticks of the colour bar of each head in the paper's figure; empty if they are not known."""
    figures: dict[str, list[list[float]]] = json.loads(PRINTED.read_text(encoding="utf-8"))["figures"]
    return figures.get(str(figure), [])


def _ticks_words(layer: LayerNumbers, printed: list[list[float]]) -> str:
    """The sentence that compares the ticks of a figure with those in the paper; empty if those are not known."""
    if len(printed) != len(layer["heads"]):
        return ""
    if all(head.get("ticks") == ticks for head, ticks in zip(layer["heads"], printed, strict=True)):
        return f"The colour bars of all {len(printed)} heads have exactly the ticks that the paper prints."
    return "The values are learned, so the ticks of the paper show another training: compare signs and sizes."


def _head_table(layer: LayerNumbers, printed: list[list[float]]) -> str:
    low, high = min(head["minimum"] for head in layer["heads"]), max(head["maximum"] for head in layer["heads"])
    measures = {"uniformity": layer["uniformity"], "context_dependence": layer["context_dependence"]}
    rows = [{"head": "all", "minimum": low, "maximum": high, **measures}, *layer["heads"]]
    comparable = len(printed) == len(layer["heads"])
    cells = [
        _cells(row, ticks) for row, ticks in zip(rows, [[], *(printed if comparable else [[]] * 99)], strict=False)
    ]
    empty = {COLUMNS.index(name) for name in COLUMNS if not any(row[COLUMNS.index(name)] for row in cells)}
    if not comparable:
        empty.add(COLUMNS.index("ticks here"))
    return table(
        [name for place, name in enumerate(COLUMNS) if place not in empty],
        [[cell for place, cell in enumerate(row) if place not in empty] for row in cells],
    )


def _cells(row: Mapping[str, Any], printed: list[float]) -> list[str]:
    """A head, or all, in the table: a head that is exactly constant has no uniformity."""
    ends = [f"{row[key]:.4g}".replace("-", "−") for key in ("minimum", "maximum")]
    ticks = [_ticks_text(values) for values in (row.get("ticks", []), printed)]
    shares = [row[key] for key in ("uniformity", "context_dependence")]
    numbers = [NO_NUMBER if share is None else f"{share:g}" if share in (0, 1) else f"{share:.3f}" for share in shares]
    return [str(row["head"]), *ends, *ticks, *numbers, row.get("note") or ""]


def _ticks_text(ticks: list[float]) -> str:
    """Ticks in a few words: the first, the last and the step."""
    if len(ticks) < 2:
        return "".join(f"{tick:g}" for tick in ticks)
    return f"{ticks[0]:g} to {ticks[-1]:g}, every {ticks[1] - ticks[0]:.4g}".replace("-", "−")
