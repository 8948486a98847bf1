"""A command that is refused."""

import sys

import pytest

from relpos.cli import main


def refused(capsys, *words):
    """What the command prints when it refuses: one sentence and exit code 2."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["relpos", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert "Errno" not in printed
    assert "Traceback" not in printed
    return " ".join(printed.split())
