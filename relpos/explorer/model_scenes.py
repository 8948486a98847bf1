"""Scenes of a model on an input. The model runs only when something is shown that depends on the input."""

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from relpos.explorer import limits
from relpos.explorer.documents import Inputs
from relpos.explorer.scenes import Scene
from relpos.maps.computing import all_cores
from relpos.maps.head_values import flat_values, head_values
from relpos.maps.heads.positional_part import equal_tokens, rotation_kernel, token_means
from relpos.maps.layer import Layer, layers_without_input, model_layers
from relpos.maps.toeplitz import ByDistance
from relpos.maps.values import HeadValues
from relpos.pictures.captions import training_sentence

if TYPE_CHECKING:
    from relpos.runs.run import Run


class Anatomy:
    """What is known of a model from its layers on two tokens.

    Args:
        run: The model.
    """

    def __init__(self, run: "Run") -> None:
        family, model = run.family, run.model
        self.depth = family.depth(model)
        self.numbers = list(range(1, self.depth + 1))
        self.layers = model_layers(family, model, torch.tensor([1, 2]), self.numbers)
        first = self.layers[0]
        self.heads, self.key_heads, self.head_dim = first.heads, first.k.shape[1], first.q.shape[-1]
        self.causal = first.causal
        self.name, self.place = family.position_titles(model, self.numbers)
        self.bias = any(layer.form is not None for layer in self.layers)
        self.rows = any(layer.reads_rows for layer in self.layers)
        self.embedded = "embedding" in self.place
        self.turned = any(layer.turned is not None for layer in self.layers)

    @property
    def shows(self) -> tuple[str, ...]:
        """The kinds of values that can be shown."""
        position = ("position",) if self.embedded or self.turned else ()
        return (*(("bias",) if self.bias else ()), "scores", "weights", *position, *(("flat",) if self.bias else ()))

    @property
    def default_show(self) -> str:
        """The kind that is shown first: the bias if all layers have one."""
        return "bias" if all(layer.form is not None for layer in self.layers) else "weights"

    def bytes_per_token(self) -> int:
        """Bytes of the queries and keys of all layers, per token."""
        return sum(4 * layer.q.shape[-1] * (layer.heads + layer.k.shape[1]) for layer in self.layers)


