"""A model of a synchronous step over W workers: compute, links, stragglers, and bytes of a rank.

One worker is one device. A step ends when its slowest worker has ended.

    N ~ Binomial(n, B / n) rows are sampled; worker w of W gets rows w, w + W, ... of them
    passes_w = sum over widths of ceil(rows_w / s)      s rows a pass, filled up with blanks
    pass = max(o + s r, b d / m)                        it reads all weights once at least
    compute_w = slow_w * (2 E passes_w pass + E v t d / m + K d g)    E directions are evaluated;
                                              forward differences: E + 1 passes, half of t
    step = max_w compute_w + links

with o seconds to start a pass, r of a row's forward pass, b bytes a parameter, t bytes of these moved
to perturb along a direction, v how often (in each pass where weights are perturbed layer by layer, else
once), m the bandwidth of the worker's memory, g seconds to draw a coordinate again for the update.
`slow_w` is lognormal with mean 1, times a factor for the rare slow worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hf_dpzero.estimators.finite_differences import passes_of

FIXED_BYTES, VALUE_BYTES = 64, 16
"""What a DPZero step sends a rank: about 64 bytes and 16 for each direction (a sum and its release)."""
UPDATE_BYTES = 20
"""Of each parameter that AdamW reads and writes: weights of two bytes, moments of four, a gradient."""
DIFFERENCE_BYTES = 8
"""Of one example's difference along one direction, float64."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, on what device; every field is an option.

    Attributes:
      parameters: d.
      parameter_bytes: of each.
      layers: of the model; FSDP2 gathers them one by one.
      rows: n, of the training data.
      batch: B, expected rows of a step, whatever the number of workers.
      slots: s, rows of a forward pass; 0 for the number with the least expected seconds. (A trainer's
        passes have several sizes, `batches.placement`, and leave fewer blanks.)
      most_slots: s at most, for memory, where it is chosen.
      widths: shapes that rows fall into with equal probability.
      directions: K.
      differences: central or forward.
      row_seconds: r, of a row in a forward pass.
      pass_start: o, seconds of a forward pass beside its rows.
      memory_bandwidth: m, bytes a second.
      traffic: t, bytes of parameters read and written for a direction, each.
      layerwise: perturb in each pass, as half-precision weights of over 1 GiB are.
      draw_seconds: g, of one coordinate of one direction.
      first_order_passes: forward passes that a row's clipped gradient takes the time of.
      gradient_bytes: of each coordinate in DP-AdamW's all-reduce.
    """

    parameters: float = 13e9
    parameter_bytes: float = 2
    layers: int = 40
    rows: int = 1_000_000
    batch: int = 1024
    slots: int = 0
    most_slots: int = 32
    widths: int = 1
    directions: int = 16
    differences: str = "central"
    row_seconds: float = 0.00875
    pass_start: float = 0.005
    memory_bandwidth: float = 3.35e12
    traffic: float = 12
    layerwise: bool = True
    draw_seconds: float = 4.5e-13
    first_order_passes: float = 4
    gradient_bytes: float = 4

    def rows_a_pass(self, workers: int) -> int:
        """s, where the rows are split over so many workers."""
        mean, counts = self.batch / workers / self.widths, range(1, self.most_slots + 1)
        passes = {count: _expected_passes(mean, count) for count in counts}
        return self.slots or min(counts, key=lambda n: passes[n] * self.pass_seconds(n))

    def passes(self, directions: int) -> int:
        """Of each row, along so many directions."""
        return passes_of(self.differences, directions)

    def pass_seconds(self, rows: int) -> float:
        """Of a forward pass of so many rows."""
        reading = self.weight_bytes / self.memory_bandwidth
        return max(self.pass_start + rows * self.row_seconds, reading)

    @property
    def weight_bytes(self) -> float:
        """Of all parameters."""
        return self.parameters * self.parameter_bytes


@dataclass(frozen=True, kw_only=True)
class Network:
    """Links: `latency` seconds and `bandwidth` bytes a second, those of one machine apart.

    Attributes:
      latency, bandwidth: between machines, of each worker.
      node_latency, node_bandwidth: inside one.
      node_workers: workers of a machine; up to so many use its links alone.
    """

    latency: float = 2e-5
    bandwidth: float = 5e10
    node_latency: float = 1e-5
    node_bandwidth: float = 4.5e11
    node_workers: int = 8

    def link(self, workers: int) -> tuple[float, float]:
        """(latency, bandwidth) that a collective of so many workers is bound by."""
        if workers <= self.node_workers:
            return self.node_latency, self.node_bandwidth
        return self.latency, self.bandwidth

    def all_reduce(self, size: float, workers: int) -> float:
        """Seconds for `size` bytes on each worker: a ring or a tree, the faster.

        Ring: 2 (W - 1) messages of size / W. Tree: up and down, 2 ceil(log2 W) messages of `size`.
        """
        latency, bandwidth = self.link(workers)
        ring = 2 * (workers - 1) * (latency + size / workers / bandwidth)
        return min(ring, 2 * _depth(workers) * (latency + size / bandwidth))

    def broadcast(self, size: float, workers: int) -> float:
        """Seconds for `size` bytes down a tree."""
        latency, bandwidth = self.link(workers)
        return _depth(workers) * (latency + size / bandwidth)

    def all_gather(self, size: float, workers: int) -> float:
        """Seconds until each worker has all `size` bytes, of which each holds its part.

        Ring: W - 1 messages of size / W. Doubling: ceil(log2 W) messages, the same bytes in all.
        """
        latency, bandwidth = self.link(workers)
        moved = (workers - 1) * size / workers / bandwidth
        return min(workers - 1, _depth(workers)) * latency + moved


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """How workers and links differ from step to step.

    Attributes:
      spread: standard deviation of the logarithm of a worker's time; its mean stays.
      slow_share: probability that a worker is slow in a step.
      slow_factor: by how much.
      slow_link_share, slow_link_factor: the same of links; a collective waits for its slowest.
    """

    spread: float = 0.05
    slow_share: float = 1e-3
    slow_factor: float = 3.0
    slow_link_share: float = 1e-3
    slow_link_factor: float = 3.0


NETWORKS = {
    "fast": Network(),
    "ethernet": Network(latency=5e-5, bandwidth=1.25e9, node_latency=1e-5, node_bandwidth=2.5e10),
    "internet": Network(latency=5e-2, bandwidth=1.25e7, node_workers=1),
}
"""InfiniBand of 400 Gbit/s a GPU and NVLink; 10 Gbit/s and PCIe; 100 Mbit/s and 50 ms."""


def _depth(workers: int) -> int:
    return math.ceil(math.log2(workers))


def _expected_passes(mean: float, rows: int) -> float:
    """E[ceil(N / rows)] of a Poisson variable N: the sum over k of P(N > k rows)."""
    k = np.arange(1, math.ceil(mean + 10 * math.sqrt(mean) + 20) + 1)
    logs = np.concatenate([[0.0], np.cumsum(math.log(mean) - np.log(k))]) - mean
    return float((1.0 - np.cumsum(np.exp(logs)).clip(max=1.0))[::rows].sum())


# ---------------------------------------------------------------- draws


@dataclass(frozen=True)
class Draws:
    """Random numbers of `trials` steps for the largest number of workers; fewer take the first ones.

    Attributes:
      job: whose rows are sampled.
      sampled: rows of the batch, `[trials]`.
      slow: a worker's time over its mean, `[trials, workers]`.
      links: the same of its link.
      generator: for what is drawn for a number of workers.
      own_rows: each worker samples n / W rows of its own, in place of a share of one batch.
    """

    job: Job
    sampled: np.ndarray
    slow: np.ndarray
    links: np.ndarray
    generator: np.random.Generator
    own_rows: bool = False

    @classmethod
    def of(
        cls,
        job: Job,
        stragglers: Stragglers,
        workers: int,
        trials: int,
        seed: int,
        own_rows: bool = False,
    ) -> Draws:
        """Draws them all from a generator of its own."""
        generator = np.random.Generator(np.random.Philox(seed))
        s, shape = stragglers, (trials, workers)
        sampled = generator.binomial(job.rows, job.batch / job.rows, size=trials)
        spread = np.exp(s.spread * generator.standard_normal(shape) - s.spread**2 / 2)
        slow = np.where(generator.random(shape) < s.slow_share, s.slow_factor, 1.0)
        links = np.where(generator.random(shape) < s.slow_link_share, s.slow_link_factor, 1.0)
        return cls(job, sampled, spread * slow, links, generator, own_rows)

    def shares(self, workers: int) -> np.ndarray:
        """Rows of each worker, `[trials, workers]`."""
        if not self.own_rows:
            return shares(self.sampled, workers)
        chance, size = self.job.batch / self.job.rows, (len(self.sampled), workers)
        return self.generator.binomial(self.job.rows // workers, chance, size=size)

    def slowest_link(self, workers: int) -> np.ndarray:
        """`[trials]`; one worker uses none."""
        return self.links[:, :workers].max(axis=1)


def shares(sampled: np.ndarray, workers: int) -> np.ndarray:
    """Rows of each worker, `[trials, workers]`: every W-th one of the sampled rows.

    >>> shares(np.array([5, 0]), 3).tolist()
    [[2, 2, 1], [0, 0, 0]]
    """
    return np.maximum(0, -((np.arange(workers) - sampled[:, None]) // workers))


@dataclass(frozen=True)
class Passes:
    """Forward passes of each worker, `[trials, workers]`, their rows, and the seconds of one."""

    count: np.ndarray
    rows: int
    seconds: float

    @classmethod
    def of(cls, draws: Draws, workers: int) -> Passes:
        """Rows of each width are filled up to whole passes with blanks; widths are drawn row by row."""
        job, rows = draws.job, draws.shares(workers)
        size = job.rows_a_pass(workers)
        if job.widths > 1:
            rows = draws.generator.multinomial(rows, [1 / job.widths] * job.widths)
        count = -(-rows // size)
        count = count.sum(axis=-1) if job.widths > 1 else count
        return cls(count, size, job.pass_seconds(size))

    def run(self) -> np.ndarray:
        """Rows on all workers, blanks included, `[trials]`."""
        return self.count.sum(axis=1) * self.rows


# ---------------------------------------------------------------- layouts


@dataclass(frozen=True)
class Step:
    """Seconds of each trial's step, `[trials]`: the slowest worker's compute, and the links'."""

    compute: np.ndarray
    links: np.ndarray
    rows_run: np.ndarray  # on all workers, blanks included; each direction counts the same

    @property
    def seconds(self) -> np.ndarray:
        """Of the whole step."""
        return self.compute + self.links


