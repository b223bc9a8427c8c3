"""Pages do not promise tests that are not there."""

import re

from tests.documented_commands import ROOT, defined_tests


def test_every_test_that_a_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "field-reports.md").read_text()))
    assert len(named) > 40
    assert named - defined_tests() == set()


def test_every_report_of_the_ids_has_a_row_of_its_own() -> None:
    text = (ROOT / "docs" / "field-reports.md").read_text()
    numbers = re.findall(r"^\| ([A-Z]\d\d) ", text, re.MULTILINE)
    assert sorted(set(numbers)) == sorted(numbers)
