"""The study of means of the last weights: its table."""

from __future__ import annotations

from scripts.studies.average_last import summary


def test_the_table_has_the_last_weights_and_what_each_mean_adds():
    cell = {"task": "trec", "epsilon": 2.0, "rate": "linear"}
    found = [{"1": 80.0, "100": 82.0, "30": 80.0}, {"1": 82.0, "100": 82.0, "30": 83.0}]
    text = summary([{**cell, "seed": i, "accuracy": each} for i, each in enumerate(found)])
    assert "| last weights | mean of 30 | mean of 100 |" in text
    assert "| trec | 2.0 | linear | 81.00 ± 1.00 | 0.50 ± 0.50 | 1.00 ± 1.00 |" in text
