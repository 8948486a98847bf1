"""One sequence over several processes: 2 and 4 processes give what 1 gives, for every encoding and scheme."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from many_processes import run

import relpos
from relpos.attend.parallel import SCHEMES

pytestmark = pytest.mark.heavy

LENGTHS = {2: 37, 4: 19}  # tokens per slice, no multiple of any block
VARIANTS = [
    *((name, {}) for name in relpos.names()),
    ("sum", {"parts": ["rope", "forgetting"]}),
    ("sum", {"parts": ["rope", "ssmax"]}),
]
REFUSED = {
    **{(name, "heads"): "is computed from all heads together" for name in ("dape", "dapev2")},
    **{(name, "ring"): "a function of complete rows of scores" for name in ("cope", "dape", "dapev2", "kcable")},
}
REFUSALS = {  # arguments, a tuple for what differs between the two processes; and what the refusal says
    "unequal slices": (
        {"lengths": [4, 5]},
        "process [01] has [45] tokens and process [01] has [45]: divide the sequence",
    ),
    "other options": ({"window": (2, 3)}, "process [01] and process [01] differ in the dtype, causal, window"),
    "heads that do not divide": ({"heads": 3, "scheme": "heads"}, "3 heads cannot be divided among 2 processes"),
    "dropout by head": ({"dropout": 0.1, "scheme": "heads"}, "'heads' cannot run this: what is dropped"),
    "dropout in a ring": ({"dropout": 0.1, "scheme": "ring"}, "'ring' cannot run this: dropout and mask= need"),
    "rows in a ring": ({"encoding": "cope", "scheme": "ring"}, "Cope is a function of complete rows of scores"),
    "an unknown scheme": ({"scheme": "rings"}, "unknown scheme 'rings'. Did you mean 'ring'"),
    "start": ({"start": 4}, "there is no decoding: leave start= out"),
    "a cache": ({"cache": relpos.Cache()}, "there is no decoding: leave cache= out"),
    "a mask": ({"mask": torch.ones(4, 8, dtype=torch.bool)}, "must be a function"),
    "documents of all tokens": (
        {"documents": torch.ones(1, 8).long()},
        r"documents is that of this process's slice, \(1, 4\)",
    ),
    "no hidden": ({"encoding": "cable"}, "Cable reads the layer's input: give hidden="),
}
EACH_KIND = ("alibi", "cable", "cope", "dape", "fire", "rope", "ssmax", "sum")  # that four processes try by default


@cache
def found(processes, every):
    """What the processes found; they run once."""
    wrong = {case: arguments for case, (arguments, _) in REFUSALS.items()} if processes == 2 else {}
    variants = {n: v for n, v in enumerate(VARIANTS) if processes == 2 or (v[0] not in EACH_KIND) == every}
    return run(processes, "sliced_attention:everything", variants, LENGTHS[processes], wrong)


def label(variant):
    name, options = variant
    return "-".join([name, *(str(part) for part in options.get("parts", ()))])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("processes", "variant"),
    [
        pytest.param(
            processes,
            number,
            id=f"{processes}-{label(variant)}",
            marks=pytest.mark.slow if processes == 4 and variant[0] not in EACH_KIND else [],
        )
        for processes in LENGTHS
        for number, variant in enumerate(VARIANTS)
    ],
)
def test_several_processes_are_one(processes, variant, scheme):
    answers = found(processes, processes == 4 and VARIANTS[variant][0] not in EACH_KIND)
    said = {
        case[2]: text for case, text in answers.items() if isinstance(case, tuple) and case[:2] == (variant, scheme)
    }
    assert len(said) == {2: 5, 4: 2}[processes]
    if (VARIANTS[variant][0], scheme) in REFUSED:
        reason = REFUSED[VARIANTS[variant][0], scheme]
        defined = [
            call for call in said if relpos.card(VARIANTS[variant][0]).directions == "both" or "both" not in call
        ]
        assert all(reason in (said[call] or "") for call in defined), said
    else:
        assert {call: text for call, text in said.items() if text is not None} == {}


@pytest.mark.parametrize("processes", LENGTHS)
def test_other_calls(processes):
    said = {
        case: text for case, text in found(processes, False).items() if isinstance(case, str) and case != "refusals"
    }
    assert len(said) == 30
    assert {case: text for case, text in said.items() if text is not None} == {}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_is_refused_in_a_sentence(case):
    said = found(2, False)["refusals"]
    assert re.search(REFUSALS[case][1], said[case]), said[case]


def test_the_table_in_the_documentation_is_what_is_tested_here():
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    table = page.split("<!-- contract:")[1].split("<!-- end of contract -->")[0].splitlines()[1:]
    header, _, *rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    assert header == ["encoding", *SCHEMES]
    expected = [
        [name, *("refused" if (name, scheme) in REFUSED else "equal" for scheme in SCHEMES)] for name in relpos.names()
    ]
    assert rows == expected
