"""What reaches attention in any PyTorch model: queries, keys, scores and rows of tables, seen where torch is called.

Nothing is replaced, so that a faulty model runs as it is. A softmax over scores, or `scaled_dot_product_attention`, is
one call of attention; the first product of its shape before the softmax gives the queries and keys.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

HIDDEN = -5e3  # scores below are those of hidden keys: models add −10,000, the lowest value of the dtype, or −inf
PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
SUMS = (torch.baddbmm, Tensor.baddbmm)  # a bias, and the product of the next two arguments
ADDITIONS = ("add", "add_", "__add__", "__radd__", "__iadd__")
SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention."""

    layer: str  # name of the module, as in model.named_modules(); "" outside of modules
    scores: Callable[[], Tensor]  # (batch, heads, queries, keys), with mask and bias, as the softmax gets them
    visible: Callable[[], Tensor]  # boolean (queries, keys), of the first row and head
    q: Tensor | None  # (batch, heads, queries, head_dim)
    k: Tensor | None  # (batch, heads or key heads, keys, head_dim)
    sink: bool  # whether the softmax has a column beside the keys
    boolean: bool  # whether a boolean mask was added to the scores, which hides nothing
    projections: list[Tensor] = field(default_factory=list)  # what modules in the layer have returned before


Listener = Callable[[AttentionCall], object]
TableListener = Callable[[Tensor, Tensor], object]


@contextlib.contextmanager
def attention_calls(model: nn.Module | None, listener: Listener, tables: TableListener | None = None) -> Iterator[None]:
    """Within this context, call a function for each call of attention, and another for each look-up in a table."""
    watcher = _Watcher(listener, tables)
    hooks = []
    for name, module in () if model is None else model.named_modules():
        hooks.append(module.register_forward_pre_hook(watcher.entering(name)))
        hooks.append(module.register_forward_hook(watcher.leaving(), always_call=True))
    fast = torch.backends.mha.get_fastpath_enabled()  # PyTorch's fused encoder layers call no function that can be seen
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with watcher:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for hook in hooks:
            hook.remove()


