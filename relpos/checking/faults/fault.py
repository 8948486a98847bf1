"""What a fault is, and the tools by which faults are injected into models of transformers for the tests."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from relpos.checking.check_subject import ModelSubject
from relpos.checking.configured import LayerBias
from relpos.checking.findings import Finding
from relpos.checking.rotations import LayerRotation
from relpos.encodings.rope import Rope
from relpos.encodings.window import Window
from relpos.forms.encoding import Encoding
from relpos.forms.rotation import RopeParameters, turn
from relpos.pretrained.families.relpos_models import parts

Change = Callable[..., Any]
APPLY = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_emb")  # functions that turn q and k
READS_MASK = ("bloom", "esm", "falcon", "mpt", "opt")  # model types whose code needs a 2-D mask of padding
SLOPES = ("_get_alibi_slopes",)
MASKS = {  # functions of transformers that make masks with a window, and those without
    "create_sliding_window_causal_mask": "create_causal_mask",
    "create_bidirectional_sliding_window_mask": "create_bidirectional_mask",
}
ALIBI = ("build_alibi_tensor", "build_mpt_alibi_tensor")


class NotPossibleError(Exception):
    """A model cannot have a fault."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    name: str
    title: str  # a few words
    tests: tuple[str, ...]  # those whose findings tell it
    diagnosis: str  # one sentence
    remedy: str  # the line that mends it
    claims: Callable[[Finding], bool]  # whether a failed finding of these tests is this fault
    inject: Callable[[ModelSubject], AbstractContextManager[None]]  # raises NotPossibleError
    also: tuple[str, ...] = ()  # tests that fail as a consequence
    threads: tuple[str, ...] = ()  # public threads where it happened


MASKED = ("cache", "pieces", "crop", "static cache", "left padding", "right padding", "packing", "window")
ROTATED = ("precision", "bias", "shift", "cache", "pieces", "crop", "static cache", "packing", "left padding")


# -- Telling


def wrong_rotations(finding: Finding) -> list[LayerRotation]:
    """The layers whose rotation is not as configured."""
    rotations = finding.evidence["rotations"]
    return [rotations[number] for number in finding.evidence["wrong"]]


def wrong_biases(finding: Finding) -> list[LayerBias]:
    """The layers whose bias is not as configured."""
    wrong: list[LayerBias] = finding.evidence["wrong"]
    return wrong


# -- Injecting


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute with another value."""
    before = vars(owner).get(name, replaced)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is replaced:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextlib.contextmanager
def together(*contexts: AbstractContextManager[None]) -> Iterator[None]:
    """Several contexts as one."""
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def code_of(subject: ModelSubject) -> Any:
    """The module of transformers that has the code of the model's attention."""
    return sys.modules[type(subject.layers[0].module).__module__]


def with_function(subject: ModelSubject, names: tuple[str, ...], change: Change) -> AbstractContextManager[None]:
    """The functions of these names in the model's code, wrapped: change(function, *arguments, **keywords)."""
    code = code_of(subject)
    found = [name for name in names if hasattr(code, name)]
    if not found:
        raise NotPossibleError(f"its code has no {names[0]}")
    return together(*(replaced(code, name, functools.partial(change, getattr(code, name))) for name in found))


def with_rotation(subject: ModelSubject, change: Change) -> AbstractContextManager[None]:
    """The function that turns q and k, wrapped: change(function, q, k, cos, sin, *rest, **keywords)."""
    if "rotary" not in subject.kinds or subject.model.config.model_type in ("llama4_text", "deepseek_v2"):
        raise NotPossibleError("its rotations are not cosines and sines")
    if subject.ours:
        return together(*(turning(rope, change) for rope in our_parts(subject, Rope)))
    return with_function(subject, APPLY[:2], change)


def rotary_modules(subject: ModelSubject) -> list[Any]:
    """The modules that have the frequencies."""
    modules = [module for module in subject.model.modules() if "Rotary" in type(module).__name__]
    if not modules or "rotary" not in subject.kinds:
        raise NotPossibleError("it has no module of frequencies")
    return modules


