"""What the server sends and receives as JSON, as types, from which those of the page are made.

python -m relpos.explorer.replies > explorer/src/data/types.ts

Layers and heads are counted from 1, queries and keys from 0.
"""

import json
import math
import sys
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, NotRequired, TypedDict, Union, get_args, get_origin, get_type_hints, is_typeddict

from relpos.explorer.explore_options import LONGEST, TEXT_BYTES
from relpos.maps.map import FLAT_RANGE, TILE, ColourMap, Extend
from relpos.maps.subject import Kind, Show

Parameter = float | str | bool | list[float]
Numbers = list[float | None]  # None: no number
SIDE, MOST_SIDE = 48, 192  # cells per side of a small map: by default, and at most


class Slider(TypedDict):
    """One parameter of an encoding, with its range."""

    name: str
    label: str
    help: str
    kind: Literal["float", "int", "choice", "per_head"]
    low: float | None
    high: float | None
    step: float | None
    scale: Literal["linear", "log"]
    value: Parameter
    choices: list[str | float | bool] | None


class Preset(TypedDict):
    """Parameters of an encoding that are worth a look."""

    name: str
    parameters: dict[str, Parameter]


class Formula(TypedDict):
    """A formula as mathematics."""

    statements: list[str]  # MathML, each
    note: str
    text: str  # in one line


class EncodingCard(TypedDict):
    """What the page of an encoding shows of it."""

    name: str
    summary: str
    group: str
    place: str
    form: str
    paper: str
    arxiv: str | None
    formula: Formula
    parameters: list[Slider]
    presets: list[Preset]
    causal_only: bool


class StoryStep(TypedDict):
    """One step of a story: what is said, and what the page shows."""

    text: str
    address: str  # of the page: "#/encoding/alibi/1?q=100&k=92"
    reads: NotRequired[float]  # the value under the cursor
    unseen: NotRequired[bool]  # whether the query does not see the key
    refused: NotRequired[str]  # part of the sentence with which the server refuses what is asked
    play: NotRequired[str]  # a parameter whose slider moves


class Story(TypedDict):
    """A short tour of an encoding."""

    name: str
    title: str
    encoding: str
    steps: list[StoryStep]


class Group(TypedDict):
    """Encodings that act in the same place."""

    title: str
    names: list[str]


class DocumentTitle(TypedDict):
    """A held-out document that a model can read."""

    id: int
    title: str
    tokens: int


class NoInput(TypedDict):
    """Nothing: random tokens."""

    kind: Literal["none"]


class DocumentInput(TypedDict):
    """The beginning of a held-out document."""

    kind: Literal["document"]
    id: int


class TextInput(TypedDict):
    """The reader's own text."""

    kind: Literal["text"]
    text: str


Reading = NoInput | DocumentInput | TextInput


class WrittenInput(TypedDict):
    """The first `length` tokens of something, and those that the model wrote after them."""

    kind: Literal["written"]
    of: Reading
    length: int
    tokens: int


Input = Reading | WrittenInput


class SceneRequest(TypedDict):
    """The description of a scene; the server fills in what is missing."""

    subject: str | None
    encoding: NotRequired[str | None]
    length: NotRequired[int]
    input: NotRequired[Input]
    seed: NotRequired[int]
    parameters: NotRequired[dict[str, Parameter]]
    heads: NotRequired[int]
    causal: NotRequired[bool]


class Subject(TypedDict):
    """What was named on the command line."""

    id: str
    name: str
    kind: Kind
    encoding: str | None
    family: str | None
    layers: int
    heads: int
    causal: bool
    trained_length: int | None
    shows: list[Show]
    default_show: Show
    reads_text: bool
    can_write: bool
    documents: list[DocumentTitle]
    default: SceneRequest
    evaluation: bool
    formula: Formula | None
    paper: str | None
    caption: str
    parameters: list[Slider]


class Start(TypedDict):
    """What the first view needs."""

    version: str
    subjects: list[Subject]
    examples: list[Subject]  # of stories: shown there only
    encodings: list[EncodingCard]
    groups: list[Group]
    stories: list[Story]
    colour_maps: dict[ColourMap, list[str]]
    classes: list[str]


_From = TypedDict("_From", {"from": NotRequired[int]})  # where what the model has written begins


class Scene(_From):
    """A subject with its parameters on an input at a length."""

    scene: str  # the hash of its completed request
    request: SceneRequest
    length: int
    layers: int
    heads: int
    causal: bool
    shows: list[Show]
    default_show: Show
    static: bool
    has_tokens: bool
    caption: str
    notes: list[str]
    uniformity: list[Numbers] | None
    context_dependence: list[Numbers] | None


class Scale(TypedDict):
    """The values of the first and the last colour, and the ticks of the colour bar."""

    low: float
    high: float
    log: bool
    ticks: list[float]
    extend: Extend  # the ends beyond which there are values


class MassByDistance(TypedDict):
    """The attention mass per distance, without the sink."""

    distance: list[int]
    mass: Numbers


_Kind = TypedDict("_Kind", {"class": str | None})


class HeadClass(_Kind):
    """The class of a head in the overview."""

    half_distance: int | None
    decay: float | None
    sink: float | None


