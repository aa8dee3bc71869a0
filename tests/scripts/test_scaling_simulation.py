"""The scaling model against closed forms: one worker, equal ones, rare slow ones, what links cost."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from scripts.benchmarks.scaling_model import (
    LAYOUTS,
    NETWORKS,
    Draws,
    Job,
    Network,
    Passes,
    Stragglers,
    data_parallel,
    direction_split,
    dp_adamw,
    fsdp,
    memory_bytes,
    shares,
)
from scripts.benchmarks.scaling_simulation import main, simulate

NONE = Stragglers(spread=0.0, slow_share=0.0, slow_link_share=0.0)
JOB = Job(
    parameters=1e9, parameter_bytes=4, layers=10, rows=64, batch=64, slots=4, directions=2,
    row_seconds=0.01, pass_start=0.0, memory_bandwidth=1e12, traffic=16, layerwise=False,
    draw_seconds=1e-12,
)  # fmt: skip
"""Full batches of 64 rows: nothing varies. A pass of 4 rows takes 0.04 s, more than 4e9 bytes / 1e12."""
PERTURBING = 2 * 16e9 / 1e12 + 2 * 1e9 * 1e-12
"""Two directions of 16 bytes a parameter, and the update's 2e9 draws."""
FREE = Network(latency=0, bandwidth=math.inf, node_latency=0, node_bandwidth=math.inf)


def seconds(layout, job=JOB, network=FREE, workers=1, stragglers=NONE, trials=3, most=None, seed=1):
    draws = Draws.of(job, stragglers, most or workers, trials, seed)
    return layout(network, draws, workers).seconds


@pytest.mark.parametrize("network", NETWORKS.values())
def test_one_worker_computes_and_uses_no_link(network):
    zeroth = 2 * 2 * 16 * 0.04 + PERTURBING  # 2 K passes over 64 / 4 microbatches
    forward = dataclasses.replace(
        JOB, differences="forward"
    )  # K + 1 passes, one sign of each direction
    one_sign = 3 * 16 * 0.04 + 16e9 / 1e12 + 2e9 * 1e-12
    for layout in (data_parallel, direction_split, fsdp):
        assert seconds(layout, network=network) == pytest.approx(zeroth)
        assert seconds(layout, forward, network) == pytest.approx(one_sign)
    assert seconds(dp_adamw, network=network) == pytest.approx(64 * 0.01 * 4 + 20e9 / 1e12)


def test_equal_workers_on_free_links_divide_passes_but_not_what_each_does_alone():
    """Data parallel: every worker perturbs all parameters. Split: K / W directions. FSDP2: d / W."""
    assert seconds(data_parallel, workers=4) == pytest.approx(4 * 4 * 0.04 + PERTURBING)
    # gcd(4, 2) = 2 groups of one direction; the rows over two workers each
    assert seconds(direction_split, workers=4) == pytest.approx(2 * 8 * 0.04 + 0.016 + 0.002)
    assert seconds(fsdp, workers=4) == pytest.approx(4 * 4 * 0.04 + PERTURBING / 4)
    assert seconds(dp_adamw, workers=4) == pytest.approx(16 * 0.01 * 4 + 0.02)
    layerwise = dataclasses.replace(JOB, layerwise=True)
    each = seconds(data_parallel, job=layerwise, workers=4) - seconds(data_parallel, workers=4)
    assert each == pytest.approx(3 * 2 * 0.016)  # in each of 4 passes in place of once


def test_links_cost_what_rings_and_trees_cost():
    net = Network(latency=1e-3, bandwidth=1e9, node_workers=1)
    assert net.all_reduce(1e9, 1) == net.all_gather(1e9, 1) == net.broadcast(1e9, 1) == 0
    assert net.all_reduce(1e9, 8) == pytest.approx(14 * (1e-3 + 1 / 8))  # a ring, for many bytes
    assert net.all_reduce(8, 1024) == pytest.approx(20 * 1e-3, rel=1e-4)  # a tree, for few
    assert net.all_gather(1e9, 8) == pytest.approx(3e-3 + 7 / 8)
    assert net.broadcast(1e6, 5) == pytest.approx(3 * (1e-3 + 1e-3))
    inside = dataclasses.replace(net, node_workers=8, node_latency=0.0, node_bandwidth=1e12)
    assert inside.all_gather(1e9, 8) == pytest.approx(7 / 8e3)
    assert inside.all_gather(1e9, 16) == net.all_gather(1e9, 16)


def test_steps_pay_for_what_each_layout_sends():
    net = Network(latency=0.0, bandwidth=1e9, node_workers=1)

    def paid(layout):
        return float((seconds(layout, network=net, workers=2) - seconds(layout, workers=2)).mean())

    values = (64 + 16 * 2) / 1e9  # half in a ring of two, half told down a tree
    assert paid(data_parallel) == pytest.approx(values)
    gathered = paid(direction_split) - paid(data_parallel)
    assert gathered == pytest.approx(64 * 2 * 8 / 2 / 1e9)
    assert paid(dp_adamw) == pytest.approx(2 * 4e9 / 2 / 1e9)  # 2 (W - 1) / W of 4 d bytes
    # 2 K gathers of half of 4e9 bytes in each of 8 passes, less the passes that they hide behind
    assert paid(fsdp) == pytest.approx(4 * 8 * (2.0 - 0.04), rel=1e-6)


