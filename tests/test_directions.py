"""Directions: the bit source against an independent Philox, laws with power, random access."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from scipy import stats

from hf_dpzero import directions
from hf_dpzero.directions import (
    DISTRIBUTIONS,
    Direction,
    DirectionStream,
    direction_vector,
    largest_coordinate,
    random_words,
)

CPU = torch.device("cpu")
KEY = 0x0123456789ABCDEF_FEDCBA9876543210
MASK = (1 << 64) - 1


def philox4x64(counter: list[int], key: list[int]) -> list[int]:
    """One Philox4x64-10 call, from the paper (Salmon et al. 2011, section 3.3), in plain integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (
            (second >> 64) ^ c1 ^ k0,
            second & MASK,
            (first >> 64) ^ c3 ^ k1,
            first & MASK,
        )
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return [c0, c1, c2, c3]


def reference_words(direction: Direction, start: int, count: int, domain: int) -> list[int]:
    """Word w is word w % 4 of the call with counter (w // 4 + 1, step, query, domain)."""
    key = [direction.key & MASK, direction.key >> 64]
    words = []
    for w in range(start, start + count):
        counter = [w // 4 + 1, direction.step, direction.query, domain]
        words.append(philox4x64(counter, key)[w % 4])
    return words


def stream(distribution: str, size: int, step: int = 0, query: int = 0, key: int = KEY):
    return DirectionStream(Direction(key, step, query), distribution, [(0, size)])


def whole(distribution: str, size: int, **where: int) -> torch.Tensor:
    made = stream(distribution, size, **where)
    return made.raw(0, size, CPU) * made.scale


# ---------------------------------------------------------------- the bit source


def test_the_reference_itself_passes_the_published_known_answers():
    """kat_vectors of Random123 for philox4x64-10: counters and keys all zero, all one, digits of pi."""
    assert philox4x64([0] * 4, [0] * 2) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]
    assert philox4x64([MASK] * 4, [MASK] * 2) == [
        0x87B092C3013FE90B,
        0x438C3C67BE8D0224,
        0x9CC7D7C69CD777B6,
        0xA09CAEBF594F0BA0,
    ]


@pytest.mark.parametrize("start", [0, 1, 3, 4, 65_535, 65_536, 1_000_003, (1 << 40) + 2])
@pytest.mark.parametrize("domain", [0, 1])
def test_words_are_philox(start: int, domain: int):
    direction = Direction(KEY, step=12_345, query=7)
    found = random_words(direction, start, 9, domain)
    assert found.dtype == np.uint64
    assert found.tolist() == reference_words(direction, start, 9, domain)


