"""The tokenizer of a task: one entry per word, so that people can read and write its sequences."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from relpos.tasks.task import PAD, UNKNOWN, Task


def task_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a task; words are separated by spaces."""
    words = Tokenizer(models.WordLevel(task.vocabulary, unk_token=UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, unk_token=UNKNOWN)
