"""Models of transformers that run by their own code, as scoring and drawing see them.

Their queries and keys are recorded where they reach attention, so that no family needs code of its own here.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from relpos.attend.layer_call import LayerCall
from relpos.checkpoints.biases import ModelsOwn, dense
from relpos.checkpoints.interface import LISTENERS
from relpos.checkpoints.probe import evaluating, examples
from relpos.checkpoints.use import use
from relpos.encodings.encoding import Encoding
from relpos.models.family import Output, Reader, check_finite, family_of
from relpos.models.registry import PREFIX

NEXT_TOKEN = ("ForCausalLM", "LMHeadModel")  # endings of the names of classes
MASKED = ("ForMaskedLM", "ForPreTraining")


def reader_of(model: PreTrainedModel) -> Reader:
    """What scoring and drawing ask about a model, ours or another's."""
    return family_of(model) if model.config.model_type.startswith(PREFIX) else Published(model)


class _ReachedError(Exception):
    """The output matrix has been reached: its product, length × vocabulary, is not needed."""


class Published(Reader):
    """A model of transformers, on our attention where `relpos.use` can run it.

    Args:
        model: The model. `relpos.use` is applied to it; a model that it refuses keeps its own attention.

    Attributes:
        refusal: Why it keeps its own attention; None if it runs on ours.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.name = self.title = str(model.config.model_type)
        kind = type(model).__name__
        self.causal = kind.endswith(NEXT_TOKEN)
        self.predicts_tokens = self.causal or kind.endswith(MASKED)
        self.refusal: str | None = None
        try:
            use(model)
        except ValueError as error:
            self.refusal = str(error)
        self._names: list[str] | None = None
        self._heads = 0
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

    def hidden(self, model: PreTrainedModel, ids: Tensor, documents: Tensor | None = None) -> Tensor:
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
        return len(self.names(model))

    def heads(self, model: PreTrainedModel) -> int:
        self.names(model)
        return self._heads

    def names(self, model: PreTrainedModel) -> list[str]:
        """The names of its self-attention layers, in the order in which they run."""
        if self._names is None:
            with evaluating(model):
                for inputs in examples(model):
                    recorded = self._record(model, inputs, range(1, 2))
                    self._names = [name for name, _ in recorded]
                    first = next((call for _, call in recorded if call is not None), None)
                    self._heads = 0 if first is None else first.q.shape[1]
                    break
        if not self._names:
            raise ValueError(f"{type(self).__name__} has no self-attention that relpos can record.")
        return self._names

    def calls(self, model: PreTrainedModel, ids: Tensor, numbers: Iterable[int]) -> list[LayerCall]:
        wanted = list(numbers)
        inputs = text_inputs(model, ids)
        with evaluating(model):
            recorded = self._record(model, inputs, wanted)
        calls = []
        for number in wanted:
            call = recorded[number - 1][1]
            assert call is not None
            check_finite(number, call.q)
            calls.append(call)
        return calls

    def _record(
        self, model: PreTrainedModel, inputs: Mapping[str, Any], wanted: Container[int]
    ) -> list[tuple[str, LayerCall | None]]:
        """The self-attention layers of one forward, by name, in order; with the calls of those that are wanted."""
        return record(model, inputs, wanted) if self.refusal is None else eager_weights(model, inputs, wanted)

    def positions(self, model: PreTrainedModel, numbers: Sequence[int]) -> tuple[str, str]:
        return self.name, "nowhere"

    def position(self, model: PreTrainedModel) -> dict[str, Any]:
        return {"name": self.name}


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


def record(
    model: PreTrainedModel, inputs: Mapping[str, Any], wanted: Container[int]
) -> list[tuple[str, LayerCall | None]]:
    """Run a model that is on our attention, and keep what reaches it.

    Args:
        model: A model after `relpos.use`.
        inputs: Of one forward.
        wanted: Numbers of the self-attention layers whose queries and keys are kept; 1 is the first.

    Returns:
        One entry per call of self-attention, in order: the name of the module, and the call or None.
    """
    names = {module: name for name, module in model.named_modules()}
    found: list[tuple[str, LayerCall | None]] = []

    def listen(
        module: nn.Module, q: Tensor, k: Tensor, position: Encoding | None, arguments: Mapping[str, Any]
    ) -> None:
        if q.shape[2] == k.shape[2]:
            call = LayerCall(q, k, position, arguments) if len(found) + 1 in wanted else None
            found.append((names[module], call))

    LISTENERS.append(listen)
    try:
        model(**inputs)
    finally:
        LISTENERS.remove(listen)
    return found


def eager_weights(
    model: PreTrainedModel, inputs: Mapping[str, Any], wanted: Container[int]
) -> list[tuple[str, LayerCall | None]]:
    """The attention weights that a model returns by its own code, as calls whose softmax they are."""
    out = model(**inputs, output_attentions=True)
    weights = [
        each for name in ("encoder_attentions", "decoder_attentions", "attentions") for each in out.get(name) or ()
    ]
    found: list[tuple[str, LayerCall | None]] = []
    for number, each in enumerate((each for each in weights if each is not None), 1):
        call = None
        if number in wanted:
            causal = not bool(each.triu(1).any())
            zeros = each.new_zeros(1, each.shape[1], each.shape[2], 1)
            logits = each[:1].clamp(min=torch.finfo(each.dtype).tiny).log()
            own = ModelsOwn(each.shape[1], 1, (dense(logits),))
            call = LayerCall(zeros, zeros, own, {"causal": causal, "mask": each[:1] > 0})
        found.append((f"layer {number}", call))
    return found
