"""A trained model and what belongs to it: opened from a run's folder, or from any folder of weights of ours."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from relpos.lab.corpus import Corpus, open_corpus
from relpos.lab.settings import Settings, load_settings
from relpos.lab.tokenizers import gpt2_tokenizer
from relpos.lab.tokens import Tokens, tokenize
from relpos.models.gpt2 import RelposGPT2ForCausalLM
from relpos.models.gpt2_config import RelposGPT2Config

ABOUT, RESULT = "run.yaml", "result.json"  # in a run's folder: its settings and surroundings, and how it ended
EVALUATION = "evaluation"  # the folder in it of what was measured
KINDS = ("relpos_gpt2", "gpt2")
GPT2_ENTRIES = 50257


@dataclass
class Run:
    """A model with its tokenizer, and how it was trained where that is known."""

    folder: Path
    model: RelposGPT2ForCausalLM  # in evaluation mode
    tokenizer: PreTrainedTokenizerFast
    settings: Settings | None  # of a run's folder
    about: dict[str, Any]  # versions, corpus, parameters; empty for a folder that is no run's
    result: dict[str, Any]  # steps, tokens, seconds, losses; empty for one that has not finished

    @property
    def encoding(self) -> str:
        """The name of its encoding."""
        return str(self.model.config.position["name"])

    @property
    def trained_length(self) -> int | None:
        """The length of the windows it was trained on, where known."""
        if self.settings is not None:
            return self.settings.data.length
        length = self.model.config.position.get("length")
        return int(length) if length else None

    @property
    def checksum(self) -> str:
        """Of its weights and their names."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters()):
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def corpus(self, name: str | None = None, split: str = "heldout") -> Corpus:
        """The corpus it was trained on, or another by name."""
        data = None if self.settings is None else self.settings.data
        if data is not None and data.task is not None:
            raise ValueError(
                f"{self.folder} was trained on the task {data.task} and knows no other words: "
                f"evaluate it by relpos evaluate {self.folder} --task {data.task}."
            )
        if data is None or data.corpus is None:
            return open_corpus(name or "sotu", split=split)
        if name is None or name == data.corpus:
            return open_corpus(data.corpus, data.text, data.subset, split)
        return open_corpus(name, split=split)

    def trained_on(self, name: str | None = None) -> bool:
        """Whether a corpus is the one it was trained on: by its name, its path or its content."""
        if self.settings is None or "corpus" not in self.about:
            return False  # how it was trained is not known
        own = str(self.settings.data.corpus)
        if name is None or name == own or Path(name).resolve() == Path(own).resolve():
            return True
        try:
            return self.corpus(name).hash == str(self.about["corpus"]["hash"])
        except ValueError:  # too little to be divided, so it was not trained on
            return False

    def heldout(self, corpus: str | None = None) -> Tokens:
        """The held-out tokens of its corpus, or of another."""
        return tokenize(self.corpus(corpus), self.tokenizer)["heldout"]


def open_run(folder: str | Path, position: Mapping[str, Any] | None = None) -> Run:
    """Open a run's folder, one of its checkpoints, or any folder with a GPT-2 of ours or of transformers.

    `position` replaces the encoding that the folder names: the same weights under, say, a scaled rope.
    """
    folder = Path(folder)
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except FileNotFoundError:
        begun = " A run has begun there: the same relpos train goes on." if (folder / ABOUT).exists() else ""
        raise FileNotFoundError(f"there is no model in {folder}: it has no config.json.{begun}") from None
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} is no JSON: {error}") from None
    if kind not in KINDS:
        raise ValueError(f"{folder} holds a model of type {kind!r}; those that can be opened are {', '.join(KINDS)}.")
    given = {} if position is None else {"position": dict(position)}
    config = RelposGPT2Config.from_pretrained(folder, **given)
    transformers.utils.logging.disable_progress_bar()  # of reading the weights, which takes no time
    model = RelposGPT2ForCausalLM.from_pretrained(folder, config=config).eval()
    home = folder if (folder / ABOUT).exists() else folder.parent  # a checkpoint lies in its run's folder
    known = (home / ABOUT).exists()
    return Run(
        folder,
        model,
        _tokenizer(folder, int(config.vocab_size)),
        load_settings(str(home / ABOUT), {}) if known else None,
        yaml.safe_load((home / ABOUT).read_text(encoding="utf-8"))["about"] if known else {},
        json.loads((home / RESULT).read_text(encoding="utf-8")) if known and (home / RESULT).exists() else {},
    )


def _tokenizer(folder: Path, vocabulary: int) -> PreTrainedTokenizerFast:
    if (folder / "tokenizer.json").exists():
        found: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
        return found
    if vocabulary >= GPT2_ENTRIES:
        return gpt2_tokenizer()
    raise FileNotFoundError(f"{folder} has no tokenizer.json, and {vocabulary} entries are not GPT-2's {GPT2_ENTRIES}.")
