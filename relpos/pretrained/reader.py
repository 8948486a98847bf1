"""Models of transformers, for scoring and drawing: their queries and keys are recorded where they reach attention."""

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from relpos.attend.arguments import LayerCall
from relpos.forms.bias import Toeplitz
from relpos.forms.call import Call
from relpos.forms.encoding import Encoding
from relpos.model_catalogue import PREFIX
from relpos.models.attention_interface import ModelBias, captured_calls, dense
from relpos.models.family import Output, Reader, check_finite, family_of
from relpos.models.plan import PositionEntry
from relpos.pretrained.families.position_tables import GROWING
from relpos.pretrained.layer_position import LayerPosition
from relpos.pretrained.positions import layer_positions
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
    """A model of transformers, on our attention where `relpos.use` can run it, which is applied to it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.name = self.title = str(model.config.model_type)
        self.causal = predicts_next_token(model)
        self.predicts_tokens = self.causal or type(model).__name__.endswith(MASKED)
        self.refusal: str | None = None  # why it keeps its own attention
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
        """Refuse more tokens than a table of positions has rows for, unless it grows."""
        if model.config.model_type in GROWING:
            return
        rows = [len(position.table) for position in layer_positions(model) if position.table is not None]
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
        scale, divisor = (float(getattr(config, name, None) or 1.0) for name in ("logit_scale", "logits_scaling"))
        states = hidden if scale == divisor else hidden * (scale / divisor)
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
            calls = {record.number: record.call for record in self._record(model, inputs, wanted)}
        positions = self.layer_positions(model, len(ids))
        for number, call in calls.items():
            check_finite(number, call.q)
            rotary = None if positions is None else positions[number - 1].rotary
            if rotary is not None and not rotary.start:  # heads that begin with their rotated dimensions
                calls[number] = replace(call, turned=rotary)
        return [calls[number] for number in wanted]

    def _record(self, model: PreTrainedModel, inputs: Mapping[str, Any], wanted: Container[int]) -> list[LayerRecord]:
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

    def position_entry(self, model: PreTrainedModel) -> PositionEntry:
        positions = self.layer_positions(model) or []
        kinds = dict.fromkeys(position.kind for position in positions)
        return {"name": " / ".join(kinds) or "unknown", "layers": [position.words for position in positions]}

    def layer_positions(self, model: PreTrainedModel, length: int | None = None) -> list[LayerPosition] | None:
        """Where position lives in its self-attention layers, in their order; None if they were not recognised."""
        known = {position.name: position for position in layer_positions(model, length)}
        names = [record.name for record in self.layers(model)]
        if known.keys() >= set(names):
            return [known[name] for name in names]
        return list(known.values()) if len(known) == len(names) else None


def static_call(table: Tensor, causal: bool) -> LayerCall:
    """A call whose queries and keys are 0, with a bias at the distances 1 − length to length − 1: (heads, …)."""
    heads, length = len(table), (table.shape[1] + 1) // 2

    def bias(call: Call) -> Toeplitz:
        return Toeplitz(table[:, call.lowest + length - 1 :].to(call.dtype).contiguous(), call.zero)

    q = table.new_zeros(1).expand(1, heads, length, 1)
    return LayerCall(q, q, ModelBias(heads, 1, (bias,)), {"causal": causal})


def text_inputs(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """Inputs of a forward on a text, for a decoder one token less, so that cross attention is recognised."""
    if model.main_input_name != "input_ids":
        raise ValueError(f"{type(model).__name__} reads {model.main_input_name}, not text.")
    inputs = {"input_ids": ids[None].to(model.device)}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :-1]
    return inputs


def record(model: PreTrainedModel, inputs: Mapping[str, Any], wanted: Container[int]) -> list[LayerRecord]:
    """Run a model that is on our attention: the calls of the wanted self-attention layers, in order; 1 is the first."""
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
    layers = (weights for kind in kinds for weights in out.get(kind) or () if weights is not None)
    records = []
    for number, weights in enumerate(layers, 1):  # (1, heads, length, length)
        if number in wanted:
            heads = weights.shape[1]
            zeros = weights.new_zeros(*weights.shape[:3], 1)
            logits = weights.clamp(min=torch.finfo(weights.dtype).tiny).log()
            arguments = {"causal": not bool(weights.triu(1).any()), "mask": weights > 0}
            call = LayerCall(zeros, zeros, ModelBias(heads, 1, (dense(logits),)), arguments)
            records.append(LayerRecord(number, f"layer {number}", call))
    return records
