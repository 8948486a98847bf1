"""relpos computes what the authors' own code computed, and says where it does not."""

import re

import golden
import pytest
import torch

DOCUMENT = (golden.FOLDER.parents[2] / "docs" / "exactness.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", golden.COMPARISONS)
def test_numbers_are_those_of_the_authors_code(name):
    compare, allowed, _ = golden.COMPARISONS[name]
    assert golden.largest_difference(compare(golden.read(name))) < allowed


def test_every_golden_file_is_compared():
    assert {file.stem for file in golden.FOLDER.glob("*.json")} == set(golden.COMPARISONS)


@pytest.mark.parametrize("deviation", golden.DEVIATIONS)
def test_a_deviation_shows_in_the_numbers(deviation):
    name, compare = golden.DEVIATIONS[deviation]
    assert golden.largest_difference(compare(golden.read(name))) > 1e-4


def test_fire_without_negative_units_is_the_same_with_and_without_a_leak():
    content = golden.read("dape_fire")
    leaking, plain = (next(golden.dape_fire(content, leak=leak))[0] for leak in (0.01, 0.0))
    torch.testing.assert_close(leaking, plain, rtol=0.0, atol=1e-12)


def test_a_comparison_sees_a_difference_and_a_missing_number():
    theirs = torch.tensor([1.0, 2.0, float("nan")], dtype=torch.float64)
    ours = torch.tensor([1.0, 2.5, -torch.inf], dtype=torch.float64)
    assert golden.largest_difference(iter([(theirs[:2], theirs[:2]), (ours, theirs)])) == 0.25
    with pytest.raises(ValueError, match="same places"):
        golden.largest_difference(iter([(ours.nan_to_num(neginf=0.0), theirs)]))


def test_the_document_lists_every_comparison_and_deviation():
    rows = [[cell.strip() for cell in re.split(r" \| ", line.strip("| "))] for line in DOCUMENT.splitlines()]
    listed = {row[0]: row[1:] for row in rows if len(row) in (3, 5)}
    for name, (_, allowed, encoding) in golden.COMPARISONS.items():
        said, source, difference, bound = listed[name]
        assert (said, source, float(bound)) == (encoding, golden.read(name)["source"], allowed)
        assert float(difference) < allowed
    for deviation, (name, _) in golden.DEVIATIONS.items():
        assert listed[deviation][0] == name
