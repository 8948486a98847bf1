"""Opening a trained model: the folder of a run, any model of transformers in a folder or on the hub, a GGUF file."""

import copy
import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from relpos.model_catalogue import PREFIX, family_of_type, model_types, opens
from relpos.models.family import Family, Reader, get_family
from relpos.models.saved import MissingTensorsError
from relpos.pretrained.framing import NO_FRAMING, Framing, framing_of
from relpos.pretrained.open import check_sizes, only_head, open_model, open_tokenizer
from relpos.pretrained.positions import longest
from relpos.pretrained.reader import predicts_next_token, reader_of
from relpos.pretrained.source import Source, check_weights, find_source, source_config
from relpos.pretrained.transplant import ORIGINALS, transplant
from relpos.runs.checkpoints import CLOCK, WEIGHTS, read_log, step_of
from relpos.runs.results import ABOUT, EVALUATION, RESULT, About, RunResult, read_about
from relpos.runs.settings import CORPUS, DataSettings, Settings
from relpos.system.errors import check_not_empty
from relpos.system.files import read_json
from relpos.system.seal import SEAL, damage
from relpos.text.corpus import Corpus, open_corpus
from relpos.text.tokenizers import published_tokenizer
from relpos.text.tokens import Tokens, tokenize

WORDS = 12  # of a text, in captions


