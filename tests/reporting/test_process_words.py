"""What a report says of the processes of its run, and of the links between them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from test_privacy_report import full_batch_plan, poisson_plan, report

from hf_dpzero.privacy.group_losses import PerStepGroups
from hf_dpzero.privacy.mechanisms import DPSGD
from hf_dpzero.reporting.model_card import model_card
from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport

ALONE = {"processes": 1, "row_shares": 1, "direction_parallel_size": 1, "sharded": False}
FOUR = {"processes": 4, "row_shares": 2, "direction_parallel_size": 2, "sharded": False}


def first(step: int, shares: dict[str, Any]) -> dict[str, Any]:
    return {"first_step": step, **shares}


def links(found: PrivacyReport) -> list[str]:
    return [caveat for caveat in found.caveats if "torch.distributed" in caveat]


def row(found: PrivacyReport) -> str | None:
    return dict(found.rows()).get("processes")


def test_one_process_adds_no_caveat() -> None:
    one, unknown = report(processes=[first(0, ALONE)]), report()
    assert row(one) == "1" and one.caveats == unknown.caveats and links(one) == []
    assert row(unknown) is None and unknown.processes == []


def test_a_mesh_is_told_with_what_it_sends() -> None:
    found = report(processes=[first(0, FOUR)])
    assert row(found) == "4 (2 shares of the rows x 2 shares of the directions)"
    (caveat,) = links(found)
    assert "At most 4 processes" in caveat and "losses of single examples" in caveat
    assert "finite differences" in caveat and "gradients" not in caveat


def test_first_order_runs_send_gradients() -> None:
    plan = dataclasses.replace(
        poisson_plan(),
        mechanism=DPSGD(clip=1.0, noise_multiplier=2.0, expected_batch_size=64.0, dimension=10),
    )
    rows = {**FOUR, "row_shares": 4, "direction_parallel_size": 1}
    (caveat,) = links(report(plan, direction="none", processes=[first(0, rows)]))
    assert "clipped gradients before noise" in caveat and "finite differences" not in caveat
    assert "single examples" not in caveat and "groups" not in caveat


def test_losses_of_groups_are_named() -> None:
    groups = PerStepGroups(names=("a", "b"), shares=(0.5, 0.5), loss_bound=2.0)
    grouped = dataclasses.replace(poisson_plan(), groups=groups)
    told = [
        links(report(plan, processes=[first(0, FOUR)]))[0] for plan in (grouped, poisson_plan())
    ]
    assert ["the groups' losses before noise" in caveat for caveat in told] == [True, False]


def test_every_stretch_is_told_one_after_another() -> None:
    """40 steps; the start at step 9 with four released nothing before one process took over."""
    starts = [first(0, ALONE), first(9, FOUR), first(9, ALONE), first(39, FOUR)]
    four = "4 (2 shares of the rows x 2 shares of the directions)"
    found = report(processes=starts)
    assert row(found) == (
        f"steps 0 to 8: 1; a start at step 9 without a release: {four}; steps 9 to 38: 1; "
        f"step 39: {four}"
    )
    assert len(links(found)) == 1


def test_steps_that_nobody_counted_are_named() -> None:
    found = report(processes=[first(1, ALONE)])
    assert row(found) == "step 0: not recorded; steps 1 to 39: 1"
    assert sum("took step 0 is not recorded" in caveat for caveat in found.caveats) == 1


def test_runs_that_are_extended_speak_for_themselves() -> None:
    earlier, later = full_batch_plan(), full_batch_plan()
    chain = dataclasses.replace(later, after=((earlier, 25),))
    entry = {
        "folder": "out", "base_weights": "declared_public", "tuning": "none",
        "weights_digest": "w", "trajectory_digest": "t",
    }  # fmt: skip
    found = report(chain, processes=[first(0, ALONE)], extends=[entry])
    assert any("their own reports say" in caveat for caveat in found.caveats)
    assert not any("their own reports say" in caveat for caveat in report(earlier).caveats)


@pytest.mark.parametrize(
    "entries",
    [
        [first(0, {**ALONE, "processes": 2})],  # no mesh of one has two places
        [first(0, {**ALONE, "processes": 0, "row_shares": 0})],
        [first(5, ALONE), first(4, FOUR)],
        [first(41, ALONE)],  # of 40 steps
        [first(-1, ALONE)],
        [ALONE],
        [first(0, {**ALONE, "sharded": 1})],
        {"processes": 1},
        None,
    ],
)
def test_entries_that_contradict_themselves_are_refused(entries: Any) -> None:
    with pytest.raises(ValueError, match="it must list the first_step, processes"):
        dataclasses.replace(report(), processes=entries)


def test_a_report_without_the_entry_is_read_as_one_that_does_not_know(tmp_path: Path) -> None:
    old = report().to_dict()
    assert old.pop("processes") == []
    (tmp_path / REPORT_FILE).write_text(json.dumps(old))
    found = PrivacyReport.load(tmp_path)
    assert found == report() and row(found) is None


def test_the_card_shows_the_row_and_the_caveat() -> None:
    found = report(processes=[first(0, FOUR)])
    card = model_card(found).content
    assert f"| processes | {row(found)} |" in card and f"- {links(found)[0]}" in card
    assert "| processes |" not in model_card(report()).content


@pytest.mark.parametrize("page", ["README.md", "docs/how_to/my_csv.md"])
def test_reports_in_documents_have_the_lines_of_a_report(page: str) -> None:
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    block = text.partition("-differentially private (target ")[2].partition("```")[0]
    labels = [line[2:].split("  ")[0] for line in block.splitlines()[1:]]
    lines = [label[:11].strip() for label, _ in report(processes=[first(0, ALONE)]).rows()]
    assert [label[:11].strip() for label in labels] == lines
