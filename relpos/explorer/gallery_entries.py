"""The gallery: a small map and profiles of every encoding, untrained, computed once per server."""

from functools import cache
from typing import Any

import torch

from relpos.encodings.registry import card, encoding_class
from relpos.explorer import replies
from relpos.explorer.measures import thumbnail
from relpos.explorer.scenes import ExplorerSubject
from relpos.maps.diagonals import spread
from relpos.maps.subject import EncodingSubject, three_heads

LENGTH, SHORT = 512, 256  # tokens: of a bias by distance, and of all others, which take longer
HEADS = [head + 1 for head in three_heads(12)]  # of the profiles; the second has the map
SIDE = 96  # cells per side of the map
POINTS = 96  # of a profile


def gallery_entry(name: str) -> replies.GalleryEntry:
    """An encoding among all of them."""
    cls: Any = encoding_class(name)
    return _entry(name, cls)


@cache
@torch.no_grad()
def _entry(name: str, cls: object) -> replies.GalleryEntry:
    subject = ExplorerSubject(None, EncodingSubject(name))
    length = LENGTH if card(name).group == "distance" else SHORT
    scene = subject.scene(subject.complete({"length": length}))  # not kept: nobody zooms into it
    show = scene.default_show
    distances = torch.tensor(spread(0, length - 1, POINTS))
    profiles = [scene.head_map(show, 1, head).values.profile(distances)[1].float() for head in HEADS]
    if show == "scores":  # the content sets their level, the encoding their shape
        profiles = [profile - profile[0] for profile in profiles]
    return {
        **thumbnail(scene, show, 1, HEADS[1], SIDE),
        "name": name,
        "show": show,
        "length": length,
        "head": HEADS[1],
        "distance": distances.tolist(),
        "heads": HEADS,
        "profiles": [profile.tolist() for profile in profiles],
    }
