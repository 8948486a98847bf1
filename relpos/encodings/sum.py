"""Several encodings at once: each acts in its place, and their biases add up."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from relpos.encodings.call import Call
from relpos.encodings.encoding import Encoding
from relpos.encodings.forms import Form, Sum
from relpos.encodings.registry import encoding


class Together(Encoding):
    """Several encodings at once, for example RoPE with forget gates."""

    place = "score"
    form = "Sum"
    learns = "parts"
    directions = "as its parts"
    paper = "as its parts; rope with forgetting: Lin et al. 2025, arXiv 2503.02130"
    formula = "B_ij = Σ of the parts' biases;  parts that rotate or embed do so, in order"
    options = {
        "parts": "names of the encodings",
        "part_options": "options by name of a part, for every part of that name",
    }

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        parts: Sequence[str] = ("alibi", "cable_nw"),
        part_options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        if isinstance(parts, str) or not parts:
            raise ValueError(f"parts must be a list of encodings' names, not {parts!r}.")
        options = _options_by_name(parts, part_options or {})
        encodings = [encoding(name, heads, head_dim, **options.get(name, {})) for name in parts]
        if len({part.width for part in encodings}) > 1:
            raise ValueError(f"the parts read inputs of different widths: {[part.width for part in encodings]}.")
        super().__init__(heads, head_dim, encodings[0].width)
        self.parts = nn.ModuleList(encodings)
        self.gate_size = sum(part.gate_size for part in encodings)

    @property
    def bidirectional(self) -> bool:
        return all(part.bidirectional for part in self._each())

    @property
    def needs_scores(self) -> bool:
        return any(part.needs_scores for part in self._each())

    @property
    def depends_on_length(self) -> bool:
        return any(part.depends_on_length for part in self._each())

    def embed(self, x: Tensor, start: int = 0, documents: Tensor | None = None) -> Tensor:
        for part in self._each():
            x = part.embed(x, start, documents)
        return x

    def rotate(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        for part in self._each():
            q, k = part.rotate(q, k, call)
        return q, k

    def gates(self, hidden: Tensor) -> Tensor | None:
        each = [part.gates(hidden) for part in self._each()]
        known = [gates for gates in each if gates is not None]
        return torch.cat(known, dim=-1) if known else None  # (batch, heads, length, gate_size)

    def bias(self, call: Call) -> Form | None:
        terms, start = [], 0
        for part in self._each():
            own = None if call.gates is None else call.gates[..., start : start + part.gate_size]
            start += part.gate_size
            term = part.bias(call.with_gates(own))
            if term is not None:
                terms.append(term)
        return Sum(tuple(terms)) if terms else None

    def _each(self) -> list[Encoding]:
        return list(self.parts)  # type: ignore[arg-type]


def _options_by_name(parts: Sequence[str], part_options: object) -> Mapping[str, Mapping[str, Any]]:
    """`part_options`, if it holds options for parts that are there."""
    if not isinstance(part_options, Mapping) or not all(isinstance(each, Mapping) for each in part_options.values()):
        raise ValueError(
            f"part_options must hold a dictionary of options by name of a part, as in "
            f"{{{parts[0]!r}: {{…}}}}, not {part_options!r}."
        )
    strangers = sorted(set(part_options) - set(parts))
    if strangers:
        raise ValueError(f"part_options names {', '.join(strangers)}, not among the parts {', '.join(parts)}.")
    return part_options