class _Watcher(TorchFunctionMode):
    """Sees every function of torch that is called."""

    def __init__(self, listener: Listener, tables: TableListener | None) -> None:
        super().__init__()
        self.listener, self.tables = listener, tables
        self.stack: list[tuple[str, nn.Module]] = []
        self.products: list[tuple[Tensor, Tensor, Tensor]] = []  # since the last attention: left, right, result
        self.projections: list[Tensor] = []
        self.boolean = False
        self.calls: Counter[str] = Counter()  # of this forward, by the module that they are in
        self.weights: tuple[int, ...] | None = None  # shape of the last ones, until the values are multiplied by them

    def entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, arguments: Any) -> None:
            if not name:  # the complete model
                self.calls.clear()
            if "Attention" in type(module).__name__:
                self.products, self.projections, self.weights, self.boolean = [], [], None, False
            self.stack.append((name, module))

        return enter

    def leaving(self) -> Callable[..., None]:
        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            if self.stack:
                self.stack.pop()
            if isinstance(output, Tensor) and output.is_floating_point() and not any(module.children()):
                self.projections.append(output)

        return leave

    def _layer(self) -> str:
        """The innermost attention module; else the innermost module with parts, and the number of its call."""
        for name, module in reversed(self.stack):
            if "Attention" in type(module).__name__:
                return name
        name = next((name for name, module in reversed(self.stack) if any(module.children())), "")
        self.calls[name] += 1
        return name if self.calls[name] == 1 and name else f"{name or 'attention'} ({self.calls[name]})"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._fused(*args, **kwargs)
        elif func in PRODUCTS and len(args) == 2:
            self._product(args[0], args[1], result)
        elif func in SUMS:
            named = [kwargs.get(name) for name in ("batch1", "batch2")]
            left, right = named if named[0] is not None else args[1:3]
            self._product(left, right, result)
        elif func is torch.einsum:
            self._einsum(args, result)
        elif getattr(func, "__name__", "") in ADDITIONS and len(args) == 2:
            self.boolean |= adds_boolean(args)
        elif func in SOFTMAX:
            self._softmax(args[0] if args else kwargs["input"])
        elif func is F.embedding and self.tables is not None:
            ids, table = [*args, *kwargs.values()][:2]
            self.tables(table, ids)
        return result

    def _product(self, left: Tensor, right: Tensor, result: Tensor) -> None:
        if self.weights == tuple(left.shape[-2:]):
            self.weights = None
        elif result.dim() >= 3 and left.dim() >= 3 and right.dim() >= 3:
            self.products.append((left, right, result))

    def _einsum(self, args: Any, result: Tensor) -> None:
        """A product of queries and keys in any order of their axes."""
        equation, *operands = args if len(args) > 2 else (args[0], *args[1])
        inputs, _, output = str(equation).replace(" ", "").partition("->")
        names = inputs.split(",")
        if len(operands) != 2 or len(names) != 2 or "." in equation or len(output) < 3:
            return
        batch, (i, j) = list(output[:-2]), list(output[-2:])
        if i not in names[0]:  # keys come first
            names, operands = names[::-1], operands[::-1]
        summed = (set(names[0]) & set(names[1])) - set(output)
        if len(summed) != 1 or i not in names[0] or j not in names[1] or i in names[1] or j in names[0]:
            return
        left, right = (
            torch.einsum(f"{name}->{''.join(x for x in [*batch, *last] if x in name)}", operand)
            for name, operand, last in zip(names, operands, ((i, *summed), (*summed, j)), strict=True)
        )
        self._product(left, right, result)

    def _softmax(self, scores: Tensor) -> None:
        if scores.dim() < 3:
            return
        queries, keys = scores.shape[-2:]
        found = None
        for left, right, result in self.products:
            for extra in (0, 1):
                if result.shape[-2:] == (queries, keys - extra) and result.numel() * keys == scores.numel() * (
                    keys - extra
                ):
                    found = found or (left, right, extra)
        if found is None:
            return
        left, right, extra = found
        scores = scores if scores.dim() == 4 else scores[None]
        own = scores[..., : keys - extra]
        batch = own.shape[0]

        def by_head(x: Tensor) -> Tensor | None:
            groups = x.shape[:-2].numel()
            return x.reshape(batch, groups // batch, *x.shape[-2:]) if groups % batch == 0 and groups >= batch else None

        q, k = by_head(left), by_head(right.transpose(-1, -2))
        self.weights = (queries, keys - extra)
        self._report(lambda: own, lambda: own[0, 0] > HIDDEN, q, k, bool(extra))

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **further: Any,
    ) -> None:
        queries, keys = query.shape[-2], key.shape[-2]
        size = query.shape[-1] ** -0.5 if scale is None else scale

        def mask() -> Tensor | None:
            if is_causal:
                return torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
            return attn_mask

        def visible() -> Tensor:
            hidden = mask()
            if hidden is None:
                return torch.ones(queries, keys, dtype=torch.bool, device=query.device)
            first = hidden.expand(*query.shape[:-2], queries, keys).flatten(0, -3)[0]
            return first if first.dtype == torch.bool else first > HIDDEN

        def scores() -> Tensor:
            repeated = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
            products = query @ repeated.transpose(-1, -2) * size
            hidden = mask()
            if hidden is None:
                return products
            if hidden.dtype == torch.bool:
                return products.masked_fill(~hidden, float("-inf"))
            return products + hidden

        self._report(scores, visible, query, key, False)

    def _report(
        self,
        scores: Callable[[], Tensor],
        visible: Callable[[], Tensor],
        q: Tensor | None,
        k: Tensor | None,
        sink: bool,
    ) -> None:
        call = AttentionCall(self._layer(), scores, visible, q, k, sink, self.boolean, list(self.projections))
        self.products, self.projections, self.boolean = [], [], False
        with torch._C.DisableTorchFunction():  # what the listener computes is not the model's
            self.listener(call)


def adds_boolean(args: Any) -> bool:
    """Whether the arguments of an addition are scores and a boolean."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    scores = any(x.is_floating_point() and x.dim() > 2 for x in tensors)
    return scores and any(x.dtype == torch.bool and x.dim() > 1 for x in tensors)