def test_the_slowest_of_many_follows_the_closed_form():
    """Rare slow workers: 1 + (f - 1) (1 - (1 - p)^W); a wrong share would be seen."""
    rare = dataclasses.replace(NONE, slow_share=0.01, slow_factor=5.0)
    job = dataclasses.replace(JOB, slots=64, draw_seconds=0.0, traffic=0.0)
    base, trials = 4 * job.pass_seconds(64), 4000  # one pass of 64 slots on each, however few rows
    for workers in (1, 8, 64):
        measured = seconds(data_parallel, job, workers=workers, stragglers=rare, trials=trials)
        chance = 1 - 0.99**workers
        error = 4 * math.sqrt(chance * (1 - chance) / trials)
        assert float(measured.mean()) / base == pytest.approx(1 + 4 * chance, abs=4 * error)


def test_lognormal_spread_keeps_the_mean_and_its_maximum_is_the_known_one():
    spread = dataclasses.replace(NONE, spread=0.1)
    draws = Draws.of(JOB, spread, 256, 4000, seed=3)
    assert float(draws.slow.mean()) == pytest.approx(1.0, abs=4 * 0.1 / math.sqrt(draws.slow.size))
    # the median of a maximum of W is the quantile 0.5^(1/W)
    quantile = 2.7823  # of a standard normal at 0.5^(1/256)
    expected = math.exp(0.1 * quantile - 0.005)
    assert float(np.median(draws.slow.max(axis=1))) == pytest.approx(expected, rel=0.005)


def test_shares_and_blanks():
    rows = shares(np.array([10, 3]), 4)
    assert rows.tolist() == [[3, 3, 2, 2], [1, 1, 1, 0]]
    for workers in (1, 3, 7, 100):
        assert (shares(np.array([0, 5, 64]), workers).sum(axis=1) == [0, 5, 64]).all()
    job = dataclasses.replace(JOB, rows=1000)
    split = Passes.of(Draws.of(job, NONE, 8, 500, seed=2), 8)
    assert split.rows == 4 and split.run().mean() >= 64
    wide = Passes.of(Draws.of(dataclasses.replace(job, widths=4), NONE, 8, 500, seed=2), 8)
    assert wide.run().mean() > split.run().mean()  # each width has a microbatch that is not full
    own = Draws.of(job, NONE, 8, 500, seed=2, own_rows=True).shares(8)
    assert own.sum(axis=1).mean() == pytest.approx(64, abs=4 * 8 / math.sqrt(500))
    assert own.std() > 2 > shares(np.array([64]), 8).std()  # Binomial(125, 0.064): 2.7


def test_the_rows_of_a_pass_are_those_with_the_least_expected_seconds():
    """A pass that costs nothing to start holds one row; one that costs much holds all that come."""
    free = dataclasses.replace(JOB, slots=0, memory_bandwidth=1e15)
    assert [free.rows_a_pass(w) for w in (1, 8)] == [1, 1]
    dear = dataclasses.replace(free, pass_start=10.0)
    assert [dear.rows_a_pass(w) for w in (1, 64)] == [32, 5]  # at most 32; P(N > 5) = 6e-4
    assert dataclasses.replace(dear, slots=8).rows_a_pass(1) == 8
    slow = dataclasses.replace(JOB, memory_bandwidth=4e9)  # as long as reading the weights
    assert slow.pass_seconds(4) == pytest.approx(1.0) and JOB.pass_seconds(4) == 0.04
    assert dataclasses.replace(JOB, pass_start=0.5).pass_seconds(4) == 0.54
    even = dataclasses.replace(free, pass_start=0.01)
    chosen = even.rows_a_pass(8)  # 8 expected rows: by enumeration over Poisson(8)
    chances = [math.exp(-8) * 8**n / math.factorial(n) for n in range(60)]
    expected = {
        s: sum(p * math.ceil(n / s) for n, p in enumerate(chances)) * (1 + s) for s in range(1, 33)
    }
    assert chosen == min(expected, key=expected.__getitem__) and 1 < chosen < 8


def test_memory_of_a_rank():
    job = Job(parameters=1e9, parameter_bytes=2, layers=10)
    alone, many = memory_bytes(job, 1), memory_bytes(job, 1000)
    assert alone["DPZero, data parallel"] == many["DPZero, data parallel"] == 2e9 + 2e8
    assert many["DPZero, FSDP2"] == 2e6 + 2 * 2e8 and alone["DPZero, FSDP2"] == 2.2e9
    assert alone["DP-AdamW, all-reduce"] == 3 * 2e9 + 8e9
    plain = memory_bytes(dataclasses.replace(job, parameter_bytes=4), 1)
    assert plain["DPZero, data parallel"] == 4e9  # moved in place: no copy of a layer


def test_the_tables_of_the_docs_are_those_of_the_command():
    """To 2 %, which another version of numpy's draws stays within."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
    for network in ("fast", "ethernet"):
        table = text[text.index(f"| {network} links |") :].split("\n\n")[0]
        rows = {cells[1].strip(): cells[2:-1] for r in table.split("\n") if (cells := r.split("|"))}
        for name, found in simulate(Job(), NETWORKS[network], Stragglers()).items():
            seconds = [float(cell.split()[0]) for cell in rows[name]]
            assert seconds == pytest.approx([row["seconds"] for row in found], rel=0.02)


def test_the_command_prints_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    words = ["--workers", "1", "8", "--trials", "5", "--networks", "fast", "--batch", "32"]
    image = tmp_path / "scaling.png"
    assert main([*words, "--plot", str(image)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| fast links | 1 | 8 |" and len(lines) == 2 + len(LAYOUTS)
    assert all(line.split("|")[2].strip().endswith("(1)") for line in lines[2:])
    assert image.stat().st_size > 1000
    assert main([*words, "--json", "--seed", "7"]) == 0
    first = capsys.readouterr().out
    assert main([*words, "--json", "--seed", "7"]) == 0
    assert capsys.readouterr().out == first and json.loads(first)["job"]["batch"] == 32
    assert main([*words, "--memory"]) == 0
    assert "DPZero, FSDP2" in capsys.readouterr().out
