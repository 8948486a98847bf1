"""`relpos.check`: whether the positions of a model are right."""

import contextlib
import inspect
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from relpos.checking import configured, fingerprints, ports, rotations, trained
from relpos.checking.check_options import TESTS, CheckOptions
from relpos.checking.check_subject import (
    FeatureSubject,
    FunctionModule,
    FunctionSubject,
    ModelSubject,
    ModuleSubject,
    NotTestableError,
    Subject,
)
from relpos.checking.faults import diagnosed
from relpos.checking.findings import FAILED, NOT_TESTED, PASSED, Finding, Report
from relpos.checking.outcomes import Outcome, Test
from relpos.model_catalogue import PREFIX
from relpos.pretrained.framing import framing_of
from relpos.pretrained.open import open_model, open_tokenizer
from relpos.pretrained.positions import summary
from relpos.pretrained.reader import predicts_next_token
from relpos.pretrained.source import find_source, one_line, source_config
from relpos.pretrained.use import unwrap
from relpos.runs.results import ABOUT
from relpos.runs.run import Run, open_run
from relpos.system.errors import check_not_empty, unknown
from relpos.system.options import takes

FULL_WORK = 10**12  # multiplications of a forward in a full check
ORDER = {name: place for place, name in enumerate(TESTS)}  # causes before consequences


@takes(CheckOptions)
def check(options: CheckOptions) -> Report:
    """Check whether the positions of a model are right: against themselves, and against its configuration.

    Nothing of the model is changed, and nothing is trained. What cannot be tested is listed as such.

    Returns:
        The report: `report.failed`, one finding per test, and for known patterns the fault and what mends it.

    Raises:
        ValueError: There is nothing to check, or an unknown test is named.
        OSError: The model does not exist.

    Example:
        >>> report = relpos.check(model)
        >>> report.failed, report.findings[0].diagnosis
        >>> relpos.check(model).assert_right()
    """
    begun = time.monotonic()
    if options.model is None:
        raise ValueError("there is nothing to check: give a model.")
    if options.quick and options.full:
        raise ValueError("--quick and --full exclude each other: give only one of them.")
    for name in options.only or ():
        if name not in TESTS:
            raise unknown("test", name, TESTS)
    say = options.say or (lambda text: None)
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # its warnings of unusual entries would stand among the findings
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            subject = subject_of(options.model, options)
            findings = make_tests(subject, chosen_tests(options), say)
            if options.against is not None:
                say("comparing with the other port")
                findings += compare_ports(subject, subject_of(options.against, options))
    finally:
        logging.set_verbosity(level)
    ordered = sorted(findings, key=lambda finding: (finding.status != FAILED, ORDER.get(finding.test, -1)))
    positions = summary(subject.model) if isinstance(subject, ModelSubject) else ()
    return Report(subject.name, tuple(diagnosed(ordered)), time.monotonic() - begun, positions)


def wants_text(options: CheckOptions) -> bool:
    """Whether the tests on real text are asked for."""
    return options.full or bool({"trained", "lengths"} & set(options.only or ()))


def compare_ports(subject: Subject, other: Subject) -> list[Finding]:
    """The findings of a comparison with another port."""
    with subject.prepared(), other.prepared():
        try:
            return ports.ports(subject, other)
        except Exception as error:  # the code of either may raise anything
            words = f"its code failed: {type(error).__name__}: {one_line(error)[:200]}"
            return [Finding("ports", ports.TITLE, NOT_TESTED, words=words)]


def subject_of(model: Any, options: CheckOptions) -> Subject:
    """What is checked, behind one interface."""
    work = FULL_WORK if options.full else 1 if options.quick else None
    if isinstance(model, str | Path):
        model = open_original(model, options.trust_remote_code)
    if isinstance(model, Run):
        subject = model_subject(model.model, work)
        subject.name = str(model.folder)
        if wants_text(options) and model.tokenizer is not None and isinstance(subject, ModelSubject):
            subject.text = trained.sample(model, options.data)
        return subject
    if isinstance(model, nn.Module):
        try:
            inner = unwrap(model)
        except TypeError:  # it is not, and does not wrap, a model of transformers
            return module_subject(model, options)
        return model_subject(inner, work)
    if callable(model):
        if reads_tokens(model):
            return ModuleSubject(FunctionModule(model), name_of(model), options.example, options.decode)
        return FunctionSubject(model, name_of(model))
    raise TypeError(f"relpos.check takes a model, a module, a function or a path, not {type(model).__name__}.")


