"""What the files of an evaluation are called: another question has another name, so that none overwrites another."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

LONGEST = 150  # characters of a name; file systems allow 255 bytes


def question_stem(
    subject: str,
    *,
    rope_scaling: str | None = None,
    corpus: str | None = None,
    corpus_hash: str = "",
    split: str | None = None,
    lengths: Iterable[int] = (),
    **options: int | None,
) -> str:
    """The name, without its ending, of the files that answer a question.

    What is left out or None is as by default and is not in the name: `windows`, `last-yarn-4`,
    `windows-wiki.test-3fa9c1d2`, `windows-lengths-512-2048-tokens-4096`.

    Args:
        subject: the protocol, or task-NAME.
        rope_scaling: as in yarn:4.
        corpus: another than the run's own; its last name stands in the file's.
        corpus_hash: of its content, since two corpora may have one name.
        split: other than the corpus's default.
        lengths: other than the default ones.
        options: further options of the question, by name.

    Returns:
        At most 150 characters.
    """
    words = [subject]
    if rope_scaling:
        words.append(rope_scaling)
    if corpus is not None:
        words += [Path(corpus).name.removesuffix(".txt"), corpus_hash[:8]]
    if split:
        words.append(split)
    if lengths := list(lengths):
        words += ["lengths", *map(str, lengths)]
    for name, value in options.items():
        if value is not None:
            words += [name, str(value)]
    return joined(words)


def joined(words: Iterable[str]) -> str:
    """Words as one name for a file; where it would be too long, a hash of all stands for its end."""
    stem = re.sub(r"[^\w.+=-]+", "-", "-".join(word for word in words if word))
    if len(stem) <= LONGEST:
        return stem
    return f"{stem[: LONGEST - 9]}-{hashlib.sha256(stem.encode()).hexdigest()[:8]}"
