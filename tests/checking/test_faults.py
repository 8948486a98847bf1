"""Every fault of the library is found where it is injected and named, and clean models have none."""

import pytest
import torch
from small_models import small_model

import relpos
from relpos.checking.faults import FILES, faults
from relpos.checking.faults.fault import NotPossibleError
from relpos.checking.subject import ModelSubject

LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
SCALED = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
MODELS = {  # between them, they can have every fault
    "llama": {},
    "llama linear": {"rope_parameters": LINEAR},
    "llama yarn": {"rope_parameters": SCALED},
    "gemma3_text": {},
    "smollm3": {},
    "gpt_oss": {},
    "cohere2": {},
    "opt": {},
    "gpt2": {},
    "bloom": {},
    "t5": {},
    "bert": {},
    "modernbert": {},
}


def model_of(name):
    family = name.split()[0] if name.startswith("llama ") else name
    return small_model(family, **MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_a_clean_model_has_no_fault(name):
    report = relpos.check(model_of(name))
    assert not report.failed, report.summary
    assert report.tested
    assert report.exit_status == 0
    report.assert_right()


@pytest.mark.parametrize("name", MODELS)
def test_each_fault_is_found_and_named(name):
    model = model_of(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    possible = 0
    for fault in faults():
        subject = ModelSubject(model)
        assert subject.known
        try:
            with fault.inject(subject):
                report = relpos.check(model)
        except NotPossibleError:
            continue
        possible += 1
        assert report.failed, f"{fault.name} was not found"
        assert report.faults[0] == fault.name, report.faults
        assert report.exit_status == 1
    assert possible >= 4
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not relpos.check(model).failed  # all injections are undone


def test_every_fault_can_be_injected_into_one_of_these_models():
    missing = set(FILES)
    for name in MODELS:
        subject = ModelSubject(model_of(name))
        assert subject.known
        for file, fault in zip(FILES, faults(), strict=True):
            try:
                with fault.inject(subject):
                    missing.discard(file)
            except NotPossibleError:
                pass
    assert not missing


def test_faults_have_different_names_and_say_what_mends_them():
    known = faults()
    assert len({fault.name for fault in known}) == len(known) >= 25
    for fault in known:
        assert fault.diagnosis.endswith(".")
        assert fault.remedy.endswith(".")
        assert fault.tests
