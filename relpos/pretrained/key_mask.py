"""Which keys each query sees, described in linear memory, in the shape in which transformers passes masks around."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from relpos.forms.call import Call, MaskFunction

ATTRIBUTE = "_relpos_key_mask"  # of a tensor, in traced graphs


@dataclass(frozen=True)
class KeyMask:
    """What `relpos.attention` needs to know of a mask; the fields have the names of its arguments."""

    batch: int
    queries: int
    keys: int
    start: int = 0
    causal: bool = False
    window: tuple[int, int] | None = None
    documents: Tensor | None = None  # (batch, keys)
    padding: Tensor | None = None  # (batch, keys)
    function: MaskFunction | Tensor | None = None

    ndim = 0  # a model that would add something to a 4-D mask leaves this alone

    def to(self, *args: Any, **kwargs: Any) -> "KeyMask":
        """Itself: models outside the interface convert their masks, and this one holds what its reader needs."""
        return self

    def contiguous(self) -> "KeyMask":
        """Itself, as `to`."""
        return self

    @property
    def everything(self) -> bool:
        """Whether every query sees every key."""
        return not self.causal and (self.window, self.documents, self.padding, self.function) == (None,) * 4

    def arguments(self, batch: int, keys: int) -> dict[str, Any]:
        """The arguments of `relpos.attention`, for this many rows and keys.

        Args:
            batch: Rows of the batch; a mask of one row serves all.
            keys: Number of keys. A mask for more keys is cut.

        Raises:
            ValueError: The mask is for fewer keys.
        """
        if keys > self.keys:
            raise ValueError(f"the mask is for {self.keys} keys, but there are {keys}.")
        per_key = {
            name: None if value is None else value[:, :keys].expand(batch, -1)
            for name, value in (("documents", self.documents), ("padding", self.padding))
        }
        return {
            "start": self.start,
            "causal": self.causal,
            "window": self.window,
            "mask": self.function,
            **per_key,
        }

    def materialise(self) -> Tensor:
        """Materialise the mask: boolean (batch, 1, queries, keys)."""
        device = next((x.device for x in (self.padding, self.documents) if x is not None), torch.device("cpu"))
        call = Call(
            self.queries,
            self.keys,
            causal=self.causal,
            documents=self.documents,
            padding=self.padding,
            device=device,
            start=self.start,
            window=self.window,
            mask=self.function,
            batch=self.batch,
        )
        return call.visible(call.i).expand(self.batch, 1, self.queries, self.keys)


class KeyMaskTensor(Tensor):
    """A boolean mask (batch, 1, queries, keys) that takes no memory: it is materialised only if a model computes on it.

    transformers passes 4-D masks through unchanged, so the description reaches attention. What keeps its meaning
    (slicing, repeating, boolean operations, choosing by it) is done with the materialised mask and stays exact. What
    would not is refused: True is a key that is seen, so that a mask converted to numbers and added to scores, or filled
    with −∞, or extended by another model's additive mask, would hide what it shows.
    """

    key_mask: KeyMask

    @staticmethod
    def __new__(cls, key_mask: KeyMask, device: torch.device) -> "KeyMaskTensor":
        shape = (key_mask.batch, 1, key_mask.queries, key_mask.keys)
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.key_mask = key_mask
        return mask

    def __init__(self, key_mask: KeyMask, device: torch.device) -> None:
        """All is done in `__new__`."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"KeyMaskTensor({self.key_mask})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "KeyMaskTensor":
        return KeyMaskTensor(self.key_mask, self.device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):  # reentrant checkpoints detach
            return KeyMaskTensor(args[0].key_mask, args[0].device)

        def materialised(x: Any) -> Any:
            return x.key_mask.materialise().to(x.device) if isinstance(x, KeyMaskTensor) else x

        result = func(*tree_map(materialised, args), **tree_map(materialised, kwargs or {}))
        if changes_meaning(func, args, result):
            raise ValueError(  # torch would swallow a TypeError
                f"this model computes {func.overloadpacket.__name__} with its attention mask, which would change the "
                "meaning of relpos's boolean one (True: seen): run it without relpos (relpos.use(model, off=True))."
            )
        return result


def changes_meaning(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Whether an operation on a `KeyMaskTensor` yields something that is no longer a boolean mask, or fills it."""
    aten = torch.ops.aten
    chosen_by = {aten.where: 0, aten.masked_fill: 1, aten.masked_fill_: 1}.get(func.overloadpacket)
    if chosen_by is not None and isinstance(args[chosen_by], KeyMaskTensor):
        return False
    if func.overloadpacket in (aten.masked_fill, aten.masked_fill_):
        return isinstance(args[2], float)
    if func.overloadpacket == aten.cat:  # T5Gemma 2 joins the masks of two kinds of keys
        return not all(isinstance(x, KeyMaskTensor) for x in args[0])
    if func.overloadpacket == aten.constant_pad_nd:
        return True
    return any(isinstance(x, Tensor) and x.is_floating_point() for x in tree_leaves(result))


def traced_mask(key_mask: KeyMask, device: torch.device | str) -> Tensor:
    """The same for a traced graph, in which tensors keep attributes but subclasses cannot be made.

    It is uint8, as no real mask is: if the attribute is lost on the way, attention notices.
    """
    mask = torch.ones(1, 1, 1, 1, dtype=torch.uint8, device=device)
    setattr(mask, ATTRIBUTE, key_mask)
    return mask


def key_mask_of(mask: Any) -> KeyMask | None:
    """The description that a mask carries, or None."""
    if isinstance(mask, KeyMask):
        return mask
    if isinstance(mask, KeyMaskTensor):
        return mask.key_mask
    key_mask = getattr(mask, ATTRIBUTE, None)
    return key_mask if isinstance(key_mask, KeyMask) else None
