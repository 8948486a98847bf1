"""Models of transformers that run by their own code, for scoring and drawing.

Their queries and keys are recorded where they reach attention, so that no family needs code of its own here.
"""

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from relpos.attend.arguments import LayerCall, RotaryFrequencies
from relpos.forms.bias import Toeplitz
from relpos.forms.call import Call
from relpos.forms.encoding import Encoding
from relpos.model_catalogue import PREFIX
from relpos.models.family import Output, Reader, check_finite, family_of
from relpos.pretrained.attention_interface import ModelBias, captured_calls, dense
from relpos.pretrained.families.absolute import GROWING
from relpos.pretrained.positions import LayerPosition, Rotary, layer_positions
from relpos.pretrained.probe import evaluating, examples
from relpos.pretrained.use import use

MOST_LAYERS = 10_000
NEXT_TOKEN = ("ForCausalLM", "LMHeadModel")  # endings of the names of classes
MASKED = ("ForMaskedLM", "ForPreTraining")


def predicts_next_token(model: PreTrainedModel) -> bool:
    """Whether a model has a head for the next token, by the name of its class."""
    return type(model).__name__.endswith(NEXT_TOKEN)


def reader_of(model: PreTrainedModel) -> Reader:
    """The interface used by scoring and drawing, for a model of relpos or of transformers."""
    return family_of(model) if model.config.model_type.startswith(PREFIX) else TransformersReader(model)


class _ReachedError(Exception):
    """The output matrix has been reached: its product, length × vocabulary, is not needed."""


@dataclass(frozen=True)
class LayerRecord:
    """One call of self-attention in a forward."""

    number: int  # 1 is the first
    name: str  # of the module
    call: LayerCall


