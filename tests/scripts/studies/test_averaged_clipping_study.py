"""The study of averaged clipping: robust mean, theorems' parameters, data, tables, the command."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy.integrate import quad

from scripts.studies.averaged_clipping import algorithm as averaged_clipping
from scripts.studies.averaged_clipping import (
    catoni_holland,
    heavy_tails,
    parameters,
    report,
    sweeps,
)
from scripts.studies.averaged_clipping import study as study_module
from scripts.studies.averaged_clipping.algorithm import LINEAR, LOGISTIC, Cells, Descent
from scripts.studies.averaged_clipping.heavy_tails import OBJECTIVES, Yardstick, draw
from scripts.studies.averaged_clipping.study import QUICK, Study
from scripts.studies.harness import run

SMALL = Study(
    num_examples=500, epsilons=(0.5, 2.0), seeds=(1, 2), schedules=((8, 20), (16, 20)),
    full_batch_steps=(2,), objectives=("linear",), noises=("laplace", "chi2"),
)  # fmt: skip
PROBLEM = parameters.Problem(
    smoothness=1.0, distance=1.0, variance=1.0, dimension=10, num_examples=100_000,
    epsilon=1.0, delta=1e-5, beta=0.01,
)  # fmt: skip


def rng(seed=1):
    return np.random.default_rng(seed)


def columns(*cells):
    return Cells(*np.array(cells, dtype=np.float64).T)


def test_eq_9_gives_a_fortieth_of_the_noise_that_is_needed():
    """Theorem 3's own N and m at n = 1e5, d = 10, eps = 1 with L = R = sigma = 1, beta = .01."""
    made = parameters.constrained(PROBLEM)
    assert (made.descent.steps, made.descent.batch_size, made.clip) == (14, 222, 2.0)
    published = parameters.paper_calibration(made.descent, 100_000, 1.0, 1e-5)
    assert published == pytest.approx(0.0282, abs=1e-4)

    def spent(sigma):
        return averaged_clipping.true_epsilon(made.descent, 100_000, sigma, 1e-5)

    # 1.184 lambda are needed, 0.592 of the sensitivity 2 lambda
    assert spent(1.186) < 1 < spent(1.182) and spent(published) > 5000


def test_the_authors_script_gives_dp_sgd_hundreds_of_times_the_noise_it_needs():
    """TEST.m of github.com/Jchenhan/AClippingDP: ridge regression on Adult at eps = 1.

    n = 28,000, m = 200, 4,200 steps. It squares the deviation of Eq. 9 and passes it to
    std::normal_distribution, which takes a deviation; the noise is on the mean of the clipped gradients.
    """
    n, m, steps, delta = 28_000, 200, 4200, 1 / 28_000
    averaged = Descent(steps=steps, batch_size=m)
    eq9 = parameters.paper_calibration(averaged, n, 1.0, delta)
    clip_uc = math.sqrt(162 * steps**2 / (math.log(4 * steps / 0.01) ** 2 * m)) / 300
    clip_sgd = 6 / 5 / (0.1 * math.sqrt(steps) ** (2 / 3))
    assert (round(clip_uc, 2), round(clip_sgd, 2)) == (0.88, 0.74)  # the appendix: 0.87, 0.74
    uc = (clip_uc * eq9) ** 2 / clip_uc
    on_mean = (2 * 5.29 * clip_sgd * 24 / m * math.sqrt(1.95) * 2 / 3 * eq9) ** 2
    sgd = m * on_mean / clip_sgd
    assert (uc, sgd) == (pytest.approx(1.93, abs=0.01), pytest.approx(456, abs=1))
    assert 2.4 < averaged_clipping.true_epsilon(averaged, n, uc, delta) < 2.7
    per_example = Descent(clipping="per_example", steps=steps, batch_size=m)
    assert averaged_clipping.true_epsilon(per_example, n, 1.76, delta) < 1.0


def test_dp_gds_accounting_is_the_gaussian_mechanism_of_its_sensitivity():
    plan = catoni_holland.plan(1000, 25).calibrate(epsilon=1.0, delta=1e-5)
    assert plan.accountant_used == "gaussian_exact"
    # noise on the mean over the replace-one sensitivity, of T steps together
    one = catoni_holland.plan(1000, 1).calibrate(epsilon=1.0, delta=1e-5)
    ratio = plan.mechanism.noise_multiplier / one.mechanism.noise_multiplier
    assert ratio == pytest.approx(5.0, rel=1e-3)
    assert one.mechanism.noise_multiplier / 2 == pytest.approx(
        3.73, abs=0.01
    )  # Balle and Wang 2018


# --- the robust mean


def test_the_closed_form_has_the_golden_values():
    a, b = np.array([0.3, 1.5, -2.0, 5.0]), np.array([0.2, 0.6, 1.0, 2.0])
    found = catoni_holland.smoothed_phi(a, b)
    np.testing.assert_allclose(found, [0.2895, 0.8638994, -0.8571481, 0.9267346], atol=5e-8)


