"""The pictures on the pages of the encodings: a map and a profile of each, drawn once and kept in build/docs."""

import hashlib
from pathlib import Path

import relpos
from relpos.pictures.draw_options import Show
from relpos.pictures.encodings_page import thumbnail_figure
from relpos.pictures.printed_page import save
from website.repository import ROOT

KEPT = ROOT / "build" / "docs"
HEADS = (1, 6, 12)  # of 12: the slopes of ALiBi fall from the first to the last
LENGTH = 256
SMALL = "small"  # the thumbnail of the gallery
CAPTIONS = {
    "map": "Rows are queries, columns are keys: the {what} of heads 1, 6 and 12 over {length} tokens.",
    "profile": "The same against the distance between query and key.",
}


def sources() -> str:
    """A hash of everything that a picture depends on."""
    code = ROOT / "relpos"
    rooms = ("forms", "encodings", "maps", "pictures")
    files = [Path(__file__), *(file for room in rooms for file in sorted(code.glob(f"{room}/*.py")))]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]


def pictures(name: str) -> dict[str, Path]:
    """The files of an encoding's pictures by kind, drawn if they are missing."""
    folder = KEPT / "pictures" / sources()
    files = {kind: folder / f"{name}-{kind}.png" for kind in (*CAPTIONS, SMALL)}
    for kind, file in files.items():
        if file.exists():
            continue
        if kind == SMALL:
            save(thumbnail_figure(name), file)
        else:  # the page has the caption
            show: Show | None = "profile" if kind == "profile" else None
            relpos.draw(name, show=show, head=HEADS, length=LENGTH, caption=False).save(file)
    return files


def markdown(name: str) -> str:
    """The pictures as they stand on the page."""
    what = "bias" if relpos.card(name).form != "none" else "scores"
    lines = []
    for kind, caption in CAPTIONS.items():
        text = caption.format(what=what, length=LENGTH)
        width = '{ width="480" }' if kind == "profile" else ""
        lines += [f"![{kind} of {name}](pictures/{name}-{kind}.png){width}", ""]
        lines += [f"*{text} Drawn by `relpos.draw`, untrained.*", ""]
    return "\n".join(lines)
