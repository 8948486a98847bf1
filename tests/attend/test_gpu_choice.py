"""Which backend runs on CUDA and ROCm. There is no GPU here: the tensors only say that they are on one."""

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import relpos
from relpos.attend import backends, chunks, flex, reference, triton
from relpos.attend.triton import first_use
from relpos.cli import app
from relpos.forms.bias import Projected, RankOne, Scored, Toeplitz
from relpos.forms.call import Call

RIGHT = first_use.Verdict(1e-3, "out", 3e-2, True)
FORMS = {
    "none": lambda: None,
    "Toeplitz": lambda: Toeplitz(torch.zeros(2, 5)),
    "learned Toeplitz": lambda: Toeplitz(torch.zeros(2, 5, requires_grad=True)),
    "learned RankOne": lambda: RankOne(torch.zeros(1, 2, 5, dtype=torch.float64, requires_grad=True)),
    "Projected": lambda: Projected(torch.zeros(1, 2, 5, 8), torch.zeros(1, 5, 8)),
    "Scored": lambda: Scored(lambda i, j, scores, visible: scores),
}


class OnCuda:
    """What the choice may ask of a tensor on CUDA. Anything else, as its values, is an error."""

    device, dtype = torch.device("cuda", 0), torch.bfloat16
    requires_grad = False

    def __init__(self, head_dim=8, queries=9):
        self.shape = (1, 2, queries, head_dim)


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch):
    """Triton is there, nothing is asked for by the environment, and every first use is right."""
    monkeypatch.delenv("RELPOS_GPU", raising=False)
    monkeypatch.setattr(triton, "INTERPRETED", False)
    monkeypatch.setattr(triton, "INSTALLED", True)
    monkeypatch.setattr(first_use, "environment", lambda device: "a GPU")
    monkeypatch.setattr(first_use, "verdict_of", lambda device, subject, tracing=False: RIGHT)
    backends.notice_failure.cache_clear()


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def chosen(form, backend=None, q=None, **options):
    q = q or OnCuda()
    return backends.choose(backend, q, q, FORMS[form](), Call(5, 5, **options))


@pytest.mark.parametrize("form", ["none", "Toeplitz", "learned Toeplitz", "learned RankOne"])
def test_flexattention_is_the_default(form):
    assert chosen(form) is flex


@pytest.mark.parametrize(
    ("form", "options"),
    [("Projected", {}), ("Toeplitz", {"dropout": 0.1, "seed": torch.tensor(1)}), ("none", {"dropout": 0.1})],
)
def test_what_flexattention_refuses_runs_in_triton(form, options):
    assert flex.refuses(OnCuda(), OnCuda(), FORMS[form](), Call(5, 5, **options))
    assert chosen(form, **options) is triton


def test_what_both_refuse_runs_in_chunks():
    assert chosen("Scored") is chunks
    assert chosen("none", q=OnCuda(head_dim=512)) is chunks


def test_a_mask_stays_with_flexattention(monkeypatch):
    monkeypatch.setenv("RELPOS_GPU", "triton")
    assert chosen("Toeplitz", mask=torch.ones(5, 5, dtype=torch.bool)) is flex


@pytest.mark.usefixtures("deterministic")
def test_in_deterministic_mode_flexattention_adds_no_gradient_of_a_bias():
    assert [chosen(form) for form in ("learned Toeplitz", "learned RankOne")] == [triton, triton]
    assert [chosen(form) for form in ("none", "Toeplitz")] == [flex, flex]
    with torch.no_grad():
        assert chosen("learned Toeplitz") is flex
    # Triton has no mask=: rather plain torch, which is deterministic or says that it is not.
    assert chosen("learned Toeplitz", mask=torch.ones(5, 5, dtype=torch.bool)) is chunks


def test_the_environment_chooses_for_all_calls(monkeypatch):
    monkeypatch.setenv("RELPOS_GPU", "triton")
    assert [chosen(form) for form in ("none", "Toeplitz", "Projected", "Scored")] == [triton] * 3 + [chunks]
    monkeypatch.setenv("RELPOS_GPU", "flex")
    assert [chosen(form) for form in ("none", "Toeplitz", "Projected", "Scored")] == [flex, flex, chunks, chunks]
    assert chosen("Toeplitz", backend="triton") is triton


