"""Which keys each query sees, described in linear memory: transformers' masks as arguments of `relpos.attention`.

transformers describes a mask by a function (batch, head, query, key) -> seen, composed of a few known ones. They are
recognised by their names, and their settings are read from their closures; tests/pretrained/test_use.py notices when
transformers changes them. What is not recognised is evaluated: row by row if the function takes index tensors, else
materialised.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map
from transformers import masking_utils
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    prepare_padding_mask,
    sdpa_mask,
)

from relpos.attend.arguments import WeightOptions
from relpos.forms.call import Call

WITHOUT = 'run the model without relpos (relpos.use(model, off=True), or without attn_implementation="relpos")'
ATTRIBUTE = "_relpos_key_mask"  # of a tensor, in traced graphs
NO_SKIP = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
ADDITIVE = {"deepseek_v4"}  # model types that join an additive bias to their mask, so that it has to be additive too
KNOWN = {  # by the name of the function: our name, and the variables of its closure
    "sliding_window_overlay.<locals>.inner_mask": ("window", {"sliding_window"}),
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": ("window of both directions", {"sliding_window"}),
    "chunked_overlay.<locals>.inner_mask": ("chunks", {"chunk_size", "left_padding"}),
    "packed_sequence_mask_function.<locals>.inner_mask": ("documents", {"packed_sequence_mask"}),
    "padding_mask_function.<locals>.inner_mask": ("padding", {"padding_mask"}),
}
Parts = list[tuple[str, Mapping[str, Any]]]  # ("causal", {}), ("window", {"sliding_window": w}), …


@dataclass(frozen=True)
class KeyMask(Call):
    """A call of attention of which only the sizes and what masks it are known."""

    ndim = 0  # a model that would add something to a 4-D mask leaves this alone

    def to(self, *args: Any, **kwargs: Any) -> "KeyMask":
        """Itself: models outside the interface convert their masks, and this one holds what its reader needs."""
        return self

    contiguous = to

    def arguments(self, batch: int, keys: int) -> WeightOptions:
        """The arguments of `relpos.attention`: a mask of one row serves all rows, a mask for more keys is cut."""
        if keys > self.keys:
            raise ValueError(f"the mask is for {self.keys} keys, but there are {keys}.")
        documents, padding = (
            None if value is None else value[:, :keys].expand(batch, -1) for value in (self.documents, self.padding)
        )
        where: WeightOptions = {"start": self.start, "causal": self.causal, "window": self.window, "mask": self.mask}
        return {**where, "documents": documents, "padding": padding}

    def materialise(self) -> Tensor:
        """Materialise the mask: boolean (batch, 1, queries, keys)."""
        return self.visible(self.i).expand(self.batch, 1, self.queries, self.keys)


class KeyMaskTensor(Tensor):
    """A boolean mask (batch, 1, queries, keys) that takes no memory: it is materialised only if a model computes on it.

    transformers passes 4-D masks through unchanged, so the description reaches attention. What keeps its meaning
    (slicing, repeating, boolean operations, choosing by it) is done with the materialised mask and stays exact. What
    would not is refused: True is a key that is seen, so that a mask converted to numbers and added to scores, or filled
    with −∞, or extended by another model's additive mask, would hide what it shows.
    """

    key_mask: KeyMask

    @staticmethod
    def __new__(cls, key_mask: KeyMask) -> "KeyMaskTensor":
        shape = (key_mask.batch, 1, key_mask.queries, key_mask.keys)
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=key_mask.device)
        mask.key_mask = key_mask
        return mask

    def __init__(self, key_mask: KeyMask) -> None:
        """All is done in `__new__`."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"KeyMaskTensor({self.key_mask})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "KeyMaskTensor":
        return KeyMaskTensor(self.key_mask)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):  # reentrant checkpoints detach
            return KeyMaskTensor(args[0].key_mask)

        def materialised(x: Any) -> Any:
            return x.key_mask.materialise() if isinstance(x, KeyMaskTensor) else x

        result = func(*tree_map(materialised, args), **tree_map(materialised, kwargs or {}))
        if changes_meaning(func, args, result):
            raise ValueError(  # torch would swallow a TypeError
                f"this model computes {func.overloadpacket.__name__} with its attention mask, which would change the "
                f"meaning of relpos's boolean one (True: seen): {WITHOUT}."
            )
        return result


