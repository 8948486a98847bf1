"""How long the light commands take, beside `import torch`: interleaved, best of several. Run by `make bench`."""

import subprocess
import sys
from functools import partial

from measure import best_seconds

COMMANDS = {
    "python -c 'import torch'": [sys.executable, "-c", "import torch"],
    "relpos --help": [sys.executable, "-m", "relpos.cli", "--help"],
    "relpos ls": [sys.executable, "-m", "relpos.cli", "ls"],
    "relpos ls kerple_log": [sys.executable, "-m", "relpos.cli", "ls", "kerple_log"],
    "python -c 'import relpos'": [sys.executable, "-c", "import relpos"],
}
ROUNDS = 7


def main() -> None:
    quiet = partial(subprocess.run, check=True, stdout=subprocess.DEVNULL)
    best = best_seconds({name: partial(quiet, command) for name, command in COMMANDS.items()}, ROUNDS)
    torch_time = best["python -c 'import torch'"]
    print(f"best of {ROUNDS}, interleaved")
    for name, seconds in best.items():
        print(f"{name:28} {seconds * 1000:7.0f} ms   {seconds / torch_time:5.2f} of import torch")


if __name__ == "__main__":
    main()
