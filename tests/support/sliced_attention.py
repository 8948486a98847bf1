"""Attention over a sequence that is divided among processes, compared with the reference of one process in float64.

Everything here runs in the processes of a group (many_processes.py); what it returns is what the first of them found.
"""

import copy
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from contract_settings import SETTINGS, build
from torch import Tensor
from torch import distributed as dist

import relpos
from relpos.attend.parallel import SCHEMES
from relpos.forms.encoding import Encoding

HEADS, HEAD_DIM = 4, 8
Variant = tuple[str, dict[str, object]]
# Documents that cross the borders of slices, and one that lies inside; padding in the middle and at the end; a window
# that is shorter than a slice, or reaches over several.
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"documents": True, "padding": True, "window": 29, "sinks": True, "key_heads": 2},
    "both directions": {"causal": False, "padding": True, "key_heads": 2},
    "both directions, documents": {"causal": False, "documents": True, "window": (13, 5), "sinks": True},
}


def inputs(batch: int, tokens: int, heads: int, key_heads: int, width: int) -> dict[str, Tensor]:
    """Random tensors of a whole sequence, the same in every process, in float64."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "q": draw(batch, heads, tokens, HEAD_DIM),
        "k": draw(batch, key_heads, tokens, HEAD_DIM),
        "v": draw(batch, key_heads, tokens, HEAD_DIM),
        "hidden": draw(batch, tokens, width),
        "sinks": draw(heads),
    }


def masks(tokens: int, call: Mapping[str, Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    if call.get("documents"):
        ends = torch.tensor([[tokens // 3, tokens // 3 + 5], [tokens - 7, tokens - 1]])
        found["documents"] = 9 - torch.stack([torch.bucketize(torch.arange(tokens), row, right=True) for row in ends])
    if call.get("padding"):
        found["padding"] = torch.ones(2, tokens, dtype=torch.bool)
        found["padding"][0, tokens // 2 : tokens // 2 + 4] = found["padding"][1, -3:] = False
    return found


def run(
    position: Encoding, given: Mapping[str, Tensor], call: Mapping[str, Any], tokens: slice, **options: Any
) -> dict[str, Tensor]:
    """Output, log-sum-exp and all gradients of a slice of the tokens; all of them, without a group."""
    axis = {"q": 2, "k": 2, "v": 2, "hidden": 1, "documents": 1, "padding": 1, "positions": 1}
    sliced = {name: x[(slice(None),) * axis[name] + (tokens,)] if name in axis else x for name, x in given.items()}
    leaves = {name: x.clone().requires_grad_() for name, x in sliced.items() if x.is_floating_point()}
    others = {name: x for name, x in sliced.items() if name not in leaves}
    if not call.get("sinks"):
        del leaves["sinks"]
    hidden = leaves["hidden"] if position.needs_hidden else None
    further = {name: call[name] for name in ("causal", "window", "softcap", "dropout", "seed", "mask") if name in call}
    out, lse = relpos.attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        position,
        hidden=hidden,
        sinks=leaves.get("sinks"),
        return_lse=True,
        **others,
        **further,
        **options,
    )
    first, last = tokens.start or 0, (tokens.start or 0) + out.shape[2]
    waves = torch.sin(torch.arange(1000 * last, dtype=torch.float64)).view(last, 1000)[first:]  # (tokens, 1000)
    heads, size = out.shape[1], out.shape[3]
    weights = waves[:, : heads * size].view(-1, heads, size).transpose(0, 1).to(out.dtype)
    of_lse = waves[:, -heads:].T.to(lse.dtype)
    loss = (out * weights).sum() + (lse.where(lse.isfinite(), 0.0) * of_lse).sum()
    parameters = dict(position.named_parameters())
    grads = torch.autograd.grad(loss, [*leaves.values(), *parameters.values()], allow_unused=True)
    named = zip([*leaves, *(f"parameter {name}" for name in parameters)], grads, strict=True)
    return {"out": out.detach(), "lse": lse.detach(), **{name: x for name, x in named if x is not None}}


def together(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The whole from the slices: parameters and sinks are summed, all else is put side by side."""
    axis = {"out": 2, "lse": 2, "q": 2, "k": 2, "v": 2, "hidden": 1}
    return {
        name: torch.cat([part[name] for part in parts], dim=axis[name])
        if name in axis
        else torch.stack([part[name] for part in parts]).sum(0)
        for name in parts[0]
    }


def difference(actual: dict[str, Tensor], expected: dict[str, Tensor], atol: float, grad_atol: float) -> str | None:
    """What differs beyond rounding, or None."""
    if actual.keys() != expected.keys():
        return f"{sorted(actual)} instead of {sorted(expected)}"
    for name, x in expected.items():
        ours = actual[name].double()
        if ours.shape != x.shape or not torch.equal(ours.isfinite(), x.isfinite()):
            return f"{name}: shape {tuple(ours.shape)} instead of {tuple(x.shape)}, or not finite at other places"
        allowed = atol if name in ("out", "lse") else grad_atol * max(1.0, float(x.abs().max()))
        error = float((ours - x).where(x.isfinite(), 0.0).abs().max())
        if error > allowed:
            return f"{name}: off by {error:.2g}, allowed {allowed:.2g}"
    return None