@pytest.mark.parametrize(
    ("a", "b"), [(0.0, 0.5), (1.4, 0.01), (-0.7, 3.0), (30.0, 12.0), (2.0, 1e-3)]
)
def test_the_closed_form_is_the_integral(a, b):
    def integrand(u):
        density = math.exp(-((u - a) ** 2) / (2 * b * b)) / (b * math.sqrt(2 * math.pi))
        return float(catoni_holland.phi(np.array(u))) * density

    root = math.sqrt(2)
    edges = sorted({a - 10 * b, a + 10 * b, *(e for e in (-root, root, a) if abs(e - a) < 10 * b)})
    expected = sum(quad(integrand, lo, hi, epsabs=1e-12)[0] for lo, hi in itertools.pairwise(edges))
    found = float(catoni_holland.smoothed_phi(np.array(a), np.array(b)))
    assert found == pytest.approx(expected, abs=1e-9)


def test_the_table_is_the_closed_form_bounded_and_finite_at_infinity():
    influence = catoni_holland.Influence(7.6)
    a = np.concatenate([np.linspace(-5, 5, 999), -np.logspace(0, 2.9, 99), [0.0]])
    exact = catoni_holland.smoothed_phi(a, np.abs(a) / math.sqrt(7.6))
    np.testing.assert_allclose(influence(a), exact, atol=1e-6)
    extremes = influence(np.array([np.inf, -np.inf, 1e300, 1e5]))
    assert np.all(np.abs(extremes) <= catoni_holland.BOUND) and extremes[1] == -extremes[0]
    with pytest.raises(ValueError, match="NaN"):
        influence(np.array([np.nan]))
    with pytest.raises(ValueError, match="precision"):
        catoni_holland.Influence(0.0)


def test_the_robust_means_sensitivity_is_attained_and_never_exceeded():
    generator, influence = rng(), catoni_holland.Influence(30.0)
    values, scale = generator.standard_cauchy((40, 5)), 2.0
    bound = catoni_holland.sensitivity(scale, 5, 40)
    assert bound == pytest.approx(4 * math.sqrt(2) * 2.0 * math.sqrt(5) / (3 * 40))
    low, high = values.copy(), values.copy()
    low[0], high[0] = -1e9, 1e9
    means = [catoni_holland.robust_mean(v, scale, influence) for v in (low, high)]
    moved = np.linalg.norm(means[1] - means[0])
    assert 0.9999 * bound < moved <= bound
    for _ in range(100):
        other = values.copy()
        other[3] = generator.standard_cauchy(5) * 100
        mean = catoni_holland.robust_mean(other, scale, influence)
        first = catoni_holland.robust_mean(values, scale, influence)
        assert np.linalg.norm(mean - first) <= bound
    # the plan's noise is stated in the sensitivity of the sum under add-or-remove, half of n * bound
    assert catoni_holland.plan(40, 1).mechanism.sensitivity("replace_one") == 2.0


def test_dp_gd_is_the_algorithm_written_out():
    data = draw(LOGISTIC, "chi2", 60, rng())
    found = catoni_holland.run(LOGISTIC, data, 2, columns((0.2, 3.0, 0.7)), rng(4))[0]
    generator, x, precision = rng(4), np.zeros(10), math.log(2 / 0.01)
    for _ in range(2):
        gradients = LOGISTIC.slopes(x[None], data) * data.features
        a = gradients / 3.0
        mean = 3.0 * catoni_holland.smoothed_phi(a, np.abs(a) / math.sqrt(precision)).mean(axis=0)
        deviation = 0.7 * catoni_holland.sensitivity(3.0, 10, 60) / 2
        x = x - 0.2 * (mean + deviation * generator.standard_normal(10))
    np.testing.assert_allclose(found, x, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dataclasses.replace(PROBLEM, beta=4 / math.e), "4/e"),
        (lambda: parameters.constrained(dataclasses.replace(PROBLEM, variance=1e4)), "more data"),
        (lambda: parameters.hoelder(PROBLEM, 1.5, 1.0, 0.1), "exponent=1.5"),
        (lambda: draw(LINEAR, "cauchy", 3, rng()), "laplace"),
        (lambda: catoni_holland.smoothed_phi(np.zeros(1), np.array(-1.0)), "standard deviation"),
    ],
)
def test_impossible_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- the theorems' parameters


