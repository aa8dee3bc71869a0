"""A federated run's learning rate where the recipe gives none."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
from federated_sides import NAMES, rounds_of, side, started

from hf_dpzero.federated.local_plan import local_plan
from hf_dpzero.federated.rates import Rates, chosen_rate, learning_rates
from hf_dpzero.settings.defaults import NOISE_SHARE, learning_rate


def plan_of(made, rows=20, **values):
    config = made.recipe.training
    for name, value in values.items():
        setattr(config, name, value)
    return local_plan(config, rows, sampling_probability=0.2)


def test_one_client_has_the_rate_of_one_machine(tmp_path):
    local = plan_of(side(tmp_path), 60, noise_multiplier=1.5)
    expected = learning_rate(local.plan, "linear")
    assert chosen_rate([local], "linear") == pytest.approx(expected, rel=1e-9)


def test_n_equal_clients_divide_it_by_the_root_of_n(tmp_path):
    """n clients with B/n rows each: the mean's noise is sqrt(n) times one machine's."""
    made = side(tmp_path)
    whole = chosen_rate([plan_of(made, 60, noise_multiplier=1.5)], "linear")
    three = chosen_rate([plan_of(made, 20, noise_multiplier=1.5)] * 3, "linear")
    assert three == pytest.approx(whole / math.sqrt(3), rel=1e-9)


def test_the_noise_of_the_run_moves_a_loss_by_its_share(tmp_path):
    made = side(tmp_path)
    plans = [plan_of(made, rows, noise_multiplier=s) for rows, s in ((20, 1.0), (35, 2.5))]
    clip = plans[0].mechanism.clip
    rate = chosen_rate(plans, "constant")
    deviation = clip * math.hypot(1.0, 2.5) / (0.2 * 55) * math.sqrt(4)  # of 4 rounds
    assert rate * deviation * clip == pytest.approx(NOISE_SHARE, rel=1e-9)


def test_a_run_takes_the_chosen_rate_and_keeps_it(tmp_path):
    made, server = started(tmp_path, noise_multiplier=1.5)
    config = made.recipe.training
    config.learning_rate = None
    running = rounds_of(made, server)
    running.learning_rates = Rates(config, server)
    running.run()
    plans = [server.members[name].local for name in NAMES]
    expected = learning_rates(config, chosen_rate(plans, config.lr_scheduler_type))
    assert [r.learning_rate for r in server.trajectory.releases] == expected
    late = dataclasses.replace(server.members[NAMES[0]], name="late", joined=3)
    server.members["late"] = late
    assert list(Rates(config, server)) == expected


def test_a_given_rate_counts_and_no_noise_leaves_the_default():
    config = SimpleNamespace(
        learning_rate=0.25,
        max_steps=3,
        chosen=frozenset(),
        lr_scheduler_type="constant",
        lr_scheduler_kwargs=None,
        get_warmup_steps=lambda steps: 0,
    )
    assert list(Rates(config, SimpleNamespace(members={}))) == [0.25] * 3
    config.learning_rate, config.chosen = None, frozenset({"learning_rate"})
    assert list(Rates(config, SimpleNamespace(members={}))) == [5e-5] * 3
