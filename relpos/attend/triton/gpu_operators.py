"""Forward and backward by the Triton kernels, and their operators, `relpos::triton_attention` and its backward."""

import math

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from relpos.attend.kernel_inputs import NOWHERE, Inputs
from relpos.attend.kernel_operators import Results, empty_out, register
from relpos.attend.triton import FEW, projected_tile, rank_one_tile, scaled_tile, skipped_tiles, toeplitz_tile
from relpos.attend.triton.backward_kernels import grad_kv_kernel, grad_q_kernel
from relpos.attend.triton.decoding_kernel import decode
from relpos.attend.triton.decoding_state import PackedBias, RunningTotals
from relpos.attend.triton.distance_kernel import distance_kernel
from relpos.attend.triton.forward_kernel import forward_kernel
from relpos.attend.triton.gpu_problem import GpuProblem
from relpos.attend.triton.tile_sizes import TileSize
from relpos.attend.triton.tiles import LOG2E

TILES_PER_PROGRAM = 64  # of a block diagonal, about: more programs share a longer diagonal


class TritonKernel:
    """The Triton kernels, as their operators run them. The log-sum-exp for the backward has base 2."""

    def run(self, inputs: Inputs, packed: PackedBias | RunningTotals | None = None) -> Results:
        problem = GpuProblem(inputs)
        if packed is not None:
            packed.fill(problem)
        q, out = inputs.q, empty_out(inputs)
        lse, record = q.new_empty(q.shape[:3], dtype=torch.float32), skipped_tiles.empty_record(inputs)
        if q.shape[2] <= FEW:
            decode(problem, out, lse)
        else:
            problem.set_strides("o", out)
            size = problem.size("forward")
            grid = (triton.cdiv(q.shape[2], size.BM), q.shape[0] * q.shape[1])
            skipped_tiles.keep_keys(problem, record)
            problem.launch(forward_kernel, grid, size, OUT=out, LSE=lse)
        return out, natural(lse) if inputs.return_lse else lse.new_empty(0), lse, record

    def fake(self, inputs: Inputs) -> Results:
        lse = inputs.q.new_empty(inputs.q.shape[:3], dtype=torch.float32)
        nothing = lse.new_empty(0)
        record = skipped_tiles.empty_record(inputs)
        return empty_out(inputs), lse if inputs.return_lse else nothing, torch.empty_like(lse), record

    def gradients(
        self, inputs: Inputs, grad: Tensor, grad_lse: Tensor | None, results: Results, wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        return Backward(inputs, grad, grad_lse, results, wanted).gradients()


def natural(lse: Tensor) -> Tensor:
    """The natural log-sum-exp, −inf for a row that sees nothing, where the kernels keep +inf."""
    return torch.where(lse == math.inf, -math.inf, lse) / LOG2E


class Backward:
    """One backward: the kernels for q, for k and v, and for each form with a gradient by distance."""

    def __init__(
        self, inputs: Inputs, grad: Tensor, grad_lse: Tensor | None, results: Results, wanted: frozenset[str]
    ) -> None:
        self.inputs, self.wanted = inputs, wanted
        self.problem = problem = GpuProblem(inputs)
        out, _, self.lse, record = results
        skipped_tiles.use_record(problem, record)
        self.grad_lse = grad_lse
        grad = grad.to(inputs.q.dtype)
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        moved = torch.zeros_like(self.lse)
        if grad_lse is not None:  # of a row that sees nothing, −inf is a constant
            moved = torch.where(self.lse == math.inf, 0.0, grad_lse.float()).contiguous()
        self.moved, self.delta = moved, torch.empty_like(self.lse)
        problem.set_strides("o", out)
        problem.set_strides("g", grad)
        if inputs.symmetric:
            problem.arguments["RANKS"] = rank_one_tile.ranks(problem.arguments["totals"])
        problem.arguments |= {"OUT": out, "GRAD": grad, "GRAD_LSE": moved, "DELTA": self.delta}

    def launch(self, kernel, grid: tuple[int, ...], size: TileSize, **more: object) -> None:
        """Run a kernel with the log-sum-exp that it reads."""
        values = self.problem.by_blocks(size)
        level = rank_one_tile.levels(self.lse, values, self.inputs.symmetric) if values else self.lse
        self.problem.launch(kernel, grid, size, LEVEL=level, **more)

    def learns(self, *names: str) -> bool:
        """Whether a gradient of one of these inputs is wanted."""
        return not self.wanted.isdisjoint(names)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by the names of `LEARNED`."""
        inputs, form = self.inputs, self.problem.form
        batch, heads, queries, _ = inputs.q.shape
        key_heads, keys, _ = inputs.k.shape[1:]
        learned = {
            toeplitz_tile.BIT: ("table",),
            rank_one_tile.BIT: ("total", "step", "weight"),
            scaled_tile.BIT: ("curve", "inverse", "knot", "base", "gain", "bend"),
            projected_tile.QUERY_BIT: ("query_vectors", "query_relative"),
            projected_tile.KEY_BIT: ("key_vectors", "key_relative"),
        }
        bits = sum(bit for bit, names in learned.items() if form & bit and self.learns(*names))
        blocks = triton.cdiv(queries, self.problem.size("grad_q").BM)
        new = inputs.q.new_empty
        single = torch.float32
        grads = {"q": new(inputs.q.shape), "k": new(inputs.k.shape), "v": new(inputs.v.shape)}
        sums: dict[str, Tensor] = {}
        if bits & rank_one_tile.BIT:
            rows = (batch, heads, queries)
            sums |= {"ROW_SUMS": new(rows, dtype=single), "ROW_GROWTH": new(rows, dtype=single)}
            sums |= {"KEY_SUMS": new((batch, heads, keys), dtype=single)}
        if bits & scaled_tile.BIT:
            knots = self.problem.arguments["KNOTS"]
            sums["ROW_INVERSE"] = new((batch, heads, queries), dtype=single)
            sums["KNOT_SUMS"] = new((batch, heads, blocks, 4, knots), dtype=single)
        for name, length in (("query", queries), ("key", keys)):
            if bits & (projected_tile.QUERY_BIT if name == "query" else projected_tile.KEY_BIT):
                size = self.problem.arguments["R"]
                sums[f"GRAD_{name.upper()}_VECTORS"] = new((batch, heads, length, size), dtype=single)
        ends = (inputs.far_low, inputs.far_high) != (-NOWHERE, NOWHERE) and bool(bits & toeplitz_tile.BIT)
        if ends:
            sums["FAR_SUMS"] = new((2, batch, heads, queries), dtype=single)
        size = self.problem.size("grad_q")
        self.launch(
            grad_q_kernel, (blocks, batch * heads), size, GRAD_Q=grads["q"], LEARNED=bits, HAS_ENDS=ends,
            far_low=inputs.far_low, far_high=inputs.far_high, **sums,
        )  # fmt: skip
        skipped_tiles.keep_rows(self.problem)
        size = self.problem.size("grad_kv")
        ranges = row_ranges(self.problem.arguments["FIRST"], self.problem.arguments["END"], keys, size.BM, size.BN)
        self.launch(
            grad_kv_kernel, (triton.cdiv(keys, size.BN), batch * key_heads), size, GRAD_K=grads["k"], GRAD_V=grads["v"],
            LEARNED=bits, RANGES=ranges, range_b=ranges.stride(0) if len(ranges) > 1 else 0, **sums,
        )  # fmt: skip
        if bits & toeplitz_tile.BIT:
            grads["table"] = self.table_gradient(sums.get("FAR_SUMS"))
        if bits & rank_one_tile.BIT:
            grads |= self.totals_gradients(sums)
        if bits & scaled_tile.BIT:
            matters = inputs.sinks is not None or self.grad_lse is not None
            by_distance = self.by_distance(scaled_tile.BIT)
            grads |= scaled_tile.gradients(inputs, by_distance, sums["ROW_INVERSE"], sums["KNOT_SUMS"], matters)
        for name, bit in (("query", projected_tile.QUERY_BIT), ("key", projected_tile.KEY_BIT)):
            if bits & bit:
                of_tokens = sums[f"GRAD_{name.upper()}_VECTORS"]
                grads |= projected_tile.gradients(inputs, name, of_tokens, self.by_distance(bit))
        if inputs.sinks is not None:
            grads["sinks"] = -(self.sink_share * self.delta).sum((0, 2)).to(inputs.sinks.dtype)
        return grads

    @property
    def sink_share(self) -> Tensor:
        """The weight of the sink in each row, (batch, heads, queries)."""
        assert self.inputs.sinks is not None
        return torch.exp2(self.inputs.sinks.float()[:, None] * LOG2E - self.lse)

    def totals_gradients(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of running totals and weights. A row of ds has a known sum: its weights are 1 with the sink's."""
        inputs = self.inputs
        of_rows, of_keys, growth = self.moved, sums["KEY_SUMS"], sums.get("ROW_GROWTH")
        if inputs.symmetric:
            of_rows = sums["ROW_SUMS"]
        elif inputs.sinks is not None:
            of_rows = of_rows + self.sink_share * self.delta
        if inputs.weight is not None or inputs.symmetric:  # the kernel's weights are times log2(e)
            of_keys = of_keys / LOG2E
        return rank_one_tile.gradients(inputs, of_rows, growth, of_keys)

    def table_gradient(self, far: Tensor | None) -> Tensor:
        """The gradient of a table, (heads, distances): by distance between its ends, of their sums at one column."""
        table = self.inputs.table
        assert table is not None
        by_distance = self.by_distance(toeplitz_tile.BIT)
        if far is not None:
            zero, width = self.inputs.zero, table.shape[1]
            before, after = far.sum((1, 3))  # (heads,) each
            low, high = zero + self.inputs.far_low, zero + self.inputs.far_high  # columns
            distance = torch.arange(width, device=table.device)
            by_distance = torch.where((distance > low) & (distance < high), by_distance, 0.0)
            if low >= 0:
                by_distance[:, min(low, width - 1)] = before
            if high < width:
                by_distance[:, max(high, 0)] = after
        return by_distance.to(table.dtype)

    def by_distance(self, bit: int) -> Tensor:
        """Sums over scores of equal distance, for the columns of a table: (heads, distances), of vectors (…, R)."""
        inputs, problem = self.inputs, self.problem
        batch, heads, queries, _ = inputs.q.shape
        keys, start, zero = inputs.k.shape[2], inputs.start, inputs.zero
        size = problem.size("distance")
        BM, BN, ratio = size.BM, size.BN, size.BM // size.BN
        # The distances that can be seen, from the geometry alone: the host reads no tensor.
        nearest, farthest = 0 if inputs.causal else start - (keys - 1), start + queries - 1
        if inputs.window_left >= 0:
            farthest = min(farthest, inputs.window_left)
        if inputs.window_right >= 0:
            nearest = max(nearest, -inputs.window_right)
        if bit == toeplitz_tile.BIT:
            nearest, farthest = max(nearest, inputs.far_low + 1), min(farthest, inputs.far_high - 1)
        # The block diagonal o has the distances start + o·BN + (−BN + 1 … BM − 1).
        lowest = max(-((start + BM - 1 - nearest) // BN), 1 - triton.cdiv(keys, BN))
        highest = min((farthest - start + BN - 1) // BN, (triton.cdiv(queries, BM) - 1) * ratio)
        diagonals = max(highest - lowest + 1, 1)
        splits = max(1, triton.cdiv(triton.cdiv(queries, BM) * batch, TILES_PER_PROGRAM))
        vectors = bit in (projected_tile.QUERY_BIT, projected_tile.KEY_BIT)
        rank = problem.arguments["R"] if vectors else 1
        parts = inputs.q.new_empty(splits, heads, diagonals, ratio + 1, BN, rank, dtype=torch.float32)
        skipped_tiles.keep_diagonals(problem, diagonals, lowest, size)
        row_keys = block_keys(problem.arguments["FIRST"], problem.arguments["END"], BM)
        self.launch(
            distance_kernel, (diagonals, heads, splits), size, PARTS=parts, OF=bit, lowest=lowest, ROW_KEYS=row_keys,
            SKIPS=inputs.documents is not None, range_b=row_keys.stride(0) if len(row_keys) > 1 else 0,
        )  # fmt: skip
        # Part t of diagonal o has the distances of part 0 of diagonal o + t: shifted additions, in a fixed order.
        shifted = [F.pad(part, (0, 0, 0, 0, t, ratio - t)) for t, part in enumerate(parts.sum(0).unbind(2))]
        flat = sum(shifted[1:], shifted[0]).flatten(1, 2)  # (heads, (diagonals + ratio)·BN, rank)
        column = zero + start + (lowest - 1) * BN + (1 if vectors else 0)  # of the first entry
        width = zero + start + queries
        placed = F.pad(flat, (0, 0, column, width - column - flat.shape[1]))  # negative padding cuts
        return placed if vectors else placed[..., 0]


def row_ranges(first: Tensor, end: Tensor, keys: int, BM: int, BN: int) -> Tensor:
    """Rows that see a block of keys, [begin, stop), and all of it, [inner, outer): (1 or batch, blocks, 4), int32.

    The host reads no value: these are binary searches, as first and end never fall.
    """
    key0 = torch.arange(0, keys, BN, device=first.device, dtype=torch.int32).expand(len(first), -1).contiguous()
    last = (key0 + BN).clamp(max=keys)
    stop = torch.searchsorted(first, last)  # the first row with first >= last
    begin = torch.minimum(torch.searchsorted(end, key0, right=True), stop) // BM * BM  # that with end > key0
    inner = torch.searchsorted(end, key0 + BN)  # that with end >= key0 + BN: never, where the block ends after the keys
    outer = torch.searchsorted(first, key0, right=True)  # that with first > key0
    return torch.stack([begin, stop, inner, outer], -1).int().contiguous()


def block_keys(first: Tensor, end: Tensor, BM: int) -> Tensor:
    """The first key and one past the last that each block of rows sees: (1 or batch, blocks, 2), int32."""
    rows = torch.arange(0, first.shape[1], BM, device=first.device)
    last = (rows + BM - 1).clamp(max=first.shape[1] - 1)
    return torch.stack([first[:, rows], end[:, last]], -1).int().contiguous()


forward = register("triton_attention", TritonKernel())
