"""Numbers out of range are refused when a configuration is made, each in one sentence that names it."""

from __future__ import annotations

import json
import math
import operator

import numpy as np
import pytest
from tiny_runs import config
from transformers.utils import logging

from hf_dpzero.privacy.accounting import MAX_PLD_STEPS
from hf_dpzero.settings.config import DPZeroConfig
from hf_dpzero.settings.hf_arguments import RANGES
from hf_dpzero.settings.nested import NESTED
from hf_dpzero.settings.setting import Allowed, settings_of

NAN, INF = math.nan, math.inf
BAD = {
    "learning_rate": (-1e-3, 1e30, NAN, INF, "-1e-3", "a", True),
    "weight_decay": (-0.1, NAN, INF, 200.0),
    "max_steps": (0, -2, 2.5, NAN, INF),
    "warmup_steps": (-1, 1.5, NAN),
    "smoothing": (0.0, -1e-3, 1e30, NAN, INF),
    "clip": (0.0, -1.0, NAN, INF),
    "clipping_config.quantile": (0.0, 1.0, NAN),
    "clipping_config.learning_rate": (-0.1, 11, NAN),
    "clipping_config.count_noise": (0.0, -1.0, INF),
    "clipping_config.stability": (0.0, NAN),
    "clipping_config.groups": (0, 1.5),
    "expected_batch_size": (0, -1, NAN, INF),
    "noise_multiplier": (-1.0, NAN, INF),
    "num_directions": (0, 1.5, INF, NAN, 10**8),
    "microbatch_size": (0, -1, 1.5),
    "performance.direction_parallel_size": (0, -1, 1.5),
    "max_length": (0, -1, 1.5),
    "max_batch_size": (0, 1.5),
    "max_rows_per_unit": (0, 1.5, 257),
    "correlated_noise.bands": (0, 1.5),
    "correlated_noise.hold_direction_for": (0, -1, 1.5),
    "group_robust.loss_bound": (0.0, -1.0, NAN, INF),
    "group_robust.rate": (0.0, -1.0, NAN),
    "group_robust.budget": (0.0, 1.0, NAN),
    "group_robust.draws": (0, 1.5),
    "per_device_train_batch_size": (0,),
    "gradient_accumulation_steps": (0,),
    "per_device_eval_batch_size": (0,),
    "max_grad_norm": (-1.0, NAN),
    "momentum": (1.0, -0.1, NAN),
    "update_window": (0, 1.5),
    "adam_beta1": (1.0, -0.1),
    "adam_beta2": (1.0, NAN),
    "adam_epsilon": (-1e-8,),
    "label_smoothing_factor": (-0.1, 1.0, NAN),
    "eval_steps": (-5, 1.5),
    "save_steps": (-1, 1.5),
    "logging_steps": (-1, 1.5),
    "eval_delay": (-1,),
    "save_total_limit": (-3, 1.5),
    "target_delta": (0.0, 1.0, -1.0, NAN),
}


@pytest.fixture
def heard(caplog, monkeypatch):
    """What is logged, also what was logged before."""
    monkeypatch.setattr(logging.logging.getLogger("transformers"), "propagate", True)
    logging.logging.Logger.warning_once.cache_clear()
    return caplog


CASES = [(name, value) for name, values in BAD.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES)
def test_numbers_out_of_range_are_refused(tmp_path, name, value):
    with pytest.raises(ValueError, match=rf"\b{name}=.*must") as refusal:
        config(tmp_path, **{name: value})
    assert str(refusal.value).count("\n") == 0


def test_every_range_is_tried():
    parts = {"": DPZeroConfig, **{f"{name}.": kind for name, kind in NESTED.items()}}
    own = {
        prefix + field.name
        for prefix, kind in parts.items()
        for field, described in settings_of(kind)
        if isinstance(described.allowed, Allowed) and described.allowed.kind in (int, float)
    }
    seeds = {"seed", "testing.direction_key", "testing.insecure_noise_seed"}
    inherited = {name for name, allowed in RANGES.items() if allowed.kind in (int, float)}
    assert (own | inherited) - BAD.keys() - seeds == {"target_epsilon"}  # beside noise_multiplier
    for value in (0.0, -1.0, NAN, INF):
        with pytest.raises(ValueError, match="target_epsilon="):
            config("unused", noise_multiplier=None, target_epsilon=value)


@pytest.mark.parametrize("epochs", [0, -1, NAN, INF])
def test_epochs_are_refused_where_they_count(tmp_path, epochs):
    with pytest.raises(ValueError, match="num_train_epochs=.* must be a finite number above 0"):
        config(tmp_path, num_train_epochs=epochs, max_steps=-1)


@pytest.mark.parametrize("steps", [{"max_steps": 10}, {"max_steps": -1, "num_train_epochs": 1}])
def test_a_warmup_is_held_against_the_steps(tmp_path, heard, steps):
    """120 rows in batches of 12: one epoch is 10 steps."""
    assert config(tmp_path, warmup_steps=11, **steps).plan(120).steps == 10
    assert (
        "warmup_steps=11 is more than the run's 10 steps, so learning_rate is never" in heard.text
    )
    assert config(tmp_path, warmup_steps=0.5).warmup_steps == 0.5  # a share of the steps


