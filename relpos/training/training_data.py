"""The data of a run: windows of a corpus, or sequences of a task."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from relpos.runs.settings import Settings
from relpos.tasks import task
from relpos.tasks.windows import TaskWindows, task_tokenizer
from relpos.text.corpus import open_corpus
from relpos.text.masking import MaskedWindows, add_mask_token
from relpos.text.tokenizers import load_tokenizer
from relpos.text.tokens import Windows, tokenize

ENDLESS = 10**9  # more sequences than any run reads


@dataclass(frozen=True)
class Data:
    """The data of a run.

    Attributes:
        tokenizer: The tokenizer.
        train: The windows to train on.
        heldout: The windows to evaluate on during training.
        order: In which order the training windows are read: "random", or "sequential" if they are random themselves.
        about: A description for run.yaml.
    """

    tokenizer: PreTrainedTokenizerFast
    train: Dataset[dict[str, Tensor]]
    heldout: Windows | MaskedWindows | TaskWindows
    order: str
    about: dict[str, Any]


def open_data(settings: Settings, tokenizer: PreTrainedTokenizerFast | None = None) -> Data:
    """Open the corpus or task that the settings name.

    Args:
        settings: The settings of the run.
        tokenizer: That of the model that the run starts from; None for the one that the settings name.

    Raises:
        ValueError: The data cannot be read, or is too short for a window.
        FileNotFoundError: The data does not exist.
    """
    if settings.data.task is not None:
        return _open_task(settings, settings.data.task)
    return _open_text(settings, tokenizer)


def _open_text(settings: Settings, tokenizer: PreTrainedTokenizerFast | None) -> Data:
    data, run = settings.data, settings.run
    assert data.source is not None
    corpus = open_corpus(data.source, data.text_field, data.subset, keep_line_ends=data.keep_line_ends)
    if tokenizer is None:
        assert data.tokenizer is not None
        tokenizer = load_tokenizer(data.tokenizer, corpus)
    if data.masking is not None:
        tokenizer = add_mask_token(tokenizer)
    tokens = tokenize(corpus, tokenizer)
    about = {"corpus": {"name": corpus.name, "hash": corpus.hash, "documents": dict(corpus.counts)}}
    train: Windows | MaskedWindows = Windows(
        tokens["train"], data.length, data.separate_documents, multiple=run.batch_size
    )
    heldout: Windows | MaskedWindows = Windows(
        tokens["heldout"], data.length, data.separate_documents, run.eval_windows
    )
    if data.masking is not None:
        assert isinstance(train, Windows)
        assert isinstance(heldout, Windows)
        words = data.masking == "word"
        train = MaskedWindows(train, tokenizer, run.seed, data.mask_share, words)
        heldout = MaskedWindows(heldout, tokenizer, run.seed, data.mask_share, words, fixed=True)
    return Data(
        tokenizer,
        train,
        heldout,
        "random",
        {**about, "tokens": {portion: len(ids) for portion, ids in tokens.items()}},
    )


def _open_task(settings: Settings, name: str) -> Data:
    data, run, own_task = settings.data, settings.run, task(name)
    same = (run.seed, data.task_loss == "all", data.task_shortest)
    return Data(
        task_tokenizer(own_task),
        TaskWindows(own_task, "train", data.length, ENDLESS, *same),
        TaskWindows(own_task, "heldout", data.length, run.eval_windows, *same),
        "sequential",
        {"task": {"name": name, "hash": own_task.digest, "words": len(own_task.vocabulary)}},
    )
