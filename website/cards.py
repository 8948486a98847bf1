"""The page of an encoding: what follows from its card is written here, the rest by hand."""

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import relpos
from relpos.forms.cards import HEAD_DIM, HEADS, Card
from relpos.forms.parameters import RangeParameter

UNWRITTEN = "Nobody has written this part yet."
MIDDLE = f"""## The idea

{UNWRITTEN} The formula: `{{formula}}`

<!-- pictures -->
"""


def page(name: str, written: str | None = None) -> str:
    """The page of an encoding.

    Args:
        name: The encoding's name.
        written: The page as it is written by hand, with its title; None if nobody has written it.

    Returns:
        The page in Markdown, with what follows from its card before and after.
    """
    middle = MIDDLE.format(formula=relpos.card(name).formula) if written is None else written.partition("\n")[2]
    return f"# {name}\n\n{head(name)}\n\n{middle.strip()}\n\n{tail(name)}\n"


def head(name: str) -> str:
    """Summary and facts."""
    card = relpos.card(name)
    rows = {
        "acts on": card.place,
        "form of its bias": f"[{card.form}](../reference/forms.md)" if card.form != "none" else "it adds no bias",
        "directions": "both" if card.directions == "both" else "causal attention only",
        "learned values per head": card.learned,
        "paper": linked(card.paper),
        **({"other names": ", ".join(f"`{alias}`" for alias in card.aliases)} if card.aliases else {}),
    }
    first, *others = [f"| {key} | {value} |" for key, value in rows.items()]
    facts = "\n".join([first, "|---|---|", *others])
    return f"{card.summary}\n\n{facts}"


def linked(paper: str) -> str:
    """A reference with links to arXiv."""
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", paper)


def tail(name: str) -> str:
    """How to use it, its parameters, its options."""
    card = relpos.card(name)
    parts = [
        f"## Use it\n\n```python\n{use(card)}\n```",
        f"On the command line: `relpos draw {name}`, `relpos train --encoding {name}`.",
        f"## Parameters\n\n{parameters(card)}",
        f"## Options\n\n{options(card)}",
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
            f"| parameter, of {HEADS} heads with head_dim {HEAD_DIM} | shape | start values |",
            "|---|---|---|",
            *rows,
        ]
    )


@torch.no_grad()
def values(encoding: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters as they are used: those that are positive by construction after their softplus."""
    wrapped = {path: module for path, module in encoding.named_modules() if isinstance(module, RangeParameter)}
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
    rows = [
        f"| `{name}` | {escaped(option.type)} | `{escaped(option.default)}` | {escaped(option.meaning)} |"
        for name, option in card.options.items()
    ]
    return "\n".join(["| option | type | default | meaning |", "|---|---|---|---|", *rows])


def escaped(text: str) -> str:
    """Text for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")