def test_parameters_are_the_theorems():
    p = PROBLEM
    assert p.steps == round((1e5 / math.sqrt(10 * math.log(1e5))) ** (2 / 7)) == 14
    log = math.log(400)
    made = parameters.constrained(p)
    assert made.rate == 1 / (2 * log) and made.descent.radius == 1.0
    assert made.descent.batch_size == math.ceil(81 * 14**2 / (2 * log**2))

    log = math.log(4 * 14 / 0.01)
    made = parameters.unconstrained(p)
    root = math.sqrt(10 * 14 * math.log(4 * 14**2 / 0.01) * math.log(1e5))
    d = 648 * made.rate * 14**3 * root / (1e5 * log**2)
    assert made.rate == 1 / (24 * log) and math.isclose(made.clip, 4 + 2 * math.sqrt(d))
    assert made.descent.batch_size == max(1, math.ceil(162 * 14**2 / (made.clip * log) ** 2))

    made = parameters.hoelder(p, 0.5, 2.0, 0.1)
    assert math.isclose(made.clip, 4 * math.sqrt(7))
    log = math.log(800)
    assert made.descent.batch_size == max(1, math.ceil(27 * 14 / (made.clip**2 * log)))
    d = 108 * 14**1.5 * math.sqrt(10 * math.log(8 * 14 / 0.01) * math.log(1e5)) / (1e5 * log)
    assert math.isclose(
        made.rate,
        min(
            0.1 ** (1 / 3) / (8 * 2 ** (4 / 3)),
            1 / (math.sqrt(28) * 0.1 ** (1 / 3) * 2 ** (2 / 3)),
            1 / (2 * made.clip * log),
            made.clip / (2 * d * 14),
        ),
    )


def test_restarts_have_theorem_6s_steps():
    made = parameters.restarted(PROBLEM, strong_convexity=1.0)
    n0 = made.descent.steps
    assert n0 / math.log(4 * n0 / 0.01) >= 768 > (n0 - 2) / math.log(4 * (n0 - 2) / 0.01)
    assert made.descent.stages == math.ceil(math.log(1e5))
    assert made.clip == parameters.unconstrained(PROBLEM, n0).clip


# --- data


def test_excess_risk_is_zero_at_the_optimum_only():
    for objective in (LINEAR, LOGISTIC):
        yardstick = Yardstick.of(objective, "laplace", 4000, seed=1)
        x = np.stack([yardstick.best, yardstick.best + 0.1, np.full(10, np.nan)])
        found = yardstick.excess(x)
        assert abs(found[0]) < 1e-12 and found[1] > 1e-3 and found[2] == np.inf
    gradient = yardstick.objective.slopes(x[:1], yardstick.data).T @ yardstick.data.features
    assert np.abs(gradient).max() / 4000 < 1e-10


# --- the study


def test_rows_tables_and_plot(tmp_path, monkeypatch):
    """Without an accountant, whose own tests are above, and the tables on one problem."""
    monkeypatch.setattr(study_module, "calibrated", lambda *_: 2.0)
    monkeypatch.setattr(study_module, "true_epsilon", lambda *_: 99.0)
    rows = run(SMALL, tmp_path)
    assert len(rows) == 2 * (1 + 2 * 5) + 2 * 2 * 5
    for row in rows:
        assert len(row["excess"]) == len(row["loss_ratio"]) == 2
        correct = row["calibration"] == "correct"
        assert row["true_epsilon"] == (row["epsilon"] if correct else 99.0)
    monkeypatch.setattr(report, "theorem_table", lambda _: "theorems")
    monkeypatch.setattr(report, "sweep_table", lambda _: "sweeps")
    assert "sweeps" not in report.write(SMALL, rows[1:], tmp_path)
    text = report.write(SMALL, rows, tmp_path)
    assert "theorems" in text and "sweeps" in text
    assert "| linear | chi2 | 2 |" in text and "(ε = 99)" in text
    assert (tmp_path / "excess.png").read_bytes()[:4] == b"\x89PNG"


def test_tables_on_one_problem_run_or_refuse(monkeypatch):
    monkeypatch.setattr(sweeps, "calibrated", lambda *_: 2.0)
    monkeypatch.setattr(sweeps, "true_epsilon", lambda *_: 99.0)
    unconstrained = lambda p, strong_convexity: parameters.unconstrained(p)  # noqa: E731
    monkeypatch.setattr(sweeps, "restarted", unconstrained)
    text = sweeps.theorem_table(dataclasses.replace(SMALL, num_examples=2000))
    assert text.count("| 99 | 2 |") == 4 and "refused" not in text
    monkeypatch.setattr(sweeps, "constrained", lambda _: averaged_clipping.check_batch_size(9, 8))
    text = sweeps.theorem_table(SMALL)
    assert "| 3 (CC) | refused: batch_size=9 is larger than num_examples=8 |" in text
    text = sweeps.sweep_table(dataclasses.replace(SMALL, schedules=((3, 40),)))
    assert text.count("\n") == 2 + 4 + 1 + 8
    assert "| averaged | 64 | 3 x 40 | 0.0312 |" in text
    assert "| per-example | – | 30 x 2 | 1 |" in text


@pytest.mark.slow
def test_per_example_clipping_is_far_ahead_under_one_accountant(tmp_path):
    """The quick study at one epsilon: over 20 times less excess risk, for every noise."""
    study = dataclasses.replace(QUICK, epsilons=(0.5,), noises=tuple(heavy_tails.NOISES))
    risks = {
        (row["noise"], row["method"]): np.mean(row["excess"])
        for row in run(study, tmp_path)
        if row["calibration"] == "correct"
    }
    for noise in heavy_tails.NOISES:
        for method in ("CC", "UC", "R-AClip"):
            assert risks[noise, method] > 20 * risks[noise, "DP-SGD"]
    assert set(OBJECTIVES) == {"linear", "logistic"}
