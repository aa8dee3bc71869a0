"""Rows of one person are one unit: what a step does with them, and what the report says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_runs import SECRET, build, same, stopping, tiny_data, weights

from hf_dpzero.batches.logical_batch import StepBatches
from hf_dpzero.batches.units import Units, unit_means
from hf_dpzero.privacy.mechanisms import mechanism_from_dict

PERSON = {"unit_column": "who"}


def people(rows: int = 120, each: int = 3):
    """So many rows of each person but the first, who has all that are left over."""
    names = [f"p{max(0, i // each - 4)}" for i in range(rows)]
    return tiny_data(rows).add_column("who", names)


def test_a_step_takes_at_most_so_many_rows_of_each_unit_and_keeps_them_on_one_process():
    units, key = Units.of([f"p{i % 7 if i < 70 else 7}" for i in range(100)], most=4), bytes(32)
    rows, codes = units.drawn([0, 3, 7], 5, key)
    assert len(units) == 8 and len(rows) == 12 == len(set(rows.tolist()))
    assert (codes // 256).tolist() == [0] * 4 + [3] * 4 + [7] * 4
    assert {i % 7 for i in rows[:4]} == {0} and all(i >= 70 for i in rows[8:])
    again, _ = units.drawn([7, 0], 5, key)
    assert set(again) == set(rows[:4]) | set(rows[8:])  # whoever else is drawn
    others = [set(units.drawn([7], step, key)[0]) for step in range(20)]
    assert len(set.union(*others)) > 20  # each step draws anew
    shares = units.share_of(np.arange(8), 2, key)
    assert set(shares) == {0, 1} and (units.share_of(np.array([5]), 2, key) == shares[5]).all()


def test_a_mean_is_that_of_the_units_finite_rows_whatever_their_order():
    x = torch.tensor([[1e30, 1.0], [2.0, 3.0], [-1e30, 2.0], [7.0, 0.0], [float("nan"), 1.0]])
    codes = [512, 0, 513, 514, 256]
    means = unit_means(x, codes)
    assert means[0].tolist() == [2.0, 3.0] and means.shape == (2, 2)  # one has no finite row
    for order in ([3, 2, 1, 0, 4], [2, 4, 3, 0, 1]):
        assert torch.equal(unit_means(x[order], [codes[i] for i in order]), means)
    assert unit_means(x[4:], codes[4:]).shape == (0, 2)


@pytest.mark.parametrize("name", ["dpzero", "dpzero-adaptive"])
@pytest.mark.parametrize("m", [1, 4, 64])
def test_no_person_moves_the_sum_by_more_than_the_clip(name, m):
    """The person's rows and the rows that these displace, by 2^-8 radii each, all pull one way."""
    values = {"name": name, "clip": 2.0, "noise_multiplier": 1.0, "expected_batch_size": 8}
    if name == "dpzero-adaptive":
        values["clip_count_noise"] = 1.0
    mechanism = mechanism_from_dict(values | ({} if m == 1 else {"rows_per_unit": m}))
    radius, others = mechanism.radius, 2 * m
    assert radius == pytest.approx(2.0 / (1 + m / 256))
    worst = 0.0
    for own, here in ((1e9, 0.5), (radius, 0.0), (-radius, -0.3), (0.9, 0.99)):
        x = torch.full((others, 1), here, dtype=torch.float64) * radius
        before = mechanism.clip_sum(unit_means(x, [256 * i for i in range(others)]))
        moved = x.clone()
        moved[:m] += np.sign(own) * radius / 256
        rows = torch.cat([moved, torch.full((m, 1), own, dtype=torch.float64)])
        codes = [256 * i for i in range(others)] + [256 * others + i for i in range(m)]
        after = mechanism.clip_sum(unit_means(rows, codes))
        worst = max(worst, abs(after[0] - before[0]) * mechanism.granularity)
        if name == "dpzero-adaptive":
            assert abs(after[1] - before[1]) <= 2**30 + 2 * m  # 1/2 in units of 2^-31
    # integers are truncated: a row's by less than a grid step
    assert 0.99 * 2.0 < worst <= 2.0 + 2 * others * mechanism.granularity


@pytest.mark.parametrize("method", ["dpzero", "dpgd-0th", "dp-sgd", "dp-adamw", "mezo", "sgd"])
def test_every_method_trains_by_unit(tmp_path, method):
    own = {"noise_multiplier": None} if method in ("mezo", "sgd") else {}
    optim = {"optim": "adamw_torch"} if method == "dp-adamw" else {}
    trainer = build(tmp_path, data=people(), method=method, max_steps=2, **own, **optim, **PERSON)
    start = weights(trainer.model)
    trainer.train()
    plan = trainer.plan
    assert plan.sampler.num_examples == 36 and plan.sampler.sampling_probability == 12 / 36
    assert not same(start, weights(trainer.model))


