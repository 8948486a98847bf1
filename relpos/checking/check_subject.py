"""What is checked, behind one interface: a model of transformers, any module that returns logits, or a function.

A subject says what it can do (caches, padding, positions of its own); what it cannot do is listed as not tested.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache

from relpos.checking.capture import Listener, TableListener, attention_calls
from relpos.models.base import RelposModel
from relpos.pretrained.layer_position import LayerPosition, ModelLayer, model_layers
from relpos.pretrained.positions import layer_positions, longest
from relpos.pretrained.probe import evaluating, examples, numbers_of, probe_tokens, tensors, token_ids
from relpos.pretrained.reader import MASKED, NEXT_TOKEN

SHORT = 32  # tokens of a test, if no window needs more
ROOM = 4  # rows of a table that are left free: RoBERTa's begins after its padding
RELATIVE = ("rotary", "buckets", "alibi", "none", "deberta")  # kinds of positions that depend on distances alone
ABSOLUTE = ("learned", "sinusoidal")
LOW = (torch.bfloat16, torch.float16)
HEADS, HEAD_DIM = 4, 16  # of the queries that a bare function gets
VOCABULARY = 32
FRAMES = 64  # of the features that `examples` makes for models that read one row per frame
FARTHEST = 2_048  # tokens of a window that a test leaves
SELECTIONS = ("index_topk", "keep_window_size")  # entries of configurations whose layers select keys


class NotTestableError(Exception):
    """A test cannot be made; the text says why."""


class NotApplicableError(NotTestableError):
    """A test makes no sense for the subject, which has nothing of the kind: it is left out of the report."""


class Subject:
    """What every subject has: it turns token ids into outputs."""

    name: str
    causal: bool | None  # None: not known
    padding = False  # whether it takes an attention mask
    positions = False  # whether it takes any positions
    cache = False
    model: nn.Module | None = None
    length = SHORT  # tokens of a test

    def tokens(self, rows: int, length: int, seed: int) -> Tensor:
        """Random token ids: (rows, length)."""
        raise NotImplementedError

    def run(self, ids: Tensor, **inputs: Any) -> Tensor:
        """The outputs for token ids (rows, length): (rows, length, width), in float32 or more."""
        raise NotImplementedError

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """In evaluation mode without gradients, and in float32."""
        with torch.no_grad():
            yield

    @contextlib.contextmanager
    def captured(self, listener: Listener, tables: TableListener | None = None) -> Iterator[None]:
        """Within this context, hear of each call of attention."""
        with attention_calls(self.model, listener, tables):
            yield


class ModuleSubject(Subject):
    """Any module that returns logits, or hidden states, for token ids."""

    def __init__(
        self,
        model: nn.Module,
        name: str = "",
        example: Mapping[str, Any] | None = None,
        decode: Callable[[Tensor], Any] | None = None,
    ) -> None:
        self.model: nn.Module = model
        self.name = name or type(model).__name__
        self.causal = None
        self.example = dict(example or {})
        self.decode = decode  # token ids (1, length) to logits, step by step with the module's own cache
        self.casts: list[Cast] = []
        self.accepted = inspect.signature(model.forward).parameters
        self.padding = "attention_mask" in self.accepted
        self.positions = "position_ids" in self.accepted

    @cached_property
    def vocabulary(self) -> int:
        """The tokens that it knows: by its largest table, else by its logits for the first one."""
        tables = [module.num_embeddings for module in self.model.modules() if isinstance(module, nn.Embedding)]
        return max(tables) if tables else self.run(torch.zeros(1, 1, dtype=torch.long, device=self.device)).shape[-1]

    @cached_property
    def device(self) -> torch.device:
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))

    def tokens(self, rows: int, length: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(min(4, self.vocabulary - 1), self.vocabulary, (rows, length), generator=generator).to(
            self.device
        )

    def run(self, ids: Tensor, **inputs: Any) -> Tensor:
        output = self.model(ids, **self.example, **inputs)
        return first_tensor(output)

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        with evaluating(self.model), cast(self.model, LOW, torch.float32) as self.casts:
            yield

    @contextlib.contextmanager
    def in_own_dtype(self) -> Iterator[None]:
        """Within `prepared`, in the dtype that the model came in."""
        for change in self.casts:
            change.owner.data = change.data
        try:
            yield
        finally:
            for change in self.casts:
                change.owner.data = change.data.float()


class FunctionModule(nn.Module):
    """A function of token ids as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, ids: Tensor, **inputs: Any) -> Any:
        return self.function(ids, **inputs)


