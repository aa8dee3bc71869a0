"""Online federated learning with correlated noise: Algorithm 1, sensitivity, noise, clients."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hf_dpzero.privacy.correlated import factorization as f
from scripts.studies.online_federated import logistic as logistic
from scripts.studies.online_federated import network as network
from scripts.studies.online_federated.algorithm import (
    NOISES,
    Cells,
    Federation,
    Stream,
    calibrated,
    clipped,
    decoder,
    increments,
    learn,
    local_message,
    paper_column_bound,
    paper_deviation,
    paper_tree_norm,
    simulate,
    true_epsilon,
)


def rng(seed=0):
    return np.random.Generator(np.random.Philox(seed))


def records_of(federation, seed=0, dimension=4):
    """All rounds of one seed's logistic clients."""
    generator = rng(seed)
    population = logistic.Population.of(generator, federation.learners, dimension, 0.1, 0.1)
    rounds = logistic.stream([population], [generator], federation.rounds, federation.local_steps)
    return [logistic.Records(r.features.astype(float), r.labels.astype(float)) for r in rounds]


def learner_streams(federation, rounds):
    """The same records for `learn`: one stream a learner."""
    return [
        Stream([list(zip(r.features[0, i], r.labels[0, i], strict=True)) for r in rounds])
        for i in range(federation.learners)
    ]


# --- Algorithm 1


@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize("rounds", [1, 3, 6])
def test_prefix_sums_carry_b_times_xi(name, rounds):
    """x^r = x^0 - etilde (sum of g + b^r xi), b^0 = 0: x^0 is not lost, and x^0 itself has no noise."""
    federation = Federation(rounds=rounds, local_steps=2, learners=3)
    make = NOISES[name]
    noise = make(rounds) if make else None
    xi = rng(1).standard_normal((3, rounds, 4))
    added = [increments(noise, x) for x in xi]
    data, start = records_of(federation), np.array([5.0, -1.0, 2.0, 0.5])
    run = list(
        learn(
            federation, logistic.gradient, learner_streams(federation, data), added,
            etilde=0.1, start=start,
        )
    )  # fmt: skip
    assert len(run) == rounds
    b = decoder(noise) if noise else np.zeros((rounds, rounds))
    models = [start, *(x for x, _ in run)]
    gradients = np.zeros((3, 4))
    for r in range(rounds):
        again = learner_streams(federation, data)
        for earlier in range(r):
            for stream in again:
                stream.take(earlier)
        gradients += [
            local_message(logistic.gradient, models[r], s.take(r), 0.05, 1.0) for s in again
        ]
        sums = gradients + np.einsum("w,iwd->id", b[r], xi)
        np.testing.assert_allclose(sum(m for _, m in run[: r + 1]), sums, atol=1e-12)
        np.testing.assert_allclose(models[r + 1], start - 0.1 * sums.mean(axis=0), atol=1e-12)
    if noise:
        ones = np.tril(np.ones((rounds, rounds)))
        whitened = np.linalg.solve(np.linalg.cholesky(b @ b.T), ones)  # of the release A G + B xi
        assert np.linalg.norm(whitened, axis=0).max() == pytest.approx(noise.sensitivity, rel=1e-9)


def test_many_cells_at_once_are_the_algorithm_for_each():
    federation = Federation(rounds=6, local_steps=3, learners=4, clip=0.4, server_rate=2.0)
    data, start = records_of(federation), np.array([0.3, -1.0, 0.2, 0.5])
    kinds = [f.tree(6), f.toeplitz(6)]
    xi = rng(2).standard_normal((4, 6, 4))
    mean = xi.mean(axis=0) * math.sqrt(4)  # simulate divides V by sqrt(n)
    noises = np.stack([increments(k, mean)[:, None] for k in kinds])
    cells = Cells(np.array([0.1, 0.1, 0.7]), np.array([0, 1, 1]), np.array([0.2, 0.3, 0.0]))
    found = list(
        simulate(federation, logistic.Logistic(), Stream(data), noises, cells, start[None])
    )
    for c in range(3):
        added = [cells.scales[c] * increments(kinds[cells.kinds[c]], x) for x in xi]
        run = learn(
            federation, logistic.gradient, learner_streams(federation, data), added,
            etilde=cells.steps[c], start=start,
        )  # fmt: skip
        for x, (expected, _) in zip(found, run, strict=True):
            np.testing.assert_allclose(x[c, 0], expected, atol=1e-10)


