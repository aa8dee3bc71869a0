"""Directions: the documented layout recomputed in plain integers, laws with power, random access."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats
from test_philox import reference_words
from whole_directions import direction_vector

from hf_dpzero.perturbation import directions
from hf_dpzero.perturbation.directions import (
    DISTRIBUTIONS,
    Direction,
    DirectionStream,
    dither,
    largest_coordinate,
    normal_tables,
    normals_of,
)

KEY = 0x0123456789ABCDEF_FEDCBA9876543210
UNIT = 2.0**-21
BYTES = np.convolve(np.convolve(np.ones(256), np.ones(256)), np.ones(256)) / 2.0**24
"""P(s) for the sum s of three uniform bytes, exact in float64."""


def stream(distribution: str, size: int, step: int = 0, query: int = 0, key: int = KEY):
    return DirectionStream(Direction(key, step, query), distribution, [(0, size)])


def stream_of_tensors(count: int, step: int = 0, query: int = 0) -> DirectionStream:
    """A stream over `count` tensors of one element, 32 indices apart."""
    layout = [(32 * number, 1) for number in range(count)]
    return DirectionStream(Direction(KEY, step, query), "rademacher", layout)


def whole(distribution: str, size: int, **where: int) -> torch.Tensor:
    made = stream(distribution, size, **where)
    return made.raw(0, size) * made.scale


def reference_sign(key: np.ndarray, i: int) -> float:
    """32 consecutive coordinates take the same bit of 32 consecutive calls; 128 bits a call."""
    tile, row, lane = i // 4096, i % 4096 // 32, i % 32
    word = reference_words(key, tile * 32 + lane)[row // 32]
    return 1.0 if word >> (row % 32) & 1 else -1.0


def reference_normal(key: np.ndarray, i: int) -> float:
    """32 consecutive coordinates take the same word of 32 consecutive calls; 4 words a call."""
    tile, row, lane = i // 128, i % 128 // 32, i % 32
    x = reference_words(key, tile * 32 + lane)[row]
    s, b = (x & 255) + (x >> 8 & 255) + (x >> 16 & 255), x >> 24 & 127
    center, half = (int(table[s]) for table in normal_tables())
    return (center + (2 * b - 127) * half) * UNIT


@pytest.mark.parametrize("start", [0, 31, 4090, 65_536 - 5, (1 << 33) - 7, (1 << 37) + 4000])
def test_coordinates_are_the_documented_words(start):
    """Across rows, tiles and the 2^32nd call's carry (sign 2^37 is call 2^30; normal 2^34, 2^32)."""
    for distribution, reference in [("rademacher", reference_sign), ("gaussian", reference_normal)]:
        made = stream(distribution, 8, step=3, query=1)
        found = made.raw(start, 200)
        assert found.dtype == torch.float32
        expected = [reference(made.key, i) for i in range(start, start + 200)]
        assert found.tolist() == expected


@pytest.mark.parametrize(("distribution", "per_call"), [("rademacher", 128), ("gaussian", 4)])
def test_calls_beyond_32_bits_carry_into_the_counter(distribution, per_call):
    """The coordinates of calls 2^32 - 32 .. 2^32 + 32; dropping the high half would repeat call 0."""
    reference = reference_sign if distribution == "rademacher" else reference_normal
    edge, made = (1 << 32) * per_call, stream(distribution, 8)
    found = made.raw(edge - 64, 128)
    assert found.tolist() == [reference(made.key, i) for i in range(edge - 64, edge + 64)]
    assert not torch.equal(found[64:], made.raw(0, 64))


def test_the_stream_is_named_by_direction_and_domain():
    from hf_dpzero.perturbation.directions import philox_words, stream_key

    made = stream_of_tensors(40, step=12_345, query=7)
    assert made.key.tolist() == stream_key(KEY, 12_345, 7, 0).tolist()
    numbers = np.array([0, 39, 5], np.uint64)
    for domain, found in [(1, made.tensor_words(numbers)), (2, made.perturbation_dither(numbers))]:
        words = philox_words(numbers, stream_key(KEY, 12_345, 7, domain))
        assert found.tolist() == (words if domain == 1 else words[0]).tolist()
    w0, w1 = (w.astype(object) for w in made.tensor_words(numbers)[:2])
    expected = [((b << 32 | a) >> 11) / 2**53 for a, b in zip(w0, w1, strict=True)]
    assert made.coefficient_uniforms(numbers).tolist() == expected


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_any_slice_equals_the_whole(distribution):
    """Random unaligned slices of 300 000 coordinates, read in random order from one stream."""
    size = 300_000
    expected = stream(distribution, size).raw(0, size)
    reader, choose = stream(distribution, size), np.random.default_rng(0)
    for _ in range(30):
        start = int(choose.integers(0, size - 1))
        count = int(min(choose.integers(1, 70_000), size - start))
        assert torch.equal(reader.raw(start, count), expected[start : start + count])
    assert stream(distribution, 8).raw(299_000, 1000).equal(expected[-1000:])


