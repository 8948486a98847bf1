"""transformers' attention_mask and position_ids, checked and converted to the arguments of `relpos.attention`."""

import torch
from torch import Tensor

from relpos.forms.call import positions


def read_mask(mask: Tensor | None, batch: int, total: int) -> tuple[Tensor | None, Tensor | None]:
    """Convert a mask (batch, total), 1 for tokens that count, to `documents` and `padding` of `relpos.attention`.

    Padding on the left becomes a document of its own, so that the text begins at position 0 and every encoding gives
    the same result as without padding. Other masked tokens are hidden and do not change the positions of the rest.
    """
    if mask is None:
        return None, None
    if mask.shape != (batch, total):
        raise ValueError(
            f"attention_mask must be (batch, tokens so far) = ({batch}, {total}), not {tuple(mask.shape)}."
        )
    mask = mask.bool()
    if bool(mask.all()):
        return None, None
    begun = mask.cumsum(dim=1) > 0
    hidden = begun & ~mask
    return (None if bool(begun.all()) else begun.long()), (~hidden if bool(hidden.any()) else None)


def read_position_ids(
    position_ids: Tensor,
    documents: Tensor | None,
    packed: bool,
    mask: Tensor | None,
    batch: int,
    length: int,
    total: int,
) -> Tensor | None:
    """Check position_ids, and return the documents that they describe.

    In relpos, positions follow from the order of the tokens: they continue from the cache and restart at 0 where a
    document begins. An encoding of distances cannot represent other positions, so they are refused. While compiling,
    values cannot be read: documents are computed from the ids without the check.

    Args:
        position_ids: (batch or 1, length) or (length,), of the new tokens.
        documents: (batch, total) of the tokens so far: packed documents, or padding on the left.
        packed: Whether `documents` are packed documents.
        mask: attention_mask (batch, total), False or 0 where a token does not count; its position is ignored.
        batch: Number of rows.
        length: Number of new tokens.
        total: Number of tokens so far, those in the cache included.

    Returns:
        Documents (batch, total), or None if each row is one document.

    Raises:
        ValueError: The shape is wrong, or a position is not the token's place in its document.
        TypeError: The position_ids are not integers.
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
        return None  # the usual case: a single document
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
            f"is expected: positions continue from the {seen} tokens in the cache, without gaps, and restart at 0 "
            "where a document begins. Leave position_ids out, or pass documents= if packed documents were cached."
        )
