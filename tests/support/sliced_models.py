"""A model on slices of a window, compared with the same model on the window; it runs in the processes of a group."""

import copy
from typing import Any

import torch
from torch import distributed as dist

from relpos.models import RelposGPT2Config, RelposGPT2ForCausalLM, RelposLlamaConfig, RelposLlamaForCausalLM
from relpos.models.context import divide_sequences, slice_window


def models() -> dict[str, Any]:
    torch.manual_seed(0)
    llama = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    llama |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    gpt2 = {"vocab_size": 40, "n_embd": 24, "n_layer": 2, "n_head": 3}
    return {
        "llama, cable": RelposLlamaForCausalLM(RelposLlamaConfig(**llama, position="cable")),
        "llama, rope": RelposLlamaForCausalLM(RelposLlamaConfig(**llama)),
        "gpt2, three heads, learned": RelposGPT2ForCausalLM(RelposGPT2Config(**gpt2)),
        "gpt2, dape": RelposGPT2ForCausalLM(RelposGPT2Config(**gpt2, position="dape")),
    }


def compare(share: int) -> dict[str, float]:
    """By model: the largest difference of the loss and of any gradient, their means over the processes taken."""
    processes, rank = dist.get_world_size(), dist.get_rank()
    length = share * processes
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(40, (2, length + 1), generator=generator)
    labels[0, 3:7] = -100  # slices with different numbers of labels
    documents = torch.stack([torch.arange(length) // 7, torch.arange(length) // (share + 1)])
    window = {"input_ids": labels[:, :-1].clamp(min=0), "labels": labels, "documents": documents}
    found = {}
    for name, model in models().items():
        whole = copy.deepcopy(model)
        loss = whole(**window).loss
        loss.backward()
        divide_sequences(model, dist.group.WORLD)
        own = model(**slice_window(window, rank, processes)).loss
        own.backward()
        parts = [own.detach(), *(parameter.grad for parameter in model.parameters())]
        for part in parts:
            dist.all_reduce(part)
        expected = [loss.detach(), *(parameter.grad for parameter in whole.parameters())]
        found[name] = max(float((a / processes - b).abs().max()) for a, b in zip(parts, expected, strict=True))
    return found


def refusals() -> dict[str, str]:
    """What a model on slices refuses."""
    model, said = models()["llama, rope"].eval(), {}
    divide_sequences(model, dist.group.WORLD)
    ids = torch.ones(1, 4, dtype=torch.int64)
    for name, more in {
        "labels": {"labels": ids},
        "use_cache": {"use_cache": True},
        "attention_mask": {"attention_mask": torch.ones_like(ids)},
    }.items():
        try:
            model(ids, **more)
        except ValueError as error:
            said[name] = str(error)
    return said
