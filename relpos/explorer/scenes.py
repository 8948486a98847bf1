"""Scenes: a subject with its parameters on an input at a length, from a description that is checked and completed."""

import hashlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

from relpos.encodings.registry import card, encoding_class, names
from relpos.explorer import explore_options as options
from relpos.explorer import replies
from relpos.explorer.sliders import make_encoding, presets, sliders
from relpos.forms.formulas import mathml, statements
from relpos.maps import HEAD_DIM, HEADS, LENGTH
from relpos.maps.map import HeadMap, both_signs, sampled_range
from relpos.maps.model_subject import ModelSubject, ModelView
from relpos.maps.subject import EncodingSubject, Request, Show, Subject, TensorSubject, View, turns_by_distance
from relpos.maps.toeplitz import ByDistance
from relpos.maps.values import all_cores
from relpos.runs.results import read_evaluations
from relpos.system.errors import unknown

if TYPE_CHECKING:
    from relpos.explorer.model_inputs import ModelInputs

ENTRIES = ("subject", "encoding", "length", "input", "seed", "parameters", "heads", "causal")  # of a request
ARXIV = re.compile(r"arXiv (\d{4}\.\d{4,5})")
Result = TypeVar("Result")


class Scene:
    """What can be looked at: the map of every layer and head of a view."""

    def __init__(self, request: replies.SceneRequest, view: View, shows: tuple[Show, ...], default_show: Show) -> None:
        self.request, self.view, self.shows, self.default_show = request, view, shows, default_show
        self.length, self.heads, self.depth = view.length, view.heads, len(view.numbers)
        self.caption = f"{view.heading}, {view.ending}"
        self.notes: list[str] = []  # how it differs from what was asked for
        self.used = time.monotonic()  # when it was last asked for
        self._lock = threading.Lock()
        self._maps: OrderedDict[tuple[str, int, int], HeadMap] = OrderedDict()
        self._measured: dict[Any, Any] = {}

    def head_map(self, show: str, number: int, head: int) -> HeadMap:
        """The map of a head of a layer; 1 is the first of both."""
        kind = self.check_show(show)
        for name, place, last in (("layer", number, self.depth), ("head", head, self.heads)):
            if not 1 <= place <= last:
                raise ValueError(f"there is no {name} {place}: give a number from 1 to {last}.")
        key = (show, number, head)
        with self._lock:
            if key in self._maps:
                self._maps.move_to_end(key)
                return self._maps[key]
        head_map = HeadMap(self.view.values(kind, number, head))
        with self._lock:
            return self._maps.setdefault(key, head_map)

    def measured(self, key: Any, compute: Callable[[], Result]) -> Result:
        """What was measured before, or is measured now: small results that several requests need."""
        with self._lock:
            if key in self._measured:
                return cast(Result, self._measured[key])
        result = compute()
        with self._lock:
            return cast(Result, self._measured.setdefault(key, result))

    def both_signs(self, show: str) -> bool:
        """Whether the maps of a kind of values have colours centred on 0: decided once, from the heads of all layers.

        The rule is that of the figures; the ranges come from a sample of rows, so that one map need not wait for all.
        """
        if self.check_show(show) in ("weights", "flat"):
            return False

        def decide() -> bool:
            ranges = []
            for number in self.view.numbers:
                try:
                    heads = [self.view.values(show, number, head + 1) for head in range(self.heads)]  # type: ignore[arg-type]
                except ValueError:  # a layer without such values
                    continue
                ranges += [sampled_range(values, show) for values in heads]
            return bool(ranges) and both_signs(ranges)

        return self.measured(("both signs", show), decide)

    def check_show(self, show: str) -> Show:
        """Refuse a kind of values that the scene does not have."""
        if show not in self.shows:
            raise unknown("kind of values", show[:40], self.shows)
        return show

    def forget_maps(self, most: int) -> None:
        """Drop the maps that were not looked at for the longest time, until the others have at most this many bytes."""
        with self._lock:
            while self._maps and sum(head_map.nbytes for head_map in self._maps.values()) > most:
                self._maps.popitem(last=False)

    @property
    def map_bytes(self) -> int:
        with self._lock:
            return sum(head_map.nbytes for head_map in self._maps.values())

    @property
    def by_distance(self) -> bool:
        """Whether the default values of all heads are known to be a function of the distance, for every input."""
        if not self.view.static or self.default_show == "weights" or self.view.kind == "tensor":
            return False
        return all(isinstance(self.view.values(self.default_show, n, 1), ByDistance) for n in self.view.numbers)

    def as_json(self) -> replies.Scene:
        """The reply to a request for a scene."""
        known = self.by_distance
        return {
            "scene": scene_hash(self.request),
            "request": self.request,
            "length": self.length,
            "layers": self.depth,
            "heads": self.heads,
            "causal": self.view.causal,
            "shows": list(self.shows),
            "default_show": self.default_show,
            "static": self.view.static,
            "has_tokens": self.view.tokens is not None,
            "caption": self.caption,
            "notes": self.notes,
            "uniformity": [[1.0] * self.heads] * self.depth if known else None,
            "context_dependence": [[0.0] * self.heads] * self.depth if known else None,
        }