@pytest.mark.parametrize(
    "sampling", ["poisson", "truncated_poisson", "fixed_batches", "full_batch"]
)
def test_a_batch_above_the_rows_is_all_of_them(tmp_path, heard, sampling):
    """The account is that of B = n; `full_batch` is what it is whatever B says."""
    cap = {"max_batch_size": 300} if sampling == "truncated_poisson" else {}
    above, all_rows = (
        config(tmp_path, sampling=sampling, expected_batch_size=size, **cap).plan(120)
        for size in (200, 120)
    )
    assert above == all_rows and above.sampler.sampling_probability == 1
    assert above.epsilon(1e-3) == all_rows.epsilon(1e-3)
    told = (
        "expected_batch_size=200 is more than the 120 rows: each step takes them all" in heard.text
    )
    assert told == (sampling != "full_batch")


NUMBERS = {
    **{
        "learning_rate": 1e-4,
        "weight_decay": 0.01,
        "max_steps": 7,
        "gradient_accumulation_steps": 2,
    },
    **{"target_epsilon": 2.0, "num_directions": 4, "eval_accumulation_steps": 3, "seed": 5},
    **{"testing.direction_key": 1 << 100, "clipping_config.quantile": 0.5},
}


@pytest.mark.parametrize("kind", [str, "{:e}".format, np.float64, np.float32, np.int64])
def test_numbers_of_numpy_and_of_yaml_are_numbers(tmp_path, kind):
    """YAML 1.1 takes 1e-4 for a text, and numpy's numbers are none to JSON."""
    whole = {name: value for name, value in NUMBERS.items() if isinstance(value, int)}
    part = {name: v for name, v in NUMBERS.items() if name not in whole}
    numbers = {str: NUMBERS, np.int64: {**whole, "testing.direction_key": 3}}.get(kind, part)
    given = {"noise_multiplier": None, "target_epsilon": 2.0, "expected_batch_size": None}
    made = config(tmp_path, **{**given, **{name: kind(v) for name, v in numbers.items()}})
    for name in numbers.keys() - {"gradient_accumulation_steps"}:
        value = operator.attrgetter(name)(made)
        assert type(value) in (int, float) and value == pytest.approx(float(kind(numbers[name])))
    json.dumps(made.to_dict())
    if kind is str:
        assert made.expected_batch_size == 16  # 2 x 8


@pytest.mark.parametrize(
    "settings",
    [
        *[{f"{name}_strategy": "no", f"{name}_steps": 0} for name in ("logging", "save", "eval")],
        {"eval_strategy": "epoch", "eval_steps": 0},
    ],
)
def test_intervals_of_0_switch_nothing_on(tmp_path, heard, settings):
    config(tmp_path, **settings)
    assert "steps=0" not in heard.text


def test_evaluation_every_0_steps_is_as_often_as_logs(tmp_path):
    """As in Trainer."""
    assert config(tmp_path, eval_strategy="steps", eval_steps=0, logging_steps=3).eval_steps == 3
    for name in ("logging", "save"):
        with pytest.raises(ValueError, match=f"^{name}_steps=0 must be an integer of at least 1"):
            config(tmp_path, **{f"{name}_strategy": "steps", f"{name}_steps": 0})


def test_a_folder_that_cannot_be_made_is_refused_with_the_settings(tmp_path):
    (file := tmp_path / "rows.csv").write_text("a\n1\n")
    for folder in (file, file / "out" / "run"):
        with pytest.raises(ValueError, match=f"output_dir='{folder}': '{file}' is a file; give"):
            config(folder)
    config(tmp_path / "new" / "run")


@pytest.mark.parametrize(("smoothing", "warns"), [(1e-8, True), (1e-3, False)])
def test_a_smoothing_that_float32_cannot_resolve_warns(tmp_path, caplog, smoothing, warns):
    logging.logging.Logger.warning_once.cache_clear()
    config(tmp_path, smoothing=smoothing)
    assert ("smoothing=1e-08 is finer than float32 resolves" in caplog.text) == warns
    config(tmp_path, smoothing=1e-8, method="dp-sgd")
    assert caplog.text.count("finer than float32") == warns


def test_a_billion_steps_are_refused_before_anything_is_computed(tmp_path, monkeypatch):
    """dp-accounting would compute for hours; the RDP accountant answers."""
    composed = "dp_accounting.pld.PLDAccountant.compose"
    monkeypatch.setattr(composed, lambda *_: pytest.fail("PLDs were composed"))
    settings = {"noise_multiplier": None, "target_epsilon": 2.0, "target_delta": 1e-5}
    made = config(tmp_path, **settings, max_steps=10**9)
    with pytest.raises(
        ValueError, match=f"1000000000 steps are .*{MAX_PLD_STEPS}: use accountant='rdp'"
    ):
        made.plan(10_000)
    plan = config(tmp_path, **settings, max_steps=10**9, accountant="rdp").plan(10_000)
    assert plan.epsilon(1e-5) <= 2.0