@dataclass
class Run:
    """A model with its tokenizer. What `relpos train` wrote is a `TrainedRun`, which knows how it was trained.

    Attributes:
        folder: What it was opened from: a folder, a .gguf file, or a name on the hub.
        model: The model of transformers, in evaluation mode.
        tokenizer: None for a model that does not read text.
        settings: None for a model that `relpos train` did not write.
        about: Versions, corpus, number of parameters; empty for such a model.
        result: Steps, tokens, seconds and losses; empty if the run has not finished.
        framing: The special tokens around each window of text that it reads; none for a run of `relpos train`.
    """

    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    settings: Settings | None = None
    about: About = field(default_factory=About)
    result: RunResult = field(default_factory=RunResult)
    framing: Framing = NO_FRAMING

    @cached_property
    def family(self) -> Reader:
        """The family of its model: how it is scored and drawn."""
        return reader_of(self.model)

    def reading(self, bos: bool) -> "Run":
        """The same run; without `bos`, one that reads windows of text alone, with no special tokens around them."""
        if bos or not len(self.framing):
            return self
        plain = replace(self, framing=NO_FRAMING)
        plain.__dict__["family"] = self.family  # which need not be checked again
        return plain

    @property
    def encoding(self) -> str:
        """The name of its encoding."""
        return str(self.family.position_entry(self.model)["name"])

    @property
    def trained_length(self) -> int | None:
        """The length of the windows it was trained on, as far as its folder says; None if it is not known."""
        return longest(self.model)

    @property
    def evaluation(self) -> Path:
        """The folder for what is measured: in its own folder, or for a model without one, in the current folder."""
        return self.folder / EVALUATION if self.folder.is_dir() else Path(EVALUATION, self.folder.name)

    @property
    def checksum(self) -> str:
        """A hash of its weights and their names."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters()):
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def training(self) -> Mapping[str, Any]:
        """Steps, tokens, seconds, held-out loss, learning rates and versions of the training; empty if unknown."""
        return {}

    def corpus(self, name: str | None = None, split: str = "heldout") -> Corpus:
        """The corpus it was trained on, or another by name."""
        if self.model.main_input_name != "input_ids":
            raise ValueError(f"{type(self.model).__name__} reads {self.model.main_input_name}, not text.")
        return open_corpus(name or CORPUS, split=split)

    def trained_on(self, name: str | None = None) -> bool:
        """Whether a corpus is the one it was trained on: by its name, its path or its content."""
        return False  # how it was trained is not known

    def heldout(self, corpus: str | None = None) -> Tokens:
        """The held-out tokens of its corpus, or of another."""
        return tokenize(self.corpus(corpus), self.tokenizer)["heldout"]


@dataclass
class TrainedRun(Run):
    """The folder of a run of `relpos train`, or one of its checkpoints."""

    settings: Settings

    @property
    def trained_length(self) -> int:
        return self.settings.data.length

    def training(self) -> Mapping[str, Any]:
        rates = ("lr", "position_lr", "table_lr", "table_eps")
        origin = {
            "corpus": self.about["corpus"]["name"] if "corpus" in self.about else None,
            "versions": self.about.get("versions"),
            "threads": self.about.get("threads"),
            **{key: getattr(self.settings.optimizer, key) for key in rates},
        }
        if (self.folder / ABOUT).exists():
            measured = ("tokens", "seconds", "loss", "heldout", "heldout_at_start")
            return {"steps": self.result.get("step"), **{key: self.result.get(key) for key in measured}, **origin}
        step, log = step_of(self.folder), read_log(self.folder.parent)  # a checkpoint: what was known then
        losses = [entry["heldout"] for entry in log if entry["step"] == step and "heldout" in entry]
        return {
            "steps": step,
            "tokens": step * self.settings.run.batch_size * self.settings.data.length,
            "seconds": round(read_json(self.folder / CLOCK)["seconds"], 1),
            "heldout": losses[-1] if losses else None,
            **origin,
        }

    def corpus(self, name: str | None = None, split: str = "heldout") -> Corpus:
        data = self.settings.data
        if data.task is not None or data.source is None:
            raise ValueError(
                f"{self.folder} was trained on the task {data.task} and its vocabulary has no other words: "
                f"evaluate it with relpos evaluate {self.folder} --task {data.task}."
            )
        if name in (None, data.source):
            return heldout_corpus(data, split)
        return open_corpus(str(name), split=split, keep_line_ends=data.keep_line_ends)

    def trained_on(self, name: str | None = None) -> bool:
        if "corpus" not in self.about:
            return False
        source = str(self.settings.data.source)
        if name is None or name == source or Path(name).resolve() == Path(source).resolve():
            return True
        try:
            return self.corpus(name).hash == str(self.about["corpus"]["hash"])
        except ValueError:  # too short to be split, so it was not trained on
            return False


def training_corpus(data: DataSettings, **options: Any) -> Corpus:
    """The text that settings name, divided as they say; `options` of `open_corpus` replace theirs."""
    assert data.source is not None
    theirs = {
        "keep_line_ends": data.keep_line_ends,
        "heldout": data.heldout if data.heldout_source is None else 0,
        "stream": data.stream,
        "separator_first": data.separator_first,
    }
    return open_corpus(data.source, data.text_field, data.subset, **{**theirs, **options})


def heldout_corpus(data: DataSettings, split: str = "heldout") -> Corpus:
    """The text whose held-out part evaluations read: that of training, or for `heldout` that of data.heldout_source."""
    if data.heldout_source is None or split != "heldout":
        return training_corpus(data, split=split)
    options = {"keep_line_ends": data.keep_line_ends, "separator_first": data.separator_first}
    return open_corpus(data.heldout_source, data.text_field, data.subset, split="all", **options)


def open_run(what: str | Path, position: Mapping[str, Any] | None = None, *, trust_remote_code: bool = False) -> Run:
    """Open a run, one of its checkpoints, or a model that other people trained.

    A GPT-2, Llama or BERT opens as a model of our family of that name, with its own positions; it can be transplanted
    and fine-tuned. Every other model opens as the model of transformers that it is, and runs on our attention where
    `relpos.use` can run it.

    Args:
        what: A folder with a model in safetensors, a .gguf file, or a name on the Hugging Face hub, which is downloaded
            to the hub's usual cache; HF_HUB_OFFLINE=1 reads only that.
        position: Replaces the encoding in the configuration: the same weights with, for example, a scaled rope. For a
            model of transformers only {"rope_parameters": {…}}.
        trust_remote_code: Whether to run the code of a checkpoint that transformers does not know.

    Returns:
        The model in evaluation mode and in float32, its tokenizer, and how it was trained if the folder says so.

    Raises:
        FileNotFoundError: There is no such model, or files of it are missing.
        ValueError: A file is pickled, damaged, or belongs to another model.

    Example:
        >>> run = relpos.open("runs/cable")
        >>> run.encoding, run.trained_length, run.result["heldout"]
        >>> relpos.open("HuggingFaceTB/SmolLM2-135M").model.generate(...)
    """
    check_not_empty("what", what)  # Path("") is the current folder
    source = find_source(what)
    folder = source.folder
    if source.gguf is not None or (not (folder / ABOUT).exists() and not _is_ours(folder)):
        return _open_published(source, position, trust_remote_code)
    family, config = _read_config(folder, position)
    home = folder if (folder / ABOUT).exists() else folder.parent  # a checkpoint lies in its run's folder
    known = read_about(home) if (home / ABOUT).exists() else None
    tokenizer = _read_tokenizer(source, int(config.vocab_size), family.tokenizer)
    wrong = damage(folder, only=WEIGHTS) if (folder / SEAL).exists() else None
    if wrong is not None:
        raise ValueError(f"the checkpoint {folder} is damaged: {wrong}. Open another one, or the run's folder.")
    check_sizes(config, source.what, check_weights(source))
    transformers.utils.logging.disable_progress_bar()  # of loading the weights, which is fast
    try:
        model = family.model_class.from_pretrained(folder, config=config).eval()
    except MissingTensorsError as error:
        if known is not None or position is not None or not only_head(family.model_class, error.names):
            raise
        return _open_published(source, position, trust_remote_code)  # without its head
    trained_here = str(read_json(folder / "config.json")["model_type"]).startswith(PREFIX)
    framing = NO_FRAMING if trained_here else framing_of(source, tokenizer, config, predicts_next_token(model))
    if known is None:
        return Run(Path(what), model, tokenizer, framing=framing)
    result = cast(RunResult, read_json(home / RESULT) if (home / RESULT).exists() else {})
    return TrainedRun(Path(what), model, tokenizer, *known, result, framing)


def run_of_model(model: object, tokenizer: PreTrainedTokenizerFast | None = None) -> Run:
    """A run around a model that is open already, which is left as it is. Without a tokenizer it reads no text.

    Modules are copied; weights are shared, if they are float32, with a model that is not a GPT-2 or Llama.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"{type(model).__name__} is neither a model of transformers nor of relpos. Its attention can be explored "
            'as a tensor: (layers, heads, tokens, tokens) with show="weights".'
        )
    opened: PreTrainedModel
    if type(model) is ORIGINALS.get(model.config.model_type):
        opened = transplant(model, None)
    else:
        plain = all(parameter.dtype == torch.float32 for parameter in model.parameters())
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())} if plain else {}
        opened = copy.deepcopy(model, shared)
    name = Path(str(getattr(model.config, "name_or_path", "") or "")).name or type(model).__name__
    return Run(Path(name), opened.float().eval(), tokenizer)


