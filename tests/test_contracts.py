"""Every contract for every encoding on every backend, and for the variants worth a run of their own."""

import pytest
from contracts import HEAD_DIM, HEADS, SETTINGS, VARIANTS, contracts_for

import relpos
from relpos.attend import chunks

RUNS = [(backend, contract) for backend, setting in SETTINGS.items() for contract in contracts_for(setting)]


def label(variant):
    name, options = variant
    return "-".join([name, *(str(value) for value in options.values() if isinstance(value, str | int | float))])


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """So that these short sequences take several blocks, the last of them not full."""
    monkeypatch.setattr(chunks, "block_size", lambda q, form, call: 5)


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
@pytest.mark.parametrize(("backend", "contract"), RUNS, ids=lambda value: getattr(value, "__name__", value))
def test_contract(backend, contract, variant):
    name, options = variant
    contract(lambda: relpos.encoding(name, heads=HEADS, head_dim=HEAD_DIM, **options), SETTINGS[backend])
