"""The sizes of models by name, the same for every family. Imports nothing: the command line lists them."""

from dataclasses import dataclass

from relpos.system.errors import unknown


@dataclass(frozen=True)
class Preset:
    """A size, and the settings of training that go with it.

    Attributes:
        layers: Number of layers.
        heads: Number of heads.
        width: Size of the hidden states.
        lr: Learning rate.
        tokenizer: gpt2, or bpe-N trained on the data.
    """

    layers: int
    heads: int
    width: int
    lr: float  # learning rate
    tokenizer: str = "gpt2"

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.width // self.heads


PRESETS = {
    "nano": Preset(
        4, 12, 192, 2e-3, "bpe-4096"
    ),  # for a laptop; 12 heads, so that its pictures look like those of small
    "tiny": Preset(6, 8, 512, 1e-3),
    "small": Preset(12, 12, 768, 6e-4),  # GPT-2 Small, BERT Base
    "medium": Preset(24, 16, 1024, 3e-4),
    "large": Preset(36, 20, 1280, 2.5e-4),
}


def preset(name: str) -> Preset:
    """A preset by name.

    Raises:
        ValueError: There is no such preset.
    """
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return PRESETS[name]
