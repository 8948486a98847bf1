"""What every encoding promises with the arguments of attention: windows, starts, positions, sinks, softcaps, lse.

Expected values are computed in plain torch from `relpos.scores` without that argument, or from another call that must
mean the same.
"""

from collections.abc import Callable

import pytest
import torch
from contract_settings import HEADS, Layer, Make, Setting, build, directions, tokens
from torch import Tensor

import relpos
from relpos.encodings.dapev2 import DapeV2
from relpos.encodings.fire import Fire
from relpos.encodings.temperature import Temperature
from relpos.forms.call import Call
from relpos.forms.encoding import Encoding

ABSOLUTE = (Fire, Temperature)  # what they do depends on where a token stands, and not on distances alone


def inputs(position: Encoding, length: int, setting: Setting) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and hidden (the layer's input), each of the batch of 2."""
    layer = Layer(position)
    hidden = position.embed(tokens(length, setting))
    return *layer.project(hidden), hidden


def weighted(scores: Tensor, v: Tensor) -> Tensor:
    """Softmax of scores, −inf for keys that are not seen, and the sum of the values: 0 for a row that sees none."""
    powers = (scores - scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)).exp()
    return powers @ v / powers.sum(-1, keepdim=True).clamp(min=1e-300 if v.dtype == torch.float64 else 1e-30)


def a_window_is_a_mask(make: Make, setting: Setting) -> None:
    position, exact = build(make, setting), build(make, setting).double()
    q, k, v, hidden = inputs(position, 13, setting)
    documents = torch.tensor([[4] * 9 + [2] * 4, [1] * 13])
    i, j = torch.arange(13)[:, None], torch.arange(13)
    for causal in directions(position, setting):
        for window, left, right in ((0, 0, 0), (3, 3, 3), ((5, 1), 5, 1), ((99, 0), 99, 0)):
            options = {"hidden": hidden, "documents": documents, "causal": causal}
            out = relpos.attention(q, k, v, position, window=window, backend=setting.backend, **options)
            band = (j >= i - left) & (j <= i + right)
            options["hidden"] = hidden.double()
            if position.needs_scores:  # its bias reads what is seen: the mask must be there before
                scores = relpos.scores(q.double(), k.double(), exact, mask=band, **options)
            else:
                scores = relpos.scores(q.double(), k.double(), exact, **options).masked_fill(~band, -torch.inf)
            setting.close(out.double(), weighted(scores, v.double()))
    if not position.depends_on_length:
        layer, x = Layer(position, backend=setting.backend, window=3), tokens(13, setting)
        setting.close(layer.decode(x, 4), layer(x))


def queries_may_stand_anywhere(make: Make, setting: Setting) -> None:
    position = build(make, setting)
    q, k, v, hidden = inputs(position, 12, setting)
    documents = torch.tensor([[4] * 9 + [2] * 3, [1] * 12])
    for causal in directions(position, setting):
        options = {"causal": causal, "backend": setting.backend}
        for more in ({}, {"documents": documents}):
            whole = relpos.attention(q, k, v, position, hidden=hidden, **options, **more)
            part = relpos.attention(q[:, :, 3:8], k, v, position, hidden=hidden, start=3, **options, **more)
            setting.close(part, whole[:, :, 3:8])
        # Cross attention: all queries, or in causal attention those from 5 on, and the first 5 keys alone.
        first = 5 if causal else 0
        cross = (q[:, :, first:], k[:, :, :5], v[:, :, :5])
        if position.needs_hidden:
            with pytest.raises(ValueError, match="lie outside the 5 keys, but the running sums of"):
                relpos.attention(*cross, position, hidden=hidden[:, :5], start=first, **options)
            continue
        few = (torch.arange(12) < 5).expand(2, -1)
        expected = relpos.attention(q, k, v, position, padding=few, **options)[:, :, first:]
        setting.close(relpos.attention(*cross, position, start=first, **options), expected)


def positions_are_what_distances_are_measured_by(make: Make, setting: Setting) -> None:
    position = build(make, setting)
    relative = not any(isinstance(module, ABSOLUTE) for module in position.modules())
    q, k, v, hidden = inputs(position, 11, setting)
    for causal in directions(position, setting):
        options = {"hidden": hidden, "causal": causal, "backend": setting.backend}
        counted = relpos.attention(q, k, v, position, **options)
        index = torch.arange(11)[None]
        for positions in (index, index.expand(2, -1), index[0]):
            setting.close(relpos.attention(q, k, v, position, positions=positions, **options), counted)
        if relative and not position.depends_on_length:
            moved = index + torch.tensor([[17], [3]])
            setting.close(relpos.attention(q, k, v, position, positions=moved, **options), counted)


def backend_for_gaps(setting: Setting) -> str | None:
    """The compiled kernels run some of these calls only; None takes the native one where it can, else chunks."""
    return None if setting.backend in ("native", "triton") else setting.backend


def gaps_between_positions_are_hidden_tokens(make: Make, setting: Setting) -> None:
    position = build(make, setting)
    if position.needs_hidden or any(isinstance(module, DapeV2) for module in position.modules()):
        return  # a running sum counts hidden tokens too, and a convolution reads the neighbours among the keys
    q, k, v, _ = inputs(position, 13, setting)
    shown = torch.arange(13) % 3 != 1
    positions = torch.arange(13)[None, shown]  # 0, 2, 3, 5, 6, 8, 9, 11, 12
    for causal in directions(position, setting):
        options = {"causal": causal, "backend": backend_for_gaps(setting)}
        whole = relpos.attention(q, k, v, position, padding=shown.expand(2, -1), **options)
        few = (x[:, :, shown] for x in (q, k, v))
        setting.close(relpos.attention(*few, position, positions=positions, **options), whole[:, :, shown])