def with_frequencies(
    subject: ModelSubject, change: Callable[[Tensor, Any, str], Tensor]
) -> AbstractContextManager[None]:
    """The buffers of frequencies, changed: change(frequencies, module, name)."""
    if subject.ours:
        return together(
            *(
                replaced(rope, "rope", ChangedFrequencies(**vars(rope.rope), change=change))
                for rope in our_parts(subject, Rope)
            )
        )
    contexts = []
    for module in rotary_modules(subject):
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name.endswith("inv_freq"):
                changed = change(buffer, module, name)
                contexts.append(with_data(buffer, changed))
    if not contexts:
        raise NotPossibleError("it has no buffer of frequencies")
    return together(*contexts)


# Of our own models, the encodings are changed, which are the same for all families.


def our_parts(subject: ModelSubject, kind: type[Any]) -> list[Any]:
    """The encodings of a kind in one of our models, the parts of sums among them."""
    chosen = [encoding for encoding in parts(subject.model) if isinstance(encoding, kind)]
    if not subject.ours or not chosen:
        raise NotPossibleError("it has no such encoding")
    return chosen


@dataclass(frozen=True, kw_only=True)
class ChangedFrequencies(RopeParameters):
    """RoPE with other frequencies."""

    change: Callable[[Tensor, Any, str], Tensor]

    def frequencies(self, lengths: Tensor, dtype: torch.dtype) -> Tensor:
        return self.change(super().frequencies(lengths, dtype), self, "inv_freq").to(dtype)


def turning(rope: Any, change: Change) -> AbstractContextManager[None]:
    """RoPE whose rotation of q and k is wrapped."""
    own = rope.rotation

    def rotate(q: Tensor, k: Tensor, call: Any) -> tuple[Tensor, Tensor]:
        rotation = own(call)

        def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
            return tuple(turn(x, cos, sin, rope.layout) if x.shape[2] == cos.shape[1] else x for x in (q, k))

        turned_q = change(function, q, k, rotation.q_cos, rotation.q_sin)[0]
        return turned_q, change(function, q, k, rotation.k_cos, rotation.k_sin)[1]

    return together(replaced(rope, "rotation", lambda call: None), replaced(rope, "rotate", rotate))


