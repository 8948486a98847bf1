"""Stories: short tours of the encodings, one file each in the folder `stories`, and the examples that they show.

A story is {"title", "encoding", "steps"}; a step is {"text", "address"}: a sentence, and the address of the page that
shows it, as the browser has it after the "#". With q and k in the address, "reads" is the value there, which the tests
compare; "play" names a parameter whose slider moves.
"""

import json
from functools import cache
from pathlib import Path
from typing import cast

import torch

from relpos.explorer.replies import Story
from relpos.explorer.scenes import ExplorerSubject
from relpos.maps.subject import TensorSubject

STORIES = Path(__file__).with_name("stories")
TOKENS = 128  # of an example


@cache
def read_stories() -> list[Story]:
    """All stories, by the names of their files."""
    files = sorted(STORIES.glob("*.json"))
    return [cast(Story, {"name": file.stem, **json.loads(file.read_text(encoding="utf-8"))}) for file in files]


@cache
def examples() -> dict[str, ExplorerSubject]:
    """What stories show besides encodings, by the id in their addresses."""
    example = ExplorerSubject("sink", TensorSubject(_sink_weights(), "weights", None))
    example.name = "four heads"
    return {"sink": example}


def _sink_weights() -> torch.Tensor:
    """The weights of four heads that attend to near tokens; the first key has a score of its own, −4, 0, 2 or 4."""
    place = torch.arange(TOKENS)
    distance = (place[:, None] - place).float()
    content = 0.3 * torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(0))
    first = torch.tensor([-4.0, 0.0, 2.0, 4.0])[:, None, None]
    scores = content + torch.where(place == 0, first, -0.25 * distance)  # (heads, queries, keys)
    return scores.masked_fill(distance < 0, -torch.inf).softmax(dim=-1).masked_fill(distance < 0, torch.nan)
