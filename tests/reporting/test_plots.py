"""Plots are an extra: without matplotlib a run keeps its results and says what is missing."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest

from hf_dpzero.privacy.mechanisms import ScalarMechanism
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import sampler_from_dict
from hf_dpzero.privacy.schedules import factors_from_dict, noise_schedule_from_dict
from hf_dpzero.privacy.words import schedule_curves
from hf_dpzero.reporting.plan_facts import plan_facts
from hf_dpzero.reporting.plots import new_figure, optional_plot, plot_run


def test_a_missing_matplotlib_costs_the_plot_alone(tmp_path, monkeypatch, capsys):
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with optional_plot("curve.png"):
        plot_run([{"step": 1, "eval_loss": 0.5}], tmp_path)
    assert (
        "curve.png was not drawn: it needs pip install 'hf-dpzero[plots]'"
        in capsys.readouterr().err
    )
    assert not list(tmp_path.iterdir())


def test_other_errors_are_not_hidden():
    with pytest.raises(ImportError, match="another"), optional_plot("curve.png"):
        raise ImportError("another module", name="another")
    with optional_plot("curve.png"):
        assert new_figure(1) is not None


def test_schedules_are_drawn_beside_the_curves(tmp_path, monkeypatch):
    """One panel for each scheduled thing, from step 1."""
    drawn = []
    monkeypatch.setattr(
        "matplotlib.axes.Axes.plot", lambda self, x, y, **_: drawn.append((list(x), list(y)))
    )
    plan = PrivacyPlan(
        sampler=sampler_from_dict(
            {"name": "full_batch", "num_examples": 50, "expected_batch_size": 50}
        ),
        mechanism=ScalarMechanism(clip=2.0, noise_multiplier=4.0, expected_batch_size=50),
        steps=3,
        noise_schedule=noise_schedule_from_dict({"name": "given", "levels": (4.0, 2.0, 1.0)}),
        clip_schedule=factors_from_dict({"name": "linear", "end": 0.5}),
    )
    curves = schedule_curves(plan)
    assert plot_run([], tmp_path, curves) is not None
    assert drawn == [([1, 2, 3], plan.multipliers.tolist()), ([1, 2, 3], [2.0, 1.5, 1.0])]
    assert plan.multipliers[0] == 4 * plan.multipliers[2]
    assert schedule_curves(replace(plan, noise_schedule=None, clip_schedule=None)) == {}


def test_a_report_says_what_a_schedule_gains():
    plan = PrivacyPlan(
        sampler=sampler_from_dict(
            {"name": "full_batch", "num_examples": 50, "expected_batch_size": 50}
        ),
        mechanism=ScalarMechanism(clip=1.0, noise_multiplier=40.0, expected_batch_size=50),
        steps=100,
        noise_schedule=noise_schedule_from_dict({"name": "exp", "gamma": 0.95}),
    )
    words = plan_facts(plan, 1e-5, 10)["schedules"]["noise"]
    gain = float(re.search(r"gain against constant noise ([\d.]+)$", words)[1])
    assert gain == pytest.approx(1.496, rel=4e-3)
