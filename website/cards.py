"""The page of an encoding: what follows from its card is written here, the rest by hand."""

import re
from collections.abc import Iterator
from inspect import Parameter

import torch
from torch import Tensor, nn

import relpos
from relpos.encodings.registry import encoding_class
from relpos.forms.cards import HEAD_DIM, HEADS, Card
from relpos.forms.options import options_of
from relpos.forms.parameters import BoundedParameter, PositiveParameter
from website.blocks import block

FORMS = {  # the form of a bias: what it costs, and what runs it
    "Toeplitz": ("heads × distances", "native, flex, chunks"),
    "RankOne": ("batch × heads × length", "native, flex, chunks"),
    "Scaled": ("distances, and a few values per head", "native, flex, chunks"),
    "Scored": ("complete rows of scores, a block at a time", "chunks"),
}
UNWRITTEN = "Nobody has written this part yet."
MIDDLE = f"""## The idea

{UNWRITTEN} The formula above is all there is to know so far.

<!-- pictures -->
"""


def page(name: str, before: str | None = None) -> str:
    """The page of an encoding.

    Args:
        name: The encoding's name.
        before: The page as it is now, whose hand-written middle is kept; None for a new page.

    Returns:
        The page in Markdown, with its generated parts current.
    """
    middle = MIDDLE if before is None else hand_written(before)
    return f"# {name}\n\n{block('head', head(name))}\n\n{middle.strip()}\n\n{block('tail', tail(name))}\n"


def hand_written(document: str) -> str:
    """The part of a page that is written by hand."""
    return document.split("<!-- end of head -->", 1)[1].split("<!-- tail:", 1)[0].strip()


def head(name: str) -> str:
    """Summary, facts and formula in one line."""
    card = relpos.card(name)
    rows = {
        "acts on": card.place,
        "form of its bias": f"[{card.form}](../reference/forms.md)" if card.form != "none" else "it adds no bias",
        "directions": "both" if card.directions == "both" else "causal attention only",
        "learned values per head": card.learned,
        "paper": linked(card.paper),
    }
    first, *others = [f"| {key} | {value} |" for key, value in rows.items()]
    facts = "\n".join([first, "|---|---|", *others])
    return f"{card.summary}\n\n{facts}\n\nIn one line: `{card.formula}`"


def linked(paper: str) -> str:
    """A reference with links to arXiv."""
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", paper)


def tail(name: str) -> str:
    """How to use it, its parameters, its options, its cost."""
    card = relpos.card(name)
    parts = [
        f"## Use it\n\n```python\n{use(card)}\n```",
        f"The same on the command line: `relpos draw {name}`, `relpos train --encoding {name}`.",
        f"## Parameters\n\n{parameters(card)}",
        f"## Options\n\n{options(card)}",
        f"## Cost\n\n{cost(card)}",
    ]
    return "\n\n".join(parts)


def use(card: Card) -> str:
    """A short program that uses the encoding and runs as it stands."""
    lines = ["import relpos, torch", ""]
    position = f'position = relpos.encoding("{card.name}", heads=12, head_dim=64)'
    if card.places == ("embedding",):
        lines += ["x = torch.randn(1, 128, 768)  # token embeddings, (batch, length, width)", position]
        lines += ["x = position.embed(x)  # before the first layer; while decoding, embed(x, start=tokens so far)"]
        return "\n".join(lines)
    lines += ["q, k, v = torch.randn(3, 1, 12, 128, 64)  # (batch, heads, length, head_dim), not rotated"]
    if relpos.encoding(card.name, heads=2, head_dim=4).needs_hidden:
        lines += ["x = torch.randn(1, 128, 768)  # the layer's normalised input, (batch, length, width)", position]
        return "\n".join([*lines, "out = relpos.attention(q, k, v, position, hidden=x)  # (1, 12, 128, 64)"])
    return "\n".join([*lines, position, "out = relpos.attention(q, k, v, position)  # (1, 12, 128, 64)"])


def parameters(card: Card) -> str:
    """The learned parameters with shapes and start values, of 12 heads with head_dim 64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoding = relpos.encoding(card.name, heads=HEADS, head_dim=HEAD_DIM)
    rows = [f"| `{name}` | {tuple(value.shape)} | {start(value)} |" for name, value in values(encoding)]
    if not rows:
        return "It learns nothing."
    return "\n".join(
        [
            f"Of {HEADS} heads with head_dim {HEAD_DIM} and default options.",
            "",
            "| parameter | shape | start values |",
            "|---|---|---|",
            *rows,
        ]
    )


@torch.no_grad()
def values(encoding: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters as they are used: those that are positive by construction after their softplus."""
    wrapped = {
        path: module
        for path, module in encoding.named_modules()
        if isinstance(module, PositiveParameter | BoundedParameter)
    }
    for path, parameter in encoding.named_parameters():
        module = path.removesuffix(".raw")
        yield (module, wrapped[module](torch.float32)) if module in wrapped else (path, parameter.detach())


def start(value: Tensor) -> str:
    """Start values in words: the value if all are equal, else their range."""
    low, high = float(value.min()), float(value.max())
    if high - low < 1e-6:
        return f"{high:.4g}" if value.numel() == 1 else f"all {high:.4g}"
    if value.numel() < 100:
        return f"random, between {low:.2g} and {high:.2g} with seed 0"
    return f"random, mean {abs(float(value.mean())):.1f}, standard deviation {float(value.std()):.2g}"


def options(card: Card) -> str:
    """A table of the options."""
    if not card.options:
        return "It has no options besides `heads` and `head_dim`."
    required = Parameter.empty
    assert all(each.default is not required for each in options_of(encoding_class(card.name)).values())
    rows = [
        f"| `{name}` | {escaped(option.type)} | `{escaped(option.default)}` | {escaped(option.meaning)} |"
        for name, option in card.options.items()
    ]
    return "\n".join(["| option | type | default | meaning |", "|---|---|---|---|", *rows])


def escaped(text: str) -> str:
    """Text for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def cost(card: Card) -> str:
    """What it costs beside attention itself, by place and form."""
    rows = []
    if "embedding" in card.places:
        rows.append("| one addition to the embeddings | once per sequence, before the first layer | any |")
    if "query and key" in card.places:
        rows.append("| queries (and keys) changed | length × head_dim / 2 at most, shared by the heads | any |")
    for form in card.form.split(" + "):
        if form in FORMS:
            memory, backends = FORMS[form]
            rows.append(f"| a bias of the form `{form}` | {memory} | {backends} |")
    if not rows:
        return "Nothing: attention runs as if there were no encoding."
    return "\n".join(
        [
            "| what | memory beside q, k and v | backends beside `reference` |",
            "|---|---|---|",
            *rows,
            "",
            "[How attention runs](../attention.md#how-fast) has the measured times.",
        ]
    )
