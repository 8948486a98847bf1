"""Every contract for every encoding, and for the variants worth a run of their own."""

import pytest
from contracts import CONTRACTS, HEAD_DIM, HEADS, VARIANTS

import relpos


def label(variant):
    name, options = variant
    return "-".join([name, *(str(value) for value in options.values() if isinstance(value, str | int | float))])


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
def test_contract(contract, variant):
    name, options = variant
    contract(lambda: relpos.encoding(name, heads=HEADS, head_dim=HEAD_DIM, **options))