def _is_ours(folder: Path) -> bool:
    """Whether a folder has a model of one of our families, by our own type or as transformers published it."""
    file = folder / "config.json"
    if not file.exists():
        return True  # which is refused with a sentence about our folders
    entries = read_json(file)
    return opens(entries.get("model_type"), entries.get("architectures"))


def _open_published(source: Source, position: Mapping[str, Any] | None, trust_remote_code: bool) -> Run:
    """Open a model that relpos train did not write."""
    config = source_config(source, trust_remote_code)
    ours = config.model_type in ORIGINALS and opens(config.model_type, config.architectures)
    if position is not None and not ours:
        _replace_rope(source, config, position)
    model = open_model(source, config, trust_remote_code)
    if ours and type(model) is ORIGINALS[config.model_type]:  # not if the file lacks the head
        model = transplant(model, position)
    tokenizer = open_tokenizer(source)
    if tokenizer is None and model.main_input_name == "input_ids":
        raise FileNotFoundError(f"there is no tokenizer in {source.what}: it has no tokenizer.json.")
    framing = framing_of(source, tokenizer, config, predicts_next_token(model))
    return Run(Path(source.what), model, tokenizer, framing=framing)


def _replace_rope(source: Source, config: PreTrainedConfig, position: Mapping[str, Any]) -> None:
    """Change the rope parameters of a model of transformers, the only entry of its positions that can be replaced."""
    if position.keys() - {"name"} != {"rope_parameters"}:
        raise ValueError(f"{source.what} is a model of transformers: only its rope_parameters can be replaced.")
    parameters = getattr(config, "rope_parameters", None)
    if not parameters or any(isinstance(value, Mapping) for value in parameters.values()):
        has = "rope parameters that differ by layer" if parameters else "no rope parameters"
        raise ValueError(f"the rope of {source.what} cannot be scaled: its configuration has {has}.")
    config.rope_parameters = {**parameters, **position["rope_parameters"]}