class ModelSubject(ModuleSubject):
    """A model of transformers that reads text."""

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, name: str = "", work: int | None = None) -> None:
        super().__init__(model, name or f"{type(model).__name__} (model type {model.config.model_type!r})")
        self.ours = isinstance(model, RelposModel)
        self.text: Any = None  # of `trained.sample`, for the tests on real text
        self.rotations: dict[torch.dtype, list[Any]] = {}  # what `rotations.measured` found, by dtype
        self.two_stacks = bool(getattr(model.config, "is_encoder_decoder", False))
        self.causal = self._is_causal()
        prefix = "decoder_" if self.two_stacks else ""
        self.padding = f"{prefix}attention_mask" in self.accepted
        self.restarts = f"{prefix}position_ids" in self.accepted  # whether positions may begin again at 0
        self.positions = self.restarts and not self.ours
        self.cache = self.causal is not False and "past_key_values" in self.accepted and model.can_generate()
        limit = min(
            numbers_of(model, ("max_position_embeddings", "n_positions", "max_target_positions")), default=10**6
        )
        self.limit = limit - ROOM
        tokens = probe_tokens(model) if work is None else probe_tokens(model, work)
        if self.ours and work != 1:  # their windows are in plans, which the probe does not read
            tokens = max([tokens, *(window + window // 4 + SHORT for window in self.windows if window <= FARTHEST)])
        self.length = min(max(SHORT, tokens), max(8, self.limit))
        if self.selected is not None and self.selected >= SHORT:
            self.length = min(self.length, self.selected)

    def _is_causal(self) -> bool | None:
        """Whether it must be causal; None for a model of a family that is not known, which may see a prefix."""
        name, config = type(self.model).__name__, self.model.config
        if "unknown" in self.kinds or not self.kinds:
            return None
        if self.two_stacks:
            return bool(getattr(getattr(config, "decoder", None), "is_decoder", True))
        if name.endswith(NEXT_TOKEN):
            return True
        if name.endswith(MASKED):
            return bool(getattr(config, "is_decoder", False))
        return any(getattr(layer.module, "is_causal", None) for layer in self.layers)

    @cached_property
    def layers(self) -> list[ModelLayer]:
        """Its self-attention layers that run for a text; without those of a vision tower, for example."""
        layers = [layer for layer in model_layers(self.model) if not layer.cross]
        seen: set[str] = set()
        try:
            with evaluating(self.model), self.captured(lambda call: seen.add(call.layer)):
                self.run(self.tokens(1, 4, 0))
        except Exception:  # which the first test reports
            return layers
        return [layer for layer in layers if layer.name in seen] or layers

    @cached_property
    def selected(self) -> int | None:
        """How many keys its layers select; None if they see all. Equal scores may fall either way."""
        numbers = numbers_of(self.model, SELECTIONS)
        blocks = max(numbers_of(self.model, ("index_block_size",)), default=1)
        return min(numbers) * blocks if numbers else None

    @cached_property
    def known(self) -> dict[str, LayerPosition]:
        """Where its configuration puts position, by the name of the layer."""
        return {position.name: position for position in layer_positions(self.model)}

    @property
    def kinds(self) -> set[str]:
        return {self.known[layer.name].kind for layer in self.layers}

    @property
    def only_attention(self) -> bool:
        """Whether nothing but attention mixes tokens: no convolution, recurrence or linear attention."""
        types = getattr(self.model.config.get_text_config(), "layer_types", None) or ()
        words = ("Conv1d", "Conv1D", "Mamba", "DeltaNet", "Recurrent", "LinearAttention", "ShortConv", "SSM")
        mixes = any(
            any(word in type(module).__name__ for word in words)
            and not (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))  # GPT-2's name of a linear layer
            for module in self.model.modules()
        )
        return not mixes and not any("linear" in kind or "conv" in kind or "mamba" in kind for kind in types)

    @property
    def windows(self) -> list[int]:
        """The windows of its layers."""
        return [layer.window for layer in self.layers if layer.window is not None]

    @property
    def window(self) -> int | None:
        """The smallest window of its layers."""
        return min(self.windows, default=None)

    @contextlib.contextmanager
    def captured(self, listener: Listener, tables: TableListener | None = None) -> Iterator[None]:
        """Within this context, hear of each call of attention; our models then run by its definition, in float64."""
        exact = cast(self.model, (torch.float32,), torch.float64) if self.ours else contextlib.nullcontext()
        with exact, super().captured(listener, tables):
            yield

    @property
    def trained_length(self) -> int | None:
        return longest(self.model)

    def tokens(self, rows: int, length: int, seed: int) -> Tensor:
        return token_ids(self.model, rows, length, seed).to(self.device)

    def run(self, ids: Tensor, **inputs: Any) -> Tensor:
        return first_tensor(self.output(ids, **inputs))

    def output(self, ids: Tensor, **inputs: Any) -> Any:
        """What the model returns; for a model with two stacks, `ids` are those of the decoder."""
        if "use_cache" in self.accepted or self.cache:
            inputs.setdefault("use_cache", inputs.get("past_key_values") is not None)
        if not self.two_stacks:
            return self.model(input_ids=ids, **inputs)
        source = self.tokens(1, 12, 99).expand(len(ids), -1)
        renamed = {
            f"decoder_{name}" if name in ("attention_mask", "position_ids") else name: x for name, x in inputs.items()
        }
        return self.model(input_ids=source, decoder_input_ids=ids, **renamed)

    def static_cache(self, tokens: int) -> Any:
        """An empty cache of a fixed number of tokens."""
        cache: Any = StaticCache(config=self.model.config, max_cache_len=tokens)
        return EncoderDecoderCache(cache, DynamicCache()) if self.two_stacks else cache


def as_model(subject: Subject) -> ModelSubject:
    """The subject, if it is a model of text of transformers."""
    if not isinstance(subject, ModelSubject):
        raise NotTestableError("only for models of text of transformers, which have a configuration")
    return subject


class FeatureSubject(ModuleSubject):
    """A model of transformers that reads frames of features, as of speech: token ids stand for random frames."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, f"{type(model).__name__} (model type {model.config.model_type!r})")
        inputs = list(examples(model))
        if model.main_input_name != "input_features" or not inputs or len(inputs[-1]["input_features"][0]) != FRAMES:
            raise ValueError(
                f"{type(model).__name__} reads {model.main_input_name}; relpos check needs a model of text, or of "
                "frames of features."
            )
        *_, self.inputs = inputs
        width = self.inputs["input_features"].shape[-1]
        self.frames = torch.randn(VOCABULARY, width, generator=torch.Generator().manual_seed(0))

    def tokens(self, rows: int, length: int, seed: int) -> Tensor:
        return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))

    def run(self, ids: Tensor, **inputs: Any) -> Tensor:
        own = {name: x.expand(len(ids), *x.shape[1:]) for name, x in self.inputs.items()}
        frames = self.frames[ids].to(self.device)
        return first_tensor(self.model(**{**own, "input_features": frames, **self.example, **inputs}))


class FunctionSubject(Subject):
    """A bare attention function of q, k and v, each (batch, heads, length, head_dim).

    Token ids stand for random vectors. The values are the rows of the identity, so that the outputs are the weights.
    """

    def __init__(
        self, function: Callable[..., Any], name: str = "", heads: int = HEADS, head_dim: int = HEAD_DIM
    ) -> None:
        self.function, self.heads, self.head_dim = function, heads, head_dim
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.causal = None
        generator = torch.Generator().manual_seed(0)
        self.vectors = torch.randn(3, VOCABULARY, heads, head_dim, generator=generator)
        self.model = function if isinstance(function, nn.Module) else None

    def tokens(self, rows: int, length: int, seed: int) -> Tensor:
        return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))

    def run(self, ids: Tensor, **inputs: Any) -> Tensor:
        q, k, v = (table[ids].transpose(1, 2) for table in self.vectors)  # (rows, heads, length, head_dim)
        output = first_tensor(self.function(q, k, v, **inputs))
        return output.transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class Cast:
    """A parameter or buffer that has another dtype for a while, and its own values."""

    owner: Tensor
    data: Tensor


@contextlib.contextmanager
def cast(model: nn.Module, dtypes: tuple[torch.dtype, ...], to: torch.dtype) -> Iterator[list[Cast]]:
    """A model whose tensors of some dtypes are of another: in more bits, two ways to the same numbers agree closer.

    Afterwards all tensors are the same objects with the same values as before.
    """
    changes = [Cast(x, x.data) for x in (*model.parameters(), *model.buffers()) if x.dtype in dtypes]
    for change in changes:
        change.owner.data = change.data.to(to)
    try:
        yield changes
    finally:
        for change in changes:
            change.owner.data = change.data


def first_tensor(output: Any) -> Tensor:
    """The logits, or the first tensor of real numbers, that something returns."""
    logits = getattr(output, "logits", None)
    found = logits if isinstance(logits, Tensor) else next(iter(tensors(output)), None)
    if found is None:
        raise NotTestableError(f"it returns {type(output).__name__}, which has no tensor of real numbers")
    return found.detach().to(torch.promote_types(found.dtype, torch.float32))