def test_a_gradient_is_clipped_and_one_that_is_not_finite_counts_as_zero():
    g = np.array([[3.0, 4.0], [0.3, 0.4], [np.nan, 1.0], [-np.inf, 1.0], [0.0, 0.0]])
    expected = [[0.6, 0.8], [0.3, 0.4], [0, 0], [0, 0], [0, 0]]
    np.testing.assert_allclose(clipped(g, 1.0), expected)
    assert clipped(g[:2], math.inf) is not None and np.array_equal(clipped(g[:2], math.inf), g[:2])


# --- sensitivity


def concave(z, record):
    """Repels from 0, but the records "left" and "right" push to their side."""
    direction = {"left": 1.0, "right": -1.0}.get(record)
    return np.array([direction if direction else -np.sign(z[0])])


def test_one_record_moves_a_message_by_two_clips_whatever_tau():
    """The 1/tau of the mean is lost: the later local steps follow the first."""
    federation = Federation(rounds=1, local_steps=5, learners=1, clip=0.5)
    messages = [
        local_message(concave, np.zeros(1), [first, *["any"] * 4], 0.1, federation.clip)
        for first in ("left", "right")
    ]
    assert abs(messages[0] - messages[1])[0] == pytest.approx(federation.sensitivity()) == 1.0


def test_a_convex_loss_keeps_the_mean():
    """Random and adversarial replacements stay within 2 B_g / tau at eta L <= 2, and attain it."""
    federation = Federation(rounds=1, local_steps=4, learners=1, clip=0.3)
    norm = 3.0
    smoothness = logistic.Logistic(norm).smoothness
    assert smoothness == norm**2 / 4
    etilde = 2 / smoothness * federation.local_steps  # eta = 2 / L
    bound = federation.convex_sensitivity(etilde, smoothness)
    assert bound == pytest.approx(2 * 0.3 / 4)
    generator, largest = rng(3), 0.0
    for _ in range(400):
        a = clipped(4 * generator.standard_normal((5, 2)), norm)
        b = generator.choice([-1.0, 1.0], 5)
        x, at = 3 * generator.standard_normal(2), int(generator.integers(4))
        records = list(zip(a[:4], b[:4], strict=True))
        other = [*records[:at], (a[4], b[4]), *records[at + 1 :]]
        rate = federation.local_rate(etilde)
        pair = [local_message(logistic.gradient, x, r, rate, 0.3) for r in (records, other)]
        largest = max(largest, float(np.linalg.norm(pair[0] - pair[1])))
    assert 0.9 * bound < largest <= bound * (1 + 1e-12)
    with pytest.raises(ValueError, match=r"above 2 / L = 0\.888889.*sensitivity is 2 clip"):
        federation.convex_sensitivity(1.01 * etilde, smoothness)


# --- noise and epsilon


@pytest.mark.parametrize("name", [n for n in NOISES if NOISES[n]])
def test_increments_are_the_rows_of_the_factorisation(name):
    noise = NOISES[name](13)
    xi = rng(4).standard_normal((13, 2, 3))
    rows = [noise.noise_row(r) for r in range(13)]
    expected = [np.tensordot(weights, xi[draws], axes=1) for draws, weights in rows]
    np.testing.assert_allclose(increments(noise, xi), expected, atol=1e-12)
    assert increments(noise, xi.astype(np.float32)).dtype == np.float32
    with pytest.raises(ValueError, match="12 rows for 13 rounds"):
        increments(noise, xi[:12])


def test_the_paper_s_tree_is_worse_than_independent_noise_for_few_rounds():
    errors = {r: f.tree(r).prefix_error / f.independent(r).prefix_error for r in (4, 16, 64, 1000)}
    assert errors[4] == pytest.approx(1.5) and errors[16] == pytest.approx(1.2132, abs=1e-4)
    assert errors[64] < 0.66 and errors[1000] < 0.1
    # all 2R - 1 nodes of the padded tree have a root above 1,000 rounds
    assert paper_tree_norm(1000) == math.sqrt(11) and f.tree(1000).sensitivity == math.sqrt(10)
    assert [round(paper_tree_norm(r) ** 2) for r in (1, 2, 3, 4)] == [1, 2, 3, 3]