@pytest.mark.usefixtures("deterministic")
def test_the_environment_wins_over_the_deterministic_mode(monkeypatch):
    monkeypatch.setenv("RELPOS_GPU", "flex")
    assert chosen("learned Toeplitz") is flex


@pytest.mark.parametrize("word", ["", "Triton", "native"])
def test_another_word_in_the_environment_is_refused(monkeypatch, word):
    monkeypatch.setenv("RELPOS_GPU", word)
    with pytest.raises(ValueError, match=rf"RELPOS_GPU is '{word}': allowed are flex and triton"):
        chosen("none")
    assert chosen("none", backend="flex") is flex  # a name needs no environment


def test_without_triton_nothing_changes(monkeypatch):
    monkeypatch.setattr(triton, "INSTALLED", False)
    monkeypatch.setenv("RELPOS_GPU", "triton")
    assert [chosen(form) for form in ("none", "Projected")] == [flex, chunks]
    with pytest.raises(ValueError, match="'triton' cannot run this: Triton is not installed"):
        chosen("none", backend="triton")


def test_float64_goes_to_the_reference():
    q = OnCuda()
    q.dtype = torch.float64
    assert chosen("learned Toeplitz", q=q) is reference


WRONG = first_use.Verdict(0.31, "gradient of table", 3e-2, True)
BROKEN = first_use.Verdict(torch.inf, "", 3e-2, False, "OutOfResources: out of resource: shared memory")
UNSTEADY = first_use.Verdict(1e-3, "out", 3e-2, False)


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (WRONG, r"gradient of table differs from the definition by 3\.1e-01 \(allowed: 3e-02\)"),
        (BROKEN, "OutOfResources: out of resource: shared memory"),
        (UNSTEADY, "two runs gave different bits"),
    ],
)
def test_where_the_first_use_fails_the_next_backend_runs_with_one_warning(monkeypatch, verdict, words):
    monkeypatch.setattr(first_use, "verdict_of", lambda device, subject, tracing=False: verdict)
    monkeypatch.setenv("RELPOS_GPU", "triton")
    sentence = rf"failed their check at first use on this GPU \(Toeplitz, bfloat16, head_dim 8\): {words}"
    with pytest.warns(UserWarning, match=sentence) as warned:
        assert [chosen("Toeplitz") for _ in range(3)] == [flex] * 3
    assert len(warned) == 1
    with pytest.warns(UserWarning, match=r"\(Projected, bfloat16, head_dim 8, vectors of 8\)"):
        assert chosen("Projected") is chunks
    with pytest.raises(ValueError, match=f"the backend 'triton' cannot run this: the Triton kernels {sentence}"):
        chosen("Toeplitz", backend="triton")


def test_a_verdict_is_about_the_form_the_dtype_and_the_sizes(monkeypatch):
    asked = []
    monkeypatch.setattr(
        first_use, "verdict_of", lambda device, subject, tracing=False: asked.append((device, subject)) or RIGHT
    )
    both = Toeplitz(torch.zeros(2, 5)) + RankOne(torch.zeros(1, 2, 5).double()) + Toeplitz(torch.zeros(2, 5))
    first_use.failure(OnCuda(64), OnCuda(32), both)
    keys = Projected(torch.zeros(1, 2, 5, 16), torch.zeros(1, 5, 16), of_keys=True)
    first_use.failure(OnCuda(64), OnCuda(64), keys)
    first_use.failure(OnCuda(64), OnCuda(64), None)
    first_use.failure(OnCuda(64, queries=8), OnCuda(64), None)
    first_use.failure(OnCuda(64, queries=8), OnCuda(64), Toeplitz(torch.zeros(2, 9, requires_grad=True)))
    assert [device for device, _ in asked] == [OnCuda.device] * 6
    assert [str(subject) for _, subject in asked] == [
        "RankOne + Toeplitz, bfloat16, head_dim 64, value_dim 32",
        "Projected of keys, bfloat16, head_dim 64, vectors of 16",
        "no bias, bfloat16, head_dim 64",
        "no bias, bfloat16, head_dim 64, decoding",
        "Toeplitz, bfloat16, head_dim 64, decoding",  # with a gradient, also the kernels that have a backward
        "Toeplitz, bfloat16, head_dim 64",
    ]


