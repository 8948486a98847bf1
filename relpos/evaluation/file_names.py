"""The names of the files of an evaluation. Another question has another name, so that none overwrites another."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

LONGEST = 150  # characters of a name; file systems allow 255 bytes


def question_stem(
    subject: str,
    *,
    rope_scaling: str | None = None,
    data: str | None = None,
    data_hash: str = "",
    split: str | None = None,
    lengths: Iterable[int] = (),
    **options: int | None,
) -> str:
    """The name, without its suffix, of the files that answer a question.

    The name leaves out what is None or empty, and so at its default: `windows`, `last-yarn-4`,
    `windows-wiki.test-3fa9c1d2`, `windows-lengths-512-2048-eval-tokens-4096`.

    Args:
        subject: The protocol, or task-NAME.
        rope_scaling: As in yarn:4.
        data: Other data than the run's own; the last part of its path becomes part of the name.
        data_hash: Hash of its content, since two files may have the same name.
        split: A split other than the default.
        lengths: Lengths other than the default.
        options: Further options of the question, by name.

    Returns:
        At most 150 characters.

    Example:
        >>> question_stem("windows", lengths=[512, 2048], eval_tokens=4096)
        'windows-lengths-512-2048-eval-tokens-4096'
    """
    words = [subject]
    if rope_scaling:
        words.append(rope_scaling)
    if data is not None:
        words += [Path(data).name.removesuffix(".txt"), data_hash[:8]]
    if split:
        words.append(split)
    if lengths := list(lengths):
        words += ["lengths", *map(str, lengths)]
    for name, value in options.items():
        if value is not None:
            words += [name.replace("_", "-"), str(value)]
    return joined(words)


def joined(words: Iterable[str]) -> str:
    """Join words to one file name; if it is too long, a hash of it replaces its end."""
    stem = re.sub(r"[^\w.+=-]+", "-", "-".join(word for word in words if word))
    if len(stem) <= LONGEST:
        return stem
    return f"{stem[: LONGEST - 9]}-{hashlib.sha256(stem.encode()).hexdigest()[:8]}"
