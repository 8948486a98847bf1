"""A model whose sequences are divided among processes: each runs all layers on its slice, and attention joins them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Context:
    """The processes among which sequences are divided."""

    group: "ProcessGroup"  # each has a slice of equal length, in the order of the ranks
    scheme: str | None = None  # how attention divides its work, as in `relpos.attention`

    def check(
        self, cache: object, use_cache: bool | None, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> None:
        """Refuse what only a whole sequence has."""
        arguments = {
            "past_key_values": cache,
            "use_cache": use_cache or None,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
        }
        for name, value in arguments.items():
            if value is not None:
                raise ValueError(
                    "a model whose sequences are divided among processes does not decode and takes no padding: leave "
                    f"out {name}."
                )

    def place(self, length: int, documents: Tensor | None) -> tuple[int, Tensor | None]:
        """Where this process's slice of `length` tokens begins, and the documents of all tokens up to its end."""
        from relpos.attend.parallel.slices import Slices  # noqa: PLC0415  (needs torch.distributed)

        slices = Slices(self.group, self.group.size(), self.group.rank(), length)
        gathered = slices.gather(documents)
        return slices.start, None if gathered is None else gathered[:, : slices.start + length]

    def refuse_jointly(self, step: Callable[[], Tensor]) -> Tensor:
        """What a step returns; if one process refuses its slice, all do, for they would wait for it forever."""
        result, refusal = None, None
        try:
            result = step()
        except ValueError as error:
            refusal = str(error)
        refusals: list[str | None] = [None] * self.group.size()
        torch.distributed.all_gather_object(refusals, refusal, group=self.group)
        first = next((text for text in refusals if text is not None), None)
        if first is not None:
            raise ValueError(first)
        assert result is not None
        return result

    def count(self, labels: Tensor, length: int) -> Tensor:
        """Predicted labels per process, as a mean: a loss divided by it has the mean over processes of the sequence."""
        if labels.shape[1] != length + 1:
            raise ValueError(
                f"a slice of {length} tokens has {length + 1} labels, the last one that of the token after it, not "
                f"{labels.shape[1]}: relpos.models.context.slice_window cuts them."
            )
        predicted = (labels[:, 1:] != -100).sum().float()
        torch.distributed.all_reduce(predicted, group=self.group)
        return (predicted / self.group.size()).clamp(min=1e-9)


def divide_sequences(model: "PreTrainedModel", group: "ProcessGroup", scheme: str | None = None) -> None:
    """Divide every sequence that a model reads among the processes of a group.

    From then on each process passes its slice: `input_ids` (batch, length / processes), `documents` likewise, and as
    `labels` (batch, length / processes + 1) those of its slice and the one after it (`slice_window` cuts them from a
    window). Hidden states and logits are those of the slice. The loss is divided by the number of
    predicted labels per process, so that its mean over the processes is that of the whole sequence, and the mean of the
    gradients over the processes (which DDP and FSDP compute) is that of one process.

    Args:
        model: A causal relpos model (GPT-2 or Llama).
        group: The processes. They hold the same weights.
        scheme: How attention divides its work: "heads", "ring" or "gather"; see `relpos.attention`.

    Raises:
        ValueError: The model is of a family that attends in both directions.

    Example:
        >>> divide_sequences(model, torch.distributed.group.WORLD)
        >>> window = slice_window({"input_ids": ids, "labels": ids}, rank, processes)
        >>> loss = model(**window).loss
    """
    base: Any = model.base_model
    if not hasattr(base, "context"):
        raise ValueError(
            f"{type(model).__name__} cannot divide a sequence among processes: GPT-2 and Llama can, which are causal."
        )
    base.context = Context(group, scheme)


def slice_window(window: dict[str, Tensor], rank: int, processes: int) -> dict[str, Tensor]:
    """The slice of a batch of windows that one process reads.

    Labels are cut so that every token of a window predicts the next one, also the last token of a slice.

    Args:
        window: `input_ids` and, if there are any, `documents` (batch, length); `labels` (batch, length), or one longer.
        rank: The number of the process.
        processes: The number of processes.

    Returns:
        The same entries with length / processes tokens each, and one label more.

    Raises:
        ValueError: The length is not a multiple of the number of processes.

    Example:
        >>> slice_window({"input_ids": ids, "labels": ids}, rank=0, processes=2)
    """
    length = window["input_ids"].shape[1]
    if length % processes:
        raise ValueError(f"a window of {length} tokens cannot be divided among {processes} processes evenly.")
    share = length // processes
    first, end = rank * share, (rank + 1) * share
    own = {name: x[:, first:end] for name, x in window.items() if name != "labels"}
    if "labels" in window:
        labels = window["labels"]
        if labels.shape[1] == length:
            labels = torch.nn.functional.pad(labels, (0, 1), value=-100)
        own["labels"] = labels[:, first : end + 1].clone()
        if rank:
            own["labels"][:, 0] = -100  # the slice before predicts it
    return own
