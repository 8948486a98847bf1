"""Attention of a call whose arguments have been checked: the encoding acts, then a backend runs."""

from dataclasses import replace

from torch import Tensor

from relpos.attend.arguments import Position, check_finite
from relpos.attend.backends import choose
from relpos.attend.kept import Kept
from relpos.attend.native import RunningTotals as Running
from relpos.forms.bias import Form, locate, take_heads
from relpos.forms.call import Call


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Position | None,
    call: Call,
    backend: str | None = None,
    kept: Kept | None = None,
    running: Running | None = None,
    rotated: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention with arguments that have been checked.

    Args:
        q: Queries, (batch, heads, queries, head_dim).
        k: Keys, (batch, key_heads, keys, head_dim).
        v: Values, (batch, key_heads, keys, value_dim).
        position: The encoding.
        call: The call of attention.
        backend: The name of the backend, or None for the fastest.
        kept: What a decoder keeps of the encoding between its steps.
        running: The running sums of the encoding's bias, if a cache keeps them.
        rotated: Whether q and k are already rotated.

    Returns:
        The output and, if the call asks for it, the log-sum-exp.
    """
    if kept is not None and not isinstance(position, Form):
        step = kept.attention(q, k, v, position, call, backend, running)
        if step is not None:
            return step
    q, k, form, call = positioned(q, k, position, call, rotated)
    out, lse = choose(backend, q, v, form, call).attention(q, k, v.to(q.dtype), form, call)
    return out.to(v.dtype), lse


def positioned(
    q: Tensor, k: Tensor, position: Position | None, call: Call, rotated: bool = False, heads: slice | None = None
) -> tuple[Tensor, Tensor, Form | None, Call]:
    """Let the encoding act; if q and k are already rotated, on the scores alone.

    Args:
        q: Queries, (batch, heads, queries, head_dim).
        k: Keys, (batch, key_heads, keys, head_dim).
        position: The encoding.
        call: The call of attention.
        rotated: Whether q and k are already rotated.
        heads: Which of the encoding's heads q and the call have; None for all of them.

    Returns:
        Queries, keys, the form of the bias, and the call with the rotation that is still to be applied to q and k. An
        encoding that changes q and k otherwise has done so here.
    """
    if position is None:
        return q, k, None, call
    if isinstance(position, Form):
        own = locate(position.fit(call), call)
        check_form(own)
        return q, k, own, call
    if "query and key" in position.places:
        rotation = None if rotated else position.rotation(call)
        factor = position.query_factor(call)
        if rotation is None and factor is None and not rotated:
            # In float32 at least: half precision would lose the angles to rounding.
            q, k = position.rotate(q.to(call.dtype), k.to(call.dtype), call)
        if factor is not None:
            check_finite("factor of the queries", factor)
            if heads is not None and factor.shape[1] > 1:
                factor = factor[:, heads]
            q, k = q.to(call.dtype) * factor, k.to(call.dtype)
        if rotation is not None:
            call = replace(call, rotation=rotation)
    form = position.located_bias(call)
    if form is not None:
        check_form(form)
        if heads is not None:
            form = take_heads(form, heads, position.heads)
    return q, k, form, call


def check_form(form: Form) -> None:
    """Refuse NaN and +inf in a bias.

    Raises:
        ValueError: A tensor of the form holds one.
    """
    for name, numbers in form.tensors():
        check_finite(f"{name} of the bias", numbers)
