"""PyTorch's own Triton kernels of FlexAttention, for tensors on a CPU and for GPUs that are not here.

Inductor can write Triton code for a CPU (`cpu_backend="triton"`). It refuses FlexAttention there, for which it has a
kernel in C++; `triton_kernels` switches that off, so that the templates for GPUs are filled in with our functions. What
Inductor asks of the device (its tiles, its number of multiprocessors) is answered for a target. `generate` returns the
kernels of a problem without running them.
"""

import contextlib
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
import triton
from torch import Tensor
from torch._inductor import graph
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.choices import InductorChoices
from torch._inductor.codecache import PyCodeCache
from torch._inductor.kernel.flex import flex_attention as lowering
from torch._inductor.kernel.flex import flex_decoding
from torch._inductor.lowering import lowerings
from torch._inductor.runtime import triton_helpers
from torch._inductor.template_heuristics import triton as heuristics
from torch.nn.attention import flex_attention
from triton.backends.compiler import GPUTarget

from relpos.attend import flex
from relpos.attend.flex import kernel
from relpos.forms.bias import Form, RankOne, Toeplitz
from relpos.forms.call import Call

MULTIPROCESSORS = 132  # of an H100
WITHOUT = " without gradient"
HEADS, LENGTH = 4, 1024  # of generated kernels, in which only strides depend on them


@dataclass(frozen=True)
class Tiles:
    """Sizes that replace the target's."""

    forward: tuple[int, int]  # queries, keys
    backward: tuple[int, int, int, int]  # queries and keys of the loop for k and v, then of the loop for q
    splits: int  # of the keys, in decoding


@contextlib.contextmanager
def triton_kernels(target: GPUTarget, tiles: Tiles | None = None) -> Iterator[None]:
    """Within this context, FlexAttention on CPU tensors is compiled to the Triton kernels of a GPU."""
    capability = divmod(target.arch, 10) if target.backend == "cuda" else (9, 4)

    def splits(batch: int, heads: int, keys: int) -> int:
        return tiles.splits if tiles else max(MULTIPROCESSORS // max(batch * heads, 1) * 2, 1)

    replacements: list[tuple[Any, str, Any]] = [
        # Captured numbers are tensors on the GPU there, 0-d CPU tensors here, which Inductor would read on the host.
        (graph.GraphLowering, "is_unspec_arg", constantly(False)),
        (flex_decoding, "get_split_k", splits),
        (torch.cuda, "get_device_capability", constantly(capability)),
        (flex_attention, "_validate_device", constantly(None)),
        (flex_attention, "_apply_kernel_options", with_logsumexp(flex_attention._apply_kernel_options)),
        (triton_helpers, "set_driver_to_cpu", constantly(None)),  # it would warn that Triton has no driver for a CPU
        (flex, "refuses", constantly(None)),
        (kernel, "RECENT", kernel.Recent(8)),
    ]
    driver = triton.runtime.driver
    before = driver._active
    with contextlib.ExitStack() as stack:
        for owner, name, value in replacements:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mock.patch.dict(lowerings))
        stack.enter_context(torch._inductor.config.patch(cpu_backend="triton", fx_graph_cache=False))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        register_lowering_for_gpus()
        driver.set_active(types.SimpleNamespace(get_current_target=lambda: target))
        chosen = FixedTiles(tiles) if tiles else device_tiles(target)
        stack.enter_context(mock.patch.object(InductorChoices, "get_config_heuristics", constantly(chosen)))
        forget()
        try:
            yield
        finally:
            driver._active = before
            forget()


def device_tiles(target: GPUTarget) -> Any:
    """Inductor's heuristics for a device; those for AMD ask the active driver."""
    return heuristics.CUDAConfigHeuristic() if target.backend == "cuda" else heuristics.ROCmConfigHeuristic()


def constantly(value: Any) -> Callable[..., Any]:
    """A function that returns this, whatever its arguments are."""

    def function(*arguments: Any, **named: Any) -> Any:
        return value

    return function


def forget() -> None:
    """Let nothing that was compiled before be found again."""
    torch._dynamo.reset()
    kernel.compiled.cache_clear()


def register_lowering_for_gpus() -> None:
    """FlexAttention's lowering without its branch for the CPU."""
    source, branch = inspect.getsource(lowering.flex_attention), 'query.get_device().type == "cpu"'
    if source.count(branch) != 1:
        raise RuntimeError(
            f"The lowering of FlexAttention in PyTorch {torch.__version__} has no branch {branch!r}, unlike PyTorch "
            "2.13: look how it chooses its kernel for the CPU now."
        )
    exec(compile(source.replace(branch, "False"), lowering.__file__, "exec"), dict(vars(lowering)))