def table_points() -> tuple[np.ndarray, np.ndarray]:
    """(z, probability) of every one of the 766 * 128 values, in order, float64."""
    center, half = (table.astype(np.int64) for table in normal_tables())
    odd = 2 * np.arange(128) - 127
    z = (center[:, None] + odd * half[:, None]) * UNIT
    return z.reshape(-1), np.repeat(BYTES / 128, 128)


def test_normal_table_is_the_one_that_released_trajectories_used():
    """Its entries are public constants: a maths library that changed one would break replays."""
    center, half = normal_tables()
    assert (center.dtype, half.dtype) == (np.int32, np.int32)
    digests = [
        hashlib.sha256(table.astype("<i4").tobytes()).hexdigest() for table in (center, half)
    ]
    assert digests == [
        "f07e7976b10aeeddd05e2c02b6949ef95290881e8a8d9f96e4403e887a60c7a5",
        "c0a2630d160ad256e0886181bfab352612bb39222dcf25efff06656536f58195",
    ]


def test_normal_table_is_symmetric_and_its_cells_are_contiguous():
    """A cell's 128 points fill it evenly: it ends where the next begins, a grid gap in between."""
    center, half = (table.astype(np.int64) for table in normal_tables())
    assert center.tolist() == (-center[::-1]).tolist()
    assert half.tolist() == half[::-1].tolist()
    assert half.min() > 0
    assert (center + 128 * half)[:-1].tolist() == (center - 128 * half)[1:].tolist()
    assert half.max() < 1 << 16  # what the kernels pack next to a center
    assert np.abs(center).max() + 127 * half.max() < 1 << 24  # exact in float32


def test_normal_table_has_the_normals_distribution_function():
    """At every atom, from the left and from the right, to 1e-4; a 0.1 % scale error would fail."""

    def distance(points: np.ndarray) -> float:
        above, normal = np.cumsum(p), stats.norm.cdf(points)
        return float(max(np.abs(above - normal).max(), np.abs(above - p - normal).max()))

    z, p = table_points()
    assert (np.diff(z) > 0).all()
    assert distance(z) < 1e-4
    assert distance(1.001 * z) > 1e-4


def z_scores(u: torch.Tensor) -> dict[str, float]:
    """Standardised first, second and fourth moments of what should be N(0, 1)."""
    n, x = u.numel(), u.double()
    return {
        "mean": float(x.mean()) * math.sqrt(n),
        "variance": (float((x * x).mean()) - 1) * math.sqrt(n / 2),
        "fourth": (float((x**4).mean()) - 3) * math.sqrt(n / 96),
    }


def test_gaussian_moments_and_the_power_to_see_one_percent():
    u = whole("gaussian", 1 << 20)
    assert max(abs(z) for z in z_scores(u).values()) < 4.5
    assert abs(z_scores(1.01 * u)["variance"]) > 10
    assert abs(z_scores(u + 0.01)["mean"]) > 8
    mixture = u.clone()
    mixture[::2] *= math.sqrt(1.2)
    mixture[1::2] *= math.sqrt(0.8)  # variance 1, fourth moment 3.12
    assert abs(z_scores(mixture)["fourth"]) > 8


