"""Samplers: the distribution that runs is the one that is accounted."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from hf_dpzero.privacy import sampling
from hf_dpzero.privacy.sampling import (
    FixedBatchesSampler,
    FixedSizeSampler,
    PoissonSampler,
    TruncatedPoissonSampler,
    inclusion_threshold,
    new_sampler_key,
)

KEY = bytes(range(32))
GOLDEN = {  # recorded once; a change breaks every run that resumes
    "poisson": [1, 5, 26, 42, 43, 46, 47],
    "truncated": [1, 5, 42, 43, 46],
    "fixed": [23, 24, 41, 45, 46],
}
FALSE_ALARM = 1e-7


def words_by_the_book(n: int, step: int, domain: bytes, attempt: int = 0) -> list[int]:
    """The documented bit source, written again without numpy."""
    data = b"hf_dpzero.sampling." + domain.ljust(16, b"\0") + KEY
    data += step.to_bytes(8, "little") + attempt.to_bytes(8, "little")
    stream = hashlib.shake_256(data).digest(8 * n)
    return [int.from_bytes(stream[8 * i : 8 * i + 8], "little") for i in range(n)]


def subset_by_the_book(n: int, size: int, step: int, domain: bytes) -> list[int]:
    """The first `size` different places of a stream of uniform ones, or what they leave."""
    if 2 * size > n:
        return sorted(set(range(n)) - set(subset_by_the_book(n, n - size, step, domain)))
    found: list[int] = []
    for word in words_by_the_book(20 * n, step, domain):
        if len(found) < size and word < 2**64 // n * n and word % n not in found:
            found.append(word % n)
    return sorted(found)


def exact_binomial(n: int, p: Fraction) -> list[Fraction]:
    return [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]


@pytest.mark.parametrize("q", [0.1, 0.15, 0.6])
def test_poisson_is_the_documented_function_of_key_and_step(q):
    """The number of rows by inversion in rational arithmetic, then a uniform subset of that size."""
    n = 40
    chances = exact_binomial(n, Fraction(inclusion_threshold(q * n / n), 2**64))
    sampler, sizes = PoissonSampler(num_examples=n, expected_batch_size=q * n), set()
    for step in (*range(25), 2**40):
        first, second = words_by_the_book(2, step, b"poisson count")
        digits = first.to_bytes(8, "little") + second.to_bytes(8, "little")
        uniform = Fraction(int.from_bytes(digits, "big"), 2**128)
        size = sum(uniform >= below for below in itertools.accumulate(chances))
        batch = sampler.batch(step, KEY)
        assert batch.tolist() == subset_by_the_book(n, size, step, b"poisson")
        assert batch.dtype == np.int64
        sizes.add(size)
    assert len(sizes) > 5


@pytest.mark.parametrize(("n", "quarters"), [(3, 1), (4, 3), (5, 2)])
def test_the_number_of_rows_is_binomial_exactly(n, quarters, monkeypatch):
    """All first digits of U in turn, so few that more are taken where these do not decide."""
    bits, seen, asked = 2 * n + 2, Counter(), []
    for digits in range(2**bits):
        # Ends in a third of a unit: at no boundary, for these are multiples of 4^-n.
        uniform = (3 * digits + 1) * 2 ** (8192 - bits) // 3

        def stream(size, *_, uniform=uniform):
            asked.append(size)
            return (uniform >> (8192 - 8 * size)).to_bytes(size, "big")

        monkeypatch.setattr(sampling, "_stream", stream)
        seen[sampling._binomial(n, quarters * 2**62, 0, KEY, bits=8)] += 1
    chances = exact_binomial(n, Fraction(quarters, 4))
    assert [seen[k] for k in range(n + 1)] == [2**bits * chance for chance in chances]
    assert max(asked) > 1  # eight bits did not always decide


def test_time_and_memory_of_a_step_follow_from_the_batch(monkeypatch):
    """A hundred million rows: a few hundred words of the stream, and of weights."""
    read, stream = [], sampling._stream
    monkeypatch.setattr(sampling, "_stream", lambda size, *a: read.append(size) or stream(size, *a))
    for sampler in (
        PoissonSampler(num_examples=10**8, expected_batch_size=64),
        TruncatedPoissonSampler(num_examples=10**8, expected_batch_size=64, max_batch_size=65),
        FixedSizeSampler(num_examples=10**8, expected_batch_size=64),
    ):
        read.clear()
        assert 20 < len(sampler.batch(3, KEY)) < 120 and sum(read) < 8 * 400
    threshold = inclusion_threshold(64 / 10**8)
    lowest, sums, lacking = sampling._binomial_sums(10**8, threshold, 128)
    assert lowest == 0 and len(sums) < 400 and lacking == (10**8 + 1) ** 2
    expected = stats.binom.cdf(np.arange(len(sums) - 1), 10**8, 64 / 10**8)
    assert np.allclose([s / sums[-1] for s in sums[1:]], expected, rtol=1e-7, atol=1e-30)


def test_streams_are_pinned_so_that_a_resumed_run_continues_its_own_batches():
    sizes = {"num_examples": 50, "expected_batch_size": 5}
    assert PoissonSampler(**sizes).batch(4, KEY).tolist() == GOLDEN["poisson"]
    assert FixedSizeSampler(**sizes).batch(3, KEY).tolist() == GOLDEN["fixed"]
    truncated = TruncatedPoissonSampler(**sizes, max_batch_size=5)
    assert truncated.batch(4, KEY).tolist() == GOLDEN["truncated"]


@pytest.mark.parametrize("q", [1e-6, 0.016, 1 / 3, 0.1, 0.5, 1 - 2**-53])
def test_the_threshold_is_exact_and_never_above_q(q):
    threshold = inclusion_threshold(q)
    assert Fraction(threshold, 2**64) <= Fraction(q) < Fraction(threshold + 1, 2**64)


@pytest.mark.false_alarm(0)  # a fixed key
def test_poisson_rates_and_independence():
    n, b, steps = 40, 10, 5000
    sampler = PoissonSampler(num_examples=n, expected_batch_size=b)
    member = np.zeros((steps, n), dtype=bool)
    for step in range(steps):
        member[step, sampler.batch(step, KEY)] = True
    assert stats.binomtest(int(member.sum()), steps * n, b / n).pvalue > FALSE_ALARM
    counts = member.sum(axis=0)
    z = (counts - steps * b / n) / math.sqrt(steps * b / n * (1 - b / n))
    assert np.abs(z).max() < 6
    correlation = np.corrcoef(member.T) - np.eye(n)
    assert np.abs(correlation).max() < 6.5 / math.sqrt(steps)
    lag = np.corrcoef(member[:-1].ravel(), member[1:].ravel())[0, 1]
    assert abs(lag) < 6 / math.sqrt(steps * n)
    sizes = np.bincount(member.sum(axis=1), minlength=n + 1)
    expected = steps * stats.binom.pmf(np.arange(n + 1), n, b / n)
    keep = expected > 5
    observed = [*sizes[keep], sizes[~keep].sum()]
    right = [*expected[keep], expected[~keep].sum()]
    assert stats.chisquare(observed, right).pvalue > FALSE_ALARM
    wrong = steps * stats.binom.pmf(np.arange(n + 1), n, b / n * 1.1)
    wrong = [*wrong[keep], wrong[~keep].sum()]
    assert stats.chisquare(observed, np.array(wrong)).pvalue < 1e-20


def test_poisson_extremes():
    everyone = PoissonSampler(num_examples=7, expected_batch_size=7)
    assert everyone.batch(0, KEY).tolist() == list(range(7))
    rare = PoissonSampler(num_examples=10, expected_batch_size=1e-12)
    assert rare.batch(0, KEY).shape == (0,)


@pytest.mark.false_alarm(0)  # a fixed key
def test_fixed_size_sets_are_equally_likely():
    sampler = FixedSizeSampler(num_examples=6, expected_batch_size=3)
    seen = Counter(tuple(sampler.batch(step, KEY).tolist()) for step in range(8000))
    assert set(seen) == set(itertools.combinations(range(6), 3))
    assert stats.chisquare(list(seen.values())).pvalue > FALSE_ALARM


def test_words_that_would_favour_low_places_and_places_taken_are_passed_over(monkeypatch):
    """Three rows: of 2^64 = 3 m + 1 words the last is left out, and a place counts once."""
    words = np.array([2**64 - 1, 1, 4, 1, 2**64 - 2], dtype=np.uint64)
    monkeypatch.setattr(sampling, "_words", lambda count, *a: words[:count])
    assert sampling._subset(3, 1, 0, KEY, b"").tolist() == [1]
    assert sampling._subset(3, 2, 0, KEY, b"").tolist() == [0, 2]  # what [1] leaves
    assert sampling._subset(6, 2, 0, KEY, b"").tolist() == [1, 4]
    assert sampling._subset(5, 2, 0, KEY, b"").tolist() == [1, 4]


@pytest.mark.false_alarm(0)  # a fixed key
@pytest.mark.parametrize("q", [0.3, 0.7])
def test_poisson_sets_of_four_rows_have_the_probability_of_independent_ones(q):
    """All 16 sets, by chi-square; another q, or drawing with replacement, is found."""
    steps = 6000
    sampler = PoissonSampler(num_examples=4, expected_batch_size=4 * q)
    seen = Counter(tuple(sampler.batch(step, KEY).tolist()) for step in range(steps))

    def p(q: float) -> float:
        return stats.chisquare(
            [seen[s] for size in range(5) for s in itertools.combinations(range(4), size)],
            [
                steps * q**size * (1 - q) ** (4 - size)
                for size in range(5)
                for _ in range(math.comb(4, size))
            ],
        ).pvalue

    assert p(q) > FALSE_ALARM
    assert p(q + 0.03) < 1e-8
    # With replacement two draws are one place of four in a quarter of cases.
    pairs = sum(seen[s] for s in itertools.combinations(range(4), 2))
    expected = steps * 6 * q**2 * (1 - q) ** 2
    assert abs(pairs - expected) < 6 * math.sqrt(expected) < expected / 4


@pytest.mark.false_alarm(0)  # a fixed key
def test_truncation_keeps_a_uniform_subset_of_the_poisson_sample():
    n, b, cap = 6, 3, 4
    truncated = TruncatedPoissonSampler(num_examples=n, expected_batch_size=b, max_batch_size=cap)
    plain = PoissonSampler(num_examples=n, expected_batch_size=b)
    kept: dict[int, Counter] = {5: Counter(), 6: Counter()}
    for step in range(20_000):
        full, batch = plain.batch(step, KEY).tolist(), truncated.batch(step, KEY).tolist()
        assert len(batch) <= cap
        if len(full) <= cap:
            assert batch == full
        else:
            assert set(batch) < set(full)
            kept[len(full)][tuple(full.index(i) for i in batch)] += 1
    for size, seen in kept.items():
        assert set(seen) == set(itertools.combinations(range(size), cap))
        assert stats.chisquare(list(seen.values())).pvalue > FALSE_ALARM


def test_domains_keys_and_steps_give_unrelated_streams():
    poisson = PoissonSampler(num_examples=400, expected_batch_size=200)
    fixed = FixedSizeSampler(num_examples=400, expected_batch_size=200)
    batches = [
        poisson.batch(0, KEY),
        poisson.batch(1, KEY),
        poisson.batch(0, bytes(32)),
        poisson.batch(0, new_sampler_key()),
        fixed.batch(0, KEY),
    ]
    for a, b in itertools.combinations(batches, 2):
        overlap = len(set(a.tolist()) & set(b.tolist()))
        assert abs(overlap - 100) < 70
    assert new_sampler_key() != new_sampler_key()


def test_fixed_batches_visit_each_row_once_an_epoch_in_the_same_place():
    sampler = FixedBatchesSampler(num_examples=23, expected_batch_size=5)
    epochs = [[sampler.batch(5 * epoch + i, KEY) for i in range(5)] for epoch in range(3)]
    assert sampler.period == 5
    assert max(len(batch) for batch in epochs[0]) == 5  # two of 25 places are empty
    assert sorted(np.concatenate(epochs[0]).tolist()) == list(range(23))
    for epoch in epochs[1:]:
        assert all(map(np.array_equal, epoch, epochs[0]))
    other = [sampler.batch(i, bytes(32)).tolist() for i in range(5)]
    assert other != [batch.tolist() for batch in epochs[0]]


@pytest.mark.false_alarm(0)  # a fixed key
def test_the_order_of_fixed_batches_is_uniform():
    """Each row in each place equally often, over keys: 4 rows in 2 batches of 2, six splits."""
    sampler = FixedBatchesSampler(num_examples=4, expected_batch_size=2)
    keys = (i.to_bytes(32, "little") for i in range(3000))
    counts = Counter(tuple(sampler.batch(0, key).tolist()) for key in keys)
    assert len(counts) == 6
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4