def changes_meaning(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Whether an operation on a `KeyMaskTensor` yields something that is no longer a boolean mask, or fills it."""
    aten, operation = torch.ops.aten, func.overloadpacket
    chosen_by = {aten.where: 0, aten.masked_fill: 1, aten.masked_fill_: 1}.get(operation)
    if chosen_by is not None and isinstance(args[chosen_by], KeyMaskTensor):
        return False
    if operation in (aten.masked_fill, aten.masked_fill_):
        return isinstance(args[2], float)
    if operation == aten.cat:  # T5Gemma 2 joins the masks of two kinds of keys
        return not all(isinstance(x, KeyMaskTensor) for x in args[0])
    if operation == aten.constant_pad_nd:
        return True
    return any(isinstance(x, Tensor) and x.is_floating_point() for x in tree_leaves(result))


def key_mask_of(mask: Any) -> KeyMask | None:
    """The description that a mask is or carries, or None."""
    if isinstance(mask, KeyMask):
        return mask
    key_mask = mask.key_mask if isinstance(mask, KeyMaskTensor) else getattr(mask, ATTRIBUTE, None)
    return key_mask if isinstance(key_mask, KeyMask) else None


@dataclass(frozen=True)
class MaskRequest:
    """The mask that transformers asks for: the arguments of its `sdpa_mask`."""

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor = 0  # position of the first query
    kv_offset: int = 0  # position of the first key: above 0 where a cache has dropped older keys
    mask_function: Callable[..., Tensor] = causal_mask_function
    attention_mask: Tensor | None = None  # padding
    local_size: int | None = None
    allow_is_causal_skip: bool = True
    allow_is_bidirectional_skip: bool | None = None  # passed for masks of both directions only
    use_vmap: bool = False
    device: torch.device | str = "cpu"

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> "MaskRequest":
        """The request in the arguments of a mask function; the others, as the dtype, are of no use to us."""
        return cls(**{name: value for name, value in arguments.items() if name in cls.__dataclass_fields__})

    def materialise(self, **changes: Any) -> Tensor | None:
        """The mask of transformers: boolean (batch, 1, queries, keys), or None if it may be left out."""
        mask: Tensor | None = sdpa_mask(**{**self.__dict__, **changes})
        return mask

    def described(self, config: Any = None) -> KeyMask | None:
        """The description of the mask; None if it must be materialised."""
        return self._traced(config) if torch.compiler.is_compiling() else self._recognised()

    def key_mask(self, causal: bool = False, **fields: Any) -> KeyMask:
        """A description with the sizes of the request."""
        fields |= {"batch": self.batch_size, "device": torch.device(self.device)}
        return KeyMask(self.q_length, self.kv_length, causal=causal, **fields)

    @property
    def keys(self) -> slice:
        """The positions of the keys."""
        return slice(self.kv_offset, self.kv_offset + self.kv_length)

    @property
    def padding(self) -> Tensor | None:
        """Which keys are not padding, (batch, keys); None if the caller gave none."""
        padding = prepare_padding_mask(self.attention_mask, self.kv_length, self.kv_offset)
        return None if padding is None else padding[:, self.keys]

    def one_row(self) -> Tensor | None:
        """The mask of a single query: boolean (batch, 1, 1, keys), or None if it sees all keys."""
        padding = self.attention_mask
        if padding is not None and self.kv_length == 1 and padding.shape[1] > self.kv_offset + 1:
            # Recurrent Gemma's cache tells no length, since its first layers keep no keys: transformers makes a mask of
            # one key, the first token, for all. The keys are the last ones.
            keys = min(padding.shape[1], self.local_size or padding.shape[1])
            return padding[:, None, None, padding.shape[1] - keys :].bool()
        return self.materialise()

    def _recognised(self) -> KeyMask | None:
        """The description of a mask whose values can be read."""
        function, first_key = self.mask_function, int(self.kv_offset)
        start = int(self.q_offset) - first_key
        parts = recognise(function)
        if start >= 0 and parts is not None:
            key_mask = self._composed(parts, start)
            if key_mask is not None:
                return key_mask
        if start >= 0 and not self.use_vmap:

            def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:  # for one block of queries at a time
                return function(b, h, i + first_key, j + first_key)

            return self.key_mask(start=start, padding=self.padding, mask=seen)
        warnings.warn(
            "this model masks attention by a function that relpos does not know as intervals: the mask is "
            "materialised, which takes memory of queries × keys. The result is exact.",
            stacklevel=4,
        )
        return None

    def _composed(self, parts: Parts, start: int) -> KeyMask | None:
        """The recognised parts of a mask as one description; None if documents do not cover the queries."""
        keys, last = self.kv_length, start + self.q_length
        far = last + keys  # wider than any distance
        windows = [(far, far)]
        documents: Tensor | None = None
        padding = self.padding
        for name, settings in parts:
            if name == "causal":
                windows.append((far, 0))
            elif name == "window":
                windows.append((settings["sliding_window"] - 1, far))
            elif name == "window of both directions":
                windows.append((settings["sliding_window"],) * 2)
            elif name == "padding":
                counts = settings["padding_mask"][:, self.keys].bool()
                padding = counts if padding is None else counts & padding
            else:
                if name == "documents":
                    ids = settings["packed_sequence_mask"][:, self.keys].long()
                else:
                    before = settings["left_padding"][:, None]
                    position = torch.arange(self.keys.start, self.keys.stop, device=before.device)
                    ids = torch.div(position - before, settings["chunk_size"], rounding_mode="floor")
                # Both kinds of ids never decrease along a row, so that pairs of them are again contiguous documents.
                documents = ids if documents is None else documents * (keys + far) + (ids - ids.amin())
        if documents is not None and (last > keys or documents.shape[1] != keys):
            return None
        if padding is not None and bool(padding.all()):
            padding = None
        left, right = (min(sides) for sides in zip(*windows, strict=True))
        window = None if left >= far and right in (0, far) else (left, right)
        return self.key_mask(right == 0, start=start, window=window, documents=documents, padding=padding)

    def _traced(self, config: Any) -> KeyMask | None:
        """The description of a mask in a traced graph, where neither values nor closures can be read.

        A causal mask that is a conjunction hides a token's predecessor only where a document or a chunk begins, so the
        ids of the documents are counted from there.
        """
        function, window = self.mask_function, self.local_size
        chunked = window is not None and getattr(config, "attention_chunk_size", None) is not None
        both_directions = self.allow_is_bidirectional_skip is not None
        if (
            self.use_vmap
            or isinstance(self.q_offset, Tensor)
            or self.kv_offset > self.q_offset
            or getattr(function, "__name__", "") == "or_mask"
            or (window is not None and window < 2)
            or (chunked and getattr(config, "sliding_window", None) is not None)
        ):
            return None
        start = self.q_offset - self.kv_offset
        documents = None
        if not both_directions and function is not causal_mask_function:
            if start + self.q_length > self.kv_length:
                return None
            token = torch.arange(1, self.kv_length, device=self.device)[None] + self.kv_offset
            row = torch.arange(self.batch_size, device=self.device)[:, None]
            sees_the_last = function(row, torch.zeros_like(row), token, token - 1)  # (batch or 1, keys − 1)
            documents = F.pad((~sees_the_last).long().expand(self.batch_size, -1).cumsum(1), (1, 0))
        sides = None
        if window is not None and not chunked:
            sides = (window, window) if both_directions else (window - 1, 0)
        where = {"start": start, "window": sides, "documents": documents, "padding": self.padding}
        return self.key_mask(not both_directions, **where)


def interval_mask(config: Any = None, **arguments: Any) -> Any:
    """A mask of transformers' mask interface, as a tensor that takes no memory or one value per key.

    The arguments are those of transformers' `sdpa_mask`. The result is None where nothing is masked; a boolean row per
    sequence for a single query; else a mask that carries its description (`key_mask_of`). Model types in `ADDITIVE` get
    the mask that they would get in "eager".
    """
    if getattr(config, "model_type", None) in ADDITIVE:
        return eager_mask(**arguments)
    request = MaskRequest.read(arguments)
    if request.q_length == 1:  # nothing can be saved
        return request.one_row()
    key_mask = request.described(config)
    if torch.compiler.is_compiling():
        return request.materialise() if key_mask is None else traced_mask(key_mask)
    if key_mask is None:
        return request.materialise(**NO_SKIP)
    hides = (key_mask.window, key_mask.documents, key_mask.padding, key_mask.mask)
    nothing = not key_mask.causal and hides == (None,) * 4
    return None if nothing and request.allow_is_bidirectional_skip else KeyMaskTensor(key_mask)


def traced_mask(key_mask: KeyMask) -> Tensor:
    """A mask that carries its description in a traced graph, where subclasses of tensors cannot be made.

    It is uint8, as no real mask is: if the attribute is lost on the way, attention notices.
    """
    mask = torch.ones(1, 1, 1, 1, dtype=torch.uint8, device=key_mask.device)
    setattr(mask, ATTRIBUTE, key_mask)
    return mask


def described_mask(attention_mask: Any = None, **arguments: Any) -> KeyMask:
    """The same for models outside the interface whose attention we replaced: always the description itself.

    It is not a tensor, so that such a model cannot add anything to it: Falcon would add ALiBi.
    """
    if isinstance(attention_mask, KeyMask):  # generate makes the mask before the model does
        return attention_mask
    request = MaskRequest.read({**arguments, "attention_mask": attention_mask})
    key_mask = request.described()
    return request.key_mask(start=0, mask=request.materialise(**NO_SKIP)) if key_mask is None else key_mask


def recognise(function: Callable[..., Any]) -> Parts | None:
    """The parts that a mask function is the conjunction of, in any order; None if one of them is not known."""
    if function is causal_mask_function:
        return [("causal", {})]
    if function is bidirectional_mask_function:
        return []
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    settings = inspect.getclosurevars(function).nonlocals
    if function.__qualname__ == "and_masks.<locals>.and_mask":
        parts = [recognise(part) for part in settings["mask_functions"]]
        return None if None in parts else [item for part in parts if part is not None for item in part]
    name, keys = KNOWN.get(function.__qualname__, ("", set()))
    return [(name, {key: settings[key] for key in keys})] if name and keys <= settings.keys() else None