class TransformersReader(Reader):
    """A model of transformers, on our attention where `relpos.use` can run it.

    Args:
        model: The model. `relpos.use` is applied to it; a model that it refuses keeps its own attention.

    Attributes:
        refusal: Why it keeps its own attention; None if it runs on ours.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.name = self.title = str(model.config.model_type)
        kind = type(model).__name__
        self.causal = predicts_next_token(model)
        self.predicts_tokens = self.causal or kind.endswith(MASKED)
        self.refusal: str | None = None
        try:
            use(model)
        except ValueError as error:
            self.refusal = str(error)
        self._layers: list[LayerRecord] | None = None
        self._checked = False

    def check_scoring(self, model: PreTrainedModel) -> None:
        if self._checked:
            return
        super().check_scoring(model)
        ids = torch.arange(1, 9, device=model.device)[None] % int(model.config.get_text_config().vocab_size)
        with evaluating(model):
            output = self.output(model, self.hidden(model, ids))
            logits = output.states @ output.weight.T + (0 if output.bias is None else output.bias)
            if output.softcap is not None:
                logits = output.softcap * torch.tanh(logits / output.softcap)
            expected = model(input_ids=ids).logits
        if not torch.allclose(logits, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
            raise ValueError(
                f"the logits of {type(model).__name__} are not its output matrix times its last states, so relpos "
                "cannot score it."
            )
        self._checked = True

    def check_length(self, model: PreTrainedModel, length: int) -> None:
        """Check that a model has positions for so many tokens.

        Raises:
            ValueError: Its table of positions is shorter, and does not grow.
        """
        rows = [
            len(position.table)
            for position in layer_positions(model)
            if position.table is not None and model.config.model_type not in GROWING
        ]
        if rows and length > min(rows):
            raise ValueError(
                f"{type(model).__name__} has a table of {min(rows):,} positions, and the input has {length:,} "
                "tokens: give a smaller length."
            )

    def hidden(self, model: PreTrainedModel, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        self.check_length(model, ids.shape[1])
        if documents is not None:
            raise ValueError(f"{self.title} does not separate packed documents: leave documents out.")
        head: Any = model.get_output_embeddings()
        reached: list[Tensor] = []

        def stop(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            reached.append(arguments[0])
            raise _ReachedError

        hook = head.register_forward_pre_hook(stop)
        try:
            model(input_ids=ids, **({"use_cache": False} if self.causal else {}))
        except _ReachedError:
            return reached[0]
        finally:
            hook.remove()
        raise ValueError(f"{type(model).__name__} does not call its output matrix, so relpos cannot score it.")

    def output(self, model: PreTrainedModel, hidden: Tensor) -> Output:
        head: Any = model.get_output_embeddings()
        config = model.config.get_text_config()
        factor = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        states = hidden if factor == 1.0 else hidden * factor
        return Output(states, head.weight, head.bias, getattr(config, "final_logit_softcapping", None))

    def depth(self, model: PreTrainedModel) -> int:
        return len(self.layers(model))

    def heads(self, model: PreTrainedModel) -> int:
        return self.layers(model)[0].call.q.shape[1]

    def layers(self, model: PreTrainedModel) -> list[LayerRecord]:
        """Its self-attention layers on a small input, in the order in which they run."""
        if self._layers is None:
            with evaluating(model):
                inputs = next(examples(model), None)
                self._layers = [] if inputs is None else self._record(model, inputs, range(1, MOST_LAYERS))
        if not self._layers:
            raise ValueError(f"{type(model).__name__} has no self-attention that relpos can record.")
        return self._layers

    def calls(self, model: PreTrainedModel, ids: Tensor, numbers: Iterable[int]) -> list[LayerCall]:
        wanted = list(numbers)
        inputs = text_inputs(model, ids)
        self.check_length(model, len(ids))
        with evaluating(model):
            recorded = {each.number: each.call for each in self._record(model, inputs, wanted)}
        positions = self.layer_positions(model, len(ids))
        calls = []
        for number in wanted:
            check_finite(number, recorded[number].q)
            rotary = None if positions is None else positions[number - 1].rotary
            calls.append(replace(recorded[number], turned=turns_of(rotary)))
        return calls

    def _record(self, model: PreTrainedModel, inputs: Mapping[str, Any], wanted: Container[int]) -> list[LayerRecord]:
        """The self-attention layers of one forward that are wanted, in order."""
        return record(model, inputs, wanted) if self.refusal is None else eager_weights(model, inputs, wanted)

    def calls_without_input(
        self, model: PreTrainedModel, length: int, numbers: Iterable[int]
    ) -> list[LayerCall] | None:
        positions, layers = self.layer_positions(model), self.layers(model)
        calls = []
        for number in numbers:
            bias = None if positions is None else positions[number - 1].bias_by_distance
            if bias is None:
                return None
            calls.append(static_call(bias(length), layers[number - 1].call.arguments["causal"]))
        return calls

    def position_titles(self, model: PreTrainedModel, numbers: Sequence[int]) -> tuple[str, str]:
        positions = self.layer_positions(model)
        if positions is None:
            return "its own positions", "unknown"
        shown = [positions[number - 1] for number in numbers]
        places = dict.fromkeys(position.acts_on for position in shown)
        return " / ".join(dict.fromkeys(position.title for position in shown)), " / ".join(places)

    def position_entry(self, model: PreTrainedModel) -> dict[str, Any]:
        positions = self.layer_positions(model) or []
        kinds = dict.fromkeys(position.kind for position in positions)
        return {"name": " / ".join(kinds) or "unknown", "layers": [position.words for position in positions]}

    def layer_positions(self, model: PreTrainedModel, length: int | None = None) -> list[LayerPosition] | None:
        """Where position lives in its self-attention layers, in their order; None if they were not recognised."""
        known = {position.name: position for position in layer_positions(model, length)}
        names = [each.name for each in self.layers(model)]
        if known.keys() >= set(names):
            return [known[name] for name in names]
        return list(known.values()) if len(known) == len(names) else None


def turns_of(rotary: Rotary | None) -> RotaryFrequencies | None:
    """The rotation of a layer whose heads begin with their rotated dimensions."""
    if rotary is None or rotary.start:
        return None
    return RotaryFrequencies(rotary.frequencies, rotary.layout)


def static_call(table: Tensor, causal: bool) -> LayerCall:
    """A call whose queries and keys are 0, and whose bias is a function of the distance.

    Args:
        table: The bias at the distances −(length − 1) to length − 1, (heads, 2 · length − 1).
        causal: Whether a query sees only keys up to its own index.
    """
    heads, length = len(table), (table.shape[1] + 1) // 2

    def bias(call: Call) -> Toeplitz:
        return Toeplitz(table[:, call.lowest + length - 1 :].to(call.dtype).contiguous(), call.zero)

    q = table.new_zeros(1).expand(1, heads, length, 1)
    return LayerCall(q, q, ModelBias(heads, 1, (bias,)), {"causal": causal})


def text_inputs(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """Inputs of a forward on a text, for a decoder one token less, so that cross attention is recognised.

    Raises:
        ValueError: The model does not read text.
    """
    if model.main_input_name != "input_ids":
        raise ValueError(f"{type(model).__name__} reads {model.main_input_name}, not text.")
    inputs = {"input_ids": ids[None].to(model.device)}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :-1]
    return inputs


def record(model: PreTrainedModel, inputs: Mapping[str, Any], wanted: Container[int]) -> list[LayerRecord]:
    """Run a model that is on our attention, and keep what reaches it.

    Args:
        model: A model after `relpos.use`.
        inputs: Of one forward.
        wanted: Numbers of the self-attention layers to keep; 1 is the first.

    Returns:
        The wanted calls of self-attention, in order.
    """
    names = {module: name for name, module in model.named_modules()}
    calls: list[LayerRecord] = []
    numbers = itertools.count(1)

    def listen(
        module: nn.Module, q: Tensor, k: Tensor, position: Encoding | None, arguments: Mapping[str, Any]
    ) -> None:
        if q.shape[2] == k.shape[2] and (number := next(numbers)) in wanted:
            calls.append(LayerRecord(number, names[module], LayerCall(q, k, position, arguments)))

    with captured_calls(model, listen):
        model(**inputs)
    return calls


def eager_weights(model: PreTrainedModel, inputs: Mapping[str, Any], wanted: Container[int]) -> list[LayerRecord]:
    """The attention weights that a model returns by its own code, as calls whose softmax they are."""
    out = model(**inputs, output_attentions=True)
    kinds = ("encoder_attentions", "decoder_attentions", "attentions")
    weights = [each for kind in kinds for each in out.get(kind) or () if each is not None]
    return [
        LayerRecord(number, f"layer {number}", weights_call(each))
        for number, each in enumerate(weights, 1)
        if number in wanted
    ]


def weights_call(weights: Tensor) -> LayerCall:
    """A call of attention that has these weights, (1, heads, length, length)."""
    _, heads, length, _ = weights.shape
    zeros = weights.new_zeros(1, heads, length, 1)
    logits = weights.clamp(min=torch.finfo(weights.dtype).tiny).log()
    causal = not bool(weights.triu(1).any())
    return LayerCall(zeros, zeros, ModelBias(heads, 1, (dense(logits),)), {"causal": causal, "mask": weights > 0})
