"""Time and peak memory of drawing a long map: python benchmarks/draw.py [WHAT …] [--length 65536]

WHAT is an encoding's name or a run's folder. Each is drawn in a process of its own: the bias (or the scores), one PNG.
The time is that of drawing, without starting Python and importing; beside it the processor time of all threads, which
other work on the machine changes less.
"""

import json
import subprocess
import sys
import tempfile

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
NAMES = ["alibi", "kerple_log", "clipped", "fire", "cable"]


def measure(name: str, length: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", CHILD, name, str(length), folder]
        return dict(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def main() -> None:
    parser = option_parser(__doc__, file=False)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--length", type=int, default=65536)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
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
