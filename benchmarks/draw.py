"""Time and peak memory of drawing a long map: python benchmarks/draw.py [WHAT …] [--length 65536]

WHAT is an encoding's name or a run's folder. Each is drawn in a process of its own: the bias (or the scores), one PNG.
The time is that of drawing, without starting Python and importing; beside it the processor time of all threads, which
other work on the machine changes less.

    python benchmarks/draw.py --estimates [WHAT …] [--length 4096]

compares the times that `relpos draw` says are left with those that it then takes: the ratio of both, for every line
that it printed.
"""

import json
import subprocess
import sys
import tempfile
from typing import Any

from measure import option_parser

CHILD = """
import json, resource, sys, time
from relpos.pictures.draw import draw
if "/" in sys.argv[1]:
    import relpos.runs.run  # a run needs them
begun, worked = time.perf_counter(), time.process_time()
draw(sys.argv[1], length=int(sys.argv[2])).save(sys.argv[3] + "/map.png")
seconds, worked = time.perf_counter() - begun, time.process_time() - worked
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
times = {"seconds": seconds, "processor_seconds": worked}
print(json.dumps({"encoding": sys.argv[1], "length": int(sys.argv[2]), **times, "megabytes": peak}))
"""
ESTIMATES = """
import json, re, sys, time
from pathlib import Path
from relpos.cli import commands

lines = []

class Recorded:
    def __init__(self, *args, **kwargs): pass
    def __call__(self, text): lines.append((time.monotonic(), text))
    def clear(self): pass

commands.LiveLine = Recorded
commands.draw(what=[sys.argv[1]], length=int(sys.argv[2]), out=sys.argv[3] + "/map.png")
end = time.monotonic()
pairs = []
for at, text in lines:
    minutes, seconds = re.search(r"(\\d+):(\\d\\d) left", text).groups()
    pairs.append([60 * int(minutes) + int(seconds), round(end - at, 1)])
print("\\n" + json.dumps({"encoding": sys.argv[1], "length": int(sys.argv[2]), "said and took": pairs}))
"""
NAMES = ["alibi", "kerple_log", "clipped", "fire", "cable"]


def measure(name: str, length: int, child: str = CHILD) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", child, name, str(length), folder]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return dict(json.loads(printed.splitlines()[-1]))


def compare_estimates(name: str, length: int) -> None:
    """Print the ratios of what was said to be left and what was left, where that was 2 seconds or more."""
    pairs = [(said, took) for said, took in measure(name, length, ESTIMATES)["said and took"] if took >= 2]
    ratios = [max(said, 0.5) / took for said, took in pairs]
    within = sum(0.5 <= ratio <= 2 for ratio in ratios)
    words = " ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"{name:12} {length} tokens: {within} of {len(ratios)} lines within a factor of 2: {words}", flush=True)


def main() -> None:
    parser = option_parser(__doc__, file=False)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--length", type=int, default=65536)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--estimates", action="store_true", help="compare the times that are said to be left")
    arguments = parser.parse_args()
    if arguments.estimates:
        for name in arguments.names:
            compare_estimates(name, arguments.length)
        return
    measurements = []
    for name in arguments.names:
        measurements.append(measure(name, arguments.length))
        if not arguments.json:
            line = (
                "{encoding:20} {length} tokens  {seconds:6.1f} s ({processor_seconds:.1f} s CPU)  {megabytes:6.0f} MB"
            )
            print(line.format(**measurements[-1]), flush=True)
    if arguments.json:
        print(json.dumps(measurements))


if __name__ == "__main__":
    main()
