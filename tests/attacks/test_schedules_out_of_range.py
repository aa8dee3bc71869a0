"""Attack: schedules that read as other numbers, or that stop a run when part of its budget is spent."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_runs import config

from hf_dpzero.privacy.heterogeneous import _losses
from hf_dpzero.privacy.schedules import noise_schedule_from_dict


def plan(tmp_path, **settings):
    return config(tmp_path, **{"clipping": "fixed", **settings}).plan(120)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("levels.csv", "-1,1,1,1,1,1"),
        ("levels.txt", "-5\n4\n3\n2\n1\n1\n"),
        ("levels.yaml", "- -1\n- 1\n- 1\n- 1\n- 1\n- 1\n"),
    ],
)
@pytest.mark.parametrize("setting", ["schedules.noise", "schedules.clip"])
def test_a_sign_in_a_file_is_no_bullet(setting, name, text, tmp_path):
    """The minus was stripped, and the run took the positive number."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="entry 0 is -[15]"):
        plan(tmp_path, **{setting: str(path)})


def test_bullets_of_yaml_are_read(tmp_path):
    path = tmp_path / "levels.yaml"
    path.write_text("- 6\n- 5\n  - 4\n- 3\n- 2\n- 1\n", encoding="utf-8")
    read = plan(tmp_path, schedules={"noise": str(path)}).noise_schedule.levels
    assert read == (6, 5, 4, 3, 2, 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"schedules.clip": "linear(1e30)"},
        {"schedules.clip": "1,1,1,1,1,1e-30"},
        {"schedules.noise": "1000,1000,1000,1000,1000,1", "noise_multiplier": 0.002},
        {"schedules.noise": "1,1,1,1,1,1e6", "noise_multiplier": 1000.0},
        {"schedules.noise": "1,1,1,1,1,1e6", "noise_multiplier": None, "target_epsilon": 1e-3},
        {
            "schedules.noise": "1,1,1,1,1,9",
            "clipping": "adaptive",
            "clipping_config.count_noise": 1e7,
        },
    ],
)
def test_a_step_out_of_range_is_refused_before_the_first(settings, tmp_path):
    """The plan was accepted, and step 1 or 5 of 6 raised after releases had been paid for."""
    with pytest.raises(
        ValueError, match=r"schedules\.(noise|clip)=.*, step \d: .*(between|outside)"
    ):
        plan(tmp_path, **settings)


@pytest.mark.parametrize("target", [None, 2.0])
@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("1e-300,1,1,1,1,1", "differs by a factor"),
        ("exp(gamma=1e-300)", "differs by a factor"),
        ("learning_rate(gamma=0.9, warmup_steps=2)", "has 'warmup_steps', which it takes from"),
        ("subsampled(gamma=0.9, learning_rate=3)", "has 'learning_rate', which it takes from"),
    ],
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_what_cannot_be_run_is_refused_in_words(schedule, words, target, tmp_path):
    noise = {"target_epsilon": target, "noise_multiplier": None if target else 1.0}
    with pytest.raises(ValueError, match=words):
        plan(tmp_path, schedules={"noise": schedule}, **noise)


def test_an_integer_beyond_floats_is_refused():
    with pytest.raises(ValueError, match="entry 0 is 1000"):
        noise_schedule_from_dict({"name": "given", "levels": [10**400, 1]})


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_losses_beyond_floats_count_with_the_larger_end():
    """exp(loss) overflows above 709; the mass there went to the smaller end of its interval."""
    sigma, grid = 0.02, 0.5
    removal, _ = _losses(sigma, 0.5, grid)
    index = np.arange(len(removal.masses)) + removal.first
    far = index * grid > 720
    from scipy.special import ndtr

    tail = np.cumsum(removal.masses[::-1])[::-1][far] + removal.infinite
    x = sigma**2 * (index[far] * grid + np.log(2)) + 0.5
    exact = 0.5 * ndtr(-(x - 1) / sigma) + 0.5 * ndtr(-x / sigma)
    assert (tail >= exact * (1 - 1e-9)).all()
