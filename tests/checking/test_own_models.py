"""Our own models are checked as others are: what runs is what the configuration says, and faults are named."""

import pytest
import torch
from small_models import saved

import relpos
from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults import faults
from relpos.checking.faults.fault import NotPossibleError
from relpos.checking.findings import FAILED, PASSED
from relpos.models.family import get_family

YARN = {"name": "rope", "scaling": "yarn", "factor": 4.0, "length": 64}
WINDOW = {"name": "rope", "plan": [{"every": 2, "window": 12}]}


def model_of(family, position, **entries):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "position": position, **entries}
    return get_family(family).model_class(get_family(family).config_class.preset("nano", **sizes)).eval()


def status(report):
    return {finding.test: finding.status for finding in report.findings}


@pytest.mark.parametrize(
    ("family", "position", "tests"),
    [
        ("gpt2", {"name": "rope"}, {"rotation", "attention factor", "cache", "static cache", "packing", "kernel"}),
        ("llama", WINDOW, {"rotation", "window", "cache", "left padding", "kernel"}),
        ("gpt2", {"name": "sum", "parts": ["rope", "forgetting"]}, {"rotation", "bias", "kernel"}),
        ("gpt2", {"name": "cable"}, {"bias", "cache", "crop", "kernel"}),
        ("gpt2", {"name": "cope"}, {"bias", "kernel"}),
        ("bert", {"name": "t5"}, {"bias", "causality", "right padding", "kernel"}),
        ("bert", {"name": "learned", "length": 64}, {"causality", "right padding", "kernel"}),
        ("llama", {"name": "nope"}, {"causality", "cache", "packing", "kernel"}),
    ],
)
def test_a_model_of_ours_is_right_in_all_parts(family, position, tests):
    report = relpos.check(model_of(family, position))
    assert not report.failed, report.summary
    passed = {test for test, result in status(report).items() if result == PASSED}
    assert tests <= passed, report.findings


@pytest.mark.parametrize(
    ("family", "position", "names"),
    [
        ("gpt2", {"name": "rope"}, {"layout", "theta", "fraction", "keys backwards", "bfloat16 frequencies"}),
        ("llama", YARN, {"scaling missing", "factor missing", "factor twice", "rotation backwards"}),
        ("llama", WINDOW, {"window missing", "window shifted"}),
        ("gpt2", {"name": "alibi"}, {"slopes reversed", "slopes of rank", "bias sign", "bias scaled", "bias twice"}),
    ],
)
def test_faults_of_our_models_are_found_and_named(family, position, names):
    model = model_of(family, position)
    possible = set()
    for fault in faults():
        subject = ModelSubject(model)
        assert subject.known
        if fault.name not in names:
            continue
        try:
            with fault.inject(subject):
                report = relpos.check(model, only=fault.tests)
        except NotPossibleError:
            continue
        possible.add(fault.name)
        assert report.faults[:1] == [fault.name], (fault.name, report.faults)
    assert possible == names
    assert not relpos.check(model, only=["rotation", "window", "bias"]).failed  # all injections are undone


def test_a_kernel_that_differs_from_the_definition_is_found(monkeypatch):
    from relpos.attend import native

    own = native.attention
    monkeypatch.setattr(native, "attention", lambda q, k, *rest, **more: own(q, 0.9 * k, *rest, **more))
    report = relpos.check(model_of("gpt2", {"name": "alibi"}), only=["kernel"])
    assert status(report) == {"kernel": FAILED}


def test_two_of_our_models_are_compared_as_ports():
    model = model_of("llama", {"name": "rope"})
    other = model_of("llama", {"name": "rope", "base": 500_000.0})
    other.load_state_dict(model.state_dict())
    report = relpos.check(model, against=other, only=["batch"])
    assert report.faults == ["theta"], report.findings
    assert not relpos.check(model, against=model_of("llama", {"name": "rope"}), only=["batch"]).failed


@pytest.mark.heavy
def test_variants_and_the_loss_by_position_are_measured_on_text(tmp_path):
    folder = saved(model_of("gpt2", {"name": "rope"}), tmp_path / "model")
    (tmp_path / "text").mkdir()
    for number in range(6):
        words = " ".join(f"w{(7 * number + j * j) % 50 + 5:02}" for j in range(300))
        (tmp_path / "text" / f"{number}.txt").write_text(words)
    report = relpos.check(folder, only=["trained"], data=str(tmp_path / "text"))
    (finding,) = report.findings
    assert finding.status in (PASSED, FAILED), finding.words
    variants = {words for words, *_ in finding.losses}
    assert {"theta × 10", "theta ÷ 10", "queries and keys are not rotated"} <= variants


def test_where_no_variant_can_be_tried_nothing_passes(tmp_path):
    from relpos.checking.check_subject import NotTestableError
    from relpos.checking.trained import Text, trained

    subject = ModelSubject(model_of("gpt2", {"name": "learned", "length": 64}))
    subject.text = Text(torch.randint(4, 60, (4, 32)))
    with subject.prepared(), pytest.raises(NotTestableError, match="no variant"):
        trained(subject)
