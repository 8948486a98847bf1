"""A task's vocabulary as a tokenizer: a word an entry, so that its sequences can be read and written by people."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from relpos.lab.tasks.task import PAD, UNKNOWN, Task


def task_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """The tokenizer of a task; words stand between spaces."""
    words = Tokenizer(models.WordLevel(task.vocabulary, unk_token=UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, unk_token=UNKNOWN)
