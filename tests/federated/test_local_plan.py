"""A client's plan: participation, what a row pays, the largest honest value, and refusals."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny_runs import config

from hf_dpzero.federated.local_plan import LocalPlan, PlanError, check_settings, local_plan
from hf_dpzero.privacy.mechanisms import ScalarMechanism
from hf_dpzero.privacy.noise import SecureNoise
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import FullBatchSampler, PoissonSampler

OWN = {"testing.sampler_key": None, "testing.insecure_noise_seed": None}


def plan(tmp_path, n: int = 200, q: float = 0.1, participation="sampled", **settings) -> LocalPlan:
    return local_plan(
        config(tmp_path, **{**OWN, "max_steps": 20, **settings}),
        n,
        sampling_probability=q,
        participation=participation,
    )


def test_sampled_rows_pay_for_every_release(tmp_path):
    local = plan(tmp_path, clip=2.0, noise_multiplier=1.5, num_directions=4)
    by_hand = PrivacyPlan(
        sampler=PoissonSampler(num_examples=200, expected_batch_size=20),
        mechanism=ScalarMechanism(
            clip=2.0, noise_multiplier=1.5, expected_batch_size=20, num_directions=4
        ),
        steps=20,
    )
    assert local.plan == by_hand
    assert (
        local.epsilon(0) == 0 < local.epsilon(7) == by_hand.epsilon(1e-3, at=7) < local.epsilon(20)
    )


def test_a_row_that_takes_part_once_pays_once(tmp_path):
    settings = {"neighboring_relation": "replace_one", "noise_multiplier": 3.0}
    local = plan(tmp_path, 209, participation="once", **settings)
    assert local.epsilon(0) == 0.0 < local.epsilon(1) == local.epsilon(20)
    # one Gaussian release of sensitivity 2C with noise 3C: delta(eps) in closed form
    ratio, eps = 2.0 / 3.0, local.epsilon(1)

    def cdf(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    delta = cdf(ratio / 2 - eps / ratio) - math.exp(eps) * cdf(-ratio / 2 - eps / ratio)
    assert delta == pytest.approx(1e-3, rel=1e-3)
    seen = [set(local.rows(r).tolist()) for r in range(20)]
    assert all(len(rows) == 10 for rows in seen)
    assert len(set().union(*seen)) == 200 and max(set().union(*seen)) < 209


def test_once_is_calibrated_for_one_release(tmp_path):
    settings = {
        "neighboring_relation": "replace_one",
        "target_epsilon": 1.0,
        "noise_multiplier": None,
    }
    once, sampled = (plan(tmp_path, participation=p, **settings) for p in ("once", "sampled"))
    assert once.epsilon(20) <= 1 and sampled.epsilon(20) <= 1
    assert isinstance(once.plan.sampler, FullBatchSampler) and once.plan.steps == 1
    assert once.epsilon(20) > 0.97 and sampled.epsilon(20) > 0.97


def test_batches_are_drawn_anew_in_every_call(tmp_path):
    local = plan(tmp_path)
    drawn = {tuple(local.rows(3).tolist()) for _ in range(5)}
    assert len(drawn) == 5  # a key that somebody kept would give the same rows


@pytest.mark.false_alarm(1e-17)  # 1e-21 a value
@pytest.mark.parametrize("sampling", ["poisson", "truncated_poisson", "full_batch"])
@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_honest_values_stay_within_the_bound_and_worst_ones_near_it(tmp_path, sampling, noise):
    settings = {"max_batch_size": 24} if sampling == "truncated_poisson" else {}
    if sampling == "truncated_poisson" and noise == "laplace":
        pytest.skip("has no accounting: privacy/events.py")
    settings |= {"noise_distribution": noise, "num_directions": 2, "clip": 3.0}
    settings |= {"target_delta": 0.0} if noise == "laplace" else {}
    local = plan(tmp_path, 40, 0.3, sampling=sampling, **settings)
    mechanism, bound = local.mechanism, local.largest_value()
    worst = torch.tensor([[1e9, 0.0]]).expand(40, 2)  # every row pulls one way with all of C
    for number in range(50):
        total = mechanism.clip_sum(worst[: len(local.rows(number))])
        assert max(map(abs, mechanism.release(total, 0, SecureNoise()))) <= bound
    pull = mechanism.clip * local.plan.sampler.num_examples / mechanism.expected_batch_size
    assert bound > pull * (0.4 if sampling == "truncated_poisson" else 0.99) and bound < 20 * pull


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "mezo", "clip": None, "noise_multiplier": None}, "method='mezo'"),
        ({"clipping": "adaptive"}, "clipping='adaptive'"),
        ({"schedules.noise": "exp(gamma=0.99)"}, "schedules.noise"),
        ({"testing.sampler_key": "ab" * 32}, "sampler_key"),
        ({"testing.log_private_diagnostics": True}, "log_private_diagnostics"),
        (
            {
                "correlated_noise.kind": "tree",
                "correlated_noise.hold_direction_for": 5,
                "sampling": "fixed_batches",
            },
            "sampling='fixed_batches'|correlated_noise.kind='tree'",
        ),
        (
            {"group_robust.column": "g", "group_robust.shares": {"a": 0.5, "b": 0.5}},
            "group_robust.column='g'",
        ),
        ({"schedules.clip": "linear(start=2, end=1)"}, "schedules.clip"),
    ],
)
def test_settings_without_accounting_are_refused(tmp_path, settings, message):
    with pytest.raises(PlanError, match=message):
        plan(tmp_path, **settings)


@pytest.mark.parametrize(
    ("n", "settings", "message"),
    [
        (0, {}, "no rows"),
        (
            19,
            {"participation": "once", "neighboring_relation": "replace_one"},
            "19 rows for 20 rounds",
        ),
        (200, {"participation": "once"}, "add_or_remove_one.*replace_one"),
        (200, {"participation": "twice"}, "participation='twice'"),
        (70_000, {"max_steps": 65_536}, "max_steps=65536.*from 1 to 65535"),
    ],
)
def test_clients_without_a_plan_are_refused(tmp_path, n, settings, message):
    with pytest.raises(PlanError, match=message):
        plan(tmp_path, n, **settings)


def test_each_refusal_of_a_setting_stands_alone(tmp_path):
    """Settings that a config refuses together with others are refused one by one as well."""
    made = config(tmp_path, testing={"sampler_key": None, "insecure_noise_seed": None})
    check_settings(made)
    changed = copy.copy(made)
    changed.extends_run = "out/before"
    with pytest.raises(PlanError, match="extends_run='out/before'.*leave it out"):
        check_settings(changed)
    made.correlated_noise.kind = "banded"
    with pytest.raises(PlanError, match=r"correlated_noise\.kind='banded'.*leave it out"):
        check_settings(made)
