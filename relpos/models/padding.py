"""transformers' attention masks, as attention here understands them."""

from torch import Tensor


def read_mask(mask: Tensor | None, batch: int, total: int) -> tuple[Tensor | None, Tensor | None]:
    """The mask (batch, total), 1 for tokens that count, as `documents` and `padding` of attention.

    Padding on the left becomes a document of its own: the text begins at position 0, so every encoding gives what it
    gives without padding. Whatever else is masked is hidden and moves nothing.
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
