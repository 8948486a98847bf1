"""What is light stays light: a test of what gets imported, not of the time it takes."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.heavy

HEAVY = ("transformers", "matplotlib", "datasets", "accelerate", "fastapi", "uvicorn", "hypothesis", "ray", "submitit")


def imported(code: str) -> set[str]:
    """The top-level modules loaded once `code` has run, in a fresh interpreter."""
    report = "import sys; print('\\nMODULES', *sorted({name.split('.')[0] for name in sys.modules}))"
    run = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True)
    return set(run.stdout.rsplit("MODULES", 1)[1].split())


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["compare", "--help"], ["--version"], ["ls"], ["ls", "--json"], ["ls", "dapev2"]],
    ids=" ".join,
)
def test_light_commands_import_neither_torch_nor_anything_heavy(arguments):
    code = f"from relpos.cli import app\ntry: app({arguments!r})\nexcept SystemExit as end: assert not end.code"
    assert not imported(code) & {"torch", "numpy", *HEAVY}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "--encoding", "alibii"], "Did you mean 'alibi'?"),
        (["train", "--encoding", "alibi", "--option", "slope=press"], "Did you mean 'slopes'?"),
        (["draw", "alibii"], "Did you mean 'alibi'?"),
        (["draw", "alibi", "--show", "biass"], "Did you mean 'bias'?"),
        (["draw", "alibi", "--out", "a.gif"], "the name must end in"),
        (["draw", "alibi", "--log"], "--log is for the distances of a profile"),
        (["draw", "alibi", "--head", "13"], "there is no head 13: give numbers from 1 to 12"),
        (["draw", "alibi", "--option", "slope=press"], "Did you mean 'slopes'?"),
        (["draw", "alibi", "--text", "a"], "reads no text"),
        (["draw", "--all", "--head", "1"], "leave head out"),
        (["explore", "alibii"], "Did you mean 'alibi'?"),
        (["evaluate", "nowhere"], "there is no folder nowhere"),
        (["evaluate", "zoo/cabel"], "there is no folder zoo/cabel. Did you mean zoo/cable?"),
        (["check", "nowhere.gguf"], "there is no file nowhere.gguf"),
        (["train", "--from", "nowhere"], "there is no folder nowhere"),
        (["compare", "--encodings", "alibi,alibii"], "Did you mean 'alibi'?"),
        (["compare", "--encodings", "rope:bas=5"], "Did you mean 'base'?"),
        (["figures", "--preset", "nan"], "Did you mean 'nano'?"),
        (["gpu-report", "--out", "a.csv"], "must end in .md or .json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_refused_before_anything_heavy_is_imported(arguments, sentence):
    code = f"""
import contextlib, io, sys
from relpos.cli import main
sys.argv[1:] = {arguments!r}
with contextlib.redirect_stderr(io.StringIO()) as said:
    try: main()
    except SystemExit as end: assert end.code == 2
assert {sentence!r} in said.getvalue(), said.getvalue()
"""
    assert not imported(code) & {"torch", *HEAVY}


def test_import_relpos_is_light():
    assert not imported("import relpos; relpos.names(); relpos.card('fire')") & {"torch", "numpy", *HEAVY}


def test_attention_needs_torch_and_nothing_heavy():
    code = """
import torch, relpos
q = torch.randn(1, 2, 5, 4)
relpos.attention(q, q, q, relpos.encoding("alibi", heads=2, head_dim=4))
"""
    modules = imported(code)
    assert "torch" in modules
    assert not modules & set(HEAVY)
