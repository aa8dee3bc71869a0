"""PrivacyPlan: one object, one guarantee."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest

from hf_dpzero.accounting import StepLaw, epsilon_after
from hf_dpzero.mechanisms import NonPrivateMean, ScalarMechanism, VectorMechanism
from hf_dpzero.plan import PrivacyPlan
from hf_dpzero.sampling import (
    FixedSizeSampler,
    FullBatchSampler,
    PoissonSampler,
    TruncatedPoissonSampler,
)

DELTA = 1e-5
SIZES = {"num_examples": 1000, "expected_batch_size": 16}


def plan(**changes) -> PrivacyPlan:
    base = {
        "sampler": PoissonSampler(**SIZES),
        "mechanism": ScalarMechanism(clip=3.0, noise_multiplier=2.0, expected_batch_size=16),
        "steps": 100,
    }
    return PrivacyPlan(**{**base, **changes})


def test_the_accounting_reads_the_objects_that_run():
    capped = TruncatedPoissonSampler(**SIZES, max_batch_size=40)
    mechanism = ScalarMechanism(
        clip=3.0, noise_multiplier=1.5, expected_batch_size=16, num_directions=4
    )
    found = plan(sampler=capped, mechanism=mechanism, relation="replace_one").law
    assert found == StepLaw(
        sampling="truncated_poisson",
        num_examples=1000,
        batch_size=16.0,
        max_batch_size=40,
        distribution="gaussian",
        noise_multiplier=1.5,
        num_directions=4,
        relation="replace_one",
        accountant="pld",
    )
    assert plan().law.probability == plan().sampler.sampling_probability == 0.016


def test_clip_and_directions_do_not_change_epsilon_beyond_the_grid():
    wide = ScalarMechanism(
        clip=50.0, noise_multiplier=2.0, expected_batch_size=16, num_directions=16
    )
    assert plan(mechanism=wide).epsilon(DELTA) == pytest.approx(plan().epsilon(DELTA), abs=1e-9)


def test_sensitivity_is_the_mechanisms():
    assert plan().sensitivity == 3.0
    assert plan(relation="replace_one").sensitivity == 6.0


def test_epsilon_over_time():
    p = plan()
    curve = [p.epsilon(DELTA, at=k) for k in (0, 1, 10, 50, 100)]
    assert curve[0] == 0.0
    assert all(a < b for a, b in itertools.pairwise(curve))
    assert curve[-1] == p.epsilon(DELTA) == epsilon_after(p.law, 100, DELTA)
    for at in (-1, 101):
        with pytest.raises(ValueError, match=rf"at={at} is outside 0\.\.100"):
            p.epsilon(DELTA, at=at)


def test_a_part_of_the_run_never_costs_more_than_the_whole():
    p = plan(steps=3000)
    whole = p.epsilon(DELTA)
    assert all(p.epsilon(DELTA, at=k) <= whole for k in (2900, 2990, 2998, 2999))


def test_not_private_means_infinite():
    for mechanism in (
        NonPrivateMean(expected_batch_size=16),
        ScalarMechanism(clip=1.0, noise_multiplier=0.0, expected_batch_size=16),
    ):
        p = plan(mechanism=mechanism)
        assert not p.private
        assert p.epsilon(DELTA) == math.inf
        assert p.epsilon(DELTA, at=0) == 0.0
        assert type(p.event()).__name__ == "NonPrivateDpEvent"
        assert p.accountant_used == "none"
    assert plan(mechanism=NonPrivateMean(expected_batch_size=16)).sensitivity == math.inf


def test_event_repeats_the_step():
    event = plan().event(at=7)
    assert event.count == 7
    assert event.event.sampling_probability == 0.016
    assert event.event.event.noise_multiplier == 2.0
    assert plan().event().count == 100
    assert type(plan().event(at=0)).__name__ == "NoOpDpEvent"


def test_the_event_read_by_the_library_gives_our_epsilon():
    """Nothing between the event and the report but the grid, its slack, and nothing else."""
    from dp_accounting import NeighboringRelation, pld

    for relation in ("add_or_remove_one", "replace_one"):
        p = plan(relation=relation)
        accountant = pld.PLDAccountant(NeighboringRelation[relation.upper()])
        accountant.compose(p.event())
        assert p.epsilon(DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-3)


def test_accountant_in_the_report():
    full = {
        "sampler": FullBatchSampler(num_examples=16, expected_batch_size=16),
    }
    fixed = {"sampler": FixedSizeSampler(**SIZES), "relation": "replace_one"}
    assert plan().accountant_used == "pld"
    assert plan(accountant="rdp").accountant_used == "rdp"
    assert plan(**fixed).accountant_used == "rdp"
    assert plan(**full).accountant_used == "gaussian_exact"
    lemma = plan(**full, relation="replace_one", accountant="advanced_composition")
    assert lemma.accountant_used == "advanced_composition"


@pytest.mark.parametrize("cls", [ScalarMechanism, VectorMechanism])
def test_calibrate_returns_a_new_plan_that_keeps_the_target(cls):
    before = plan(mechanism=cls(clip=3.0, noise_multiplier=7.0, expected_batch_size=16))
    after = before.calibrate(epsilon=2.0, delta=DELTA)
    assert after.epsilon(DELTA) <= 2.0
    sigma = after.mechanism.noise_multiplier
    less = dataclasses.replace(after.mechanism, noise_multiplier=sigma * 0.999)
    assert plan(mechanism=less).epsilon(DELTA) > 2.0
    assert before.mechanism.noise_multiplier == 7.0
    assert dataclasses.replace(after, mechanism=before.mechanism) == before


def test_calibrate_starts_from_no_noise_too():
    silent = ScalarMechanism(clip=1.0, noise_multiplier=0.0, expected_batch_size=16)
    assert plan(mechanism=silent).calibrate(epsilon=1.0, delta=DELTA).epsilon(DELTA) <= 1.0


def test_mezo_cannot_be_calibrated():
    with pytest.raises(ValueError, match=r"'mezo', which has no noise to calibrate; use method"):
        plan(mechanism=NonPrivateMean(expected_batch_size=16)).calibrate(epsilon=1.0, delta=DELTA)


def test_batch_sizes_must_agree():
    other = ScalarMechanism(clip=1.0, noise_multiplier=1.0, expected_batch_size=17)
    with pytest.raises(ValueError, match=r"batches of 16\.0, the mechanism divides by 17\.0"):
        plan(mechanism=other)


@pytest.mark.parametrize("steps", [0, -1, 2.0, True])
def test_steps_must_be_a_count(steps):
    with pytest.raises(ValueError, match="must be an integer of at least 1"):
        plan(steps=steps)


def test_unsound_combinations_are_refused_when_the_plan_is_made():
    with pytest.raises(ValueError, match="use relation='replace_one', or the poisson sampler"):
        plan(sampler=FixedSizeSampler(**SIZES))
    with pytest.raises(ValueError, match="or the full_batch sampler"):
        plan(accountant="advanced_composition", relation="replace_one")
    with pytest.raises(ValueError, match="relation='swap' is unknown"):
        plan(relation="swap")


def test_round_trip_through_json_and_digest():
    original = plan(steps=7, relation="replace_one")
    copy = PrivacyPlan.from_dict(json.loads(json.dumps(original.to_dict(), allow_nan=False)))
    assert copy == original
    assert copy.digest() == original.digest()
    assert len(original.digest()) == 64
    changes = (
        {"steps": 8},
        {"relation": "add_or_remove_one"},
        {"mechanism": dataclasses.replace(original.mechanism, clip=3.5)},
        {"sampler": TruncatedPoissonSampler(**SIZES, max_batch_size=64)},
    )
    digests = {dataclasses.replace(original, **change).digest() for change in changes}
    assert len(digests | {original.digest()}) == 5


def test_integers_and_floats_make_the_same_plan():
    a = plan(sampler=PoissonSampler(num_examples=1000, expected_batch_size=16.0))
    b = plan(mechanism=ScalarMechanism(clip=3, noise_multiplier=2, expected_batch_size=16.0))
    assert a == b == plan()
    assert a.digest() == b.digest() == plan().digest()


def test_broken_descriptions_are_refused():
    good = plan().to_dict()
    with pytest.raises(ValueError, match=r"has no fields \['epsilon'\]"):
        PrivacyPlan.from_dict({**good, "epsilon": 1.0})
    with pytest.raises(ValueError, match=r"PrivacyPlan needs \['steps'\]"):
        PrivacyPlan.from_dict({k: v for k, v in good.items() if k != "steps"})
