"""How large the tensors are that some code makes."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Counts the values of the largest tensor that an operation returns; views that repeat values count once.

    Attributes:
        values: Their number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.values = max(self.values, x.untyped_storage().nbytes() // x.element_size())
        return out