def data_parallel(network: Network, draws: Draws, workers: int) -> Step:
    """Every worker holds the model and takes every W-th row; K sums and K releases cross the links."""
    split = Passes.of(draws, workers)
    own = _evaluations(draws.job, split, draws.job.directions)
    return Step(_slowest(own, draws), _values(network, draws, workers), split.run())


def direction_split(network: Network, draws: Draws, workers: int) -> Step:
    """Groups of directions, as many as divide both W and K; the rows are split over what is left.

    Clipping needs an example's K differences together: B K of them go to every worker. Each makes the
    update of all K directions.
    """
    job = draws.job
    groups = math.gcd(workers, job.directions)
    split = Passes.of(draws, workers // groups)
    own = np.repeat(_evaluations(job, split, job.directions // groups), groups, axis=1)
    links = network.all_gather(job.batch * job.directions * DIFFERENCE_BYTES, workers)
    links = links * draws.slowest_link(workers) + _values(network, draws, workers)
    return Step(_slowest(own, draws), links, split.run())


def fsdp(network: Network, draws: Draws, workers: int) -> Step:
    """Each worker holds d / W parameters, perturbed in place; every forward pass gathers all, by layers.

    Gathering the next layer goes on during the layer before, so that what passes wait is what gathering
    takes longer than computing. Workers with fewer passes gather along with the one with most.
    """
    job, split = draws.job, Passes.of(draws, workers)
    own = job.passes(job.directions) * split.count * split.seconds + _sharded(job) / workers
    computing = job.passes(job.directions) * split.count.max(axis=1) * split.seconds
    layer = network.all_gather(job.weight_bytes / job.layers, workers)
    gathers = job.passes(job.directions) * split.count.max(axis=1) * job.layers
    waiting = np.maximum(gathers * layer * draws.slowest_link(workers) - computing, 0.0)
    return Step(_slowest(own, draws), waiting + _values(network, draws, workers), split.run())


def dp_adamw(network: Network, draws: Draws, workers: int) -> Step:
    """Clipped gradients of every W-th row, summed over workers: d numbers each; then AdamW.

    Rows have no blanks. The update reads and writes weights and two moments, about 20 bytes each.
    """
    job, rows = draws.job, draws.shares(workers)
    own = rows * job.row_seconds * job.first_order_passes
    own = own + UPDATE_BYTES * job.parameters / job.memory_bandwidth
    links = network.all_reduce(job.gradient_bytes * job.parameters, workers)
    return Step(_slowest(own, draws), links * draws.slowest_link(workers), rows.sum(axis=1))


def _evaluations(job: Job, split: Passes, directions: int) -> np.ndarray:
    times = split.count if job.layerwise else np.ones_like(split.count)
    moving = directions * times * _traffic_seconds(job)
    return job.passes(directions) * split.count * split.seconds + moving + _drawing(job)


def _sharded(job: Job) -> float:
    return job.directions * _traffic_seconds(job) + _drawing(job)


def _traffic_seconds(job: Job) -> float:
    signs = 1 if job.differences == "forward" else 2
    return signs / 2 * job.traffic * job.parameters / job.memory_bandwidth


def _drawing(job: Job) -> float:
    return job.directions * job.parameters * job.draw_seconds


def _slowest(own: np.ndarray, draws: Draws) -> np.ndarray:
    return (own * draws.slow[:, : own.shape[1]]).max(axis=1)


def _values(network: Network, draws: Draws, workers: int) -> np.ndarray:
    """K integers are summed, and K releases told: two collectives of a few bytes."""
    half = (FIXED_BYTES + VALUE_BYTES * draws.job.directions) / 2
    seconds = network.all_reduce(half, workers) + network.broadcast(half, workers)
    return seconds * draws.slowest_link(workers)


LAYOUTS: dict[str, Callable[[Network, Draws, int], Step]] = {
    "DPZero, data parallel": data_parallel,
    "DPZero, directions split": direction_split,
    "DPZero, FSDP2": fsdp,
    "DP-AdamW, all-reduce": dp_adamw,
}


def memory_bytes(job: Job, workers: int) -> dict[str, float]:
    """Bytes of each rank beside activations, by layout; a layer is d / layers.

    DPZero in half precision holds one layer's perturbed copy, FSDP2 two gathered layers (the one that
    runs and the next), DP-AdamW weights, float64 sums, and two moments of the weights' type.
    """
    weights = job.weight_bytes
    layer = weights / job.layers
    held = weights + layer if job.parameter_bytes < 4 else weights
    return {
        "DPZero, data parallel": held,
        "DPZero, directions split": held,
        "DPZero, FSDP2": weights / workers + (2 * layer if workers > 1 else layer),
        "DP-AdamW, all-reduce": 3 * weights + 8 * job.parameters,
    }
