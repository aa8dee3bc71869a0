"""One budget for a data set: what its entries compose to, what is refused, and what crashes leave."""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import tiny_runs
from killed_runs import die, in_child
from tiny_runs import build, stopping, tiny_data

from hf_dpzero.cli import main
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.privacy.mechanisms import ScalarMechanism
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import FullBatchSampler, PoissonSampler
from hf_dpzero.reporting import budget_file
from hf_dpzero.reporting.budget_file import Ceiling, Charge, epsilon_of
from hf_dpzero.reporting.model_card import model_card

SECRET = {**tiny_runs.SECRET, "max_steps": 3}


def plan_of(sigma: float, steps: int, batch: float = 100.0) -> PrivacyPlan:
    full = batch == 100.0
    sampler = (FullBatchSampler if full else PoissonSampler)(
        num_examples=100, expected_batch_size=batch
    )
    mechanism = ScalarMechanism(clip=1.0, noise_multiplier=sigma, expected_batch_size=batch)
    return PrivacyPlan(sampler=sampler, mechanism=mechanism, steps=steps)


def run_of(plan: PrivacyPlan, name: str = "a") -> Charge:
    return Charge(what="train", name=name, privacy_unit="example", plan=plan)


def count(epsilon: float) -> Charge:
    return Charge(what="evaluate_privately", name="f", privacy_unit="example", epsilon=epsilon)


def file_of(folder: Path, epsilon: float = 4.0, **ceiling: Any) -> Path:
    path = folder / "rows.budget"
    budget_file.create(path, Ceiling(**{"epsilon": epsilon, "delta": 1e-6, **ceiling}))
    return path


# ---- composition


def test_full_batches_are_one_gaussian():
    """1/s^2 = 9/20^2 + 4/8^2 = 0.085; delta = Phi(1/2s - es) - exp(e) Phi(-1/2s - es) (Balle, Wang)."""
    found = epsilon_of([run_of(plan_of(20.0, 9)), run_of(plan_of(8.0, 4))], 1e-6)
    s, phi = 0.085**-0.5, NormalDist().cdf
    delta = phi(0.5 / s - found * s) - math.exp(found) * phi(-0.5 / s - found * s)
    assert delta == pytest.approx(1e-6, rel=1e-3)
    alone = sum(plan_of(*given).epsilon(1e-6) for given in ((20.0, 9), (8.0, 4)))
    assert found < 0.9 * alone


def test_two_runs_of_one_kind_are_one_of_all_their_steps_and_counts_are_added():
    half, whole = plan_of(1.5, 50, batch=10.0), plan_of(1.5, 100, batch=10.0)
    assert epsilon_of([run_of(half), run_of(half)], 1e-6) == whole.epsilon(1e-6)
    both = epsilon_of([run_of(half), count(0.25), run_of(half), count(0.5)], 1e-6)
    assert both == pytest.approx(whole.epsilon(1e-6) + 0.75)
    assert epsilon_of([], 1e-6) == 0.0


def test_what_is_read_is_what_was_paid(tmp_path):
    path, run = file_of(tmp_path), run_of(plan_of(8.0, 4))
    paid = [budget_file.pay(path, charge) for charge in (run, count(0.5))]
    budget = budget_file.read(path)
    assert budget.charges == (run, count(0.5)) and budget.ceiling == Ceiling(epsilon=4, delta=1e-6)
    assert [p["entry"] for p in paid] == list(budget.hashes[1:])
    assert [p["entries"] for p in paid] == [1, 2] and paid[1]["ceiling"] == 4.0
    assert paid[1]["epsilon"] == budget.epsilon == plan_of(8.0, 4).epsilon(1e-6) + 0.5


# ---- the file


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_edited_line_is_refused(tmp_path, number):
    path = file_of(tmp_path)
    for epsilon in (0.5, 0.25):
        budget_file.pay(path, count(epsilon))
    whole = path.read_text().splitlines(keepends=True)
    line = whole[number - 1]
    edited = line.replace('"epsilon":', '"epsilon":0')
    for lines in (
        [edited],
        [],
        [line, line],
        [line.replace("{", "{ ", 1)],
        ["[]\n"],
        ["nonsense\n"],
    ):
        path.write_text("".join([*whole[: number - 1], *lines, *whole[number:]]))
        if number == 3 and not lines:  # a cut tail: only a run's ledger can tell
            assert len(budget_file.read(path).charges) == 1
            continue
        with pytest.raises(LedgerError, match=r"rows.budget: line \d was edited.*restore"):
            budget_file.pay(path, count(0.1))


