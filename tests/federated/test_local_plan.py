"""A client's plan: participation, what a row pays, the largest honest value, and refusals; the rate."""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from federated_sides import NAMES, rounds_of, started
from tiny_runs import config

from hf_dpzero.federated.plan import _ALLOWED, LocalPlan, PlanError, local_plan
from hf_dpzero.federated.run import ServerRun, chosen_rate, learning_rates
from hf_dpzero.federated.setup import CLIPPED_FROM, Side
from hf_dpzero.privacy.mechanisms import ScalarMechanism
from hf_dpzero.privacy.noise import SecureNoise
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import PoissonSampler
from hf_dpzero.settings.defaults import NOISE_SHARE, learning_rate

OWN = {"testing.sampler_key": None, "testing.insecure_noise_seed": None}


def plan(tmp_path, n: int = 200, q: float = 0.1, **settings) -> LocalPlan:
    made = config(tmp_path, **{**OWN, "max_steps": 20, **settings})
    return local_plan(made, n, sampling_probability=q)


def test_sampled_rows_pay_for_every_release(tmp_path):
    local = plan(tmp_path, clip=2.0, noise_multiplier=1.5, num_directions=4)
    by_hand = PrivacyPlan(
        sampler=PoissonSampler(num_examples=200, expected_batch_size=20),
        mechanism=ScalarMechanism(
            clip=2.0, noise_multiplier=1.5, expected_batch_size=20, num_directions=4
        ),
        steps=20,
    )
    assert local.plan == by_hand and LocalPlan.from_dict(local.to_dict()) == local
    seven = by_hand.epsilon(1e-3, at=7)
    assert local.epsilon(0) == 0 < local.epsilon(7) == seven < local.epsilon(20)
    drawn = {tuple(local.rows(3).tolist()) for _ in range(5)}
    assert len(set(map(frozenset, drawn))) == 5  # a key that somebody kept would give the same rows


@pytest.mark.false_alarm(1e-17)  # 1e-21 a value
@pytest.mark.parametrize(
    ("sampling", "noise"),
    [
        ("poisson", "gaussian"),
        ("poisson", "laplace"),
        ("truncated_poisson", "gaussian"),  # with laplace noise it has no account
        ("full_batch", "gaussian"),
        ("full_batch", "laplace"),
    ],
)
def test_honest_values_stay_within_the_bound_and_worst_ones_near_it(tmp_path, sampling, noise):
    settings = {"max_batch_size": 24} if sampling == "truncated_poisson" else {}
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


WITHOUT_ACCOUNT = {
    "method": "mezo",
    "clipping": "adaptive",
    "load_best_model_at_end": True,
    "schedules.noise": "exp(gamma=0.99)",
    "schedules.clip": "linear(start=2, end=1)",
    "schedules.smoothing": "linear(start=2, end=1)",
    "sampling": "fixed_batches",
    "correlated_noise.kind": "banded",
    "group_robust.column": "g",
    "unit_column": "who",
    "extends_run": "out/before",
    "budget_file": "rows.budget",
    "testing.sampler_key": "ab" * 32,
    "testing.log_private_diagnostics": True,
}


def test_each_setting_without_account_is_refused_by_itself(tmp_path):
    """Also those that a config refuses together with others."""
    made = config(tmp_path, **OWN)
    assert WITHOUT_ACCOUNT.keys() == _ALLOWED.keys()
    for name, value in WITHOUT_ACCOUNT.items():
        changed = copy.deepcopy(made)
        *group, inner = name.split(".")
        setattr(operator.attrgetter(*group)(changed) if group else changed, inner, value)
        with pytest.raises(PlanError, match=re.escape(f"{name}={value!r}: ")):
            local_plan(changed, 200, sampling_probability=0.1)
    assert local_plan(made, 200, sampling_probability=0.1).rounds == made.max_steps