def compare_call(
    variant: Variant, scheme: str | None, call: Mapping[str, Any], length: int, dtype: torch.dtype
) -> str | None:
    """How a call over slices of `length` tokens differs from the reference, or why it is refused; None if equal."""
    name, options = variant
    heads, key_heads = call.get("heads", HEADS), call.get("key_heads", call.get("heads", HEADS))
    exact = build(lambda: relpos.encoding(name, heads=heads, head_dim=HEAD_DIM, **options), SETTINGS["reference"])
    if not call.get("causal", True) and not exact.bidirectional:
        return None
    processes, rank = dist.get_world_size(), dist.get_rank()
    tokens = processes * length
    given = {**inputs(2, tokens, heads, key_heads, exact.width), **masks(tokens, call), **call.get("tensors", {})}
    rounded = {each: x.to(dtype) if x.is_floating_point() else x for each, x in given.items()}
    own = slice(rank * length, (rank + 1) * length)
    position = copy.deepcopy(exact).to(dtype)
    try:
        backend = call.get("backend")
        part = run(position, rounded, call, own, group=dist.group.WORLD, scheme=scheme, backend=backend)
    except ValueError as error:
        if "cannot run this" in str(error):
            return f"refused: {error}"
        raise
    parts: list[Any] = [None] * processes
    dist.all_gather_object(parts, part)
    if rank:
        return None
    doubled = {each: x.double() if x.is_floating_point() else x for each, x in rounded.items()}
    whole = run(position.double(), doubled, call, slice(0, tokens), backend="reference")
    values, grads = (1e-11, 1e-10) if dtype == torch.float64 else (1e-5, 3e-5)
    return difference(together(parts), whole, values, grads)


def compare(variants: Mapping[int, Variant], length: int) -> dict[tuple[int, str, str], str | None]:
    """Every variant by every scheme and call in float32; one call in float64 too. None where all is equal.

    More than two processes try the calls that have most in them, in float32.
    """
    found: dict[tuple[int, str, str], str | None] = {}
    names = CALLS if dist.get_world_size() == 2 else ("all", "both directions, documents")
    for number, variant in variants.items():
        for scheme in SCHEMES:
            for name in names:
                found[number, scheme, name] = compare_call(variant, scheme, CALLS[name], length, torch.float32)
            if dist.get_world_size() == 2:
                found[number, scheme, "float64"] = compare_call(variant, scheme, CALLS["all"], length, torch.float64)
    return found


def compare_further(length: int) -> dict[str, str | None]:
    """Calls that not every encoding needs to be tried with."""
    tokens = length * dist.get_world_size()
    gaps = torch.arange(tokens)[None] * 2 + (torch.arange(tokens) > 15)
    cases: dict[str, tuple[Variant, str | None, dict[str, Any]]] = {
        "uneven key heads": (("alibi", {}), "heads", {"heads": 12, "key_heads": 3, "sinks": True}),
        "uneven key heads and gates": (("cable", {}), "heads", {"heads": 12, "key_heads": 3}),
        "six heads on four processes": (("forgetting", {}), None, {"heads": 6, "key_heads": 2}),
        "a mask function by head": (("t5", {}), "heads", {"mask": seen_by_head}),
        "a mask function, gathered": (("t5", {}), "gather", {"mask": seen_by_head}),
        "dropout": (("alibi", {}), None, {"dropout": 0.3, "seed": 7}),
        "softcap in a ring": (("kerple_log", {}), "ring", {"softcap": 1.5, "sinks": True}),
        "dape by itself": (("dape", {}), None, {}),
        "dynamic rope": (("rope", {"scaling": "dynamic", "factor": 2.0, "length": 8}), "ring", CALLS["all"]),
        "cable by the native kernel": (("cable", {}), "ring", {**CALLS["all"], "backend": "native"}),
        "cable in both directions": (("cable", {}), "ring", {**CALLS["both directions"], "backend": "native"}),
        "several axes": (("rope", {"sections": [2, 1, 1]}), "ring", {"tensors": {"positions": _axes(tokens)}}),
    }
    for scheme in SCHEMES:
        for name in ("t5", "fire", "rope", "xpos"):
            cases[f"{name} with gaps, {scheme}"] = ((name, {}), scheme, {"tensors": {"positions": gaps}})
        both = {"tensors": {"positions": gaps}, "causal": False, "window": (40, 9), "key_heads": 2}
        cases[f"clipped with gaps in both directions, {scheme}"] = (("clipped", {"limit": 5}), scheme, both)
        half = {"documents": True, "padding": True, "window": 2}
        cases[f"a window of two tokens, {scheme}"] = (("cable", {"step": "softplus"}), scheme, half)
    return {name: compare_call(variant, scheme, call, length, torch.float32)
            for name, (variant, scheme, call) in cases.items()}  # fmt: skip


def seen_by_head(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j) % (h + 2) != 1


def _axes(tokens: int) -> Tensor:
    index = torch.arange(tokens)[None]
    return torch.stack([index // 3, index % 5, index % 7], dim=-1)


def everything(variants: Mapping[int, Variant], length: int, wrong: Mapping[str, dict[str, Any]]) -> dict[Any, Any]:
    """All of the above and below, so that the processes start once."""
    return {**compare(variants, length), **compare_further(length), "refusals": refusals(wrong)}


def refusals(cases: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """What each of some wrong calls is refused with, in the first process; all processes must refuse it."""
    said = {}
    rank = dist.get_rank()
    for name, case in cases.items():
        q = torch.zeros(1, case.pop("heads", 4), case.pop("lengths", [4, 4])[rank], 8)
        encoding = case.pop("encoding", None)
        position = None if encoding is None else relpos.encoding(encoding, heads=q.shape[1], head_dim=8)
        arguments = {key: value[rank] if isinstance(value, tuple) else value for key, value in case.items()}
        try:
            relpos.attention(q, q, q, position, group=dist.group.WORLD, **arguments)
            said[name] = "not refused"
        except (TypeError, ValueError) as error:
            said[name] = str(error)
        except Exception:
            said[name] = traceback.format_exc()
        dist.barrier()
    return said
