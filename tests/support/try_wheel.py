"""Install a wheel into a fresh virtual environment, core only: python tests/support/try_wheel.py dist/*.whl"""

import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRIAL = """
import sys, torch, relpos
from importlib import metadata
from pathlib import Path
from relpos.attend.backends import describe
assert Path(relpos.__file__).is_relative_to(sys.prefix), relpos.__file__
assert describe()["cpu_backend"] == "native", describe()["native_missing"]
torch.set_num_threads(2)
ran = []
for name in relpos.names():
    card, generator = relpos.card(name), torch.Generator().manual_seed(0)
    if card.form == "Scored":  # of the scores themselves: chunks runs these
        continue
    q, k, v = torch.randn(3, 1, 4, 700, 16, generator=generator)
    hidden = torch.randn(1, 700, 64, generator=generator)
    position = relpos.encoding(name, heads=4, head_dim=16)
    out = relpos.attention(q, k, v, position, hidden=hidden, backend="native")
    exact = relpos.attention(*(x.double() for x in (q, k, v)), position.double(), hidden=hidden.double())
    torch.testing.assert_close(out, exact.float(), rtol=1e-4, atol=1e-5)
    ran.append(name)
assert {"alibi", "t5", "kerple_log", "fire", "rope", "cable", "sandwich"} <= set(ran)
installed = {str(file) for file in metadata.files("relpos")}
for file in ("relpos/py.typed", "relpos/runs/recipes/paper-small.yaml", "relpos/explorer/static/index.html"):
    assert file in installed, file
print(len(ran), "encodings on the native kernel,", describe()["instruction_set"])
maps = Path("/proc/self/maps")
if maps.exists():
    print("OpenMP:", *sorted({line.split()[-1].split("site-packages/")[-1] for line in maps.open() if "omp" in line}))
"""


def timed(what: str, work: Callable[[], object]) -> None:
    """Print how long a piece of work takes."""
    print(f"{what} …", flush=True)
    start = time.monotonic()
    work()
    print(f"  {time.monotonic() - start:.1f} s", flush=True)


def main() -> None:
    """Install the wheel of the command line, and try it."""
    wheel = Path(sys.argv[1])
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB")
    environment = {name: value for name, value in os.environ.items() if name not in ("RELPOS_LIBRARY", "PYTHONPATH")}
    with tempfile.TemporaryDirectory(prefix="relpos-wheel-") as folder:
        programs = Path(folder, "Scripts" if sys.platform == "win32" else "bin")

        def run(program: str, *arguments: str) -> None:
            subprocess.run([programs / program, *arguments], cwd=folder, env=environment, check=True)

        pip = ("-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"))
        timed("a fresh environment", lambda: venv.create(folder, with_pip=True))
        timed("torch and the other requirements", lambda: run("python", *pip, "torch", "numpy", "typer"))
        timed("the wheel", lambda: run("python", *pip, "--no-index", str(wheel.resolve())))
        timed("relpos ls", lambda: run("relpos", "ls"))
        timed("attention with every encoding that the kernel runs", lambda: run("python", "-c", TRIAL))


if __name__ == "__main__":
    main()