def test_rows_of_a_person_that_are_all_the_same_count_as_one(tmp_path):
    """Twice the same rows by person release what the rows alone release, at equal radii."""
    once = tiny_data(60)
    twice = once.select([i for i in range(60) for _ in range(2)])
    twice = twice.add_column("who", [i // 2 for i in range(120)])
    settings = {"expected_batch_size": 20, "max_steps": 3, "noise_multiplier": 2.0**-10}
    by_row = build(tmp_path / "rows", data=once, clip=257 / 64, **settings)
    by_person = build(
        tmp_path / "people", data=twice, clip=258 / 64, max_rows_per_unit=2, **PERSON, **settings
    )
    released = []
    for trainer in (by_row, by_person):
        trainer.train()
        released.append([release.values[0] for release in trainer.trajectory.releases])
    assert released[0] == pytest.approx(released[1], abs=0.02)
    assert max(map(abs, released[0])) > 0.1


def test_the_report_speaks_of_people(tmp_path):
    trainer = build(tmp_path, data=people(), **PERSON, **SECRET)
    trainer.train()
    report = trainer.privacy_report()
    assert report.private and report.num_examples == 36
    assert "adding or removing one who with all its rows:" in report.statement
    assert not any("a row as it was given" in caveat for caveat in report.caveats)
    assert any("under two values of it counts as two units" in c for c in report.caveats)
    header = trainer.trajectory.header
    assert header["plan"]["mechanism"]["rows_per_unit"] == 4
    assert header["privacy_unit"] == "who with all its rows"


def test_rows_of_a_person_who_is_trained_on_are_no_public_rows(tmp_path):
    others = tiny_data(20, seed=5).add_column("who", [f"q{i}" for i in range(20)])
    build(
        tmp_path / "a", data=people(), trainer_settings={"eval_dataset": others}, **PERSON
    ).train()
    shared = tiny_data(20, seed=5).add_column("who", ["p3", *[f"q{i}" for i in range(19)]])
    with pytest.raises(
        ValueError, match="unit_column='who': of some unit the evaluation data holds"
    ):
        build(
            tmp_path / "b", data=people(), trainer_settings={"eval_dataset": shared}, **PERSON
        ).train()


def test_a_run_by_unit_goes_on_where_it_stopped(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, **PERSON}
    whole = build(tmp_path / "whole", data=people(), **settings)
    whole.train()
    part = build(tmp_path / "part", data=people(), trainer_settings=stopping(4), **settings)
    part.train()
    again = build(tmp_path / "part", data=people(), **settings)
    again.train(resume_from_checkpoint=True)
    assert same(weights(again.model), weights(whole.model))


def test_shares_of_a_step_are_what_one_process_would_have(tmp_path):
    trainer = build(tmp_path, data=people(), **PERSON)
    trainer.train()
    run = trainer.run
    made = [
        StepBatches(run.rows, run.plan, bytes(32), 8, i, n, shapes=run.shapes, units=run.units)[0]
        for i, n in ((0, 1), (0, 2), (1, 2))
    ]
    codes = [set(batch["groups"]) for batch in made]
    assert codes[1] | codes[2] == codes[0] and codes[1] and codes[2]
    assert not {c // 256 for c in codes[1]} & {c // 256 for c in codes[2]}


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (None, "is no column of train_dataset"),
        ([f"p{i}" for i in range(120)], "another value for each row"),
        (["p"] * 120, "one value for all rows"),
        ([None, *["p", "q"] * 59, "p"], "has rows without a value"),
        ([float("nan"), *[1.0, 2.0] * 59, float("nan")], "has rows without a value"),
    ],
)
def test_columns_that_make_no_units_are_refused(tmp_path, column, words):
    data = tiny_data() if column is None else tiny_data().add_column("who", column)
    with pytest.raises(ValueError, match=words):
        build(tmp_path, data=data, **PERSON).train()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_rows_per_unit": 3}, "without unit_column"),
        ({**PERSON, "max_rows_per_unit": 257}, "from 1 to 256"),
        ({**PERSON, "clipping": "averaged"}, "clips means over several units"),
        (
            {**PERSON, "group_robust.column": "w", "group_robust.shares": {"a": 0.5, "b": 0.5}},
            "may be in several groups",
        ),
    ],
)
def test_what_has_no_account_by_unit_is_refused(tmp_path, settings, words):
    with pytest.raises(ValueError, match=words):
        build(tmp_path, data=people(), **settings)
