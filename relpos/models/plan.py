"""Which encoding each layer of a model has: the entries `position` and `share_position` of its configuration.

    {"name": "rope", "base": 10000.0}                                       every layer its own rope
    {"name": "rope", "plan": [{"every": 4, "name": "nope"}]}                no encoding in every fourth layer
    {"name": "rope", "plan": [{"every": 6, "base": 1000000.0}]}             two values of theta
    {"name": "rope", "plan": [{"layers": [1, 3], "window": 256}]}           a sliding window in layers 1 and 3

A rule of the plan selects layers, by `layers` (1 is the first) or `every` (n, 2n, …), and says what differs there:
`name` is another encoding, with its own options; without `name`, options change those of the same encoding; `window` is
how many tokens a query sees. Rules are applied in order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relpos.encodings.registry import encoding, encoding_class
from relpos.forms.cards import options_of
from relpos.forms.encoding import Encoding

Position = Mapping[str, Any]
PositionEntry = dict[str, Any]  # the same, as JSON: `name`, options, and possibly `plan`
SELECTORS = ("layers", "every")


@dataclass
class Positions:
    """The encodings of a model, as modules."""

    embedding: Encoding | None  # acts once, on the token embedding
    shared: Encoding | None  # of all layers, where they share one
    layers: list[Encoding | None]  # of each layer, where they do not


def read_position(position: Position | str | None, default: Position) -> PositionEntry:
    """The entry `position` of a configuration as a dictionary with a name; `default` is what None stands for."""
    if position is None:
        return dict(default)
    if isinstance(position, str):
        return {"name": position}
    if not isinstance(position, Mapping) or not isinstance(position.get("name"), str):
        raise ValueError(f'position must name an encoding, as in {{"name": "kerple_log"}}, not {position!r}.')
    return dict(position)


def layer_encodings(position: Position, layers: int) -> list[PositionEntry]:
    """The encoding of each layer, as a dictionary without a plan."""
    base = {key: value for key, value in position.items() if key != "plan"}
    rows = [dict(base) for _ in range(layers)]
    plan = position.get("plan") or []
    if not isinstance(plan, Sequence) or isinstance(plan, str):
        raise ValueError(f"a plan is a list of rules, as in [{{'every': 4, 'name': 'nope'}}], not {plan!r}.")
    for rule in plan:
        changes = (
            {key: value for key, value in rule.items() if key not in SELECTORS} if isinstance(rule, Mapping) else {}
        )
        if not changes:
            raise ValueError(f"the rule {rule!r} of the plan changes nothing: give name, window or an option.")
        for number in _selected(rule, layers):
            rows[number - 1] = dict(changes) if "name" in changes else {**rows[number - 1], **changes}
    return rows


def make_encoding(position: Position, heads: int, head_dim: int, width: int | None = None) -> Encoding:
    """Create the encoding that a dictionary of `layer_encodings` describes."""
    options = {key: value for key, value in position.items() if key not in ("name", "window")}
    name = position["name"]
    if width is not None and width != heads * head_dim and "width" in options_of(encoding_class(name)):
        options = {"width": width, **options}
    if position.get("window") is not None:
        own = {name: options} if options else {}
        windowed = {**own, "window": {"size": position["window"]}}
        name, options = "sum", {"parts": [name, "window"], "part_options": windowed}
    new = encoding(name, heads, head_dim, **options)
    new.origin = (dict(position), heads, head_dim, width)  # type: ignore[assignment]  # for `start_again`
    return new


def start_again(position: Encoding) -> Encoding | None:
    """A fresh copy of an encoding of a model, with its start values; None for a part of another encoding."""
    origin = getattr(position, "origin", None)
    return None if origin is None else make_encoding(*origin)


def make_positions(
    position: Position, share: bool, layers: int, heads: int, head_dim: int, width: int | None = None
) -> Positions:
    """The encodings of a model, where `share` says whether its layers share one."""
    rows = layer_encodings(position, layers)
    base = {key: value for key, value in position.items() if key != "plan"}
    first = make_encoding(base, heads, head_dim, width)
    if first.places == ("embedding",):
        return Positions(first, None, [_own(row, base, heads, head_dim, width) for row in rows])
    if share:
        if position.get("plan"):
            raise ValueError("layers that share one encoding cannot have a plan: leave out share_position or the plan.")
        return Positions(None, first, [None] * layers)
    if "embedding" in first.places:
        raise ValueError(
            f"the encoding {dict(base)} acts both on the embedding and in every layer: set share_position=True."
        )
    return Positions(None, None, [_own(row, None, heads, head_dim, width) for row in rows])


def _own(row: Position, embedded: Position | None, heads: int, head_dim: int, width: int | None) -> Encoding | None:
    """The encoding of a layer; None for what acts on the embedding already."""
    if row == embedded:
        return None
    new = make_encoding(row, heads, head_dim, width)
    if "embedding" in new.places:
        raise ValueError(f"{row['name']} acts once, on the token embedding: it cannot be the encoding of some layers.")
    return new


def _selected(rule: Position, layers: int) -> list[int]:
    """The numbers of the layers that a rule selects."""
    every, named = rule.get("every"), rule.get("layers")
    if (every is None) == (named is None):
        raise ValueError(f"the rule {dict(rule)!r} of the plan must have either layers or every.")
    if every is not None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every must be a positive integer, not {every!r}.")
        return list(range(every, layers + 1, every))
    numbers: list[Any] = list(named) if isinstance(named, Sequence) and not isinstance(named, str) else [named]
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= layers:
            raise ValueError(f"the plan names layer {number!r}, but the model has layers 1 to {layers}.")
    return numbers
