"""The figures of the paper's appendix (CABLE, arXiv 2503.08067)."""

from collections.abc import Iterator
from pathlib import Path

from relpos.view.figures import draw_heads, save
from relpos.view.maps import untrained

HEADS, HEAD_DIM, LENGTH = 12, 64, 512  # GPT-2 Small, as printed


def draw_figures(folder: Path, seed: int = 0) -> Iterator[tuple[Path, str]]:
    """Draw what needs no training: Figure 12 exactly, and Kerple at its start. Gives each file and its caption."""
    for stem, name in (("figure12-alibi", "alibi"), ("kerple_log-untrained", "kerple_log")):
        maps = untrained(name, HEADS, HEAD_DIM, LENGTH, seed, {})
        caption = "Figure 12. ALiBi: the additive bias of all 12 heads" if name == "alibi" else maps.caption
        figure = draw_heads(maps.values, caption)
        for suffix in (".png", ".pdf"):
            yield save(figure, folder / f"{stem}{suffix}"), caption
