"""Windows shared by several processes, a slice of the tokens each: `run.context_parallel`.

Processes 0 to N − 1 are a group and read the same windows, processes N to 2N − 1 the next ones, and so on.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedTokenizerFast, default_data_collator

from relpos.models.context import slice_window


def check_processes(context: int, processes: int) -> None:
    """Refuse a number of processes that cannot be divided into groups.

    Args:
        context: Processes per group, run.context_parallel.
        processes: Number of processes.

    Raises:
        ValueError: It cannot.
    """
    if processes % context:
        raise ValueError(
            f"run.context_parallel={context} divides each window among {context} processes, and there "
            f"{'is 1' if processes == 1 else f'are {processes}'}: start a multiple of {context}, as in torchrun "
            f"--nproc-per-node {context} -m relpos.cli train …"
        )


def context_group(context: int) -> ProcessGroup:
    """The group of this process: `context` processes with consecutive ranks. All processes call this."""
    group: ProcessGroup = torch.distributed.new_subgroups(context)[0]  # type: ignore[no-untyped-call]
    return group


def make_collator(
    tokenizer: PreTrainedTokenizerFast, state: PartialState, context: int
) -> Callable[[list[Any]], dict[str, Tensor]] | None:
    """What makes a batch of windows; None for Trainer's own.

    All windows have one length. Trainer's own collator asks for a padding token, which many tokenizers lack.
    """
    if context == 1:
        return default_data_collator if tokenizer.pad_token_id is None else None
    rank = state.process_index % context
    return lambda windows: slice_window(default_data_collator(windows), rank, context)


def share_windows(accelerator: Accelerator, context: int) -> None:
    """Let the processes of a group read the same windows: accelerate counts the groups in place of the processes."""
    prepare = accelerator.prepare_data_loader

    def prepared(loader: Any, *args: Any, **options: Any) -> Any:
        fresh = not getattr(loader, "_is_accelerate_prepared", False)
        loader = prepare(loader, *args, **options)
        if fresh:
            shard = loader.batch_sampler  # gives each process its batches
            shard.num_processes, shard.process_index = shard.num_processes // context, shard.process_index // context
        return loader

    accelerator.prepare_data_loader = prepared
