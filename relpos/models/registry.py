"""Every family of models by name.

To add one: write its file, add its line to `FAMILIES`. Imports nothing: the command line lists them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from relpos.system.errors import unknown


@dataclass(frozen=True)
class Entry:
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
    "gpt2": Entry("RelposGPT2", "GPT-2", ("GPT2LMHeadModel",)),
    "llama": Entry("RelposLlama", "Llama", ("LlamaForCausalLM",)),
    "bert": Entry(  # normalised after each layer, which is less stable
        "RelposBert", "BERT", ("BertForMaskedLM", "BertForPreTraining"), causal=False, lr_scale=0.5
    ),
}
DEFAULT = next(iter(FAMILIES))
PREFIX = "relpos_"  # of the model types of our models


def entry(family: str) -> Entry:
    """The entry of a family.

    Raises:
        ValueError: There is no such family.
    """
    if family not in FAMILIES:
        raise unknown("family", family, FAMILIES)
    return FAMILIES[family]


def family_of_type(model_type: object) -> str | None:
    """The family that opens a folder, by the `model_type` in its config.json: ours, or transformers' own.

    Returns:
        The name of the family; None if there is none.
    """
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
