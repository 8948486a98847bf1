"""What a run trains on: windows of a corpus, or sequences of a task."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from relpos.lab.data.corpus import open_corpus
from relpos.lab.data.masking import MaskedWindows, add_mask_token
from relpos.lab.data.tokenizers import load_tokenizer
from relpos.lab.data.tokens import Windows, tokenize
from relpos.lab.runs.settings import Settings
from relpos.lab.tasks import task
from relpos.lab.tasks.tokenizer import task_tokenizer
from relpos.lab.tasks.windows import TaskWindows

ENDLESS = 10**9  # more sequences than any run takes


@dataclass(frozen=True)
class Data:
    """Windows of both parts, the tokenizer, and what run.yaml says of them."""

    tokenizer: PreTrainedTokenizerFast
    train: Dataset[dict[str, Tensor]]
    heldout: Windows | MaskedWindows | TaskWindows
    order: str  # of the training windows: random, or sequential where they are made at random anyway
    about: dict[str, Any]


def open_data(settings: Settings) -> Data:
    """The data as the settings name it."""
    return _open_text(settings) if settings.data.task is None else _open_task(settings, settings.data.task)


def _open_text(settings: Settings) -> Data:
    data, run = settings.data, settings.run
    assert data.source is not None
    corpus = open_corpus(data.source, data.text_field, data.subset, keep_line_ends=data.keep_line_ends)
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
        {**about, "tokens": {part: len(found) for part, found in tokens.items()}},
    )


def _open_task(settings: Settings, name: str) -> Data:
    data, run, one = settings.data, settings.run, task(name)
    same = (run.seed, data.task_loss == "all", data.task_shortest)
    return Data(
        task_tokenizer(one),
        TaskWindows(one, "train", data.length, ENDLESS, *same),
        TaskWindows(one, "heldout", data.length, run.eval_windows, *same),
        "sequential",
        {"task": {"name": name, "hash": one.digest, "words": len(one.vocabulary)}},
    )