class ModelScene(Scene):
    """A model on an input.

    Args:
        request: The completed description.
        run: The model.
        anatomy: What is known of it.
        inputs: What it can read.
        lock: Held while the model runs.
    """

    def __init__(
        self, request: Mapping[str, Any], run: "Run", anatomy: Anatomy, inputs: Inputs, lock: threading.Lock
    ) -> None:
        super().__init__()
        self.request, self._run, self._anatomy = dict(request), run, anatomy
        self._inputs, self._model_lock = inputs, lock
        self.depth, self.heads, self.causal = anatomy.depth, anatomy.heads, anatomy.causal
        self.shows, self.default_show = anatomy.shows, anatomy.default_show
        self._static: list[Layer] | None = None
        self._read: list[Layer] | None = None
        self._equal: list[Layer] | None = None
        self._making = threading.RLock()
        length = request["length"]
        with lock:
            self._static = layers_without_input(run.family, run.model, length, anatomy.numbers)
        self.static = self._static is not None
        self._ids: Tensor | None = None
        self.notes = []
        if length > limits.ENTRY_LENGTH:
            if self._static is None:
                raise ValueError(self._too_long(length))
            flat = ("flat",) if all(layer.even_by_distance for layer in self._static) else ()
            self.shows = ("bias", *flat)
            self.notes.append(
                f"Beyond {limits.ENTRY_LENGTH:,} tokens only the bias is shown: scores need the model to read the text."
            )
            self.length, where = length, f"for {length:,} tokens"
        else:
            reading = inputs.read(request["input"], length, request["seed"])
            self._ids, self.length = reading.ids, len(reading.ids)
            self.notes += reading.notes
            where = f"on {self.length:,} tokens of {reading.name}"
            self.tokens = [run.tokenizer.decode([int(each)]) for each in reading.ids] if run.tokenizer else None
            if self._static is not None and self.length != length:
                with lock:
                    self._static = layers_without_input(run.family, run.model, self.length, anatomy.numbers)
        if anatomy.rows and self.length > limits.ROWS_LENGTH:
            raise ValueError(
                f"{anatomy.name} needs complete rows of all heads, which is done for at most {limits.ROWS_LENGTH:,} "
                f"tokens, not {self.length:,}: give a smaller length."
            )
        self.caption = f"{anatomy.name}, {run.family.title}, {where}. {training_sentence(run.training())}".strip()

    def _too_long(self, length: int) -> str:
        return (
            f"{length:,} tokens are too many for values that depend on the input: give a length of at most "
            f"{limits.ENTRY_LENGTH:,}."
        )

    @property
    def reads_input(self) -> bool:
        """Whether the model can be run on its input: not at lengths that only the bias has."""
        return self._ids is not None

    def read_layers(self) -> list[Layer]:
        """The layers on the input; the model runs once."""
        with self._making:
            if self._read is None:
                self._read = self._layers_on(self._ids)
            return self._read

    def other_layers(self) -> list[Layer] | None:
        """The layers on another input of the same length, for the context dependence; None if there is none."""
        from relpos.runs.run import heldout_samples

        try:
            samples = heldout_samples(self._run, self.length, self.request["seed"], 3)
        except (ValueError, OSError, ImportError):  # the held-out text is shorter, or not on this machine
            return None
        others = [each.ids for each in samples if self._ids is not None and not torch.equal(each.ids, self._ids)]
        return self._layers_on(others[0]) if others else None

    def _layers_on(self, ids: Tensor | None) -> list[Layer]:
        if ids is None:
            raise ValueError(self._too_long(self.length))
        needed = len(ids) * self._anatomy.bytes_per_token()
        if needed > limits.SCENE_BYTES:
            most = limits.SCENE_BYTES // self._anatomy.bytes_per_token()
            raise ValueError(f"{len(ids):,} tokens of this model need {needed / 2**30:.1f} GB: give at most {most:,}.")
        with self._model_lock, all_cores():
            return model_layers(self._run.family, self._run.model, ids, self._anatomy.numbers)

    def _equal_layers(self) -> list[Layer]:
        with self._making:
            if self._equal is None:
                ids = self._ids
                self._equal = equal_tokens(self._run.model, lambda: self._layers_on(ids))
            return self._equal

    def layer(self, show: str, number: int) -> Layer:
        if show in ("bias", "flat"):
            layer = (self._static or self.read_layers())[number - 1]
            if layer.form is None:
                raise ValueError(f"layer {number} adds no bias: show the scores or the weights.")
            return layer
        if show == "position" and self._anatomy.embedded:
            return self._equal_layers()[number - 1]
        return self.read_layers()[number - 1]

    def values(self, show: str, number: int, head: int) -> HeadValues:
        layer = self.layer(show, number)
        if head > layer.heads:
            raise ValueError(f"there is no head {head} in layer {number}: give a number from 1 to {layer.heads}.")
        if show == "flat":
            return flat_values(layer, head - 1)
        if show == "position":
            if self._anatomy.embedded:
                return head_values(layer, head - 1, "scores")
            if layer.turned is None:
                raise ValueError(f"layer {number} does not rotate queries and keys: show the scores or the weights.")
            kernel = rotation_kernel([token_means(layer)])
            distances = torch.arange(0 if layer.causal else 1 - layer.length, layer.length)
            return ByDistance(kernel.total(distances)[head - 1], layer.length)
        return head_values(layer, head - 1, show)  # type: ignore[arg-type]

    @property
    def layer_bytes(self) -> int:
        storages = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
            for layers in (self._static, self._read, self._equal)
            for layer in layers or []
            for x in (layer.q, layer.k, *(() if layer.form is None else (y for _, y in layer.form.tensors())))
        }
        return sum(storages.values())

    def measures(self) -> dict[str, Any]:
        if (
            self.default_show != "bias"
            or self._static is None
            or not all(layer.even_by_distance for layer in self._static)
        ):
            return super().measures()
        return {
            "uniformity": [[1.0] * layer.heads for layer in self._static],
            "context_dependence": [[0.0] * layer.heads for layer in self._static],
        }
