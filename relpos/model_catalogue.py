"""The models that relpos trains, by name: families, and sizes that are the same for every family.

To add a family: write its file in `relpos/models`, add its line to `FAMILIES`. This file imports nothing heavy, and is
outside `relpos.models`, which imports transformers: the command line lists these names.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relpos.system.errors import missing, unknown

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class FamilyEntry:
    """What can be known about a family without importing its file."""

    prefix: str  # of its classes in the file: RelposGPT2Config, RelposGPT2Model, RelposGPT2ForCausalLM
    title: str  # the name in text
    published: tuple[str, ...]  # transformers' classes whose folders it opens
    causal: bool = True  # predicts the next token; a family that is not causal predicts masked tokens
    lr_scale: float = 1.0  # its learning rate relative to the preset's

    @property
    def metric(self) -> str:
        """What evaluation by length measures."""
        return metric(self.causal)

    @property
    def auto_class(self) -> str:
        """The Auto class of transformers that opens its models."""
        return "AutoModelForCausalLM" if self.causal else "AutoModelForMaskedLM"

    @property
    def classes(self) -> dict[str, str]:
        """The name of its class for each of transformers' Auto classes."""
        model = self.auto_class.removeprefix("AutoModel")
        return {
            "AutoConfig": f"{self.prefix}Config",
            "AutoModel": f"{self.prefix}Model",
            self.auto_class: f"{self.prefix}{model}",
        }


def metric(causal: bool) -> str:
    """What evaluation by length measures.

    For a model that predicts masked tokens it is the pseudo-perplexity: one token in seven is masked, the same ones at
    every length, and predicted from all other tokens of its window.
    """
    return "perplexity" if causal else "pseudo-perplexity"


FAMILIES = {  # name, which is also that of its file and of transformers' own model type; the first is the default
    "gpt2": FamilyEntry("RelposGPT2", "GPT-2", ("GPT2LMHeadModel",)),
    "llama": FamilyEntry("RelposLlama", "Llama", ("LlamaForCausalLM",)),
    "bert": FamilyEntry(  # normalised after each layer, which is less stable
        "RelposBert", "BERT", ("BertForMaskedLM", "BertForPreTraining"), causal=False, lr_scale=0.5
    ),
}
DEFAULT = next(iter(FAMILIES))
PREFIX = "relpos_"  # of the model types of our models


def entry(family: str) -> FamilyEntry:
    """The entry of a family."""
    if family not in FAMILIES:
        raise unknown("family", family, FAMILIES)
    return FAMILIES[family]


def family_of_type(model_type: object) -> str | None:
    """The family that opens a folder, by the `model_type` in its config.json, ours or transformers' own; or None."""
    name = str(model_type).removeprefix(PREFIX)
    return name if name in FAMILIES else None


def opens(model_type: object, architectures: Sequence[str] | None) -> bool:
    """Whether one of our families opens a folder, by the entries of its config.json."""
    name = family_of_type(model_type)
    if name is None:
        return False
    return model_type != name or not architectures or architectures[0] in FAMILIES[name].published


def model_types() -> list[str]:
    """Every `model_type` that can be opened."""
    return [f"{prefix}{name}" for name in FAMILIES for prefix in (PREFIX, "")]


@dataclass(frozen=True)
class Preset:
    """A size, and the settings of training that go with it."""

    layers: int
    heads: int
    width: int
    lr: float  # learning rate
    tokenizer: str = "gpt2"  # or bpe-N, trained on the data
    initializer_range: float = 0.02  # deviation of the weights at the start

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.width // self.heads


PRESETS = {
    # For tasks. Weights of 0.02 suit a width of some 2,500 (1 / √width): a narrow model that starts with them attends
    # to all tokens alike for a long time (docs/tasks.md).
    "pico": Preset(2, 4, 64, 3e-3, "bpe-1024", initializer_range=0.1),
    "nano": Preset(4, 12, 192, 2e-3, "bpe-4096"),  # for a laptop; 12 heads, so that its pictures look like small's
    "tiny": Preset(6, 8, 512, 1e-3),
    "small": Preset(12, 12, 768, 6e-4),  # GPT-2 Small, BERT Base
    "medium": Preset(24, 16, 1024, 3e-4),
    "large": Preset(36, 20, 1280, 2.5e-4),
}


def preset(name: str) -> Preset:
    """A preset by name."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return PRESETS[name]


def is_hub_name(what: str | Path) -> bool:
    """Whether something that does not exist here may be a name on the hub: owner/name, where owner is not a folder."""
    return HUB_NAME.fullmatch(str(what)) is not None and not Path(what).parent.is_dir()


def check_model_exists(what: str | Path) -> None:
    """Refuse what is neither a folder nor a file here, nor may be a name on the hub."""
    path = Path(what)
    if path.exists() or (is_hub_name(what) and path.suffix != ".gguf"):
        return
    raise missing(path)