def test_a_torn_last_line_is_said_and_nothing_is_put_behind_it(tmp_path):
    path = file_of(tmp_path)
    budget_file.pay(path, count(0.5))
    torn = path.read_bytes()[:-9]
    path.write_bytes(torn)
    with pytest.raises(LedgerError, match="line 2, its last, is cut short.*remove that line"):
        budget_file.pay(path, count(0.1))
    assert path.read_bytes() == torn
    path.write_bytes(torn[: torn.index(b"\n") + 1])
    assert budget_file.pay(path, count(0.1))["entries"] == 1


def test_a_file_that_is_there_stays(tmp_path, capsys):
    path = file_of(tmp_path)
    budget_file.pay(path, count(0.5))
    before = path.read_bytes()
    assert main.main(["budget", str(path), "--epsilon", "9", "--delta", "1e-6"]) == 2
    assert "a ceiling is set once" in capsys.readouterr().err and path.read_bytes() == before


def test_the_command_makes_and_shows_a_file(tmp_path, capsys):
    path = tmp_path / "rows.budget"
    assert main.main(["budget", str(path)]) == 2
    assert "make it with `hf-dpzero budget" in capsys.readouterr().err
    assert main.main(["budget", str(path), "--epsilon", "4"]) == 2
    for epsilon, delta in ((0, 1e-6), (math.inf, 1e-6), (4, 0), (4, 1), (math.nan, 1e-6)):
        assert (
            main.main(["budget", str(path), "--epsilon", str(epsilon), "--delta", str(delta)]) == 2
        )
    assert not path.exists()
    words = ["--neighboring_relation", "replace_one", "--privacy_unit", "ward with all its rows"]
    assert main.main(["budget", str(path), "--epsilon", "4", "--delta", "1e-6", *words]) == 0
    assert "0 of 4 is spent at delta = 1e-06 (entries: 0); 4 is left" in capsys.readouterr().out
    budget_file.pay(path, replace(count(1.25), privacy_unit="ward with all its rows"))
    assert main.main(["budget", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "epsilon = 1.25 of 4 is spent at delta = 1e-06 (entries: 1); 2.75 is left" in shown
    assert "ward with all its rows" in shown and "evaluate_privately  epsilon = 1.25 alone" in shown


def test_another_relation_or_unit_is_refused(tmp_path):
    path = file_of(tmp_path, neighboring_relation="replace_one")
    with pytest.raises(
        ValueError, match="one example under replace_one, and a for .* add_or_remove_one"
    ):
        budget_file.pay(path, run_of(plan_of(8.0, 4)))
    with pytest.raises(ValueError, match="is for one example .* for one block of text"):
        budget_file.pay(path, replace(count(0.5), privacy_unit="block of text"))
    assert budget_file.pay(path, count(0.5))["entries"] == 1  # a count moves by one either way


def test_runs_without_a_common_accountant_are_refused(tmp_path):
    path, plan = file_of(tmp_path), plan_of(2.0, 5, batch=10.0)
    budget_file.pay(path, run_of(plan))
    with pytest.raises(ValueError, match="no common account"):
        budget_file.pay(path, run_of(replace(plan, accountant="rdp")))


# ---- the ceiling


def test_what_would_pass_the_ceiling_is_refused(tmp_path):
    path = file_of(tmp_path, epsilon=1.0)
    budget_file.pay(path, count(0.75))
    before = path.read_bytes()
    said = r"0.75 of epsilon = 1 is spent.*\(entries: 1\), 0.25 is left.*alone needs 0.5, and 1.25 would"
    with pytest.raises(ValueError, match=said):
        budget_file.pay(path, count(0.5))
    assert path.read_bytes() == before
    assert budget_file.pay(path, count(0.25))["epsilon"] == 1.0


def test_a_count_may_take_what_is_said_to_be_left(tmp_path):
    """0.151 + 1.249 is 1.4000000000000001 in floats: 1.248 is left there."""
    path, other = file_of(tmp_path, epsilon=1.4), tmp_path / "other"
    budget_file.pay(path, count(0.151))
    assert budget_file.read(path).left_words == "1.248"
    assert budget_file.pay(path, count(1.248))["epsilon"] <= 1.4
    other.mkdir()
    path = file_of(other, epsilon=1.3)
    for left in ("1.3", "1.05", "0"):
        assert budget_file.read(path).left_words == left
        if left != "0":
            budget_file.pay(path, count(0.25 if left == "1.3" else float(left)))


def test_of_processes_at_once_each_sees_what_the_others_paid(tmp_path, monkeypatch):
    """Six pay 0.3 of 1 at once: three can."""
    path, append = file_of(tmp_path, epsilon=1.0), budget_file.append_whole

    def slowly(*given: Any) -> None:
        time.sleep(0.05)
        append(*given)

    monkeypatch.setattr(budget_file, "append_whole", slowly)

    def one() -> None:
        try:
            budget_file.pay(path, count(0.3))
        except ValueError:
            raise SystemExit(3) from None

    forked = multiprocessing.get_context("fork")
    children = [forked.Process(target=one) for _ in range(6)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert sorted(child.exitcode for child in children) == [0, 0, 0, 3, 3, 3]
    assert [charge.epsilon for charge in budget_file.read(path).charges] == [0.3] * 3


# ---- runs


def budgeted(folder: Path, path: Path, name: str = "out", **settings: Any) -> Any:
    return build(folder / name, budget_file=str(path), **{**SECRET, **settings})


def test_a_run_pays_before_it_releases_and_says_so(tmp_path):
    plan = build(tmp_path, **SECRET).plan
    path = file_of(tmp_path, epsilon=40.0, delta=1e-3)
    trainer = budgeted(tmp_path, path)
    trainer.train()
    trainer.save_model()
    budget = budget_file.read(path)
    assert [charge.plan for charge in budget.charges] == [plan]
    own = trainer.privacy_report()
    assert own.budget == {
        "entry": budget.hashes[1],
        "entries": 1,
        "epsilon": plan.epsilon(1e-3),
        "ceiling": 40.0,
        "delta": 1e-3,
    }
    row = dict(own.rows())["budget"]
    assert " of 40 at delta = 0.001, of a budget file as this run began (entries: 1)" in row
    assert row in str(model_card(own, base_model="b"))
    assert not any("budget_file" in caveat for caveat in own.caveats)
    alone = build(tmp_path / "alone", **SECRET).privacy_report()
    assert sum("budget_file would count them" in caveat for caveat in alone.caveats) == 1


def test_a_killed_run_leaves_its_entry(tmp_path, monkeypatch):
    """After it has paid, before it has a ledger: it pays again, and the entry is never missing."""
    path = file_of(tmp_path, epsilon=40.0, delta=1e-3)

    def work() -> None:
        monkeypatch.setattr(Trajectory, "create", lambda *given: die())
        budgeted(tmp_path, path).train()

    assert in_child(work)[0] != 0
    assert len(budget_file.read(path).charges) == 1
    assert not (tmp_path / "out" / "trajectory.ledger").exists()
    budgeted(tmp_path, path).train()
    assert len(budget_file.read(path).charges) == 2


def test_a_resumed_run_does_not_pay_twice_and_notices_an_older_copy(tmp_path):
    path = file_of(tmp_path, epsilon=40.0, delta=1e-3)
    empty = path.read_bytes()
    cut = budgeted(tmp_path, path, trainer_settings=stopping(1, KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    paid = path.read_bytes()
    path.write_bytes(empty)
    with pytest.raises(LedgerError, match="no entry of the run in .*out: an older copy"):
        budgeted(tmp_path, path).train(resume_from_checkpoint=True)
    path.write_bytes(paid)
    resumed = budgeted(tmp_path, path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.trajectory.next_step == 3 and path.read_bytes() == paid


def test_a_run_that_began_without_a_file_does_not_resume_with_one(tmp_path):
    cut = build(tmp_path / "out", trainer_settings=stopping(1, KeyboardInterrupt), **SECRET)
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    path = file_of(tmp_path, epsilon=40.0, delta=1e-3)
    with pytest.raises(LedgerError, match="no entry of the run in.*from none"):
        budgeted(tmp_path, path).train(resume_from_checkpoint=True)


def test_a_run_over_the_ceiling_leaves_no_trace(tmp_path):
    spent = build(tmp_path, **SECRET).plan.epsilon(1e-3)
    path = file_of(tmp_path, epsilon=1.01 * spent, delta=1e-3)
    budgeted(tmp_path, path, "first").train()
    before = path.read_bytes()
    with pytest.raises(
        ValueError, match="entries: 1.*train in second alone needs.*Nothing was released"
    ):
        budgeted(tmp_path, path, "second").train()
    assert path.read_bytes() == before and not (tmp_path / "second/trajectory.ledger").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "mezo", "noise_multiplier": None},
        {"noise_multiplier": 0.0},
        {"testing.insecure_noise_seed": 3},
        {"testing.sampler_key": tiny_runs.KEY},
        {"testing.log_private_diagnostics": True},
    ],
)
def test_what_is_not_private_has_no_budget(tmp_path, settings):
    path = file_of(tmp_path)
    with pytest.raises(ValueError, match="NOT PRIVATE.*No budget pays for that"):
        budgeted(tmp_path, path, **settings).train()
    assert not budget_file.read(path).charges


def test_a_first_order_run_pays_too(tmp_path):
    path = file_of(tmp_path, epsilon=40.0, delta=1e-3)
    budgeted(tmp_path, path, method="dp-sgd", learning_rate=0.1, max_steps=1).train()
    (charge,) = budget_file.read(path).charges
    assert charge.plan is not None and charge.plan.mechanism.name == "dp-sgd"


def test_a_run_that_extends_another_pays_for_itself_where_the_other_paid(tmp_path):
    path = file_of(tmp_path, epsilon=90.0, delta=1e-3)
    first = budgeted(tmp_path, path, "first")
    first.train()
    first.save_model()
    second = budgeted(
        tmp_path, path, "second", model=first.model, extends_run=str(tmp_path / "first")
    )
    second.train()
    own, both = budget_file.read(path).charges, second.plan.epsilon(1e-3)
    assert [charge.plan for charge in own] == [first.plan, replace(second.plan, after=())]
    assert epsilon_of(own, 1e-3) == both
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(LedgerError, match="no entry of the run in"):
        budgeted(
            tmp_path,
            file_of(other),
            "third",
            model=first.model,
            extends_run=str(tmp_path / "first"),
        ).train()


# ---- private evaluations


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def test_training_and_evaluation_share_a_file(tmp_path):
    plan = build(tmp_path, **SECRET).plan
    path = file_of(tmp_path, epsilon=plan.epsilon(1e-3) + 0.75, delta=1e-3)
    scored = {"trainer_settings": {"compute_metrics": accuracy}}
    trainer = budgeted(tmp_path, path, **scored)
    trainer.train()
    trainer.evaluate_privately(tiny_data(5, seed=9), 0.5)
    (tmp_path / "another").mkdir()
    another = str(file_of(tmp_path / "another"))
    with pytest.raises(LedgerError, match="no entry of the run that trained on these rows"):
        trainer.evaluate_privately(trainer.train_dataset, 0.5, trained_on=True, budget_file=another)
    with pytest.raises(ValueError, match="evaluate_privately in ward alone needs 0.5"):
        trainer.evaluate_privately(tiny_data(5, seed=9), 0.5, rows="ward")
    record = (tmp_path / "out/private_evaluations.jsonl").read_text().splitlines()
    assert len(record) == 1 and json.loads(record[0])["epsilon"] == 0.5
    other = build(tmp_path / "other", **SECRET, **scored)  # names the file itself
    older = path.read_bytes()
    other.evaluate_privately(tiny_data(5, seed=8), 0.25, budget_file=str(path))
    with pytest.raises(ValueError, match="paid for an earlier evaluation.*none is named now"):
        other.evaluate_privately(tiny_data(5, seed=8), 0.25)
    paid = path.read_bytes()
    path.write_bytes(older)
    with pytest.raises(LedgerError, match="no entry of an earlier evaluation of evaluation rows"):
        other.evaluate_privately(tiny_data(5, seed=8), 0.25, budget_file=str(path))
    path.write_bytes(paid)
    budget = budget_file.read(path)
    assert [charge.what for charge in budget.charges] == ["train", *["evaluate_privately"] * 2]
    assert budget.epsilon == pytest.approx(plan.epsilon(1e-3) + 0.75)
    seeded = build(tmp_path / "seeded", **scored)
    with pytest.raises(ValueError, match="no budget pays for it"):
        seeded.evaluate_privately(tiny_data(5, seed=8), 1e-9, budget_file=str(path))
