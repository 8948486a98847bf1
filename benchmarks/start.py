"""How long the light commands take, beside `import torch`: interleaved, best of several. Run by `make bench`."""

import subprocess
import sys
import time

COMMANDS = {
    "python -c 'import torch'": [sys.executable, "-c", "import torch"],
    "relpos --help": [sys.executable, "-m", "relpos.cli", "--help"],
    "relpos ls": [sys.executable, "-m", "relpos.cli", "ls"],
    "relpos ls kerple_log": [sys.executable, "-m", "relpos.cli", "ls", "kerple_log"],
    "python -c 'import relpos'": [sys.executable, "-c", "import relpos"],
}
ROUNDS = 7


def main() -> None:
    best = dict.fromkeys(COMMANDS, float("inf"))
    for _ in range(ROUNDS):
        for name, command in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            best[name] = min(best[name], time.perf_counter() - start)
    torch_time = best["python -c 'import torch'"]
    print(f"best of {ROUNDS}, interleaved")
    for name, seconds in best.items():
        print(f"{name:28} {seconds * 1000:7.0f} ms   {seconds / torch_time:5.2f} of import torch")


if __name__ == "__main__":
    main()