def scene_hash(request: Mapping[str, Any]) -> str:
    """The name of a scene: a hash of its completed description."""
    written = json.dumps(request, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(written.encode()).hexdigest()[:32]


class ExplorerSubject:
    """A subject with its place on the command line (None for the pages of encodings) and what it shows at first."""

    def __init__(self, id: str | None, subject: Subject, length: int | None = None, text: str | None = None) -> None:
        self.id, self.subject, self.text = id, subject, text
        self.trained_length = subject.trained_length if isinstance(subject, ModelSubject) else None
        self.length = length or min(self.trained_length or LENGTH, 1024)
        self.heads = subject.heads
        self.name = f"{subject.name} {id}" if subject.kind == "tensor" and id not in (None, "0") else subject.name
        if isinstance(subject, TensorSubject):
            self.length = subject.length
        if isinstance(subject, ModelSubject):
            subject.cores, subject.most_bytes = all_cores, options.SCENE_BYTES
            _ = self.inputs and self.inputs.documents  # read before the server starts, so that the first view is fast

    @cached_property
    def inputs(self) -> "ModelInputs | None":
        """What a model can read."""
        if not isinstance(self.subject, ModelSubject):
            return None
        from relpos.explorer.model_inputs import ModelInputs

        return ModelInputs(self.subject)

    def as_json(self) -> replies.Subject:
        """What the page shows of it."""
        subject, inputs = self.subject, self.inputs
        about = encoding_json(subject.encoding) if subject.encoding in names() else None
        family = subject.run.family.title if isinstance(subject, ModelSubject) else None
        sizes = f"{subject.depth} layers, {self.heads} heads"
        captions = {
            "encoding": "" if about is None else about["summary"],
            "model": f"{family} with {subject.encoding}: {sizes}.",
            "tensor": f"A tensor of {sizes} and {self.length:,} tokens.",
        }
        return {
            "id": self.id or "",
            "name": self.name,
            "kind": subject.kind,
            "encoding": subject.encoding,
            "family": "tensor" if subject.kind == "tensor" else family,
            "layers": subject.depth,
            "heads": self.heads,
            "causal": subject.causal,
            "trained_length": self.trained_length,
            "shows": list(subject.shows),
            "default_show": subject.default_show,
            "reads_text": inputs is not None and inputs.run.tokenizer is not None,
            "can_write": inputs is not None and inputs.can_write,
            "documents": [] if inputs is None else inputs.documents,
            "default": self.complete({}),
            "evaluation": bool(self.evaluation()["curves"]),
            "formula": None if about is None else about["formula"],
            "paper": None if about is None else about["paper"],
            "caption": captions[subject.kind],
            "parameters": about["parameters"] if about is not None and subject.kind == "encoding" else [],
        }

    @cached_property
    def _fixed(self) -> dict[str, object]:
        """What a request cannot change."""
        sizes = {"heads": self.heads, "causal": self.subject.causal, "parameters": {}}
        nothing = {"kind": "none"}
        match self.subject.kind:
            case "encoding":
                return {"input": nothing}
            case "model":
                return sizes
        return {**sizes, "input": nothing, "length": self.length, "seed": 0}

    @cached_property
    def _default_input(self) -> replies.Input:
        assert self.inputs is not None
        text = self.text
        return self.inputs.default(self.length) if text is None else self.inputs.check({"kind": "text", "text": text})

    def complete(self, body: Mapping[str, Any]) -> replies.SceneRequest:
        """Check the description of a scene, and fill in what is missing."""
        for entry in body:
            if entry not in ENTRIES:
                raise unknown("entry", str(entry)[:100], ENTRIES)
        for name, value in self._fixed.items():
            if body.get(name, value) not in (value, None):
                raise ValueError(f"{name} of {self.name} is {value}: leave it out.")
        body = {**body, **self._fixed}
        if not isinstance(body.get("parameters", {}), dict):
            raise ValueError("parameters must be an object with one entry per parameter.")
        if not isinstance(body.get("causal", True), bool):
            raise ValueError(f"causal must be true or false, not {str(body['causal'])[:40]}.")
        reading = body.get("input")
        if self.inputs is not None:
            reading = self._default_input if reading is None else self.inputs.check(reading)
        return {
            "subject": self.id,
            "encoding": self.subject.encoding,
            "length": integer("length", body.get("length", self.length), 1, options.LONGEST),
            "input": reading,  # type: ignore[typeddict-item]
            "seed": integer("seed", body.get("seed", 0), 0, 2**31 - 1),
            "parameters": dict(sorted(body.get("parameters", {}).items())),
            "heads": integer("heads", body.get("heads", self.heads), 1, max(options.MOST_HEADS, self.heads)),
            "causal": body.get("causal", True),
        }

    def scene(self, request: replies.SceneRequest) -> Scene:
        """Make the scene of a completed description."""
        length, seed = request["length"], request["seed"]
        wanted = Request(length, "all", seed, request["causal"], input_free=True, closed=True)
        if isinstance(self.subject, EncodingSubject):
            return self._encoding_scene(request, wanted)
        if not isinstance(self.subject, ModelSubject):
            view = self.subject.view(wanted)
            return Scene(request, view, self.subject.shows, self.subject.default_show)
        return self._model_scene(request, wanted, self.subject)

    def _encoding_scene(self, request: replies.SceneRequest, wanted: Request) -> Scene:
        length, name = request["length"], self.subject.name
        position = make_encoding(name, request["heads"], HEAD_DIM, request["parameters"], request["seed"])
        most, why = options.LONGEST, ""
        if "Scored" in position.form:
            most, why = options.ROWS_LENGTH, f": {name} needs complete rows of all heads"
        elif not (position.static_bias or turns_by_distance(position)):
            most, why = options.ENTRY_LENGTH, f": {name} is computed from queries and keys, or from an input"
        _check_length(length, most, why)
        subject = EncodingSubject(position, name)
        shows = subject.shows
        if length > options.ENTRY_LENGTH and "Scaled" in position.form:  # no closed form of its softmax
            shows = tuple(show for show in shows if show != "flat")
        scene = Scene(request, subject.view(wanted), shows, shows[0])
        equal = "" if not scene.view.static or shows[0] == "bias" else ", of equal tokens"
        scene.caption = f"{name}: {card(name).summary} {length:,} tokens {scene.view.ending}{equal}."
        return scene

    def _model_scene(self, request: replies.SceneRequest, wanted: Request, subject: ModelSubject) -> Scene:
        assert self.inputs is not None
        length, shown, shows, notes = request["length"], None, subject.shows, list[str]()
        if length <= options.ENTRY_LENGTH:
            shown, notes = self.inputs.read(request["input"], length, request["seed"])
        view = ModelView(
            subject, wanted, shown, lambda: [] if shown is None else subject.other_inputs(shown, request["seed"])
        )
        if any(layer.reads_rows for layer in subject.layers):
            why = f": {subject.encoding} needs complete rows of all heads"
            _check_length(view.length, options.ROWS_LENGTH, why)
        if shown is None:
            if view.static_layers is None:
                _check_length(length, options.ENTRY_LENGTH, " for values that depend on the input")
            by_distance = all(layer.even_by_distance for layer in view.static_layers or [])
            shows = ("bias", "flat") if by_distance else ("bias",)
            beyond = f"Beyond {options.ENTRY_LENGTH:,} tokens"
            notes = [f"{beyond} only the bias is shown: scores need the model to read the text."]
        scene = Scene(request, view, shows, subject.default_show)
        scene.notes = notes
        return scene

    def written(self, scene: Scene, tokens: int) -> replies.SceneRequest:
        """The description of the scene in which the model has written on."""
        if self.inputs is None or not self.inputs.can_write:
            raise ValueError(f"{self.name} does not predict the next token, so it cannot write.")
        reading = scene.request["input"]
        count, before, of = tokens, scene.length, reading
        if reading["kind"] == "written":
            of, before, count = reading["of"], reading["length"], reading["tokens"] + tokens
        if before + count > options.ENTRY_LENGTH or count > options.MOST_WRITTEN:
            raise ValueError(f"the model has written enough: at most {options.MOST_WRITTEN} tokens at a time are kept.")
        writing = {"kind": "written", "of": of, "length": before, "tokens": count}
        return self.complete({**scene.request, "length": before + count, "input": writing})

    def evaluation(self) -> replies.Evaluation:
        """The curves of its evaluations, if there are any."""
        curves: list[replies.Curve] = []
        evaluations = read_evaluations(self.subject.run.evaluation) if isinstance(self.subject, ModelSubject) else []
        for evaluation in evaluations:
            rows: list[Any] = [row for row in evaluation.get("rows", []) if row.get("error") is None]
            if not rows or not all("perplexity" in row for row in rows):
                continue
            scaling = str(evaluation.get("rope_scaling") or "")
            curves.append(
                {
                    "label": f"{self.subject.encoding} {scaling}".strip(),
                    "protocol": str(evaluation.get("protocol")),
                    "lengths": [row["length"] for row in rows],
                    "perplexity": [row["perplexity"] for row in rows],
                    "low": [row.get("low") for row in rows],
                    "high": [row.get("high") for row in rows],
                }
            )
        return {"curves": curves, "trained_length": self.trained_length}


def _check_length(length: int, most: int, why: str) -> None:
    if length > most:
        raise ValueError(f"{length:,} tokens are too many{why}: give a length of at most {most:,}.")


def encoding_json(name: str) -> replies.EncodingCard:
    """What the page of an encoding shows of it."""
    cls: Any = encoding_class(name)
    return _encoding_json(name, cls)


@cache
def _encoding_json(name: str, cls: object) -> replies.EncodingCard:
    """The same, computed once per class."""
    about = card(name)
    number = ARXIV.search(about.paper)
    parts, note = statements(about.formula)
    return {
        "name": name,
        "summary": about.summary,
        "group": about.group,
        "place": about.place,
        "form": about.form,
        "paper": about.paper,
        "arxiv": number[1] if number else None,
        "formula": {"statements": [mathml(part) for part in parts], "note": note, "text": about.formula},
        "parameters": sliders(name, HEADS, HEAD_DIM),
        "presets": presets().get(name, []),
        "causal_only": about.directions != "both",
    }


def integer(name: str, value: Any, low: int, high: int) -> int:
    """An integer within bounds."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low:,} to {high:,}, not {str(value)[:40]}.")
    return value