@pytest.mark.parametrize(
    ("n", "settings", "message"),
    [
        (0, {}, "no rows"),
        (70_000, {"max_steps": 65_536}, "max_steps=65536.*from 1 to 65535"),
    ],
)
def test_clients_without_a_plan_are_refused(tmp_path, n, settings, message):
    with pytest.raises(PlanError, match=message):
        plan(tmp_path, n, **settings)


# ------------------------------------------------------------------ the learning rate


def test_a_rate_is_chosen_from_the_noise_of_all_clients(tmp_path):
    settings = {"max_steps": 4, "noise_multiplier": 45.0}  # below what curvature allows
    whole, third = plan(tmp_path, 60, 0.2, **settings), plan(tmp_path, 20, 0.2, **settings)
    one = chosen_rate([whole], "linear")  # one client is one machine
    assert one == pytest.approx(learning_rate(whole.plan, "linear"), rel=1e-9)
    # n clients with B/n rows each: the mean's noise is sqrt(n) times one machine's
    assert chosen_rate([third] * 3, "linear") == pytest.approx(one / math.sqrt(3), rel=1e-9)
    other = plan(tmp_path, 35, 0.2, **{**settings, "noise_multiplier": 25.0})
    clip, rate = third.mechanism.clip, chosen_rate([third, other], "constant")
    share = (25 / 45) ** 2  # of a row of the client with more noise
    batches = 0.2 * (share * 20 + 35)
    deviation = clip * math.hypot(share * 45.0, 25.0) / batches * math.sqrt(4)  # of 4 rounds
    assert rate * deviation * clip == pytest.approx(NOISE_SHARE, rel=1e-5)  # shares have six digits


def test_a_small_clip_makes_no_large_rate(tmp_path):
    """Differences of norm 6 C: a unit along a direction moves losses by 6 C, not by C."""
    for noise in (45.0, 1e-3):  # what noise allows, and what curvature does
        plans = [plan(tmp_path, 60, 0.2, max_steps=4, noise_multiplier=noise)]
        clip, rate = plans[0].mechanism.clip, chosen_rate(plans, "linear")
        assert chosen_rate(plans, "linear", 6 * clip) == pytest.approx(rate / 6, rel=1e-9)
        assert chosen_rate(plans, "linear", clip / 6) == rate


def test_a_run_takes_the_chosen_rate_and_keeps_it(tmp_path):
    made, server = started(tmp_path, noise_multiplier=1.5)
    config = made.recipe.training
    config.learning_rate = None
    server.close()
    run = ServerRun(made, tmp_path, resume=True)
    run.run(rounds_of(made, run.server).transport)
    members = run.server.members
    first = [members[name].local for name in NAMES]
    slope = CLIPPED_FROM * run.server.trajectory.header["median_norm"]
    expected = learning_rates(config, first, slope)
    assert expected[0] == chosen_rate(first, config.lr_scheduler_type, slope)
    assert [r.learning_rate for r in run.server.trajectory.releases] == expected
    members["late"] = dataclasses.replace(members[NAMES[0]], name="late", joined=3)
    assert run.rounds.learning_rates() == expected


def test_a_given_rate_counts_and_no_noise_leaves_the_default(tmp_path):
    given = config(tmp_path, learning_rate=0.25, max_steps=3, lr_scheduler_type="constant")
    assert learning_rates(given) == [0.25] * 3
    given.learning_rate = None
    assert learning_rates(given) == [5e-5] * 3


@pytest.mark.parametrize(("rows", "probability"), [(5, 1.0), (12, 1.0), (48, 0.25)])
def test_a_batch_above_the_rows_is_all_of_them(tmp_path, rows, probability):
    """A probability above 1 would be none; the plan of one client is that of full participation."""
    own = config(tmp_path, expected_batch_size=12)
    settings = SimpleNamespace(sampling_probability=None)
    side: Any = SimpleNamespace(
        settings=settings, recipe=SimpleNamespace(training=own), num_examples=rows
    )
    assert Side.probability(side) == probability == own.plan(rows).sampler.sampling_probability