def model_subject(model: PreTrainedModel, work: int | None) -> ModuleSubject:
    """A model of transformers, of text or of frames of features."""
    return ModelSubject(model, work=work) if model.main_input_name == "input_ids" else FeatureSubject(model)


def open_original(what: str | Path, trust_remote_code: bool) -> Run:
    """The model of a folder, file or hub name by the code that runs it: ours for a run, else that of transformers."""
    check_not_empty("model", what)
    source = find_source(what)
    if source.gguf is None and (source.folder / ABOUT).exists():
        return open_run(what)
    config = source_config(source, trust_remote_code)
    if str(config.model_type).startswith(PREFIX):
        return open_run(what)
    model, tokenizer = open_model(source, config, trust_remote_code), open_tokenizer(source)
    framing = framing_of(source, tokenizer, config, predicts_next_token(model))
    return Run(Path(what), model, tokenizer, framing=framing)


def module_subject(model: nn.Module, options: CheckOptions) -> Subject:
    """A module that reads token ids, or one that is an attention function."""
    if reads_tokens(model.forward):
        return ModuleSubject(model, example=options.example, decode=options.decode)
    return FunctionSubject(model, type(model).__name__)


def reads_tokens(function: Callable[..., Any]) -> bool:
    """Whether a function takes token ids, and not queries, keys and values: it needs fewer than three arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a built-in function
        return False
    positional = [x for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    return bool(positional) and sum(x.default is x.empty for x in positional) < 3


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function; of a partial one, that of what it calls."""
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__name__", type(inner).__name__))


def chosen_tests(options: CheckOptions) -> list[Test]:
    """The tests to be made, causes before consequences."""
    tests = [*rotations.TESTS, *configured.TESTS, *fingerprints.TESTS]
    if wants_text(options):
        tests += trained.TESTS
    if options.only is not None:
        tests = [test for test in tests if test.name in options.only]
    return sorted(tests, key=lambda test: ORDER[test.name])


def make_tests(subject: Subject, tests: list[Test], say: Callable[[str], object]) -> list[Finding]:
    """The findings of all tests; if a forward fails, that is the only one."""
    findings: list[Finding] = []
    with subject.prepared():
        first = FORWARD.finding(subject)
        if first is not None and first.status != PASSED:
            return [first, *(Finding(test.name, test.title, NOT_TESTED, words="see the first line") for test in tests)]
        if subject.causal is None and "causality" not in (test.name for test in tests):
            with contextlib.suppress(
                Exception
            ):  # other tests ask what it has measured; a model's code may raise anything
                fingerprints.causality(subject)
        for number, test in enumerate(tests, 1):
            say(f"{test.title} ({number} of {len(tests)})")
            finding = test.finding(subject)
            if finding is not None:
                findings.append(finding)
    return findings


def forward(subject: Subject) -> Outcome:
    """A forward on a short text must give finite numbers."""
    tokens = min(8, subject.length)
    try:
        output = subject.run(subject.tokens(1, tokens, 0))
    except NotTestableError:
        raise
    except Exception as error:  # a model's own code may raise anything
        return Outcome(True, None, f"{type(error).__name__}: {one_line(error)[:200]}")
    if output.dim() != 3 or (output.shape[1] != tokens and not isinstance(subject, FeatureSubject)):
        raise NotTestableError(f"it returns {tuple(output.shape)} for {tokens} tokens, not one row per token")
    if not bool(torch.isfinite(output).any()):
        return Outcome(True, None, "its outputs are not finite")
    return Outcome(False)


FORWARD = Test("forward", "a forward runs", forward, "A forward on a short text fails.")
