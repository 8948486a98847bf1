"""One sequence over several processes: 2 and 4 processes give what 1 gives, for every encoding and scheme."""

import pytest
from many_processes import run

import relpos
from relpos.attend.distributed import SCHEMES

LENGTHS = {2: 37, 4: 19}  # tokens per slice, no multiple of any block
VARIANTS = [
    *((name, {}) for name in relpos.names()),
    ("sum", {"parts": ["rope", "forgetting"]}),
    ("sum", {"parts": ["rope", "ssmax"]}),
]
REFUSED = {(name, "heads"): "is computed from all heads together" for name in ("dape", "dapev2")}
_found = {}


def found(processes):
    """What the processes found; they run once."""
    if processes not in _found:
        _found[processes] = run(processes, "sliced_attention:compare", VARIANTS, LENGTHS[processes])
    return _found[processes]


def label(variant):
    name, options = variant
    return "-".join([name, *(str(part) for part in options.get("parts", ()))])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("variant", range(len(VARIANTS)), ids=[label(variant) for variant in VARIANTS])
@pytest.mark.parametrize("processes", LENGTHS)
def test_several_processes_are_one(processes, variant, scheme):
    said = {call: text for (*case, call), text in found(processes).items() if case == [variant, scheme]}
    assert len(said) == 5
    if (VARIANTS[variant][0], scheme) in REFUSED:
        assert all(REFUSED[VARIANTS[variant][0], scheme] in (text or "") for text in said.values()), said
    else:
        assert {call: text for call, text in said.items() if text is not None} == {}
