"""What a report says beside its epsilon, against closed forms and dp-accounting used directly."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import (
    GaussianDpEvent,
    NeighboringRelation,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    pld,
)
from finished_runs import report_of, trajectory_of, write_run
from scipy.special import log_ndtr

from hf_dpzero.privacy.mechanisms import NonPrivateMean, ScalarMechanism
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import FixedSizeSampler, FullBatchSampler, PoissonSampler
from hf_dpzero.privacy.schedules import Exponential
from hf_dpzero.reporting.caveats import GRADES
from hf_dpzero.reporting.evidence import report_holds
from hf_dpzero.reporting.page import report_page
from hf_dpzero.reporting.privacy_report import PrivacyReport
from hf_dpzero.reporting.wording import round_up

N, B, STEPS, SIGMA = 1024, 64.0, 40, 2.0
DELTAS = [f"1e-{digits}" for digits in range(3, 13)]


def plan_of(sampler: Any = PoissonSampler, **settings: Any) -> PrivacyPlan:
    size = float(N) if sampler is FullBatchSampler else B
    scale = ScalarMechanism(clip=1.0, noise_multiplier=SIGMA, expected_batch_size=size)
    drawn = sampler(num_examples=N, expected_batch_size=size)
    return PrivacyPlan(**{"sampler": drawn, "mechanism": scale, "steps": STEPS, **settings})


def terms_of(plan: PrivacyPlan, **settings: Any) -> dict[str, Any]:
    return report_of(plan, in_other_terms=True, **settings).other_terms


def gaussian_delta(mu: float, epsilon: float) -> float:
    """delta(epsilon) of a Gaussian with shift mu (Balle and Wang 2018, Theorem 5)."""
    first, second = log_ndtr(mu / 2 - epsilon / mu), log_ndtr(-mu / 2 - epsilon / mu)
    return math.exp(first) - math.exp(epsilon + second)


@pytest.mark.parametrize(("relation", "moved"), [("add_or_remove_one", 1), ("replace_one", 2)])
def test_full_batches_are_one_gaussian(relation, moved):
    """mu = moved sqrt(T) / sigma, and m rows move m times as far."""
    found = terms_of(plan_of(FullBatchSampler, steps=4, relation=relation))
    assert found["mu"] == pytest.approx(moved * 2 / SIGMA)
    assert list(found["epsilon_at_delta"]) == DELTAS
    for delta, epsilon in found["epsilon_at_delta"].items():
        assert gaussian_delta(found["mu"], epsilon) == pytest.approx(float(delta), rel=1e-4)
    for m in (2, 10):
        epsilon = found["epsilon_of_rows"][str(m)]
        assert gaussian_delta(m * found["mu"], epsilon) == pytest.approx(1e-5, rel=1e-4)
    for name, shift in (("add_or_remove_one", 1), ("replace_one", 2), ("replace_special", 1)):
        epsilon = found["epsilon_by_relation"][name]
        assert gaussian_delta(shift * 2 / SIGMA, epsilon) == pytest.approx(1e-5, rel=1e-4)


def test_sampled_batches_have_the_accountants_curve_and_no_mu():
    found = terms_of(plan_of())
    event = SelfComposedDpEvent(PoissonSampledDpEvent(B / N, GaussianDpEvent(SIGMA)), STEPS)
    for relation in NeighboringRelation:
        account = pld.PLDAccountant(relation)  # its own grid, of 1e-4
        account.compose(event)
        stated = found["epsilon_by_relation"][relation.name.lower()]
        assert stated == pytest.approx(account.get_epsilon(1e-5), rel=2e-3)
        if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            known = [account.get_epsilon(float(delta)) for delta in DELTAS]
            assert [*found["epsilon_at_delta"].values()] == pytest.approx(known, rel=2e-3)
    assert found["mu"] is None and found["epsilon_of_rows"]["by"] == "accountant"
    rows = [found["epsilon_of_rows"][m] for m in ("2", "10", "100")]
    assert rows == [plan_of().epsilon_of_group(1e-5, m) for m in (2, 10, 100)]


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(FixedSizeSampler, relation="replace_one"),
        plan_of(noise_schedule=Exponential(gamma=0.98), steps=6),
        plan_of(mechanism=ScalarMechanism(clip=1.0, noise_multiplier=0.02, expected_batch_size=B)),
    ],
    ids=["no accountant", "many kinds of steps", "little noise"],
)
def test_rows_without_an_accountant_are_converted(plan):
    """From row to row: P_0 <= e^a P_1 + d <= .. <= e^(m a) P_m + d (1 + e^a + .. + e^((m - 1) a))."""
    found = terms_of(plan)
    by = found["epsilon_of_rows"].pop("by")
    assert by == "group privacy" and found["mu"] is None
    curve = {float(d): e for d, e in found["epsilon_at_delta"].items()}
    for m, epsilon in found["epsilon_of_rows"].items():
        if epsilon == "inf":
            continue
        alone = epsilon / int(m)
        (delta,) = [d for d, e in curve.items() if e == pytest.approx(alone)]
        assert delta * sum(math.exp(i * alone) for i in range(int(m))) <= 1e-5
    assert found["epsilon_of_rows"]["100"] == "inf"
    assert (found["epsilon_of_rows"]["2"] == "inf") == (plan.epsilon(1e-5) > 20)


def test_words_say_why_a_relation_is_not_accounted():
    found = terms_of(plan_of(FixedSizeSampler, relation="replace_one"))["epsilon_by_relation"]
    assert found["add_or_remove_one"].startswith("not accounted: ") and found["replace_one"] > 0


def test_what_extends_another_run_is_composed_under_each_relation():
    first = plan_of(FullBatchSampler, steps=5)
    entry = {"folder": "first", "base_weights": "equal_to_named"}
    found = terms_of(dataclasses.replace(first, steps=4, after=((first, 5),)), extends=[entry])
    assert found["mu"] == pytest.approx(3 / SIGMA)
    epsilon = found["epsilon_by_relation"]["replace_one"]
    assert gaussian_delta(2 * 3 / SIGMA, epsilon) == pytest.approx(1e-5, rel=1e-4)


def test_steps_that_were_not_taken_cost_nothing():
    plan = plan_of(FullBatchSampler, steps=25)
    assert terms_of(plan, steps=4) == terms_of(dataclasses.replace(plan, steps=4))


def test_a_unit_of_rows_has_no_epsilon_of_rows():
    assert (
        terms_of(plan_of(steps=2), privacy_unit="person with all its rows")["epsilon_of_rows"] == {}
    )


def test_nothing_is_stated_without_privacy_or_of_a_search():
    plan = dataclasses.replace(plan_of(), mechanism=NonPrivateMean(expected_batch_size=B))
    assert terms_of(plan) == terms_of(plan_of(), log_private_diagnostics=True) == {}
    found = report_of(plan_of(), in_other_terms=True)
    assert found.with_tuning("not_accounted", plan_of(), {}).other_terms == found.other_terms
    entry = {"mean_trials": 2.0, "swept": ["clip"], "epsilon_one_run": found.epsilon}
    tuning = {"repeat_and_select": entry}
    assert found.with_tuning(tuning, plan_of(), {}).other_terms == {}


def test_a_search_keeps_the_caveats_that_only_the_ledger_knows():
    found = report_of(plan_of(), public_texts="ab" * 32)
    tuned = found.with_tuning("not_accounted", plan_of(), {"public_texts": "ab" * 32})
    (told,) = [text for text in found.caveats if "fitted, without noise, to text" in text]
    assert told in tuned.caveats


def test_the_file_is_verified_in_other_terms_too(tmp_path: Path):
    plan = plan_of()
    report = report_of(plan, in_other_terms=True)
    folder = write_run(tmp_path / "run", plan, report)
    assert "follows from the plan" in report_holds(folder)
    page = report_page(PrivacyReport.load(folder), trajectory_of(plan, STEPS))
    curve = report.other_terms["epsilon_at_delta"]
    assert f"{round_up(curve['1e-9'])} at 1e-9" in page and "Gaussian of mu" not in page
    changed = {**report.other_terms, "epsilon_at_delta": {**curve, "1e-9": 0.995 * curve["1e-9"]}}
    dataclasses.replace(PrivacyReport.load(folder), other_terms=changed).save(folder)
    with pytest.raises(ValueError, match="not of the same run .*other_terms"):
        report_holds(folder)


@pytest.mark.parametrize("factor", [0.995, 1.005, 1.02])
def test_a_bound_on_another_grid_is_of_the_same_run(tmp_path: Path, factor: float):
    # 0.4 % is the most by which a coarser grid raised one; less, or 2 % more, is another number
    report = report_of(plan_of(), in_other_terms=True)
    rows = {**report.other_terms["epsilon_of_rows"]}
    rows["2"] *= factor
    other = dataclasses.replace(report, other_terms={**report.other_terms, "epsilon_of_rows": rows})
    folder = write_run(tmp_path / "run", plan_of(), other)
    if factor != 1.005:
        with pytest.raises(ValueError, match="not of the same run .*other_terms"):
            report_holds(folder)
    else:
        assert "follows from the plan" in report_holds(folder)


# ---- grades, and whom one trusts


def test_caveats_stand_by_falling_grade():
    for found in (
        report_of(plan_of(), processes="2 = 2 x 1"),
        report_of(plan_of(FullBatchSampler), delta=0.02, public_texts="ab" * 32),
    ):
        ranks = [GRADES.index(grade) for grade in found.caveat_grades]
        assert ranks == sorted(ranks) and set(ranks) == {0, 1, 2}
        graded = [*zip(ranks, found.caveats, strict=True)]
        assert any(rank == 0 and "Evaluation data" in text for rank, text in graded)
        assert any(rank == 1 and "side channels" in text for rank, text in graded)
        assert any(rank == 2 and "public constants" in text for rank, text in graded)
        page = report_page(found, trajectory_of(plan_of(), STEPS))
        assert f"<em>check first</em>: {found.caveats[0]}" in page


def test_a_report_of_before_the_grades_must_be_checked_throughout():
    values = report_of(plan_of()).to_dict()
    for name in ("other_terms", "deployment", "caveat_grades"):
        del values[name]
    assert set(PrivacyReport.from_dict(values).caveat_grades) == {"check first"}


def test_the_report_says_whom_one_trusts():
    assert report_of(plan_of()).deployment.startswith("central: ")
    federated = report_of(plan_of(), federated={"clients": 3, "steps": STEPS})
    assert federated.deployment.startswith("federated: ")
    grades = dict(zip(federated.caveats, federated.caveat_grades, strict=True))
    assert {g for text, g in grades.items() if "one of 3" in text} == {"depends on the deployment"}
