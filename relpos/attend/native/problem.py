"""The problem that the native kernel receives: padded, scaled, kept alive."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from relpos.attend.kernel_inputs import Inputs
from relpos.attend.native import library
from relpos.attend.native.library import FEW, Array
from relpos.forms.call import document_ends

WORK_FOR_A_THREAD = 1 << 21  # multiplications of q·k, about 0.1 ms: starting a thread for less costs more than it saves
READ_BY_A_THREAD = 1 << 17  # numbers of keys and values that are worth a thread where the queries are FEW
DTYPES = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}


class Fields:
    """The structure that the kernel receives, relpos_problem, and the tensors it points to, kept alive."""

    def __init__(self) -> None:
        self.fields: Any = library.interface().problem()
        self.tensors: list[Tensor] = []

    def keep(self, x: Tensor) -> Tensor:
        """The tensor, contiguous, kept alive as long as this object."""
        self.tensors.append(x.contiguous())
        return self.tensors[-1]


class Problem(Fields):
    """A problem for the kernel; its bias is still to be packed."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        q, k, v = inputs.q, inputs.k, inputs.v
        p = self.fields
        p.batch, p.heads, p.queries, p.head_dim = q.shape
        p.key_heads, p.keys, p.value_dim = v.shape[1:]
        p.dtype, p.form = library.constant(DTYPES[q.dtype]), library.constant("NONE")
        p.start, p.causal, p.scale, p.skip = inputs.start, inputs.causal, inputs.scale, inputs.skip
        p.window_left, p.window_right = inputs.window_left, inputs.window_right
        seen = k.shape[2]
        if inputs.window_left >= 0 and (inputs.causal or inputs.window_right >= 0):
            seen = min(seen, inputs.window_left + 1 + max(0, inputs.window_right))
        worth = READ_BY_A_THREAD if q.shape[2] <= FEW else WORK_FOR_A_THREAD
        p.threads = min(torch.get_num_threads(), 1 + q.numel() * seen // worth)
        p.q, p.k, p.v = self.array(q), self.array(k), self.array(v)
        if inputs.documents is not None:
            queries = slice(inputs.start, inputs.start + q.shape[2])
            first, end = (self.keep(x[:, queries].int()) for x in document_ends(inputs.documents))
            p.first, p.end = first.data_ptr(), end.data_ptr()
        if inputs.padding is not None:
            p.padding = self.keep(inputs.padding.to(torch.uint8)).data_ptr()
        if inputs.sinks is not None:
            p.sinks = self.keep(inputs.sinks.float()).data_ptr()
        p.softcap = inputs.softcap
        if inputs.dropout > 0.0:
            assert inputs.seed is not None
            # Of 24 bits, as the generator compares them, so that float32 holds it exactly.
            p.dropout, p.seed = round(inputs.dropout * 2**24) / 2**24, int(inputs.seed)
        if inputs.q_cos is None:
            return
        p.interleaved = inputs.interleaved
        for name in ("q_cos", "q_sin", "k_cos", "k_sin"):
            table = self.keep(getattr(inputs, name).float())
            setattr(p, name, table.data_ptr())
            p.pairs = table.shape[2]
            stride = table.shape[1] * table.shape[2] if table.shape[0] > 1 else 0
            setattr(p, f"{name[0]}_rotation_stride", stride)

    def array(self, x: Tensor) -> Array:
        """The tensor as rows that the kernel can read, copied only if the rows are not contiguous."""
        if x.stride(-1) != 1:
            x = x.contiguous()
        self.tensors.append(x)
        return Array.of(x)

    def run(self, function: str) -> None:
        """Call the kernel; other Python threads run meanwhile."""
        answer = getattr(library.load(), function)(ctypes.byref(self.fields))
        if answer == library.constant("OUT_OF_MEMORY"):
            raise MemoryError("the native attention kernel could not allocate memory for its tiles.")
        if answer != library.constant("OK"):
            p = self.fields
            raise RuntimeError(
                f"the native attention kernel refused its input: form {p.form}, dtype {p.dtype}, head_dim "
                f"{p.head_dim}, value_dim {p.value_dim}, {p.queries} queries from {p.start} on, {p.keys} keys."
            )
