"""transformers' position_ids, as attention here understands them."""

import torch
from torch import Tensor

from relpos.encodings.call import positions


def read_position_ids(
    position_ids: Tensor,
    documents: Tensor | None,
    packed: bool,
    mask: Tensor | None,
    batch: int,
    length: int,
    total: int,
) -> Tensor | None:
    """Check position_ids, and give the documents that they describe.

    Positions here follow from the order of the tokens: they continue from the cache and start again at 0 where a
    document begins. That is all an encoding of distances can honour, so anything else is refused. While compiling,
    values cannot be looked at: documents are read from the ids and the check is left out.

    Args:
        position_ids: (batch or 1, length) or (length,), of the new tokens.
        documents: (batch, total) of the tokens so far: packed ones as the caller gave them, or padding on the left.
        packed: whether the caller gave `documents`.
        mask: attention_mask (batch, total), False or 0 where a token does not count; its position is not looked at.
        batch: number of rows.
        length: number of new tokens.
        total: tokens so far, those in the cache included.

    Returns:
        Documents (batch, total), or None where each row is one.

    Raises:
        ValueError: the shape is wrong, or a position is not the token's place in its document.
        TypeError: position_ids are not integers.
    """
    if position_ids.is_floating_point() or position_ids.is_complex() or position_ids.dtype == torch.bool:
        raise TypeError(f"position_ids must be integers, not {position_ids.dtype}.")
    ids = (position_ids[None] if position_ids.dim() == 1 else position_ids).long()
    if ids.shape not in ((batch, length), (1, length)):
        raise ValueError(
            f"position_ids must be (batch, new tokens) = ({batch}, {length}), or one row for all, "
            f"not of shape {tuple(position_ids.shape)}."
        )
    seen = total - length
    looking = not torch.compiler.is_compiling()
    if documents is None and looking and torch.equal(ids, torch.arange(seen, total, device=ids.device).expand_as(ids)):
        return None  # the usual case: nothing to tell attention
    ids = ids.expand(batch, length)
    counted = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[:, seen:].bool()
    if not packed:
        before = ids.new_zeros(batch, seen) if documents is None else documents[:, :seen]
        last = before[:, -1:] if seen else ids.new_zeros(batch, 1)
        documents = torch.cat([before, last + ((ids == 0) & counted).cumsum(dim=1)], dim=1)
    if looking:
        _check(ids, positions(total, documents, ids.device)[:, seen:].expand_as(ids), counted, seen)
    return documents


def _check(ids: Tensor, expected: Tensor, counted: Tensor, seen: int) -> None:
    wrong = ((ids != expected) & counted).nonzero()
    if len(wrong):
        row, token = wrong[0].tolist()
        raise ValueError(
            f"position_ids have {int(ids[row, token])} at row {row}, token {token}, where {int(expected[row, token])} "
            f"is expected: positions continue from the {seen} tokens in the cache, without gaps, and start again at 0 "
            "where a document begins. Leave position_ids out, or give documents= where packed documents were cached."
        )
