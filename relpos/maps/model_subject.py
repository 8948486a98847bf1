"""A model as a subject: its layers on an input, which it reads only when something that is shown depends on it."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from relpos.attend.arguments import LayerCall
from relpos.encodings.registry import canonical, check_encoding_or_folder, names
from relpos.forms.encoding import Encoding
from relpos.maps import LENGTH
from relpos.maps.distance_profiles import equal_tokens, rotation_kernel, token_means
from relpos.maps.head_values import head_values
from relpos.maps.layer import Layer, layers_without_input, model_layers, open_layer
from relpos.maps.subject import (
    EncodingSubject,
    Request,
    Show,
    Subject,
    View,
    layer_numbers,
    refuse_sizes,
    which_layers,
)
from relpos.maps.toeplitz import ByDistance
from relpos.maps.values import HeadValues

if TYPE_CHECKING:
    from relpos.pretrained.layer_position import LayerPosition
    from relpos.runs.run import ModelInput, Run

ALL_OFFSETS = 10**6  # wider than any window of patches


class ModelSubject(Subject):
    """A model: a run, a checkpoint, or what others trained, as `relpos.open` takes them."""

    kind = "model"

    def __init__(self, run: "Run") -> None:
        self.run, self.name, self.trained_length = run, run.folder.name, run.trained_length
        self.depth, self.heads = run.family.depth(run.model), run.family.heads(run.model)
        self.lock = threading.Lock()  # held while the model runs
        self.cores: Callable[[], AbstractContextManager[None]] = nullcontext  # on which it runs
        self.most_bytes: int | None = None  # of queries and keys

    @cached_property
    def layers(self) -> list[Layer]:
        """Its layers on two tokens, which have everything but the numbers of an input."""
        return model_layers(self.run.family, self.run.model, torch.tensor([1, 2]), range(1, self.depth + 1))

    @cached_property
    def titles(self) -> tuple[str, str]:
        """Its encodings, and where they act."""
        return self.run.family.position_titles(self.run.model, range(1, self.depth + 1))

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.titles[0]

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return self.layers[0].causal

    @cached_property
    def shows(self) -> tuple[Show, ...]:  # type: ignore[override]
        bias = any(layer.form is not None for layer in self.layers)
        position = "embedding" in self.titles[1] or any(layer.turned is not None for layer in self.layers)
        kinds: dict[Show, bool] = {"bias": bias, "scores": True, "weights": True, "position": position, "flat": bias}
        return tuple(show for show, exists in kinds.items() if exists)

    @property
    def default_show(self) -> Show:  # type: ignore[override]
        return "bias" if all(layer.form is not None for layer in self.layers) else "weights"

    def layers_on(self, ids: Tensor, numbers: Sequence[int]) -> list[Layer]:
        """Run the model on token ids (length,)."""
        if self.most_bytes is not None:
            per_token = sum(4 * layer.q.shape[-1] * (layer.heads + layer.k.shape[1]) for layer in self.layers)
            if len(ids) * per_token > self.most_bytes:
                raise ValueError(
                    f"{len(ids):,} tokens of this model need {len(ids) * per_token / 2**30:.1f} GB: give at most "
                    f"{self.most_bytes // per_token:,}."
                )
        with self.lock, self.cores():
            return model_layers(self.run.family, self.run.model, ids, numbers)

    def view(self, request: Request) -> "ModelView":
        from relpos.runs.run import heldout_samples, text_sample

        refuse_sizes(str(self.run.folder), self.heads, request)
        if request.text is None:
            trained = self.trained_length or LENGTH
            usual = min(trained, LENGTH) if self.run.settings is None else trained
            shown, *rest = heldout_samples(self.run, request.length or usual, request.seed, max(2, request.windows))
            return ModelView(self, request, shown, lambda: rest, rest[: request.windows - 1])
        shown = text_sample(self.run, *request.text, request.length)
        return ModelView(self, request, shown, lambda: self.other_inputs(shown, request.seed))

    def other_inputs(self, shown: "ModelInput", seed: int) -> "list[ModelInput]":
        """Held-out text that is as long as an input, to compare it with; none if there is no such text."""
        from relpos.runs.run import heldout_samples

        try:
            samples = heldout_samples(self.run, len(shown.ids), seed, 3)
        except (ValueError, OSError, ImportError):  # the held-out text is shorter, or not on this machine
            return []
        return [sample for sample in samples if not torch.equal(sample.ids, shown.ids)][:1]


class ModelView(View):
    """A model on an input; without an input, its static bias. It runs when something depends on the input."""

    def __init__(
        self,
        subject: ModelSubject,
        request: Request,
        shown: "ModelInput | None",
        rest: "Callable[[], list[ModelInput]]",  # other inputs of the same length
        averaged: "Sequence[ModelInput]" = (),  # with the input that is shown
    ) -> None:
        run, family = subject.run, subject.run.family
        numbers = layer_numbers(request.layer, subject.depth)
        self.preset = "" if run.settings is None else run.settings.model.preset or ""
        whose = f"{family.title} {self.preset}".strip() if run.settings else f"{family.title} ({subject.name})"
        titles = family.position_titles(run.model, numbers)
        heading = f"{titles[0]}, {whose}, {which_layers(numbers, subject.depth)}"
        where = f"for {request.length:,} tokens." if shown is None else input_sentence(shown, 1)
        trained = training_sentence(run.training())
        super().__init__("model", subject.name, titles, numbers, heading, f"{where} {trained}".strip())
        if shown is not None and averaged:
            self.mean_ending = f"{input_sentence(shown, 1 + len(averaged))} {trained}".strip()
        self.more = [lambda sample=sample: self._on(sample) for sample in averaged]  # type: ignore[misc]
        self.subject, self.request, self.shown, self.rest, self.averaged = subject, request, shown, rest, averaged
        self._lock, self._computed = threading.RLock(), dict[str, list[Layer] | None]()

    @property
    def length(self) -> int:
        return len(self.shown.ids) if self.shown is not None else self.request.length or LENGTH

    @property
    def heads(self) -> int:
        return self.subject.heads

    @property
    def causal(self) -> bool:
        return (self.static_layers or self._computed.get("input") or self.subject.layers)[0].causal

    @property
    def static(self) -> bool:  # type: ignore[override]
        return self.static_layers is not None

    @cached_property
    def tokens(self) -> list[str] | None:  # type: ignore[override]
        tokenizer = self.subject.run.tokenizer
        if tokenizer is None or self.shown is None:
            return None
        return [tokenizer.decode([int(token)]) for token in self.shown.ids]

    def _once(self, name: str, compute: Callable[[], list[Layer] | None]) -> list[Layer] | None:
        with self._lock:
            if name not in self._computed:
                self._computed[name] = compute()
            return self._computed[name]

    def _on(self, sample: "ModelInput | None") -> list[Layer]:
        assert sample is not None, "the length is too great for values that depend on the input"
        return self.subject.layers_on(sample.ids, self.numbers)

    @property
    def static_layers(self) -> list[Layer] | None:
        """The layers without an input; None if their bias depends on it."""
        run = self.subject.run
        return self._once("static", lambda: layers_without_input(run.family, run.model, self.length, self.numbers))

    @property
    def input_layers(self) -> list[Layer]:
        """The layers on the input: the model runs once."""
        return self._once("input", lambda: self._on(self.shown)) or []

    @property
    def layers(self) -> list[Layer]:  # type: ignore[override]
        return (self.static_layers if self.request.input_free else None) or self.input_layers

    @property
    def others(self) -> list[Layer] | None:  # type: ignore[override]
        if self.request.input_free and self.static_layers:
            return self.static_layers if self.rest() else None
        return self.other_layers()

    def other_layers(self) -> list[Layer] | None:
        """The layers on another input; None if there is none."""
        return self._once("other", lambda: self._on(self.rest()[0]) if self.rest() else None)

    def equal(self) -> list[Layer]:
        return self._once("equal", lambda: equal_tokens(self.subject.run.model, lambda: self._on(self.shown))) or []

    def layer(self, show: Show, number: int) -> Layer:
        static = self.static_layers if show in ("bias", "flat") else None
        layers = static or (self.equal() if self._embedded(show) else self.input_layers)
        layer = layers[self.numbers.index(number)]
        if show in ("bias", "flat") and layer.form is None:
            raise ValueError(f"layer {number} adds no bias: show the scores or the weights.")
        return layer

    def _embedded(self, show: Show) -> bool:
        return show == "position" and "embedding" in self.place

    def values(self, show: Show, number: int, head: int) -> HeadValues:
        if show != "position":
            return super().values(show, number, head)
        layer = self.layer(show, number)
        if self._embedded(show):
            return head_values(layer, head - 1, "scores")
        if layer.turned is None:
            raise ValueError(f"layer {number} does not rotate queries and keys: show the scores or the weights.")
        distances = torch.arange(0 if layer.causal else 1 - layer.length, layer.length)
        return ByDistance(rotation_kernel([token_means(layer)]).total(distances)[head - 1], layer.length)

    def _kept(self) -> list[Layer]:
        return [layer for layers in list(self._computed.values()) for layer in layers or []]

    @property
    def about(self) -> dict[str, Any]:  # type: ignore[override]
        run, rest = self.subject.run, self.rest()
        assert self.shown is not None
        averaged = {"averaged_with": [input_words(sample) for sample in self.averaged]}
        return {
            "model": {
                "folder": str(run.folder),
                "preset": self.preset or None,
                "layers": self.subject.depth,
                "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
                "position": run.family.position_entry(run.model),
            },
            "training": run.training() or None,
            "input": input_words(self.shown),
            "compared_with": input_words(rest[0]) if rest else None,
            **(averaged if self.request.windows > 1 else {}),
        }


def open_model(what: "str | Path | Run", bos: bool) -> "Run":
    """A model, by name or folder or open already; without `bos` it reads text alone."""
    if isinstance(what, str | Path):
        check_encoding_or_folder(what)
        from relpos.runs.run import open_run

        what = open_run(what)
    return what.reading(bos)


def open_view(what: Any, request: Request, bos: bool = True) -> View:
    """The view of an encoding or a model for a picture."""
    if isinstance(what, Encoding) or canonical(what) in names():
        return EncodingSubject(canonical(what) if isinstance(what, str) else what).view(request)
    tables = request.input_free and request.text is None
    view = _fetched_view(what, request) if tables and isinstance(what, str) else None
    if view is not None:
        return view
    run = open_model(what, bos)
    positions = _table_positions(run)
    if positions is None:
        return ModelSubject(run).view(request)
    if not tables:
        kind = type(run.model).__name__
        raise ValueError(f"{kind} reads {run.model.main_input_name}, not text: only its bias can be drawn.")
    return _tables_view(run, positions, request)


def _fetched_view(what: str, request: Request) -> View | None:
    """The bias of a model on the hub, of which only the positional tensors are fetched; None for all others."""
    if "/" not in what or Path(what).exists():
        return None
    from relpos.model_catalogue import is_hub_name
    from relpos.pretrained.open import fetch_positions
    from relpos.pretrained.reader import static_call

    fetched = fetch_positions(what) if is_hub_name(what) else None
    if fetched is None:
        return None
    model, positions, read = fetched
    length, numbers = request.length or LENGTH, layer_numbers(request.layer, len(positions))
    layers = []
    for number in numbers:
        bias = positions[number - 1].bias_by_distance
        assert bias is not None
        causal = positions[number - 1].kind == "alibi" or "decoder" in positions[number - 1].name.split(".")
        layers.append(open_layer(number, static_call(bias(length), causal)))
    refuse_sizes(what, layers[0].heads, request)
    name = positions[numbers[0] - 1].title
    heading = f"{name}, {model.config.model_type} {what}, {which_layers(numbers, len(positions))}"
    ending = f"for {length} tokens; of the weights, {read:,} bytes were read"
    about = {"model": {"folder": what, "layers": len(positions), "bytes_fetched": read}, "input": None}
    words = ((name, "score"), numbers, heading, ending)
    return View("model", Path(what).name, *words, layers=layers, others=layers, about=about)


def _table_positions(run: "Run") -> "list[LayerPosition] | None":
    """Where position lives in each layer of a model that reads images, if it is a 2-D table in all of them."""
    from relpos.pretrained.positions import layer_positions

    if getattr(run.model, "main_input_name", "input_ids") != "pixel_values":
        return None
    positions = layer_positions(run.model)
    return positions if positions and all(position.kind == "table 2-D" for position in positions) else None


def _tables_view(run: "Run", positions: "list[LayerPosition]", request: Request) -> View:
    """Learned biases over 2-D offsets of image patches (Swin, BEiT), read from the weights: the model is not run."""
    from relpos.models.attention_interface import ModelBias, dense

    numbers, tables, layers = layer_numbers(request.layer, len(positions)), [], []
    for number in numbers:
        bias = positions[number - 1].bias
        assert bias is not None
        tables.append(bias(ALL_OFFSETS))
    if len({table.shape for table in tables}) > 1:
        counts = [len(table) for table in tables]
        raise ValueError(f"the layers of {run.folder.name} have {min(counts)} to {max(counts)} heads: give one layer.")
    heads, high, wide = len(tables[0]), *((size + 1) // 2 for size in tables[0].shape[1:])
    refuse_sizes(str(run.folder), heads, request)
    y, x = (axis.flatten() for axis in torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij"))
    for number, table in zip(numbers, tables, strict=True):  # one window of patches, row by row
        patches = table[:, y[:, None] - y + high - 1, x[:, None] - x + wide - 1]  # (heads, patches, patches)
        zeros = table.new_zeros(1).expand(1, heads, high * wide, 1)
        position = ModelBias(heads, 1, (dense(patches[None]),))
        layers.append(open_layer(number, LayerCall(zeros, zeros, position, {"causal": False})))
    name = positions[numbers[0] - 1].title
    entry = {"name": name, "layers": [position.words for position in positions]}
    about = {"model": {"folder": str(run.folder), "layers": len(positions), "position": entry}, "input": None}
    heading = f"{name}, {run.model.config.model_type} ({run.folder.name}), {which_layers(numbers, len(positions))}"
    ending = f"in windows of {high} × {wide} patches."
    words = ((name, "score"), numbers, heading, ending)
    return View("model", run.folder.name, *words, layers=layers, about=about, tables=tables)


def training_sentence(training: Mapping[str, Any]) -> str:
    """How long a model was trained, from the entries of `Run.training`; empty if unknown."""
    if training.get("steps") is None:
        return ""
    tokens = training["tokens"]
    amount = f"{tokens / 1e6:,.1f} M" if tokens >= 1e6 else f"{tokens:,}"
    loss = f"; held-out loss {training['heldout']:.2f}" if training.get("heldout") is not None else ""
    # The seconds are left out, since they differ from run to run: the same model has the same picture, byte for byte.
    return f"Trained {training['steps']:,} steps, {amount} tokens{loss}."


def input_sentence(sample: "ModelInput", windows: int) -> str:
    """The end of a sentence: on which text."""
    special = f" {sample.framing.sentence}" if len(sample.framing) else ""
    if windows > 1:
        return f"on {windows} windows of {len(sample.ids):,} tokens of held-out text.{special}"
    start = f", from token {sample.offset}" if sample.offset else ""
    return f"on {len(sample.ids)} tokens of {sample.document}{start}.{special}"


def input_words(sample: "ModelInput") -> dict[str, Any]:
    """Where an input comes from, and its first words."""
    return {
        "document": sample.document,
        "offset": sample.offset,
        "tokens": len(sample.ids),
        "first_words": sample.words,
        **({"special_tokens": sample.framing.as_json()} if len(sample.framing) else {}),
    }
