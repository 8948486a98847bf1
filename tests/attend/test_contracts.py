"""Every contract for every encoding on every backend, and for the variants worth a run of their own."""

import pytest
from contract_settings import HEAD_DIM, HEADS, SETTINGS, runs
from contracts import VARIANTS, a_static_map_is_the_same_for_any_input, contracts_for

import relpos
from relpos.attend import chunks


def make(name, options):
    return relpos.encoding(name, heads=HEADS, head_dim=HEAD_DIM, **options)


RUNS = [
    (backend, contract, variant)
    for backend, setting in SETTINGS.items()
    for variant in VARIANTS
    if backend != "triton" or not variant[1]  # the interpreter is slow, and tests/attend/test_triton.py has the forms
    if runs(make(*variant).to(setting.dtype), setting)  # the others run in chunks
    for contract in contracts_for(setting, make(*variant))
]


def label(run):
    backend, contract, (name, options) = run
    values = [str(value) for value in options.values() if not isinstance(value, dict)]
    return "-".join([backend, contract.__name__, name, *values])


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """So that these short sequences take several blocks, the last of them not full."""
    monkeypatch.setattr(chunks, "block_size", lambda q, form, call: 5)


INTERPRETED = {
    "cable": "values_and_gradients_are_those_of_the_reference",
    "t5": "packed_documents_are_separate_documents",
}


def cost(run):
    """Chunks run the variants of an encoding like its default, which `make test` tries: the variants are slow tests.

    So are most of the Triton kernels', which Triton's interpreter runs; tests/attend/test_triton.py has more of them.
    """
    backend, contract, (name, options) = run
    slow = options if backend == "chunks" else INTERPRETED.get(name) != contract.__name__ if backend == "triton" else ()
    return pytest.mark.slow if slow else ()


@pytest.mark.parametrize(
    ("backend", "contract", "variant"), [pytest.param(*run, marks=cost(run), id=label(run)) for run in RUNS]
)
def test_contract(backend, contract, variant):
    contract(lambda: make(*variant), SETTINGS[backend])


def test_a_static_map_is_checked_for_every_bias_of_the_distance_alone():
    checked = {variant[0] for _, contract, variant in RUNS if contract is a_static_map_is_the_same_for_any_input}
    cards = [relpos.card(name) for name in relpos.names()]
    assert checked >= {"alibi", "clipped", "fire", "kerple_log", "kerple_power", "nope", "sandwich", "t5"}
    assert checked >= {card.name for card in cards if card.form in ("Toeplitz", "Scaled")}
