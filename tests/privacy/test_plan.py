"""PrivacyPlan: one object, one guarantee."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest

from hf_dpzero.privacy.accounting import epsilon_after
from hf_dpzero.privacy.events import StepSpec
from hf_dpzero.privacy.mechanisms import (
    DPSGD,
    AdaptiveScalarMechanism,
    DPAdamW,
    NonPrivateMean,
    ScalarMechanism,
    VectorMechanism,
)
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import (
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
    found = plan(sampler=capped, mechanism=mechanism, relation="replace_one").spec
    assert found == StepSpec(
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
    assert plan().spec.probability == plan().sampler.sampling_probability == 0.016


def test_epsilon_over_time():
    p = plan()
    curve = [p.epsilon(DELTA, at=k) for k in (0, 1, 10, 50, 100)]
    assert curve[0] == 0.0
    assert all(a < b for a, b in itertools.pairwise(curve))
    assert curve[-1] == p.epsilon(DELTA) == epsilon_after(p.spec, 100, DELTA)
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
    assert NonPrivateMean(expected_batch_size=16).sensitivity("replace_one") == math.inf


def test_event_repeats_the_step():
    event = plan().event(at=7)
    assert event.count == 7
    assert event.event.sampling_probability == 0.016
    assert event.event.event.noise_multiplier == 2.0
    assert plan().event().count == 100
    assert type(plan().event(at=0)).__name__ == "NoOpDpEvent"


@pytest.mark.parametrize("cls", [ScalarMechanism, VectorMechanism, DPAdamW])
def test_calibrate_returns_a_new_plan_that_keeps_the_target(cls):
    before = plan(mechanism=cls(clip=3.0, noise_multiplier=0.0, expected_batch_size=16))
    after = before.calibrate(epsilon=2.0, delta=DELTA)
    assert after.epsilon(DELTA) <= 2.0
    sigma = after.mechanism.noise_multiplier
    less = dataclasses.replace(after.mechanism, noise_multiplier=sigma * 0.999)
    assert plan(mechanism=less).epsilon(DELTA) > 2.0
    assert before.mechanism.noise_multiplier == 0.0
    assert dataclasses.replace(after, mechanism=before.mechanism) == before


def test_all_gaussian_methods_cost_the_same():
    """One clipped contribution, one Gaussian: scalars, d-vectors and gradients alike."""
    sizes = {"clip": 3.0, "noise_multiplier": 2.0, "expected_batch_size": 16}
    wide = {**sizes, "clip": 50.0}
    more = [
        ScalarMechanism(**wide, num_directions=16),
        VectorMechanism(**sizes, num_directions=5),
        DPAdamW(**sizes),
        DPSGD(**sizes, clipping="automatic"),
    ]
    costs = [plan(mechanism=m).epsilon(DELTA) for m in more]
    scalar = plan().epsilon(DELTA)
    assert costs[0] == pytest.approx(scalar, rel=1e-9)
    for dense in costs[1:]:  # pays for its grid
        assert scalar < dense < scalar * 1.001
    assert len(set(costs[1:])) == 1
    relations = ("add_or_remove_one", "replace_one")
    assert [plan().mechanism.sensitivity(relation) for relation in relations] == [3.0, 6.0]


def test_averaged_clipping_costs_twice_the_bound():
    """Its sensitivity is 2C: it costs as much as an ordinary mechanism with half the noise."""
    sizes = {"clip": 3.0, "noise_multiplier": 4.0, "expected_batch_size": 16}
    averaged = DPSGD(**sizes, clipping="averaged", clip_groups=4)
    for relation in ("add_or_remove_one", "replace_one", "replace_special"):
        p = plan(mechanism=averaged, relation=relation)
        assert p.mechanism.sensitivity(p.relation) == 6.0
        ordinary = DPSGD(clip=3.0, noise_multiplier=2.0, expected_batch_size=16)
        assert p.epsilon(DELTA) == plan(mechanism=ordinary, relation=relation).epsilon(DELTA)
    calibrated = plan(mechanism=averaged).calibrate(epsilon=1.0, delta=DELTA)
    assert 0.99 < calibrated.epsilon(DELTA) <= 1.0
    once = plan(mechanism=ordinary).calibrate(epsilon=1.0, delta=DELTA).mechanism.noise_multiplier
    assert calibrated.mechanism.noise_multiplier == 2 * once


def test_averaged_clipping_on_a_full_batch_gains_what_replacement_allows():
    """Its sensitivity under replacement is 2C, not 4C: it costs what adding or removing costs."""
    sizes = {"clip": 3.0, "noise_multiplier": 4.0, "expected_batch_size": 16}
    full = {"sampler": FullBatchSampler(num_examples=16, expected_batch_size=16), "steps": 5}
    averaged = DPSGD(**sizes, clipping="averaged")
    costs = [plan(mechanism=averaged, relation=r, **full).epsilon(DELTA)
             for r in ("add_or_remove_one", "replace_one")]  # fmt: skip
    ordinary = DPSGD(**{**sizes, "noise_multiplier": 2.0})
    assert costs[0] == costs[1] == plan(mechanism=ordinary, **full).epsilon(DELTA)
    ordinary = DPSGD(**sizes)
    for accountant in ("pld", "rdp", "advanced_composition"):
        same = {"relation": "replace_one", "accountant": accountant, **full}
        costs = [plan(mechanism=m, **same).epsilon(DELTA) for m in (averaged, ordinary)]
        assert costs[0] == pytest.approx(costs[1], rel=1e-12)
        goal = plan(mechanism=averaged, **same).calibrate(epsilon=3.0, delta=DELTA)
        assert 2.99 < goal.epsilon(DELTA) <= 3.0


SIXTEEN = {"clip": 3.0, "noise_multiplier": 8.0, "expected_batch_size": 16}


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
@pytest.mark.parametrize(
    "mechanism",
    [
        None,
        DPSGD(**SIXTEEN),
        DPSGD(**SIXTEEN, clipping="averaged"),
        AdaptiveScalarMechanism(**SIXTEEN, clip_count_noise=6.0),
    ],
)
def test_the_event_read_by_the_library_gives_our_epsilon(mechanism, relation):
    """Sampled, and a full batch: nothing is between event and report but the grid and its slack."""
    from dp_accounting import NeighboringRelation, pld

    full = {"sampler": FullBatchSampler(num_examples=16, expected_batch_size=16), "steps": 5}
    changes = {} if mechanism is None else {"mechanism": mechanism, **full}
    p = plan(relation=relation, **changes)
    accountant = pld.PLDAccountant(NeighboringRelation[relation.upper()])
    accountant.compose(p.event())
    assert p.epsilon(DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-3)


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


@pytest.mark.parametrize(
    ("mechanism", "digest"),
    [
        (ScalarMechanism(clip=3, noise_multiplier=2, expected_batch_size=16),
         "580a684ce55faadfc1d967f1ed4cabc92b56f884fb165ce5566c2b248c2923ca"),
        (ScalarMechanism(clip=3, noise_multiplier=2, expected_batch_size=16, num_directions=4),
         "fb13d6086257a0ac22c0cd7f670ba6275ddad397b60b3c6afd26453809a2165f"),
        (NonPrivateMean(expected_batch_size=16),
         "20c973377a0cf7062caa48206e36858dc35f22d8440bd14165a7943bc68029af"),
        (VectorMechanism(clip=3, noise_multiplier=2, expected_batch_size=16),
         "1a4d922176c7dea87f7f32674a0823576d998d9c6a9f1493d177890e5aa02c37"),
    ],
)  # fmt: skip
def test_digests_of_plans_hold(mechanism, digest):
    """A ledger refuses another plan than its own."""
    assert plan(mechanism=mechanism).digest() == digest