def biased(encoding: Any, change: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    """An encoding whose bias by distance is changed."""
    own = encoding.bias

    def bias(call: Any) -> Any:
        form = own(call)
        return replace(form, table=change(form.table[None, :, None])[0, :, 0])

    if not encoding.static_bias or isinstance(encoding, Window) or encoding.form != "Toeplitz":
        raise NotPossibleError("it has no bias by distance")
    return replaced(encoding, "bias", bias)


@contextlib.contextmanager
def with_data(tensor: Tensor, data: Tensor) -> Iterator[None]:
    """A parameter or buffer with other values."""
    before = tensor.data
    tensor.data = data.to(before.dtype)
    try:
        yield
    finally:
        tensor.data = before


@contextlib.contextmanager
def with_inputs(model: PreTrainedModel, change: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """The keywords of the model's forward, changed in place."""

    def hook(module: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        keywords = dict(keywords)
        change(keywords)
        return arguments, keywords

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def during(modules: list[Any], set_up: Callable[[Any], Any], undo: Callable[[Any, Any], None]) -> Iterator[None]:
    """Something that holds only while some modules run, so that nobody sees it in their attributes."""
    kept: dict[Any, Any] = {}
    handles = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(lambda m, _: kept.__setitem__(m, set_up(m))))
        handles.append(module.register_forward_hook(lambda m, _, __: undo(m, kept.pop(m)), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def seen_before(keywords: dict[str, Any]) -> int:
    """The tokens in the cache of a forward."""
    cache = keywords.get("past_key_values")
    return 0 if cache is None else int(cache.get_seq_length())


def additive(visible: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A mask that is added to scores, (1, 1, queries, keys), from the keys that are seen."""
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)[None, None]


def with_mask(subject: ModelSubject, visible: Callable[[int], Tensor]) -> AbstractContextManager[None]:
    """Forwards without a cache or a padding mask see what a function of the length says."""
    code = sys.modules[type(subject.model).__module__]
    if not any(hasattr(code, f"create_{kind}_mask") for kind in ("causal", "bidirectional")) or subject.two_stacks:
        raise NotPossibleError("its code makes its masks itself")
    if subject.model.config.model_type in READS_MASK:
        raise NotPossibleError("its code makes its masks itself")

    def change(keywords: dict[str, Any]) -> None:
        ids = keywords["input_ids"]
        if keywords.get("attention_mask") is None and not seen_before(keywords) and ids.shape[1] > 3:
            dtype = next(subject.model.parameters()).dtype
            keywords["attention_mask"] = additive(visible(ids.shape[1]), dtype).expand(len(ids), -1, -1, -1)

    return with_inputs(subject.model, change)


def with_exchanged_masks(subject: ModelSubject, sliding: bool, full: bool) -> AbstractContextManager[None]:
    """Layers with a window get the mask of those without (`sliding`), and the other way round (`full`)."""
    code: Any = code_of(subject)
    pairs = [(one, other) for one, other in MASKS.items() if hasattr(code, one) and hasattr(code, other)]
    if not pairs:
        raise NotPossibleError("its code makes its masks itself")
    if full and len({layer.window for layer in subject.layers}) < 2:
        raise NotPossibleError("its layers are all of one type")
    contexts = []
    for one, other in pairs:
        contexts += [replaced(code, one, getattr(code, other))] if sliding else []
        contexts += [replaced(code, other, getattr(code, one))] if full else []
    return together(*contexts)


def with_bias(subject: ModelSubject, change: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    """The bias on the scores, changed: a function of (batch, heads, queries, keys)."""
    if subject.ours:
        return together(*(biased(encoding, change) for encoding in our_parts(subject, Encoding)))
    if "alibi" in subject.kinds:

        def wrong(function: Any, *arguments: Any, **keywords: Any) -> Tensor:
            values: Tensor = function(*arguments, **keywords)  # (batch × heads, 1, keys), (heads, 1, keys) or (heads,)
            heads = int(subject.layers[0].config.num_attention_heads)
            keys = 1 if values.dim() == 1 else values.shape[-1]
            return change(values.view(-1, heads, 1, keys)).reshape(values.shape)

        return with_function(subject, SLOPES if hasattr(code_of(subject), SLOPES[0]) else ALIBI, wrong)
    if "buckets" not in subject.kinds:
        raise NotPossibleError("it has no bias by distance")
    owners = [layer.module for layer in subject.layers if hasattr(layer.module, "compute_bias")]
    if not owners:
        raise NotPossibleError("it has no compute_bias")
    contexts = []
    for owner in owners:
        own = owner.compute_bias
        contexts.append(replaced(owner, "compute_bias", lambda *a, own=own, **k: change(own(*a, **k))))
    return together(*contexts)


def with_buckets(
    subject: ModelSubject, change: Callable[[Callable[..., Any], Tensor, dict[str, Any]], Any]
) -> AbstractContextManager[None]:
    """T5's buckets by `change`, a function of the model's own function, the relative positions and its options."""
    owners = [layer.module for layer in subject.layers if hasattr(layer.module, "_relative_position_bucket")]
    owners = [owner for owner in owners if type(owner).__name__ not in ("UMT5Attention", "LongT5LocalAttention")]
    if not owners:
        raise NotPossibleError("it has no buckets")
    contexts = []
    for owner in owners:
        own: Any = owner._relative_position_bucket

        def changed(relative: Tensor, own: Any = own, **more: Any) -> Any:
            return change(own, relative, more)

        contexts.append(replaced(owner, "_relative_position_bucket", changed))
    return together(*contexts)


def with_factor(subject: ModelSubject, power: int) -> AbstractContextManager[None]:
    """The attention factor of a scaling to a power: 0 leaves it out, 2 applies it twice."""
    factors = {position.rotary.factor for position in subject.known.values() if position.rotary is not None}
    if factors == {1.0}:
        raise NotPossibleError("its rotation has no factor")
    assert subject.known  # read before the model is changed
    if subject.ours:
        ropes = our_parts(subject, Rope)
        changed = [replace(rope.rope, attention_factor=rope.rope.amplitude**power) for rope in ropes]
        return together(*(replaced(rope, "rope", numbers) for rope, numbers in zip(ropes, changed, strict=True)))
    return together(
        *(
            replaced(module, name, getattr(module, name) ** power)
            for module in rotary_modules(subject)
            for name in list(vars(module))
            if name.endswith("attention_scaling")
        )
    )


def has_factor(finding: Finding, power: int) -> bool:
    """Whether the measured attention factor is the expected one to a power."""
    factor, expected = finding.evidence["factor"], finding.evidence["expected"]
    return bool(abs(factor - expected**power) < 0.005 * expected and expected != 1.0)
