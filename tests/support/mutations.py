"""Deliberate mistakes, one at a time, and the tests that must notice them.

    python tests/support/mutations.py             all of them, some minutes
    python tests/support/mutations.py window      those whose name has this word

Each changes one line of a clean checkout, runs the tests that are named with it, prints the first that fails, and
restores the file. A mistake that no test notices ends the run with exit status 1. Mistakes in native/ are compiled into
a library of their own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Mutation(NamedTuple):
    """A line to change and the tests to run."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = [
    Mutation(
        "triton: a distance of 0 between two tokens has a sign",
        "relpos/attend/triton/rank_one_tile.py",
        "ds = tl.where(rank_i > rank_j, ds,",
        "ds = tl.where(rank_i >= rank_j, ds,",
        "tests/attend/test_triton.py",
    ),
    Mutation(
        "triton: a mask term",
        "relpos/attend/triton/tiles.py",
        "s = tl.where((j >= first) & (j < end), s, C_NEGATIVE_INFINITY)",
        "s = tl.where(j < end, s, C_NEGATIVE_INFINITY)",
        "tests/attend/test_triton.py",
    ),
    Mutation(
        "triton: a diagonal's offset",
        "relpos/attend/triton/distance_kernel.py",
        "c = (a - x) & (BN - 1)",
        "c = (a - x + 1) & (BN - 1)",
        "tests/attend/test_triton.py",
    ),
    Mutation(
        "triton: a missing rescale",
        "relpos/attend/triton/forward_kernel.py",
        "acc * shrink[:, None], PRECISION)",
        "acc, PRECISION)",
        "tests/attend/test_triton.py",
    ),
    Mutation(
        "triton: two parts of a diagonal write to one place",
        "relpos/attend/triton/distance_kernel.py",
        "slot = (split * heads + h) * blocks + diagonal",
        "slot = h * blocks + diagonal",
        "tests/attend/test_triton.py",
    ),
    Mutation(
        "triton: the last tile of an interval is full",
        "relpos/attend/triton/tiles.py",
        "return begin, stop, tl.max(first), tl.min(end)",
        "return begin, stop, tl.max(first), tl.max(end)",
        "tests/attend/test_triton.py",
    ),
    Mutation(
        "triton: the tile after the full ones is one of them",
        "relpos/attend/triton/tiles.py",
        "at += tl.where(at < low, 0, high - low)",
        "at += tl.where(at <= low, 0, high - low)",
        "tests/attend/test_triton.py",
    ),
    Mutation(
        "triton: padding counts",
        "relpos/attend/triton/tiles.py",
        "s = tl.where(counts, s, C_NEGATIVE_INFINITY)",
        "s = tl.where(counts | FULL, s, C_NEGATIVE_INFINITY)",
        "tests/attend/test_triton.py",
    ),
    Mutation(
        "triton: the maximum of a row before its shift",
        "relpos/attend/triton/forward_kernel.py",
        "tl.max(s, 1) - shift)",
        "tl.max(s, 1))",
        "tests/attend/test_triton.py",
    ),
    Mutation(
        "triton: rows of a block of keys begin one block late",
        "relpos/attend/triton/gpu_operators.py",
        "// BM * BM  # that with end > key0",
        "// BM * BM + BM  # that with end > key0",
        "tests/attend/test_triton.py",
    ),
    Mutation(
        "triton: the growth of keys since another block",
        "relpos/attend/triton/tile_bias.py",
        "row0 // BM, key0 // BN, query_width // BM",
        "row0 // BM, key0 // BN + 1, query_width // BM",
        "tests/attend/test_triton.py",
    ),
    Mutation(
        "triton: a knot counted twice",
        "relpos/attend/triton/scaled_tile.py",
        "low = tl.sum((knot < tl.min(x)).to(tl.int32), 0)",
        "low = tl.sum((knot < tl.max(x)).to(tl.int32), 0)",
        "tests/attend/test_triton.py",
    ),
    Mutation(
        "triton: vectors turned the other way",
        "relpos/attend/triton/projected_tile.py",
        "o = (p + B - 1 - y) & (B - 1)",
        "o = (p + B - y) & (B - 1)",
        "tests/attend/test_triton.py",
    ),
    Mutation(
        "triton: dropout by the key's own hash",
        "relpos/attend/triton/tiles.py",
        "mix(hashed + i.to(tl.uint32)) + mix(",
        "mix(hashed + j.to(tl.uint32)) + mix(",
        "tests/attend/test_triton.py",
    ),
    Mutation(
        "triton: the ends of a table overlap",
        "relpos/attend/triton/backward_kernels.py",
        "tl.where(i - j >= far_high, ds, 0.0)",
        "tl.where(i - j > far_high, ds, 0.0)",
        "tests/attend/test_triton.py",
    ),
    Mutation(
        "triton: delta without the gradient of the log-sum-exp",
        "relpos/attend/triton/backward_kernels.py",
        "- tl.load(GRAD_LSE + at_rows, mask=live, other=0.0)\n",
        "\n",
        "tests/attend/test_triton.py",
    ),
    Mutation(
        "triton: a NaN is skipped",
        "relpos/attend/triton/skipped_tiles.py",
        "((bits > 0.0) == 0)",
        "(bits <= 0.0)",
        "tests/attend/test_triton_skipping.py",
    ),
    Mutation(
        "triton: a bound without the values",
        "relpos/attend/triton/tile_bounds.py",
        "worst = tl.maximum(of_mass, of_value + value)",
        "worst = of_mass",
        "tests/attend/test_triton_skipping.py",
    ),
    Mutation(
        "triton: skipped queries are never computed again",
        "relpos/attend/triton/skipped_tiles.py",
        "demanded = seen & (tl.min(spared.to(tl.int32), 0) == 0)",
        "demanded = seen & (m < 0)",
        "tests/attend/test_triton_skipping.py",
    ),
    Mutation(
        "flex: the last key that a query sees is hidden",
        "relpos/attend/flex/scores.py",
        "(key <= highest[b, query])",
        "(key < highest[b, query])",
        "tests/attend/test_flex_interpreted.py",
    ),
    Mutation(
        "flex: the weight of the key for that of the query",
        "relpos/attend/flex/scores.py",
        "-weight[b, h, query] * gained",
        "-weight[b, h, key] * gained",
        "tests/attend/test_flex_interpreted.py",
    ),
    Mutation(
        "flex: a block counts as full when its first query sees it all",
        "relpos/attend/flex/kernel.py",
        "(lowest[:, last_row, None] <= first_key)",
        "(lowest[:, first_row, None] <= first_key)",
        "tests/attend/test_flex_interpreted.py",
    ),
    Mutation(
        "kernel: the sign of RankOne's gradient by query",
        "native/src/forms.h",
        "total_query_[query] = -lane_sign_[lane]",
        "total_query_[query] = lane_sign_[lane]",
        "tests/attend/test_native.py",
    ),
    Mutation(
        "kernel: a window one token too wide",
        "native/src/tiles.h",
        "from = most(from, index - p.window_left)",
        "from = most(from, index - p.window_left - 1)",
        "tests/attend/test_native.py",
    ),
    Mutation(
        "definition: a forgotten document boundary",
        "relpos/forms/call.py",
        "        if self.documents is not None:\n            keys = self.documents",
        "        if False:\n            keys = self.documents",
        "tests/attend/test_attention.py tests/attend/test_contracts.py",
    ),
    Mutation(
        "rotation: turned the other way",
        "relpos/forms/rotation.py",
        "torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)",
        "torch.cat([a * cos + b * sin, b * cos - a * sin, rest], dim=-1)",
        "tests/encodings",
    ),
    Mutation(
        "t5: past and future change places",
        "relpos/encodings/t5.py",
        "offset = torch.where(distance < 0, buckets, 0)",
        "offset = torch.where(distance > 0, buckets, 0)",
        "tests/encodings",
    ),
    Mutation(
        "cache: a cropped token stays",
        "relpos/attend/cache.py",
        "self._length = tokens\n",
        "self._length = tokens + 1\n",
        "tests/attend/test_cache.py",
    ),
    Mutation(
        "evaluation: bits per token called bits per byte",
        "relpos/evaluation/intervals.py",
        "loss * tokens / math.log(2) / size",
        "loss / math.log(2)",
        "tests/evaluation",
    ),
    Mutation(
        "evaluation: the token after BOS is not scored",
        "relpos/evaluation/scoring.py",
        "np.arange(length) >= len(framing.before) - 1",
        "np.arange(length) >= len(framing.before)",
        "tests/pretrained/test_framing.py tests/evaluation",
    ),
    Mutation(
        "maps: keys on the diagonal of a coarse CABLE cell",
        "relpos/maps/rank_one.py",
        "count = torch.arange(1, len(sums) + 1, dtype=torch.float64)",
        "count = torch.arange(0, len(sums), dtype=torch.float64)",
        "tests/maps",
    ),
    Mutation(
        "explorer: any name of a host is let in",
        "relpos/explorer/server.py",
        "return self.outside or address.is_loopback",
        "return True",
        "tests/explorer/test_explorer_safety.py",
    ),
    Mutation(
        "ring: sinks take part in every block",
        "relpos/attend/parallel/ring.py",
        "documents=documents, sinks=None)",
        "documents=documents)",
        "tests/attend/test_context.py",
    ),
    Mutation(
        "cache of evaluations: a changed digit is believed",
        "relpos/system/seal.py",
        "return content if entry.get(CHECKSUM) == _entry_checksum(content) else None",
        "return content",
        "tests/text/test_damaged_cache.py tests/evaluation",
    ),
    Mutation(
        "window: sys.maxsize overflows",
        "relpos/attend/arguments.py",
        "return torch.sym_min(pair[0], tokens), torch.sym_min(pair[1], tokens)",
        "return pair",
        "tests/attend/test_attention.py",
    ),
    Mutation(
        "positions: descending ones are read at distance 0",
        "relpos/forms/call.py",
        "        return self._given_range[0]",
        "        return 0 if self.causal else self._given_range[0]",
        "tests/attend/test_positions.py",
    ),
    Mutation(
        "use: keywords that nobody knows are swallowed",
        "relpos/models/attention_interface.py",
        "    if unknown:\n",
        "    if False:\n",
        "tests/pretrained/test_use.py",
    ),
    Mutation(
        "open: pickles are opened",
        "relpos/pretrained/source.py",
        "        if pickles:\n",
        "        if False:\n",
        "tests/pretrained/test_open.py",
    ),
    Mutation(
        "open: a file without its head is called damaged",
        "relpos/pretrained/open.py",
        "    return bool(prefix) and not any(name.startswith",
        "    return False and not any(name.startswith",
        "tests/pretrained/test_open.py",
    ),
    Mutation(
        "positions: small integer types wrap around",
        "relpos/attend/arguments.py",
        "    return positions.long()  #",
        "    return positions  #",
        "tests/attend/test_positions.py",
    ),
    Mutation(
        "cache: cropped to a fraction of a token",
        "relpos/attend/cache.py",
        "if not isinstance(length, int) or isinstance(length, bool):",
        "if False:",
        "tests/attend/test_cache.py",
    ),
    Mutation(
        "sizes beyond memory are tried",
        "relpos/system/memory.py",
        "    if size > limit:\n",
        "    if False:\n",
        "tests/runs/test_refused_runs.py",
    ),
    Mutation(
        "an empty string means the default",
        "relpos/system/errors.py",
        "    if isinstance(value, str) and not value.strip():",
        "    if False:",
        "tests/cli/test_cli.py",
    ),
    Mutation(
        "gpu: in deterministic mode FlexAttention adds the gradient of a bias",
        "relpos/attend/backends.py",
        "torch.are_deterministic_algorithms_enabled() and wants_gradient(form)",
        "torch.are_deterministic_algorithms_enabled() and form is None",
        "tests/attend/test_gpu_choice.py",
    ),
    Mutation(
        "gpu: NaN passes the check at first use",
        "relpos/attend/triton/first_use.py",
        "not self.error and self.difference <= self.limit and self.repeats",
        "not self.error and not self.difference > self.limit and self.repeats",
        "tests/attend/test_first_use.py",
    ),
    Mutation(
        "gpu: the check at first use runs among the caller's hooks and modes",
        "relpos/attend/triton/first_use.py",
        "verdict = thread.submit(_check_alone, device, subject).result()",
        "verdict = check(device, subject)",
        "tests/attend/test_first_use.py",
    ),
    Mutation(
        "gpu: a damaged verdict is believed",
        "relpos/attend/triton/first_use.py",
        "entry = undamaged(file.read_bytes())",
        "entry = json.loads(file.read_bytes())",
        "tests/attend/test_first_use.py",
    ),
    Mutation(
        "gpu-report: a case with other bits in its second run passes",
        "relpos/attend/gpu_report.py",
        'largest <= row["limit"] and row["same_bits"] is not False',
        'largest <= row["limit"]',
        "tests/attend/test_gpu_report.py",
    ),
]


def library() -> Path:
    """The kernel of the changed sources."""
    build = ROOT / "build" / "mutation"
    for command in (["cmake", "-S", "native", "-B", build], ["cmake", "--build", build, "--parallel", "2"]):
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return next(build.glob("librelpos.*"))


def noticed_by(mutation: Mutation) -> str | None:
    """The first test that fails with this mistake."""
    file = ROOT / mutation.file
    text = file.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        sys.exit(f"{mutation.file} has {text.count(mutation.old)} places with {mutation.old!r}: mend this table.")
    try:
        file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        environment = dict(os.environ)
        if mutation.file.startswith("native/"):
            environment["RELPOS_LIBRARY"] = str(library())
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
        run = subprocess.run(
            [*command, *mutation.tests.split()], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    finally:
        file.write_text(text, encoding="utf-8")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    return failed[1] if failed else None


def main() -> None:
    """Try the mutations whose names have the word of the command line."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    missed = 0
    for mutation in MUTATIONS:
        if word in mutation.name:
            test = noticed_by(mutation)
            missed += test is None
            print(f"| {mutation.name} | {mutation.file} | {test or '**no test**'} |", flush=True)
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