class Colours(TypedDict):
    """The smallest and the largest value of a map, and its colours; the codes of a small map range over its scale."""

    low: float
    high: float
    log: bool
    colour_map: ColourMap
    scale: Scale


class Thumbnail(Colours):
    """A small map: side × side bytes in base64, row by row; 0 is no value, 1 to 255 are the scale's low to high."""

    map: str


class HeadSummary(HeadClass, Thumbnail):
    """One head of the overview."""

    head: int
    entropy: float | None
    uniformity: float | None
    context_dependence: float | None
    profile: MassByDistance | None


class GalleryEntry(Thumbnail):
    """An encoding among all of them: the map of one head, and the profiles of some."""

    name: str
    show: Show
    length: int
    head: int
    distance: list[int]
    heads: list[int]
    profiles: list[Numbers]


class LayerSummary(TypedDict):
    """One line of the overview."""

    layer: int
    heads: list[HeadSummary]
    error: NotRequired[str]  # why a layer has no such values


class Range(Colours):
    """The colours of a map with and without the first key."""

    both_signs: bool  # whether all heads of its scene have both signs, so that colours may be centred on 0
    low_without_sink: float
    high_without_sink: float
    scale_without_sink: Scale


class Statistics(TypedDict):
    """Mean, minimum and maximum of some values."""

    mean: Numbers
    low: Numbers
    high: Numbers


class Profile(Statistics):
    """Values against distance."""

    distance: list[int]


class Mass(MassByDistance):
    """The attention mass with the curve fitted to it."""

    fitted: Numbers
    fitted_distance: list[int]
    sink: float


_Class = TypedDict("_Class", {"class": dict[str, Any] | None})  # HeadClass.as_json


class HeadDetail(Range, _Class):
    """What the page shows beside the map of a head."""

    profile: Profile
    mass: Mass | None
    caption: str
    alt: str


class Row(Statistics):
    """All values of a query; each stands for `step` keys."""

    query: int
    first: int
    step: int


class Curve(TypedDict):
    """Perplexity by length."""

    label: str
    protocol: str
    lengths: list[int]
    perplexity: Numbers
    low: Numbers
    high: Numbers


class Evaluation(TypedDict):
    """The evaluations of a run."""

    curves: list[Curve]
    trained_length: int | None


class StoredMap(TypedDict):
    """A map in an exported file."""

    level: int  # the finest level that is held
    low: float
    high: float
    log: bool
    cells: str  # base64 of zlib of uint8: 0 is no value, 1 to 255 are low to high


class Progress(TypedDict):
    """How far a task is; None if it does not run."""

    done: float | None


class ExportData(TypedDict):
    """What an exported file holds, by scene, kind of values, layer and head."""

    start: Start
    scenes: list[Scene]
    overview: dict[str, list[LayerSummary]]
    heads: dict[str, HeadDetail]
    maps: dict[str, StoredMap]
    tokens: dict[str, list[str]]
    evaluations: dict[str, Evaluation]


def plain(value: Any) -> Any:
    """A value as JSON has it: tensors and arrays as lists, NaN and infinities as None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def to_json(value: Any) -> bytes:
    """A value in one line of JSON."""
    return json.dumps(plain(value), ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


def typescript() -> str:
    """The types of this file, and the constants that the page shares, in TypeScript."""
    aliases = {
        **{
            "Show": Show,
            "Kind": Kind,
            "ColourMap": ColourMap,
            "Extend": Extend,
            "Parameter": Parameter,
            "Numbers": Numbers,
        },
        **{"Reading": Reading, "Input": Input},
    }
    words = {str: "string", int: "number", float: "number", bool: "boolean", NoneType: "null", Any: "unknown"}

    def named(hint: Any, of: str = "") -> str:
        for name, alias in aliases.items():
            if hint == alias and name != of:
                return name
        if hint in words or is_typeddict(hint):
            return words.get(hint) or str(hint.__name__)
        arguments = get_args(hint)
        if get_origin(hint) is Literal:
            return " | ".join(json.dumps(argument) for argument in arguments)
        if get_origin(hint) is dict:
            return f"Record<{named(arguments[0])}, {named(arguments[1])}>"
        if get_origin(hint) in (Union, UnionType):
            return " | ".join(dict.fromkeys(named(argument) for argument in arguments))
        inner = named(arguments[0])
        return f"({inner})[]" if "|" in inner else f"{inner}[]"

    lines = ["// Made by `python -m relpos.explorer.replies`: see relpos/explorer/replies.py.", ""]
    constants = {
        "TILE": TILE,
        "SIDE": SIDE,
        "MOST_SIDE": MOST_SIDE,
        "FLAT_RANGE": FLAT_RANGE,
        "LONGEST": LONGEST,
        "TEXT_BYTES": TEXT_BYTES,
    }
    lines += [f"export const {name} = {value};" for name, value in constants.items()]
    lines += [f"export type {name} = {named(alias, name)};" for name, alias in aliases.items()]
    for name, value in globals().items():
        if is_typeddict(value) and not name.startswith("_"):
            optional = value.__optional_keys__
            entries = get_type_hints(value).items()
            fields = [f"  {key}{'?' if key in optional else ''}: {named(hint)};" for key, hint in entries]
            lines += ["", f"export interface {name} {{", *fields, "}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(typescript())