def test_rademacher_is_fair_and_reports_a_bias():
    u = whole("rademacher", 1 << 20)
    assert set(u.unique().tolist()) == {-1.0, 1.0}
    assert abs(z_scores(u)["mean"]) < 4.5
    places = u.view(-1, 4096).mean(dim=0) * math.sqrt(u.numel() / 4096)  # each bit by itself
    assert float(places.abs().max()) < 5  # 4096 of them: p about 2e-3 under the binomial
    lanes = u.view(-1, 32).mean(dim=0) * math.sqrt(u.numel() / 32)
    assert float(lanes.abs().max()) < 4.5
    stuck = u.view(-1, 4096).clone()
    stuck[:, 77] = 1.0  # one bit that never changes
    assert float(stuck.mean(dim=0).abs().max()) * math.sqrt(u.numel() / 4096) > 15


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_second_moment_matrix_is_the_identity(distribution):
    """E[u u^T] = I over 1000 steps, d = 7 in two tensors; std of an entry is at most sqrt(2/n)."""
    n, layout = 1000, [(0, 3), (256, 4)]
    rows = [direction_vector(Direction(KEY, t), distribution, layout) for t in range(n)]
    u = torch.stack(rows).double()
    error = (u.T @ u / n - torch.eye(7)).abs() * math.sqrt(n / 2)
    assert float(error.max()) < 4.5
    assert float(u.mean(dim=0).abs().max()) * math.sqrt(n) < 4.5
    copied = u.clone()
    copied[:, 4] = copied[:, 0]  # what a reused counter would do
    assert float((copied.T @ copied / n - torch.eye(7)).abs().max()) * math.sqrt(n / 2) > 20


def worst_correlation(u: torch.Tensor, v: torch.Tensor) -> float:
    """max over all cyclic shifts of |sum u[i] v[i + shift]| / sqrt(n)."""
    spectrum = torch.fft.rfft(u.double()).conj() * torch.fft.rfft(v.double())
    return float(torch.fft.irfft(spectrum, n=u.numel()).abs().max()) / math.sqrt(u.numel())


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_steps_queries_keys_and_offsets_are_independent_at_every_shift(distribution):
    """65 536 shifts: the largest of as many standard normals stays under 6 (p about 1e-4)."""
    n = 1 << 16
    u = whole(distribution, n, step=5)
    others = {
        "step": whole(distribution, n, step=6),
        "query": whole(distribution, n, step=5, query=1),
        "swapped": whole(distribution, n, step=1, query=5),
        "key": whole(distribution, n, step=5, key=KEY ^ 1),
        "high key": whole(distribution, n, step=5, key=KEY ^ (1 << 127)),
        "offset": stream(distribution, 8 * n, step=5).raw(4 * n, n),
        "far": stream(distribution, 8 * n, step=5).raw(1 << 40, n),
    }
    for name, other in others.items():
        assert worst_correlation(u, other) < 6, name
    assert worst_correlation(u, torch.roll(u, 12_345)) > 100  # a shifted copy is caught
    assert worst_correlation(u, u + 3 * others["step"]) > 50  # so is a mixture


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_a_direction_is_independent_of_itself_at_every_shift(distribution):
    """Its own lags 1 .. n - 1, which a layout that reused bits or calls would show."""

    def worst_lag(v: torch.Tensor) -> float:
        spectrum = torch.fft.rfft(v.double()).abs().square()
        lags = torch.fft.irfft(spectrum, n=v.numel())[1:]
        return float(lags.abs().max()) / math.sqrt(v.numel())

    u = whole(distribution, 1 << 18)
    assert worst_lag(u) < 6.5
    repeated = u.clone()
    repeated[4096:8192] = repeated[:4096]  # one tile used twice
    assert worst_lag(repeated) > 6.5


def test_signs_and_normals_of_a_stream_share_words_but_tensor_words_do_not():
    """The uniforms that round an update come from another domain than the update's signs."""
    numbers = np.arange(1 << 14, dtype=np.uint64)
    made = stream_of_tensors(1 << 14)
    words = np.concatenate([made.tensor_words(numbers), made.perturbation_dither(numbers)[None]])
    centred = torch.from_numpy((words * 2.0**-32 - 0.5) * math.sqrt(12))
    signs = made.raw(0, 1 << 14)
    for row in centred:
        assert worst_correlation(signs, row) < 6
    for first in range(5):
        for second in range(first):
            assert worst_correlation(centred[first], centred[second]) < 6


@pytest.mark.false_alarm(0)  # a fixed key
def test_coefficient_uniforms_are_uniform_and_differ_between_tensors_and_steps():
    numbers = np.arange(10, dtype=np.uint64)
    values = np.concatenate(
        [stream_of_tensors(10, step=t).coefficient_uniforms(numbers) for t in range(300)]
    )
    assert len(set(values.tolist())) == 3000
    assert values.min() >= 0.0
    assert values.max() < 1.0
    assert stats.kstest(values, "uniform").pvalue > 0.01
    assert stats.kstest(values**1.2, "uniform").pvalue < 1e-6


