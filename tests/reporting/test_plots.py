"""Plots are an extra: without matplotlib a run keeps its results and says what is missing."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace

import pytest

from hf_dpzero.privacy.mechanisms import ScalarMechanism
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import sampler_from_dict
from hf_dpzero.privacy.schedules import factors_from_dict, noise_schedule_from_dict
from hf_dpzero.privacy.words import schedule_curves
from hf_dpzero.reporting.model_card import new_figure, optional_plot, plot_run
from hf_dpzero.reporting.plan_facts import plan_facts


def test_plot_writes_a_png_without_a_display(tmp_path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    history = [
        {"step": 0, "eval_accuracy": 0.5, "eval_loss": 0.7},
        {"step": 10, "epsilon": 0.4, "learning_rate": 1e-6},
        {"step": 10, "eval_accuracy": 0.6, "eval_loss": math.nan},
        {"step": 20, "epsilon": math.inf},
        {"train_runtime": 3.0},
    ]
    nothing = [{"step": 1, "learning_rate": 1.0}, {"step": 2, "epsilon": math.inf}]
    assert plot_run(nothing, tmp_path) is None and not list(tmp_path.iterdir())
    path = plot_run(history, tmp_path)
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.parent == tmp_path


def test_a_missing_matplotlib_costs_the_plot_alone(tmp_path, monkeypatch, capsys):
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with optional_plot("curve.png"):
        plot_run([{"step": 1, "eval_loss": 0.5}], tmp_path)
    assert "curve.png was not drawn: it needs pip install matplotlib" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_other_errors_are_not_hidden():
    with pytest.raises(ImportError, match="another"), optional_plot("curve.png"):
        raise ImportError("another module", name="another")
    with optional_plot("curve.png"):
        assert new_figure(1) is not None


def full_batch(steps, clip, multiplier, **schedules):
    sampler = {"name": "full_batch", "num_examples": 50, "expected_batch_size": 50}
    mechanism = ScalarMechanism(clip=clip, noise_multiplier=multiplier, expected_batch_size=50)
    return PrivacyPlan(
        sampler=sampler_from_dict(sampler), mechanism=mechanism, steps=steps, **schedules
    )


def test_schedules_are_drawn_beside_the_curves(tmp_path, monkeypatch):
    """One panel for each scheduled thing, from step 1."""
    drawn = []
    monkeypatch.setattr(
        "matplotlib.axes.Axes.plot", lambda self, x, y, **_: drawn.append((list(x), list(y)))
    )
    levels = noise_schedule_from_dict({"name": "given", "levels": (4.0, 2.0, 1.0)})
    factors = factors_from_dict({"name": "linear", "end": 0.5})
    plan = full_batch(3, 2.0, 4.0, noise_schedule=levels, clip_schedule=factors)
    curves = schedule_curves(plan)
    assert plot_run([], tmp_path, curves) is not None
    assert drawn == [([1, 2, 3], plan.multipliers.tolist()), ([1, 2, 3], [2.0, 1.5, 1.0])]
    assert plan.multipliers[0] == 4 * plan.multipliers[2]
    assert schedule_curves(replace(plan, noise_schedule=None, clip_schedule=None)) == {}


def test_a_report_says_what_a_schedule_gains():
    decay = noise_schedule_from_dict({"name": "exp", "gamma": 0.95})
    plan = full_batch(100, 1.0, 40.0, noise_schedule=decay)
    words = plan_facts(plan, 1e-5, 10)["schedules"]["noise"]
    gain = float(re.search(r"gain against constant noise ([\d.]+)$", words)[1])
    assert gain == pytest.approx(1.496, rel=4e-3)