def test_coordinates_are_the_documented_bits():
    """rademacher: bit i of the stream, least significant first; gaussian: two 16-bit quantiles."""
    words = reference_words(Direction(KEY, 3), 0, 4, 0)
    bits = [words[i // 64] >> (i % 64) & 1 for i in range(256)]
    assert whole("rademacher", 256, step=3).tolist() == [2.0 * b - 1.0 for b in bits]

    halves = [words[i // 4] >> (16 * (i % 4)) & 0xFFFF for i in range(16)]
    normal = stats.norm.ppf((np.arange(65_536) + 0.5) / 65_536)
    normal *= math.sqrt(0.5 / np.mean(normal**2))
    pairs = [normal[a] + normal[b] for a, b in zip(halves[::2], halves[1::2], strict=True)]
    assert whole("gaussian", 8, step=3).tolist() == pytest.approx(pairs, abs=2 * 2.0**-20)

    uniforms = stream("gaussian", 16, step=3).uniforms(0, 16, CPU).tolist()
    rounding = reference_words(Direction(KEY, 3), 0, 4, 1)
    bits16 = [rounding[i // 4] >> (16 * (i % 4)) & 0xFFFF for i in range(16)]
    assert uniforms == [(b + 0.5) / 65_536 for b in bits16]


# ---------------------------------------------------------------- random access


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_any_slice_equals_the_whole(distribution: str):
    """Random unaligned slices of 300 000 coordinates, read in random order from one stream."""
    size = 300_000
    expected = stream(distribution, size).raw(0, size, CPU)
    reader, choose = stream(distribution, size), np.random.default_rng(0)
    for _ in range(60):
        start = int(choose.integers(0, size - 1))
        count = int(min(choose.integers(1, 70_000), size - start))
        assert torch.equal(reader.raw(start, count, CPU), expected[start : start + count])


@pytest.mark.parametrize(
    ("distribution", "edge"),
    [("rademacher", 65_536 * 64), ("gaussian", 65_536 * 2)],
)
def test_slices_across_a_cached_block_and_beyond_the_layout(distribution: str, edge: int):
    reader = stream(distribution, edge + 1000)
    fresh = stream(distribution, edge + 1000)
    crossing = reader.raw(edge - 333, 700, CPU)
    assert torch.equal(crossing[:333], fresh.raw(edge - 333, 333, CPU))
    assert torch.equal(crossing[333:], fresh.raw(edge, 367, CPU))
    outside = stream(distribution, 8).raw(edge - 333, 700, CPU)
    assert torch.equal(outside, crossing)


def test_uniforms_slices_equal_the_whole_and_ignore_what_was_read_before():
    reader = stream("gaussian", 600_000)
    reader.raw(0, 1000, CPU)
    expected = reader.uniforms(0, 600_000, CPU)
    for start, count in [(0, 1), (3, 6), (262_143, 2), (262_141, 300_001), (599_999, 1)]:
        part = stream("rademacher", 600_000).uniforms(start, count, CPU)
        assert torch.equal(part, expected[start : start + count])


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_threads_do_not_matter(distribution: str):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = whole(distribution, 200_001)
        torch.set_num_threads(2)
        two = whole(distribution, 200_001)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, two)


def test_signs_times_is_raw_times_the_amount():
    reader = stream("rademacher", 10_000)
    for start, count in [(0, 8), (8, 64), (1000, 9000), (63 * 8, 16)]:
        out = reader.signs_times_(torch.empty(count), start, 0.375)
        assert torch.equal(out, 0.375 * reader.raw(start, count, CPU))


def test_a_small_layout_does_not_generate_a_whole_block(monkeypatch: pytest.MonkeyPatch):
    """770 coordinates need 13 words, not 65 536."""
    asked: list[int] = []
    original = directions.random_words

    def counting(direction, start, count, domain=0):
        asked.append(count)
        return original(direction, start, count, domain)

    monkeypatch.setattr(directions, "random_words", counting)
    stream("rademacher", 770).raw(0, 770, CPU)
    assert asked == [13]


# ---------------------------------------------------------------- laws


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


def test_gaussian_table_has_variance_one_and_nearly_normal_kurtosis():
    table = directions._normal_table(CPU).double()
    second, fourth = float((table**2).mean()), float((table**4).mean())
    assert 2 * second == pytest.approx(1, abs=1e-8)
    assert 2 * fourth + 6 * second**2 == pytest.approx(3, abs=2e-3)  # E (a + b)^4
    assert torch.equal(table, -table.flip(0))


def test_gaussian_table_is_the_one_that_released_trajectories_used():
    """Its entries are public constants: a maths library that changed one would break replays."""
    digest = hashlib.sha256(directions._normal_table(CPU).numpy().tobytes()).hexdigest()
    assert digest == "25aeee68ac62b72ab71f3f459454303ed0e46452ea5dbb32ef84ae75809e995e"


def test_gaussian_goodness_of_fit_rejects_a_two_percent_scale_error():
    u = whole("gaussian", 500_000).double().numpy()
    assert stats.kstest(u, "norm").pvalue > 0.01
    assert stats.kstest(1.02 * u, "norm").pvalue < 1e-6
    assert stats.kstest(0.98 * u, "norm").pvalue < 1e-6


def test_rademacher_is_fair_and_reports_a_bias():
    u = whole("rademacher", 1 << 20)
    assert set(u.unique().tolist()) == {-1.0, 1.0}
    assert abs(z_scores(u)["mean"]) < 4.5
    lanes = u.view(-1, 64).mean(dim=0) * math.sqrt(u.numel() / 64)  # each bit position by itself
    assert float(lanes.abs().max()) < 4.5


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_second_moment_matrix_is_the_identity(distribution: str):
    """E[u u^T] = I over 4000 steps, d = 7 in two tensors; std of an entry is at most sqrt(2/n)."""
    n, layout = 4000, [(0, 3), (256, 4)]
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
def test_steps_queries_keys_and_offsets_are_independent_at_every_shift(distribution: str):
    """65 536 shifts: the largest of as many standard normals stays under 6 (p about 1e-4)."""
    n = 1 << 16
    u = whole(distribution, n, step=5)
    others = {
        "step": whole(distribution, n, step=6),
        "query": whole(distribution, n, step=5, query=1),
        "swapped": whole(distribution, n, step=1, query=5),
        "key": whole(distribution, n, step=5, key=KEY ^ 1),
        "high key": whole(distribution, n, step=5, key=KEY ^ (1 << 127)),
        "offset": stream(distribution, 8 * n, step=5).raw(4 * n, n, CPU),
    }
    for name, other in others.items():
        assert worst_correlation(u, other) < 6, name
    assert worst_correlation(u, torch.roll(u, 12_345)) > 100  # a shifted copy is caught
    assert worst_correlation(u, u + 3 * others["step"]) > 50  # so is a mixture


def test_rounding_uniforms_are_uniform_and_independent_of_the_direction():
    made = stream("gaussian", 1 << 16)
    uniforms = made.uniforms(0, 1 << 16, CPU)
    assert float(uniforms.min()) > 0
    assert float(uniforms.max()) < 1
    assert stats.kstest(uniforms.numpy(), "uniform").pvalue > 0.01
    centred = (uniforms - 0.5) * math.sqrt(12)
    assert worst_correlation(made.raw(0, 1 << 16, CPU), centred) < 6
    decay = (made.decay_uniforms(0, 1 << 16, CPU) - 0.5) * math.sqrt(12)
    assert worst_correlation(decay, centred) < 6


def test_scalar_uniforms_are_uniform_and_differ_between_tensors_and_steps():
    values = [
        stream("rademacher", 8, step=t).tensor_uniform(j) for t in range(300) for j in range(10)
    ]
    assert len(set(values)) == 3000
    assert min(values) >= 0.0
    assert max(values) < 1.0
    assert stats.kstest(values, "uniform").pvalue > 0.01


# ---------------------------------------------------------------- norms and bounds


@pytest.mark.parametrize("size", [1, 2, 5, 1000, 200_000])
def test_sphere_has_norm_root_d(size: int):
    u = whole("sphere", size, step=2).double()
    assert float(u.square().sum()) == pytest.approx(size, rel=1e-6)


def test_sphere_norm_counts_only_the_layout():
    layout = [(0, 10), (256, 3), (512, 700)]
    u = direction_vector(Direction(KEY, 0), "sphere", layout).double()
    assert u.numel() == 713
    assert float(u.square().sum()) == pytest.approx(713, rel=1e-6)


def test_squared_norm_is_the_exact_rational_sum():
    made = DirectionStream(Direction(KEY, 1), "gaussian", [(0, 70_000), (70_144, 5)])
    parts = [made.raw(0, 70_000, CPU), made.raw(70_144, 5, CPU)]
    integers = [round(z * 2**20) for z in torch.cat(parts).tolist()]
    assert made.squared_norm() == sum(n * n for n in integers) * 2.0**-40


def test_small_spheres_never_raise_whatever_the_draw():
    """sqrt(d)/||z|| passes 2 for one draw in a thousand at d = 16; that is no broken generator."""
    scales = [stream("sphere", 16, step=t).scale for t in range(4000)]
    assert max(scales) > 2.0
    for t in range(500):
        assert float(whole("sphere", 16, step=t).abs().max()) <= largest_coordinate("sphere")


def test_sphere_of_a_zero_vector_is_zero_not_nan():
    """d = 1 draws z = 0 once in 65 536 steps; E[u u^T] = I is unharmed by 2^-16 there."""
    zero = 164_046  # the first such step of KEY
    word = int(random_words(Direction(KEY, zero), 0, 1)[0])
    assert word & 0xFFFF == 0xFFFF - (word >> 16 & 0xFFFF)  # opposite quantiles
    made = stream("sphere", 1, step=zero)
    assert float(made.raw(0, 1, CPU)) == 0.0
    assert made.scale == 0.0


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_largest_coordinate_is_a_bound(distribution: str):
    u = whole(distribution, 1 << 20)
    assert float(u.abs().max()) <= largest_coordinate(distribution)
    if distribution == "gaussian":
        widest = 2 * float(directions._normal_table(CPU)[-1])
        assert largest_coordinate("gaussian") == widest
        assert 6.0 < widest < 6.2


def test_unknown_distribution_is_named():
    with pytest.raises(ValueError, match=r"direction='cauchy'.*rademacher, gaussian, sphere"):
        stream("cauchy", 4)


def test_new_keys_differ_and_fit_128_bits():
    keys = {directions.new_key() for _ in range(50)}
    assert len(keys) == 50
    assert all(0 <= key < 1 << 128 for key in keys)
    assert max(keys) > 1 << 120
