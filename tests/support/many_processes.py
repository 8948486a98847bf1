"""Run a function in several processes of one gloo group, once, and get what it returns in the first of them.

The function is named by module and name, as in "sliced_attention:compare"; its arguments and result are pickled. A
process that fails ends the others, and its traceback is in the AssertionError. Nothing waits forever.
"""

import contextlib
import datetime
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAP, NAPS = 0.05, 8000  # counted in naps: a busy machine may halt the test as long as it likes
TESTS = Path(__file__).parent


def run(processes: int, function: str, *arguments: Any) -> Any:
    """What `function(*arguments)` returns in the first of so many processes."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as files:
        place = Path(folder)
        (place / "arguments").write_bytes(pickle.dumps((function, arguments)))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
        children = []
        for rank in range(processes):
            log = files.enter_context((place / f"log-{rank}").open("w"))
            command = [sys.executable, __file__, folder, str(rank), str(processes)]
            children.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
        try:
            failed = _wait(children)
        finally:
            for child in children:
                child.kill()
                child.wait()
        if failed is not None:
            log_text = (place / f"log-{failed}").read_text()[-6000:]
            raise AssertionError(f"process {failed} of {processes} ended badly:\n{log_text}")
        return pickle.loads((place / "result").read_bytes())


def _wait(children: list[subprocess.Popen[bytes]]) -> int | None:
    """The number of the first process that has failed, or that has not ended in time; None if all have ended well."""
    for _ in range(NAPS):
        codes = [child.poll() for child in children]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                return rank
        if codes == [0] * len(children):
            return None
        time.sleep(NAP)
    return codes.index(None)


def main() -> None:
    folder, rank, processes = sys.argv[1:]
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    function, arguments = pickle.loads(Path(folder, "arguments").read_bytes())
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(rank),
        world_size=int(processes),
        timeout=datetime.timedelta(hours=1),  # the parent ends us earlier
    )
    module, name = function.split(":")
    result = getattr(importlib.import_module(module), name)(*arguments)
    distributed.barrier()
    if rank == "0":
        Path(folder, "result").write_bytes(pickle.dumps(result))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
