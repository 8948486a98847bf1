"""Files that travel between the user's folder and the scratch folder of another machine."""

import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path


def inside(path: Path) -> Path:
    """The same path below a scratch folder: a relative one stays, /home/me/run becomes home/me/run."""
    return path.relative_to(path.anchor) if path.is_absolute() else path


def pack(folder: Path, paths: Iterable[Path], without: Iterable[Path] = ()) -> bytes:
    """Pack files and folders, each under the path that `inside` gives it.

    Args:
        folder: Relative paths start there.
        paths: What to pack; what does not exist is left out.
        without: Files to leave out.

    Returns:
        A tar file.
    """
    left_out = {folder / path for path in without}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in paths:
            source = folder / path
            files = sorted(source.rglob("*")) if source.is_dir() else [source] if source.exists() else []
            for file in files:
                if file.is_file() and file not in left_out:
                    archive.add(file, str(inside(path) / file.relative_to(source)), recursive=False)
    return buffer.getvalue()


def states(folder: Path) -> dict[Path, tuple[int, int]]:
    """When each file of a folder was written, and its size: a file that is written again has another state."""
    found = {file: file.stat() for file in folder.rglob("*") if file.is_file()}
    return {file: (state.st_mtime_ns, state.st_size) for file, state in found.items()}


def unpack(files: bytes, folder: Path) -> None:
    """Unpack into a folder what `pack` packed."""
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        archive.extractall(folder, filter="data")


def bring_back(files: bytes, path: Path) -> None:
    """Write the files of a folder that was packed on another machine into the user's folder.

    The files are complete when they appear, the oldest first: a record that was written last appears last.

    Args:
        files: The folder `path`, as `pack` packs it.
        path: The folder on this machine.
    """
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".returned-", dir=path) as temporary:
        unpack(files, Path(temporary))
        source = Path(temporary) / inside(path)
        returned = [file for file in source.rglob("*") if file.is_file()]
        for file in sorted(returned, key=lambda file: file.stat().st_mtime_ns):
            target = path / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(file, target)