def test_epsilon_of_both_calibrations():
    for epsilon, exact, paper in ((2.0, 1.4452, 1.9844), (0.5, 4.6101, 7.5660)):
        v = calibrated(epsilon, 1e-3, 3.0)
        assert v / 3 == pytest.approx(exact, abs=1e-4)
        assert epsilon * (1 - 1e-6) < true_epsilon(v, 1e-3, 3.0) <= epsilon * (1 + 1e-8)
        assert true_epsilon(v * 2 / 3, 1e-3, 3.0) > 1.3 * epsilon
        assert paper_deviation(epsilon, 1e-3, 3.0) / 3 == pytest.approx(paper, abs=1e-4)
    assert true_epsilon(0.0, 1e-3, 1.0) == math.inf


def test_equation_8_is_below_the_column_norm_and_gives_more_epsilon_than_asked():
    for rounds in (2, 4, 16, 100, 1000, 10_000):
        norm, bound = f.toeplitz(rounds).sensitivity, paper_column_bound(rounds)
        assert 0.9 * norm < bound < norm
        assert true_epsilon(calibrated(2, 1e-3, bound), 1e-3, norm) > 2.03
        # Lemma IV.8's slack hides it
        assert true_epsilon(paper_deviation(2, 1e-3, bound), 1e-3, norm) < 1.5


def test_the_messages_have_the_noise_that_is_accounted():
    """Power: the messages' noise, decorrelated by C, has deviation V; 2/3 V and 3/2 V are rejected."""
    federation = Federation(rounds=20, local_steps=1, learners=1)
    noise = f.toeplitz(20)
    v = calibrated(2.0, 1e-3, federation.sensitivity() * noise.sensitivity)
    start, d = np.zeros(60), 60
    added = [v * increments(noise, rng(6).standard_normal((20, d)))]
    zero = Stream([[None]] * 20)
    run = learn(federation, lambda z, _: 0 * z, [zero], added, etilde=1.0, start=start)
    sums = np.cumsum([m[0] for _, m in run], axis=0)
    xi = np.linalg.solve(decoder(noise), sums)
    for scale, fits in ((v, True), (v * 2 / 3, False), (v * 3 / 2, False)):
        z = ((xi / scale) ** 2).sum()
        assert (abs(z - xi.size) < 4 * math.sqrt(2 * xi.size)) == fits


# --- refusals


def test_impossible_settings_are_refused():
    good = Federation(rounds=2, local_steps=1, learners=1)
    start, zero = np.zeros(2), [np.zeros((2, 2))]

    def run(streams=None, noises=None):
        streams = [Stream([[0], [0]])] if streams is None else streams
        return list(learn(good, lambda z, _: z, streams, noises or zero, etilde=1.0, start=start))

    assert len(run()) == 2
    used = Stream([[0], [0]])
    used.take(0)
    for make, message in (
        (lambda: Federation(rounds=2, local_steps=0, learners=1), "local_steps=0"),
        (lambda: Federation(rounds=0, local_steps=1, learners=1), "rounds=0"),
        (lambda: Federation(rounds=1, local_steps=1, learners=1, clip=0.0), "clip=0"),
        (
            lambda: Federation(rounds=1, local_steps=1, learners=1, clip=math.inf).sensitivity(),
            "no bound",
        ),
        (lambda: local_message(concave, np.zeros(1), [], 1.0, 1.0), "tau = 0"),
        (lambda: run([Stream([])]), "ended after 0 rounds"),
        (lambda: run([Stream([[0]])]), "ended after 1 rounds"),
        (lambda: run([used]), "a record is used once"),
        (lambda: run([Stream([[0, 0], [0]])]), "has 2 records; local_steps=1"),
        (lambda: run(noises=[np.zeros((3, 2))]), "2 x 2"),
        (lambda: run([]), "0 streams"),
        (
            lambda: next(
                simulate(
                    good, logistic.Logistic(), Stream([]), np.zeros((1, 3, 1, 2)),
                    Cells(*np.zeros((3, 1))), np.zeros((1, 2)),
                )
            ),
            "noises for 3 rounds",
        ),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            make()
