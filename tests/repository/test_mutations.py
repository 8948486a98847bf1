"""The deliberate mistakes of tests/support/mutations.py are still mistakes in the code as it is."""

import pytest
from mutations import MUTATIONS, ROOT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_line_that_a_mutation_changes_is_there_once(mutation):
    assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.old) == 1
    assert (ROOT / mutation.tests.split()[0]).exists()
