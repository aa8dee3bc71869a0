"""Seconds and peak memory of training steps, without what lies between them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_dpzero.training import step_meter
from hf_dpzero.training.step_meter import StepMeter


def test_the_meter_leaves_out_what_lies_between_steps(monkeypatch):
    """Steps of 1, 2 and 4 s, and pauses of 10 s: the median is 2."""
    ticks = iter([0.0, 1.0, 11.0, 13.0, 23.0, 27.0])
    monkeypatch.setattr(step_meter.time, "perf_counter", lambda: next(ticks))
    meter = StepMeter("cpu")
    assert meter.metrics() == {}
    for _ in range(3):
        meter.on_step_begin(None, None, None)
        meter.on_step_end(None, None, None)
    assert meter.seconds == [1.0, 2.0, 4.0]
    assert meter.metrics()["seconds_per_step"] == 2.0
    assert meter.metrics()["peak_memory_bytes"] > 2**20


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_the_meter_forgets_the_peak_of_an_evaluation():
    """256 MiB before the step and 32 MiB in it: the peak is that of the step."""
    meter, evaluation = StepMeter("cpu"), b"1" * 2**28
    del evaluation
    meter.on_step_begin(None, None, None)
    step = b"1" * 2**25
    meter.on_step_end(None, None, None)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert len(step) < meter.peak < resident + 2**26
