"""Which files a reader opens to follow one operation, in the order in which they are first called.

    python benchmarks/walks.py            prints the walks
    python benchmarks/walks.py --write    writes them into docs/walks.md

A file counts if one of its functions runs while the operation does; files that are only imported do not.
"""

import contextlib
import io
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from measure import option_parser

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import relpos

PACKAGE = Path(relpos.__file__).parent
PAGE = PACKAGE.parent / "docs" / "walks.md"


def walk(operation: Callable[[], object]) -> list[Path]:
    """The files of relpos whose functions run, in the order of their first call, relative to the package."""
    files: dict[Path, None] = {}

    def record(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(PACKAGE)) and not importing(frame):
            files.setdefault(Path(file).relative_to(PACKAGE))

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            operation()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(files)


def importing(frame: FrameType | None) -> bool:
    """Whether a frame runs while a file of relpos is imported, as the bodies of classes do."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            return True
        frame = frame.f_back
    return False


def walks() -> dict[str, list[Path]]:
    """The walk of each operation, on the smallest inputs."""
    import datasets  # noqa: F401 - imported before, since the recording makes imports slow
    import matplotlib.pyplot as plt  # noqa: F401
    import transformers  # noqa: F401
    from transformers import Trainer  # noqa: F401

    import relpos.models
    from relpos.cli import app

    def command(*words: str) -> Callable[[], object]:
        return lambda: app(list(words), standalone_mode=False)

    def use() -> object:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
        config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=4)
        return relpos.use(LlamaForCausalLM(config).eval())

    q, k, v = torch.randn(3, 1, 4, 32, 16)
    position = relpos.encoding("kerple_log", heads=4, head_dim=16)
    short = ("--steps", "1", "--batch-size", "1", "run.eval_windows=1")
    compare = ("--encodings", "alibi", "--seeds", "1", "--length", "32", "--lengths", "32,64", "--eval-tokens", "64")
    train = ("train", "--encoding", "kerple_log", "--length", "32", *short, "--out", "runs/k")
    operations = {
        "relpos.attention(q, k, v, position)": lambda: relpos.attention(q, k, v, position),
        "relpos train": command(*train),
        "relpos evaluate RUN": command("evaluate", "runs/k", "--lengths", "32,64", "--eval-tokens", "64"),
        "relpos draw RUN": command("draw", "runs/k", "--length", "32", "--out", "k.png"),
        "relpos explore RUN": command("explore", "runs/k", "--length", "32", "--export", "k.html"),
        "relpos.use(model)": use,
        "relpos check RUN": command("check", "runs/k"),
        "relpos compare": command("compare", *compare, *short, "--out", "runs/c"),
    }
    files = {}
    for name, operation in operations.items():
        files[name] = walk(operation)
        print(f"{name}: {len(files[name])} files", file=sys.stderr)
    return files


def paragraph(name: str, files: list[Path]) -> str:
    """One walk in Markdown."""
    path = ", ".join(f"`{file.as_posix()}`" for file in files)
    return f"## `{name}`\n\n{len(files)} files: {path}"


def main() -> None:
    parser = option_parser(__doc__, file=False)
    parser.add_argument("--write", action="store_true", help="write docs/walks.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        text = "\n\n".join(paragraph(name, files) for name, files in walks().items())
    if options.write:
        before = PAGE.read_text(encoding="utf-8").split("<!-- walks", 1)[0]
        PAGE.write_text(f"{before}<!-- walks: written by benchmarks/walks.py -->\n\n{text}\n", encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
