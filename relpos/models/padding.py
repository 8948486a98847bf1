"""transformers' attention masks, converted to the arguments of `relpos.attention`."""

from torch import Tensor


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
