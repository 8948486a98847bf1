from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from relpos.encodings.registry import encoding, encoding_class
from relpos.forms.bias import Form, Sum
from relpos.forms.call import Call
from relpos.forms.cards import options_of
from relpos.forms.encoding import PLACES, Encoding
from relpos.forms.rotation import Rotation


class SumEncoding(Encoding):
    """Several encodings together, each in its own place; their biases add up (FoX: rope with forgetting).

    Args:
        parts: Names of the encodings, in the order in which they act. Where positions have several axes, parts that
            read one axis count tokens.
        part_options: Options of the parts, by the name of the part; they apply to every part of that name.
    """

    paper = "those of its parts; rope with forgetting: Lin et al. 2025, arXiv 2503.02130"
    formula = "B_ij = Σ of the parts' biases;  parts that rotate, scale or embed do so, in order"

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        parts: Sequence[str] = ("alibi", "cable_nw"),
        part_options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        options = _options_by_name(parts, part_options)
        encodings = [encoding(name, heads, head_dim, **options.get(name, {})) for name in parts]
        if len({part.width for part in encodings}) > 1:
            raise ValueError(f"the parts read inputs of different widths: {[part.width for part in encodings]}.")
        if len({part.axes for part in encodings} - {1}) > 1:
            raise ValueError(f"the parts read positions of different axes: {[part.axes for part in encodings]}.")
        super().__init__(heads, head_dim, encodings[0].width)
        self.parts = nn.ModuleList(encodings)
        self.gate_size = sum(part.gate_size for part in encodings)
        self.needs_scores = any(part.needs_scores for part in encodings)
        self.bidirectional = all(part.bidirectional for part in encodings)
        self.axes = max(part.axes for part in encodings)
        self.depends_on_length = any(part.depends_on_length for part in encodings)
        turning = [part for part in encodings if "query and key" in part.places]
        self.rotates_by_position = len(turning) == 1 and turning[0].rotates_by_position
        self.alternatives = tuple(
            f"{instead} in place of {name}"
            for name, part in dict(zip(parts, encodings, strict=True)).items()
            if not part.bidirectional
            for instead in part.alternatives
        )

    @classmethod
    def options_for_length(cls, options: Mapping[str, Any], length: int) -> dict[str, Any]:
        filled = super().options_for_length(options, length)
        parts: Sequence[str] = filled.get("parts", options_of(cls)["parts"].default)
        part_options = dict(_options_by_name(parts, filled.get("part_options")))
        for name in parts:
            options_of_part = encoding_class(name).options_for_length(part_options.get(name, {}), length)
            if options_of_part:
                part_options[name] = options_of_part
        return {**filled, "part_options": part_options} if part_options else filled

    @property
    def places(self) -> tuple[str, ...]:
        return tuple(place for place in PLACES if any(place in part.places for part in self._each()))

    def embed(self, x: Tensor, start: int = 0, documents: Tensor | None = None) -> Tensor:
        for part in self._each():
            x = part.embed(x, start, documents)
        return x

    def rotate(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        for part in self._each():
            q, k = part.rotate(q, k, call.on_axes(part.axes))
        return q, k

    def rotation(self, call: Call) -> Rotation | None:
        rotating = self._overriding("rotation")
        return rotating[0].rotation(call.on_axes(rotating[0].axes)) if rotating and self._separable else None

    def query_factor(self, call: Call) -> Tensor | None:
        if not self._separable:
            return None
        of_parts = [part.query_factor(call.on_axes(part.axes)) for part in self._overriding("query_factor")]
        factors = [factor for factor in of_parts if factor is not None]
        return reduce(torch.mul, factors) if factors else None

    def gates(self, hidden: Tensor) -> Tensor | None:
        of_parts = [part.gates(hidden) for part in self._each()]
        computed = [gates for gates in of_parts if gates is not None]
        return torch.cat(computed, dim=-1) if computed else None  # (batch, heads, length, gate_size)

    def bias(self, call: Call) -> Form | None:
        terms, start = [], 0
        for part in self._each():
            gates = None if call.gates is None else call.gates[..., start : start + part.gate_size]
            start += part.gate_size
            terms.append(part.located_bias(replace(call, gates=gates).on_axes(part.axes)))
        biases = tuple(term for term in terms if term is not None)
        return Sum(biases) if biases else None

    def located_bias(self, call: Call) -> Form | None:
        return self.bias(call)  # each part has located its own

    @property
    def _separable(self) -> bool:
        """Whether one rotation and factors of the queries are all that happens to q and k: their order is irrelevant.

        Otherwise `rotate` lets the parts act one after another.
        """
        return not self._overriding("rotate") and len(self._overriding("rotation")) <= 1

    def _overriding(self, method: str) -> list[Encoding]:
        """The parts, also those of inner sums, that override a method of `Encoding`."""
        overriding: list[Encoding] = []
        for part in self._each():
            if isinstance(part, SumEncoding):
                overriding += part._overriding(method)
            elif part.overrides(method):
                overriding.append(part)
        return overriding

    def _each(self) -> list[Encoding]:
        return list(self.parts)  # type: ignore[arg-type]


def _options_by_name(parts: Sequence[str], part_options: object) -> Mapping[str, Mapping[str, Any]]:
    """Check `parts` and `part_options`, and return the latter, empty for None."""
    named = isinstance(parts, Sequence) and not isinstance(parts, str) and all(isinstance(name, str) for name in parts)
    if not named or not parts:
        raise ValueError(f"parts must be a list of encodings' names, not {parts!r}.")
    part_options = {} if part_options is None else part_options
    if not isinstance(part_options, Mapping) or any(not isinstance(of, Mapping) for of in part_options.values()):
        raise ValueError(
            f"part_options must hold a dictionary of options by name of a part, as in "
            f"{{{parts[0]!r}: {{…}}}}, not {part_options!r}."
        )
    strangers = sorted(set(part_options) - set(parts))
    if strangers:
        raise ValueError(f"part_options names {', '.join(strangers)}, not among the parts {', '.join(parts)}.")
    return part_options