def test_dither_is_a_weyl_sequence_modulo_two_to_the_32():
    index = [0, 1, 2, 12_345, (1 << 32) - 1, 1 << 32, (1 << 40) + 3]
    for start in (0, 1, 0xFFFFFFFF):
        found = dither(start, torch.tensor(index))
        assert found.dtype == torch.int64
        assert found.tolist() == [(start + j * 0x9E3779B9) % 2**32 for j in index]
    assert dither(torch.tensor([5, 7]), torch.tensor([0, 1])).tolist() == [5, 7 + 0x9E3779B9]


@pytest.mark.parametrize("size", [1, 2, 5, 1000, 200_000])
def test_sphere_has_norm_root_d(size):
    u = whole("sphere", size, step=2).double()
    assert float(u.square().sum()) == pytest.approx(size, rel=1e-6)


def test_squared_norm_is_the_exact_rational_sum():
    """In integers, so that no order of summation, part or thread changes a bit of it."""
    made = DirectionStream(Direction(KEY, 1), "gaussian", [(0, 70_000), (70_144, 5)])
    parts = [made.raw(0, 70_000), made.raw(70_144, 5)]
    integers = [round(z * 2**21) for z in torch.cat(parts).tolist()]
    assert made.squared_norm() == float(Fraction(sum(n * n for n in integers), 2**42))
    signs = DirectionStream(Direction(KEY, 1), "rademacher", [(0, 70_000), (70_144, 5)])
    assert signs.squared_norm() == 70_005.0


def test_small_spheres_never_raise_whatever_the_draw():
    """sqrt(d)/||z|| passes 2 for 1.9 % of the draws at d = 8; that is no broken generator."""
    n, p = 2000, float(stats.chi2.cdf(8 / 4, 8))
    scales = np.array([stream("sphere", 8, step=t).scale for t in range(n)])
    assert abs((scales > 2.0).sum() - n * p) < 5 * math.sqrt(n * p)
    for t in range(200):
        assert float(whole("sphere", 8, step=t).abs().max()) <= largest_coordinate("sphere")


@pytest.mark.parametrize("size", [150, 10_000])
@pytest.mark.parametrize("factor", [0.2, 4.1])
def test_a_broken_generator_is_noticed(size, factor):
    """A norm of 150 normals or more is within a factor of 2 of its mean, whatever was drawn."""

    def sum_of_squares(key, places):
        return int(factor * size * 2**42)

    stream = DirectionStream(Direction(1, 0), "sphere", [(0, size)], sum_of_squares)
    with pytest.raises(ArithmeticError, match="cannot happen; broken generator"):
        stream.scale  # noqa: B018


def test_largest_coordinate_is_attained_by_the_widest_word():
    widest = np.array([0x7FFFFFFF, 0x00000000], np.uint32)
    z, _ = table_points()
    bound = largest_coordinate("gaussian")
    assert (normals_of(widest) * UNIT).tolist() == [bound, -bound]
    assert float(np.abs(z).max()) == bound
    assert 5.5 < bound < 6
    assert largest_coordinate("sphere") == 2 * bound
    assert largest_coordinate("rademacher") == 1.0
    assert math.sqrt(149) > 2 * bound > math.sqrt(127)  # no sphere of d <= 127 can pass it


def test_unknown_distribution_is_named():
    with pytest.raises(ValueError, match=r"direction='cauchy'.*rademacher, gaussian, sphere"):
        stream("cauchy", 4)


def test_new_keys_differ_and_fit_128_bits():
    keys = {directions.new_key() for _ in range(50)}
    assert len(keys) == 50
    assert all(0 <= key < 1 << 128 for key in keys)
    assert max(keys) > 1 << 120


def test_roundings_along_one_direction_cancel_over_a_window():
    """44 updates of 0.9^age: unbiased, and with less than the spread of 44 independent roundings."""
    coefficients = [0.9**age for age in range(44)]
    independent = math.sqrt(sum(c * (1 - c) for c in coefficients))  # 2.15; one uniform for all: 9
    errors = []
    for step in range(200):
        stream = DirectionStream(Direction(9, step), "rademacher", [(0, 64)])
        first = np.zeros(1, np.uint64)
        uniforms = [stream.coefficient_uniforms(first, age)[0] for age in range(44)]
        rounded = sum(u >= 1 - c for u, c in zip(uniforms, coefficients))
        errors.append(rounded - sum(coefficients))
        assert uniforms[0] == stream.coefficient_uniforms(first)[0]
        assert stream.update_dither(first, 0) == stream.tensor_words(first)[2]
    assert abs(np.mean(errors)) < 4 * independent / math.sqrt(200)
    assert np.std(errors) < 0.6 * independent
