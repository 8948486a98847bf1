"""The choices and defaults of an evaluation. Imports nothing heavy: `relpos evaluate --help` prints these values."""

from typing import Literal, get_args

ProtocolName = Literal["windows", "last", "sliding", "positions"]  # docs/evaluation.md
SplitName = Literal["heldout", "all"]

PROTOCOLS: tuple[ProtocolName, ...] = get_args(ProtocolName)
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
PROTOCOL: ProtocolName = "windows"
MULTIPLES = (1, 2, 4, 8, 16)  # of the trained length: the lengths that are evaluated
EVAL_TOKENS: dict[ProtocolName, int] = {  # scored at each length, at most
    "windows": 2**20,
    "last": 2**14,
    "sliding": 2**20,
    "positions": 2**18,
}
LAST = 256  # tokens at the end of each window that the protocol `last` scores
SEED = 0
ROPE_SCALINGS = ("linear", "ntk", "dynamic", "yarn", "llama3")  # those that need no further parameters

SAMPLES = 100  # sequences of a task at each length
LONGEST_TASK = 16384  # tokens: the longest default length of a task
