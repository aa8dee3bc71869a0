"""What a report says of the processes of its run, and of the links between them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_privacy_report import report

from hf_dpzero.reporting.model_card import model_card
from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport

FOUR = "4 (2 shares of the rows x 2 shares of the directions)"


def links(found: PrivacyReport) -> list[str]:
    return [caveat for caveat in found.caveats if "torch.distributed" in caveat]


def row(found: PrivacyReport) -> str | None:
    return dict(found.rows()).get("processes")


def test_one_process_adds_no_caveat() -> None:
    one, unknown = report(processes="1"), report()
    assert row(one) == "1 at the start" and one.caveats == unknown.caveats and links(one) == []
    assert row(unknown) is None and unknown.processes == ""


def test_several_are_told_with_what_is_assumed() -> None:
    found = report(processes=FOUR)
    assert row(found) == f"{FOUR} at the start"
    (caveat,) = links(found)
    assert f"in several processes, {FOUR}; resumed, it may have gone on" in caveat
    assert "secret key" in caveat and "neither encrypted nor authenticated" in caveat


def test_a_report_without_the_entry_is_read_as_one_that_does_not_know(tmp_path: Path) -> None:
    old = report().to_dict()
    assert old.pop("processes") == ""
    (tmp_path / REPORT_FILE).write_text(json.dumps(old))
    found = PrivacyReport.load(tmp_path)
    assert found == report() and row(found) is None


def test_the_card_shows_the_row_and_the_caveat() -> None:
    found = report(processes=FOUR)
    card = model_card(found).content
    assert f"| processes | {row(found)} |" in card and f"- {links(found)[0]}" in card
    assert "| processes |" not in model_card(report()).content


@pytest.mark.parametrize("page", ["README.md", "docs/how_to/my_csv.md"])
def test_reports_in_documents_have_the_lines_of_a_report(page: str) -> None:
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    block = text.partition("-differentially private (target ")[2].partition("```")[0]
    labels = [line[2:].split("  ")[0] for line in block.splitlines()[1:]]
    lines = [label[:11].strip() for label, _ in report(processes="1").rows()]
    assert [label[:11].strip() for label in labels] == lines
