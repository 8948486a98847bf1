"""What a decoder keeps between its steps: tables for a capacity, and running totals that grow by the new tokens."""

import triton
import triton.language as tl
from torch import Tensor

from relpos.attend.kernel_inputs import Inputs, describe
from relpos.attend.triton import FEW, rank_one_tile, scaled_tile
from relpos.attend.triton.gpu_problem import GpuProblem, form_bits, on_device, pack_forms
from relpos.attend.triton.tiles import C_LOG2E, wide
from relpos.forms.bias import Form, running_sum, terms
from relpos.forms.call import Call


class PackedBias:
    """A bias that does not depend on the input, in causal attention, for all tokens below a capacity.

    The form, of Toeplitz and Scaled terms, has as many queries and keys as the capacity.
    """

    def __init__(self, form: Form, capacity: int) -> None:
        _, numbers = next(form.tensors())
        nothing = numbers.new_empty(0)
        inputs = Inputs(nothing, nothing, nothing)
        describe(form, Call(capacity, capacity, device=numbers.device), inputs)
        self.names = "+".join(type(term).__name__ for term in terms(form))
        self.form = form_bits(inputs)
        self.arguments = pack_forms(inputs, self.form)

    @property
    def scaled(self) -> bool:
        """Whether there is one factor per position, so that positions must not restart."""
        return bool(self.form & scaled_tile.BIT)

    def fill(self, problem: GpuProblem) -> None:
        """Set the arguments of the bias."""
        problem.form, problem.arguments["FORM"] = self.form, self.form
        problem.arguments |= self.arguments | {"inverse_start": problem.inputs.start if self.scaled else 0}


@triton.jit(do_not_specialize=("heads", "first", "new", "tokens"))
def append_kernel(TOTALS, STEP, WEIGHT, step_b, step_h, step_n, weight_b, weight_h, weight_n, heads, first, new, tokens,
                  WEIGHTED: tl.constexpr):  # fmt: skip
    """Extend the totals of a head by new tokens, of which `first` is the index of the first one."""
    head = tl.program_id(0).to(tl.int64)
    b, h = head // heads, head % heads
    plane = wide(tokens) * tl.num_programs(0)
    at = TOTALS + head * tokens + first
    total = tl.load(at - 1).to(tl.float64) + tl.load(at - 1 + plane).to(tl.float64)
    for n in range(0, new):
        total += tl.load(STEP + b * step_b + h * step_h + wide(n) * step_n).to(tl.float64)
        high = total.to(tl.float32)
        weight = tl.full([], C_LOG2E, tl.float32)
        if WEIGHTED:
            weight *= tl.load(WEIGHT + b * weight_b + h * weight_h + wide(n) * weight_n)
        tl.store(at + n, high)
        tl.store(at + n + plane, (total - high.to(tl.float64)).to(tl.float32))
        tl.store(at + n + 2 * plane, weight)


class RunningTotals:
    """A RankOne bias that grows with every decoded token, by steps and weights (batch, heads, tokens), float32.

    Totals may be anything that float32 holds, so `fits` is always True: reading values would stall the GPU.
    """

    fits = True
    names = "RankOne"

    def __init__(self, step: Tensor, weight: Tensor | None, capacity: int) -> None:
        self.capacity, self.length = capacity, step.shape[2]
        packed = rank_one_tile.pack_totals(running_sum(step.double()), weight)  # (3, batch · heads, tokens)
        self.totals = packed.new_zeros(3, packed.shape[1], capacity)
        self.totals[..., : self.length] = packed

    def append(self, step: Tensor, weight: Tensor | None) -> bool:
        """Add tokens to at least one, and return whether there was room."""
        first, self.length = self.length, self.length + step.shape[2]
        if self.length > self.capacity:
            return False
        weights = step if weight is None else weight
        with on_device(step):
            append_kernel[(step.shape[0] * step.shape[1],)](
                self.totals, step, weights, *step.stride(), *weights.stride(), step.shape[1], first, step.shape[2],
                self.capacity, weight is not None, num_warps=1,
            )  # fmt: skip
        return True

    def crop(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        self.length = min(self.length, length)

    def fill(self, problem: GpuProblem) -> None:
        """Set the arguments of the bias."""
        problem.form, problem.arguments["FORM"] = rank_one_tile.BIT, rank_one_tile.BIT
        problem.arguments |= {"TOTALS": self.totals, "tokens": self.capacity, "SYMMETRIC": False}
        if problem.inputs.q.shape[2] > FEW:  # the ordinary forward reads totals by blocks
            high, low, weight = self.totals[..., : self.length]
            problem.arguments |= {"totals": high.double() + low, "token_weights": weight, "WEIGHTED": True}
