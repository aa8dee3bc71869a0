"""Plots are an extra: without matplotlib a run keeps its results and says what is missing."""

from __future__ import annotations

import sys

import pytest

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