def test_a_traced_graph_takes_the_answer_without_a_check(monkeypatch):
    traced = []
    monkeypatch.setattr(first_use, "verdict_of", lambda device, subject, tracing=False: traced.append(tracing) or WRONG)

    def function(x, table):
        form = Toeplitz(table)
        first = backends.preferred("cuda", form)[0]
        return x + (1 if first is triton else 2) + (0 if first_use.failure(x, x, form) is None else 10)

    x, table = torch.zeros(1, 2, 9, 8), torch.zeros(2, 5, requires_grad=True)
    for name, expected in ((None, 12), ("triton", 11)):
        if name:
            monkeypatch.setenv("RELPOS_GPU", name)
        torch._dynamo.reset()
        out = torch.compile(function, fullgraph=True, backend="aot_eager")(x, table)
        assert (out == expected).all()
    assert set(traced) == {True}


def test_info_shows_the_choice_and_the_first_uses(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A GPU 9000")
    subject = first_use.Subject("Toeplitz", "bfloat16", 64, 64, 0)
    monkeypatch.setattr(first_use, "known_verdicts", lambda: [(subject, RIGHT), (subject, WRONG)])
    printed = CliRunner().invoke(app, ["info"]).stdout
    assert "on CUDA          FlexAttention, compiled (A GPU 9000)" in printed
    assert "Toeplitz, bfloat16, head_dim 64: right; differs from the definition by at most 1.0e-03" in printed
    assert "Toeplitz, bfloat16, head_dim 64: not used; gradient of table differs from the definition by" in printed
    monkeypatch.setenv("RELPOS_GPU", "triton")
    assert "on CUDA          Triton kernels (A GPU 9000)" in CliRunner().invoke(app, ["info"]).stdout
    facts = json.loads(CliRunner().invoke(app, ["info", "--json"]).stdout)
    assert (facts["cuda_backend"], facts["triton_missing"]) == ("triton", None)
    assert [check["passed"] for check in facts["triton_first_use"]] == [True, False]


@pytest.mark.parametrize(("name", "form"), [("kerple_log", "Toeplitz"), ("cable", "RankOne")])
def test_a_decoder_asks_for_the_form_of_its_packed_bias(monkeypatch, name, form):
    """It keeps the bias packed, so that the choice sees none."""
    asked, verdict = [], RIGHT
    monkeypatch.setattr(
        first_use, "verdict_of", lambda device, subject, tracing=False: asked.append(str(subject)) or verdict
    )
    monkeypatch.setattr(triton, "refuses", lambda q, v, form, call: None)
    ran = []

    def attention(q, k, v, form, call, packed=None):
        ran.append(packed is not None)
        return torch.zeros_like(q), None

    monkeypatch.setattr(triton, "attention", attention)
    position = relpos.encoding(name, heads=2, head_dim=8)
    q, hidden, cache = torch.randn(1, 2, 1, 8), torch.randn(1, 1, 16), relpos.Cache()
    with torch.no_grad():
        relpos.attention(q, q, q, position, hidden=hidden, cache=cache, backend="triton")
        assert ran == [True]
        assert asked == ["no bias, float32, head_dim 8, decoding", f"{form}, float32, head_dim 8, decoding"]
        verdict = WRONG
        with pytest.raises(ValueError, match="failed their check at first use"):
            relpos.attention(q, q, q, position, hidden=hidden, cache=cache, backend="triton")


@pytest.mark.heavy
def test_on_a_cpu_triton_is_never_imported():
    code = """
import sys, torch, relpos
from relpos.attend.backends import describe
q = torch.randn(1, 2, 5, 4)
relpos.attention(q, q, q, relpos.encoding("alibi", heads=2, head_dim=4))
describe()
assert "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