def left_padding_with_its_positions_is_no_padding(make: Make, setting: Setting) -> None:
    position, x = build(make, setting), tokens(13, setting)
    padding = torch.ones(2, 13, dtype=torch.bool)
    padding[0, :4] = False
    positions = (padding.long().cumsum(1) - 1).clamp(min=0)  # as transformers' generate makes them
    layer = Layer(position)
    hidden = position.embed(x, documents=padding.long())  # an embedding starts anew after the padding
    q, k, v = layer.project(hidden)
    for causal in directions(position, setting):
        options = {"causal": causal, "backend": backend_for_gaps(setting)}
        padded = relpos.attention(q, k, v, position, hidden=hidden, padding=padding, positions=positions, **options)
        alone = Layer(position, **options)
        setting.close(padded[:1, :, 4:], alone(x[:1, 4:]))
        setting.close(padded[1:], alone(x[1:]))


def sinks_softcaps_and_lse_are_a_plain_softmax(make: Make, setting: Setting) -> None:
    cap = 1.5
    for causal in directions(build(make, setting), setting):
        results = []
        for plain, dtype in ((True, torch.float64), (False, setting.dtype)):
            position = build(make, setting).to(dtype)
            q, k, v, hidden = (x.to(dtype) for x in inputs(position, 10, setting))
            sinks = torch.linspace(-1, 2, HEADS, dtype=q.dtype)
            leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
            if plain:
                out, lse = plain_attention(*leaves, position, hidden.detach(), causal, cap)
            else:
                out, lse = relpos.attention(
                    *leaves[:3],
                    position,
                    hidden=hidden.detach(),
                    causal=causal,
                    sinks=leaves[3],
                    softcap=cap,
                    return_lse=True,
                    backend=setting.backend,
                )
            waves = torch.sin(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape).to(out.dtype)
            loss = (out * waves).sum() + (lse * waves[..., 0]).sum()
            of = [*leaves, *(p for p in position.parameters() if p.requires_grad)]
            gradients = torch.autograd.grad(loss, of, allow_unused=True, materialize_grads=True)
            results.append([x.double() for x in (out, lse, *gradients)])
        for number, (expected, ours) in enumerate(zip(*results, strict=True)):
            atol = setting.atol if number < 2 else setting.grad_atol * max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(ours, expected, rtol=0.0, atol=atol)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, position: Encoding, hidden: Tensor, causal: bool, cap: float
) -> tuple[Tensor, Tensor]:
    """Attention with sinks and a softcap, and its log-sum-exp, from `relpos.scores`."""
    if position.needs_scores:  # its bias reads the capped scores
        logits = relpos.scores(q, k, position, hidden=hidden, causal=causal, softcap=cap)
    else:
        length = q.shape[2]
        rotated = position.rotate(q, k, Call(length, length, causal=causal, dtype=q.dtype))
        scores = relpos.scores(*rotated, causal=causal)
        seen = torch.ones(length, length, dtype=torch.bool).tril() if causal else torch.ones(length, length).bool()
        zero = torch.zeros_like(q)
        bias = relpos.scores(zero, zero, position, hidden=hidden, causal=causal).masked_fill(~seen, 0.0)
        capped = cap * torch.tanh(scores.masked_fill(~seen, 0.0) / cap)
        logits = (capped + bias).masked_fill(~seen, -torch.inf)
    total = torch.cat([logits, sinks[:, None, None].expand(*logits.shape[:-1], 1)], dim=-1)
    lse = total.logsumexp(-1)
    return (logits - lse[..., None]).exp() @ v, lse


def a_row_that_sees_nothing_has_no_weight(make: Make, setting: Setting) -> None:
    position = build(make, setting)
    q, k, v, hidden = inputs(position, 7, setting)
    padding = torch.ones(2, 7, dtype=torch.bool)
    padding[1, :3] = False  # in causal attention the first three queries of row 1 see nothing
    options = {"hidden": hidden, "padding": padding, "return_lse": True, "backend": setting.backend}
    out, lse = relpos.attention(q, k, v, position, **options)
    assert (out[1, :, :3] == 0).all()
    assert (lse[1, :, :3] == -torch.inf).all()
    assert lse[0].isfinite().all()
    sinks = torch.linspace(-1, 2, HEADS, dtype=q.dtype)
    with_sinks, lse_with_sinks = relpos.attention(q, k, v, position, sinks=sinks, **options)
    assert (with_sinks[1, :, :3] == 0).all()
    setting.close(lse_with_sinks[1, :, :3], sinks[:, None].expand(-1, 3))
    # A sink takes its share of the weight and nothing else.
    share = torch.sigmoid(lse - sinks[:, None])
    setting.close(with_sinks, out * share[..., None])
    setting.close(lse_with_sinks, torch.logaddexp(lse, sinks[:, None]))


ARGUMENT_CONTRACTS: list[Callable[[Make, Setting], None]] = [
    a_window_is_a_mask,
    queries_may_stand_anywhere,
    positions_are_what_distances_are_measured_by,
    gaps_between_positions_are_hidden_tokens,
    left_padding_with_its_positions_is_no_padding,
    sinks_softcaps_and_lse_are_a_plain_softmax,
    a_row_that_sees_nothing_has_no_weight,
]