def _read_config(folder: Path, position: Mapping[str, Any] | None) -> tuple[Family, PreTrainedConfig]:
    file = folder / "config.json"
    if not file.exists():
        begun = " A run has been started there: rerun relpos train to finish it." if (folder / ABOUT).exists() else ""
        raise FileNotFoundError(f"there is no model in {folder}: it has no config.json.{begun}")
    model_type = read_json(file).get("model_type")
    name = family_of_type(model_type)
    if name is None:
        raise ValueError(
            f"{folder} holds a model of type {model_type!r}; those that can be opened are {', '.join(model_types())}."
        )
    family = get_family(name)
    try:
        entries = {} if position is None else {"position": dict(position)}
        return family, family.config_class.from_pretrained(folder, **entries)
    except StrictDataclassError as error:
        raise ValueError(f"{file} is not a configuration of {family.title}: {' '.join(str(error).split())}") from None


def _read_tokenizer(source: Source, vocabulary: int, usual: str | None) -> PreTrainedTokenizerFast:
    file = source.folder / "tokenizer.json"
    if not file.exists():
        if usual is not None and vocabulary >= len(published := published_tokenizer(usual)):
            return published
        raise FileNotFoundError(f"{source.what} has no tokenizer.json, and its model has {vocabulary} entries.")
    read_json(file)  # damage is named by the file
    tokenizer = open_tokenizer(source)
    assert tokenizer is not None
    if len(tokenizer) > vocabulary:
        raise ValueError(
            f"{file} belongs to another model: it has {len(tokenizer)} entries, and the model has {vocabulary}."
        )
    return tokenizer


@dataclass(frozen=True)
class ModelInput:
    """Token ids for a picture, and where they come from."""

    ids: Tensor  # (length,), with the special tokens of the run around those of the text
    document: str
    offset: int  # position in the document of the first token of the text
    words: str  # the first words of the text
    framing: Framing = NO_FRAMING


def heldout_samples(run: Run, length: int, seed: int, count: int = 2) -> list[ModelInput]:
    """Draw windows of a run's held-out text at random; fewer if the text has fewer.

    The windows do not overlap, and each lies in one document, unless no document is long enough.
    """
    room = run.framing.room(length)
    corpus = run.corpus()
    if run.tokenizer is None:
        raise ValueError(f"{run.folder.name} has no tokenizer, so it reads no text.")
    tokens = tokenize(corpus, run.tokenizer)["heldout"]
    ends = np.append(tokens.starts[1:], len(tokens)) - 1  # the separators are left out
    windows = [
        (document, offset)
        for document, (start, end) in enumerate(zip(tokens.starts, ends, strict=True))
        for offset in range(0, int(end - start) - room + 1, room)
    ] or [(0, offset) for offset in range(0, len(tokens) - room + 1, room)]
    if not windows:
        raise ValueError(f"the held-out text of {corpus.name} has {len(tokens)} tokens, fewer than {room}.")
    samples = []
    for number in np.random.default_rng(seed).permutation(len(windows))[:count]:
        document, offset = windows[number]
        start = int(tokens.starts[document]) + offset
        ids = torch.from_numpy(tokens.ids[start : start + room].astype(np.int64))
        name = next(itertools.islice(corpus.portion("heldout"), document, None)).name
        samples.append(_model_input(run, ids, room, name, offset))
    return samples


def text_sample(run: Run, text: str, name: str, length: int | None) -> ModelInput:
    """The first tokens of the user's own text: `length` of them, special tokens included, or all."""
    ids = torch.tensor(run.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)
    if len(ids) == 0:
        raise ValueError(f"{name} has no tokens: give some text.")
    room = len(ids) if length is None else run.framing.room(length)
    if room > len(ids):
        raise ValueError(f"{name} has {len(ids)} tokens, fewer than the length {room}.")
    return _model_input(run, ids, room, name, 0)


def _model_input(run: Run, ids: Tensor, room: int, name: str, offset: int) -> ModelInput:
    words = " ".join(run.tokenizer.decode(ids[: 4 * WORDS].tolist()).split()[:WORDS])
    return ModelInput(run.framing.around(ids[:room]), name, offset, words, run.framing)