def with_logsumexp(original: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a call, with the log-sum-exp wherever a GPU would write it: for the backward."""

    def options(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        result["OUTPUT_LOGSUMEXP"] = result["OUTPUT_LOGSUMEXP"] or torch.is_grad_enabled()
        return result

    return options


@dataclass(frozen=True)
class FixedTiles:
    """Answers of Inductor's heuristics: the same tiles for every problem."""

    tiles: Tiles

    def get_flex_attn_fwd_configs(self, head_dim: int, dtype: torch.dtype) -> list[Any]:
        return [heuristics.FlexConfig(*self.tiles.forward, num_stages=1, num_warps=4)]

    def get_flex_attn_bwd_configs(self, head_dim: int, dtype: torch.dtype) -> list[Any]:
        return [heuristics.FlexBwDConfig(*self.tiles.backward, num_stages=1, num_warps=4)]

    def get_flex_decode_configs(self, head_dim: int, dtype: torch.dtype) -> list[Any]:
        return [heuristics.FlexDecodeConfig(self.tiles.forward[1], num_stages=1, num_warps=2)]


@dataclass(frozen=True)
class Kernel:
    """A kernel that Inductor has written, as `gpu_counts.compile_kernel` takes it."""

    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    options: dict[str, Any]  # of AMD's compiler
    sizes: dict[str, int]  # BLOCK_M, BLOCK_N or BLOCK_M1, BLOCK_N1, BLOCK_M2, BLOCK_N2


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_relpos(form: str, head_dim: int) -> Attention:
    """Causal attention by the backend "flex" with a bias of this form."""
    call = Call(LENGTH, LENGTH, scale=head_dim**-0.5, heads=HEADS)
    table, total, weight = numbers(form)
    forms: dict[str, Form] = {"Toeplitz": Toeplitz(table), "RankOne": RankOne(total, weight, torch.float32)}
    bias = forms.get(form.removesuffix(WITHOUT))
    return lambda q, k, v: flex.attention(q, k, v, bias, call)[0]


def by_hand(form: str, head_dim: int) -> Attention:
    """Causal FlexAttention with the shortest score function for this form."""
    table, total, weight = numbers(form)
    total_i, total_j = total.float(), total.float().clone()
    scores = {
        "none": None,
        "Toeplitz": lambda score, b, h, i, j: score + table[h, i - j],
        "RankOne": lambda score, b, h, i, j: score - weight[b, h, i] * (total_i[b, h, i] - total_j[b, h, j]),
    }
    mask = flex_attention.create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device="cpu")
    compiled = torch.compile(flex_attention.flex_attention, fullgraph=True)
    return lambda q, k, v: compiled(q, k, v, score_mod=scores[form.removesuffix(WITHOUT)], block_mask=mask)


def numbers(form: str) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors of a table, of running sums and of their weights, with gradients unless the form is without."""
    trained = not form.endswith(WITHOUT)
    table = torch.zeros(HEADS, LENGTH, requires_grad=trained)
    total = torch.zeros(1, HEADS, LENGTH, dtype=torch.float64, requires_grad=trained)
    return table, total, torch.zeros(1, HEADS, LENGTH, requires_grad=trained)


def generate(
    attention: Callable[[str, int], Attention], form: str, head_dim: int, target: GPUTarget, dtype: torch.dtype
) -> dict[str, Kernel]:
    """The kernels "forward" and "backward" of FlexAttention for a problem, written but not run.

    Args:
        attention: `by_relpos` or `by_hand`.
        form: "none", "Toeplitz", "RankOne", or one of them with WITHOUT.
    """
    sources: dict[str, str] = {}

    def note(self: AsyncCompile, name: str, source: str, device_str: str = "") -> Any:
        sources[name] = source
        return types.SimpleNamespace(run=constantly(None))

    q, k, v = (torch.zeros(1, HEADS, LENGTH, head_dim, dtype=dtype, requires_grad=True) for _ in range(3))
    with triton_kernels(target), mock.patch.object(AsyncCompile, "triton", note):
        attention(form, head_dim)(q, k, v).sum().backward()
        loaded = [(getattr(PyCodeCache.load(source), name), source) for name, source in sources.items()]
    parts = {template_of(tuner.fn.arg_names): kernel_of(tuner, source) for tuner, source in loaded}
    return {part: each for part, each in parts.items() if part is not None}


def template_of(names: Iterable[str]) -> str | None:
    """Which template a kernel with arguments of these names was made from: each has one that no other has."""
    own = {"arg_MAX": "forward", "arg_DELTA": "backward", "arg_L": "decoding"}
    return next((own[name] for name in names if name in own), None)


def kernel_of(tuner: Any, source: str) -> Kernel:
    """The kernel that Inductor has written and prepared for tuning, in the first of its configurations."""
    meta, config = tuner.triton_meta, tuner.configs[0]
    aligned = {tuner.fn.arg_names[at] for attributes in meta["configs"] for (at,) in attributes}
    signature = {x: kind + ":16" * (x in aligned) for x, kind in meta["signature"].items() if kind != "constexpr"}
    options = {x: meta[x] for x in ("matrix_instr_nonkdim", "waves_per_eu", "kpack") if x in meta}
    sizes = {x: int(size) for x, size in re.findall(r"\b(BLOCK_[MN]\d?) ?: tl\.constexpr = (\d+)", source)}
    return Kernel(tuner.fn, signature, meta["constants"], config.num_warps, config.num_stages, options, sizes)
