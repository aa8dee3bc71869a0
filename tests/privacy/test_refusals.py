"""What the parts of a plan refuse: what was made of which settings, and the message that says why."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from step_specs import FIXED, FULL, LEMMA, TRUNCATED, spec

from hf_dpzero.privacy.accounting import epsilon_after
from hf_dpzero.privacy.calibration import calibrated_noise_multiplier
from hf_dpzero.privacy.correlated.correlation import Correlation
from hf_dpzero.privacy.correlated.factorization import (
    MAX_DENSE_ROUNDS,
    Dense,
    banded,
    epoch_sensitivity,
    optimized,
    toeplitz,
    tree_least_squares,
)
from hf_dpzero.privacy.correlated.stream import CorrelatedNoise, KeyedNoise
from hf_dpzero.privacy.events import check_sound, step_event
from hf_dpzero.privacy.group_losses import PerStepGroups, PrefixSumGroups, VertexGroups
from hf_dpzero.privacy.mechanisms import (
    DPSGD,
    AdaptiveDPSGD,
    AdaptiveScalarMechanism,
    AveragedScalarMechanism,
    DPAdamW,
    NonPrivateMean,
    PlainAdamW,
    PlainSGD,
    ScalarMechanism,
    VectorMechanism,
    mechanism_from_dict,
)
from hf_dpzero.privacy.mechanisms.vertex import (
    HiddenScores,
    VertexDraw,
    zcdp_epsilon,
    zcdp_rho,
)
from hf_dpzero.privacy.noise import MAX_SCALE, InsecureSeededNoise, SecureNoise
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import (
    FixedBatchesSampler,
    FixedSizeSampler,
    FullBatchSampler,
    PoissonSampler,
    TruncatedPoissonSampler,
    sampler_from_dict,
)
from hf_dpzero.privacy.schedules import (
    Exponential,
    Given,
    GivenFactors,
    LearningRateAware,
    LinearFactors,
    Momentum,
    Subsampled,
    noise_schedule_from_dict,
)
from hf_dpzero.privacy.selection import TrialCount, composed_epsilon, selection_epsilon

KEY, DELTA = bytes(range(32)), 1e-5
THREE = {"names": ("a", "b", "c"), "shares": (0.5, 0.3, 0.2)}
SIZES = {"num_examples": 60, "expected_batch_size": 10}
NUMBERS = {"clip": 0.5, "noise_multiplier": 1.25, "expected_batch_size": 10}
POISSON, FIXED_BATCHES = PoissonSampler(**SIZES), FixedBatchesSampler(**SIZES)
CAPPED, FIXED_SIZE = TruncatedPoissonSampler(**SIZES, max_batch_size=20), FixedSizeSampler(**SIZES)
LAPLACE = ScalarMechanism(**NUMBERS, distribution="laplace")
FALLING = Exponential(gamma=0.9)


def mechanism(cls=ScalarMechanism, **changes):
    return cls(**{**NUMBERS, **changes})


def adaptive(**changes):
    return mechanism(AdaptiveScalarMechanism, **{"clip_count_noise": 2.5, **changes})


def sampler(cls=PoissonSampler, **changes):
    return cls(**{**SIZES, **changes})


def plan(**changes) -> PrivacyPlan:
    return PrivacyPlan(**{"sampler": POISSON, "mechanism": mechanism(), "steps": 18, **changes})


def correlated(**changes) -> PrivacyPlan:
    base = {"sampler": FIXED_BATCHES, "mechanism": mechanism(DPSGD)}
    return plan(**{**base, "correlation": Correlation(kind="toeplitz"), **changes})


def grouped(kind=PerStepGroups, **changes) -> PrivacyPlan:
    return plan(groups=kind(**THREE), **changes)


def after(new: PrivacyPlan, earlier: PrivacyPlan, steps: int) -> PrivacyPlan:
    return dataclasses.replace(new, after=((earlier, steps),))


def full(**changes) -> PrivacyPlan:
    numbers = {**NUMBERS, "expected_batch_size": 60, **changes.pop("numbers", {})}
    everybody = FullBatchSampler(num_examples=60, expected_batch_size=60)
    return plan(**{"sampler": everybody, "mechanism": ScalarMechanism(**numbers), **changes})


def scores() -> HiddenScores:
    return HiddenScores(2, 0.1, 100.0)


MEZO = NonPrivateMean(expected_batch_size=10)
AVERAGED = mechanism(AveragedScalarMechanism)
REFUSED = {
    "mechanisms": [
        *[(lambda cls=cls, c=change: mechanism(cls, **c), message)
          for cls in (ScalarMechanism, VectorMechanism, DPSGD) for change, message in (
            ({"clip": 0.0}, "clip=0.0 must be finite and positive"),
            ({"clip": math.inf}, "use method mezo"),
            ({"clip": math.nan}, "clip=nan"),
            ({"noise_multiplier": -0.1}, "noise_multiplier=-0.1 must be finite and >= 0"),
            ({"noise_multiplier": math.nan}, "noise_multiplier=nan"),
            ({"noise_multiplier": 2.0**-11}, r"outside \[2\^-10, 2\^25\]"),
            ({"noise_multiplier": 2.0**26}, r"outside \[2\^-10, 2\^25\]"),
            ({"expected_batch_size": 0}, "expected_batch_size=0.0 must be finite and positive"),
            ({"expected_batch_size": math.inf}, "expected_batch_size=inf"))],
        (lambda: mechanism(num_directions=0), "num_directions=0 must be an integer of at least 1"),
        (lambda: mechanism(num_directions=2.0), "num_directions=2.0 must be an integer"),
        (lambda: mechanism(distribution="cauchy"), "distribution='cauchy' is unknown"),
        (lambda: mechanism().sensitivity("swap"), "neighboring_relation='swap' is unknown"),
        (lambda: mechanism_from_dict({"name": "magic"}), "mechanism='magic' is unknown"),
        (lambda: mechanism_from_dict({**LAPLACE.to_dict(), "q": 1}), "'dpzero' has no 'q'"),
        (lambda: mechanism_from_dict({"name": "mezo"}), "'mezo' needs expected_batch_size"),
        *[(lambda shape=shape: mechanism(num_directions=2).clip_sum(torch.zeros(shape)),
           r"expected \[B, 2\], one row per example") for shape in ((4,), (4, 3), (4, 2, 1), ())],
        *[(lambda gram=gram: mechanism(VectorMechanism, num_directions=2).clip_sum(
            torch.zeros(1, 2), gram), message) for gram, message in (
            (np.eye(3), r"gram of shape \(3, 3\) for num_directions=2"),
            (np.diag([1.0, 0.0]), "finite with a positive diagonal"),
            (np.diag([1.0, math.nan]), "finite with a positive diagonal"),
            (np.array([[1.0, 2.0], [2.0, 1.0]]), "not symmetric and positive semi-definite"),
            (np.array([[1.0, 0.5], [0.4, 1.0]]), "not symmetric and positive semi-definite"))],
        (lambda: mechanism(DPSGD, clipping="adaptive"), "clipping='adaptive' is unknown"),
        (lambda: mechanism(DPSGD, clip_groups=2), "no meaning with clipping='fixed'.*use clipping"),
        (lambda: mechanism(DPSGD, clipping="averaged", clip_groups=0), "clip_groups=0 must be an"),
        (lambda: mechanism(DPSGD, clipping="averaged", clip_groups=2.0), "clip_groups=2.0 must be"),
        (lambda: mechanism(DPSGD, clip_stability=0.0), "clip_stability=0.0 must be positive"),
        (lambda: mechanism(DPSGD, clip_stability=math.inf), "clip_stability=inf must be positive"),
        (lambda: mechanism(DPSGD).group_of([0], b""), "group key of 0 bytes given; use the run's"),
        (lambda: AVERAGED.clip_sum(torch.zeros(2, 1)), "0 groups for 2 rows"),
        (lambda: mechanism(AveragedScalarMechanism, distribution="laplace"), "averaged clipping"),
        (lambda: adaptive(clip_quantile=0.0), r"clip_quantile=0.0 is outside \(0, 1\)"),
        (lambda: adaptive(clip_quantile=1.0), r"clip_quantile=1.0 is outside \(0, 1\)"),
        (lambda: adaptive(clip_learning_rate=-0.1), "clip_learning_rate=-0.1 is outside"),
        (lambda: adaptive(clip_learning_rate=math.nan), "clip_learning_rate=nan is outside"),
        (lambda: adaptive(clip_count_noise=0.0), "clip_count_noise=0.0 must be finite and pos"),
        (lambda: adaptive(clip_count_noise=0.625), "must be above half of .* 1.25, .*; raise clip_"),
        (lambda: adaptive(clip_count_noise=0.1), "the count alone costs more than the whole step"),
        (lambda: adaptive(clip_count_noise=2.0**25), r"2 \* clip_count_noise=67108864.0 is outside"),
        (lambda: VertexDraw(sensitivity=-1.0), "sensitivity=-1.0"),
        (lambda: VertexDraw(sensitivity=math.inf), "clip"),
        (lambda: HiddenScores(0, 0.1, 1.0), "dimension=0"),
        (lambda: HiddenScores(2, 0.0, 1.0), "sensitivity=0.0"),
        (lambda: HiddenScores(2, 1e-9, 100.0), "fewer steps"),
        (lambda: scores().add_(np.zeros(3)), "2 vertices"),
        (lambda: scores().add_(np.array([0.0, math.nan])), "not finite"),
        (lambda: scores().draw(-1, SecureNoise(), 0), "size=-1"),
        (lambda: zcdp_epsilon(-1.0, 0.1), "rho=-1.0"),
        (lambda: zcdp_rho(1.0, 0.0), "delta=0.0"),
        (lambda: zcdp_rho(0.0, 0.1), "epsilon=0.0"),
    ],
    "noise": [
        *[(lambda source=source, name=name, scale=scale: getattr(source, name)(scale, 1, 0),
           r"outside \(0, 2\^55\]") for source in (SecureNoise(), InsecureSeededNoise(5))
          for name in ("gaussian", "laplace")
          for scale in (0.0, -1.0, math.nan, math.inf, MAX_SCALE * 2)],
        (lambda: SecureNoise().gaussian(1.0, -1, 0), "size=-1 is negative"),
        (lambda: SecureNoise().vertices(np.array([0.0, math.nan]), 1, 0, 0), "finite"),
        (lambda: SecureNoise().vertices(np.array([]), 1, 0, 0), "at least one"),
        *[(lambda keys=keys: KeyedNoise(keys), "the first from step 0") for keys in (
            (), ((1, KEY),), ((0, b"short"),), ((0, KEY), (9, KEY), (4, KEY)))],
        (lambda: KeyedNoise(((0, KEY),)).gaussian(8.0, 1, 0), "no integers"),
        (lambda: CorrelatedNoise(KeyedNoise(((0, KEY),)), toeplitz(2), 1.0, 1).gaussian(8.0, 1, 0),
         "no integers"),
    ],
    "samplers": [
        (lambda: sampler(expected_batch_size=61), "larger than num_examples=60"),
        (lambda: sampler(expected_batch_size=0), "expected_batch_size=0.0 must be finite"),
        (lambda: sampler(expected_batch_size=math.nan), "expected_batch_size=nan"),
        (lambda: sampler(num_examples=0), "num_examples=0 must be an integer of at least 1"),
        (lambda: sampler(num_examples=10.0), r"num_examples=10\.0 must be an integer"),
        (lambda: sampler(FixedSizeSampler, expected_batch_size=2.5), "fixed-size batches need one"),
        (lambda: sampler(FixedBatchesSampler, expected_batch_size=2.5), "fixed batches need one"),
        (lambda: sampler(FullBatchSampler), "set them equal, or use PoissonSampler"),
        (lambda: sampler(TruncatedPoissonSampler, max_batch_size=9), "below expected_batch_size=10"),
        (lambda: sampler(TruncatedPoissonSampler, max_batch_size=16.5), "=16.5 must be an integer"),
        (lambda: POISSON.batch(0, b"short"), "sampler key of 5 bytes given; use the 32"),
        (lambda: POISSON.batch(-1, KEY), "step=-1 is outside"),
        (lambda: sampler_from_dict({"name": "shuffle"}), "sampler='shuffle' is unknown"),
        (lambda: sampler_from_dict({**POISSON.to_dict(), "cap": 3}), "has no 'cap'"),
    ],
    "correlations": [
        *[(lambda settings=settings: Correlation(**settings), words) for settings, words in (
            ({"kind": "other"}, "correlated_noise.kind='other'"),
            ({"kind": "banded"}, "correlated_noise.bands=0"),
            ({"kind": "tree", "bands": 3}, "correlated_noise.bands=3"),
            ({"kind": "tree", "restart": -1}, "restart=-1"))],
        (lambda: toeplitz(0), "rounds=0"),
        (lambda: banded(4, 0), "bands=0"),
        (lambda: optimized(MAX_DENSE_ROUNDS + 1), "toeplitz or banded"),
        (lambda: tree_least_squares(MAX_DENSE_ROUNDS + 1), "rounds by rounds"),
        (lambda: Dense(np.ones((3, 3)), "x"), "lower triangular"),
        (lambda: toeplitz(4).noise_row(4), "fixed in advance"),
        (lambda: epoch_sensitivity(toeplitz(4), 0), "rounds_per_epoch=0"),
        (lambda: epoch_sensitivity(toeplitz(4), 1, 5), "count=5"),
        (lambda: correlated(sampler=POISSON), "Use sampling='fixed_batches'"),
        (lambda: full(correlation=Correlation(kind="tree")), "Use sampling='fixed_batches'"),
        (lambda: correlated(mechanism=mechanism(AdaptiveDPSGD, clip_count_noise=2.0)),
         "clipping='fixed'"),
        (lambda: correlated(mechanism=mechanism(DPAdamW, clipping="averaged", clip_groups=2)),
         "clipping='fixed'"),
        (lambda: correlated(mechanism=mechanism(VectorMechanism)), "use one of dp-sgd"),
        (lambda: correlated(mechanism=mechanism()), "directions"),
        (lambda: correlated(mechanism=PlainSGD(expected_batch_size=10)), "'sgd' is not accounted"),
        (lambda: correlated(clip_schedule=LinearFactors(end=0.5)), "Leave the schedule out"),
        (lambda: correlated(accountant="advanced_composition", relation="replace_one"),
         "use accountant='pld'"),
        (lambda: plan(sampler=FIXED_BATCHES, noise_schedule=FALLING), "use sampling='poisson'"),
    ],
    "groups": [
        *[(lambda settings=settings: PerStepGroups(**{**THREE, **settings}), words)
          for settings, words in (
            ({"names": (), "shares": ()}, "at least one"),
            ({"names": ("a", "a"), "shares": (0.5, 0.5)}, "each one once"),
            ({"names": ("a", "b"), "shares": (1.0,)}, "one each"),
            ({"names": ("a", "b"), "shares": (0.5, 0.4)}, "add up to 0.9"),
            ({"names": ("a", "b"), "shares": (1.0, 0.0)}, "leave out a group that no row may have"),
            ({"names": ("a", "b"), "shares": (math.nan, 0.5)}, "shares divide"),
            ({"loss_bound": 0.0}, "loss_bound"), ({"loss_bound": math.inf}, "loss_bound"),
            ({"rate": -1.0}, "rate"), ({"budget": 0.0}, "budget"), ({"budget": 1.0}, "budget"))],
        (lambda: PerStepGroups(**THREE, budget=1e-6).multiplier(2.0**24), "group_robust.budget"),
        (lambda: VertexGroups(**THREE, draws=0), "draws=0 of groups must be an integer"),
        (lambda: VertexGroups(**THREE, rate=0.1), "follows from their share of the budget"),
        (lambda: grouped(mechanism=MEZO), "noise_multiplier=0"),
        (lambda: grouped(mechanism=mechanism(VectorMechanism)), "use 'dpzero'"),
        (lambda: grouped(mechanism=AVERAGED), "clipping='fixed'"),
        (lambda: grouped(mechanism=mechanism(DPSGD, clipping="averaged")), "clipping='fixed'"),
        (lambda: grouped(mechanism=LAPLACE), "group_robust.weights='balanced'"),
        *[(lambda kind=kind, drawn=drawn: grouped(kind, **drawn), "fixed_batches.*per_step")
          for kind in (PrefixSumGroups, VertexGroups) for drawn in (
            {}, {"sampler": CAPPED}, {"sampler": FIXED_SIZE, "relation": "replace_one"})],
        (lambda: plan(
            sampler=FixedBatchesSampler(num_examples=10**7, expected_batch_size=1000),
            mechanism=mechanism(expected_batch_size=1000), steps=10**6,
            groups=PrefixSumGroups(**THREE)), "float64 sums .*per_step"),
    ],
    "schedules": [
        (lambda: Exponential(gamma=0.0), r"gamma=0.0 must be in \(0, 1\]"),
        (lambda: Exponential(gamma=1.5), r"gamma=1.5 must be in \(0, 1\]"),
        (lambda: Exponential(gamma=math.nan), "gamma=nan"),
        (lambda: Momentum(gamma=0.9, beta=1.0), "0 <= beta < 1"),
        (lambda: Momentum(gamma=1.0, beta=0.5), "below 1"),
        (lambda: Given(levels=(1.0, 0.0)), "entry 1 is 0.0"),
        (lambda: Given(levels=(1.0, -1.0)), "entry 1 is -1.0"),
        (lambda: Given(levels=(math.inf, 1.0)), "entry 0 is inf"),
        (lambda: Given(levels=()), "is empty"),
        (lambda: Given(levels=(torch.tensor(1.0),)), "entry 0 is tensor"),
        (lambda: LearningRateAware(gamma=0.9, learning_rate="polynomial"), "list or file"),
        (lambda: Subsampled(gamma=0.9, order=0.0), "order: entry 0 is 0.0"),
        (lambda: LinearFactors(end=0.0), "finite numbers above 0"),
        (lambda: plan(noise_schedule=Given(levels=(1.0, 2.0)), steps=3), "2 levels for 3 steps"),
        (lambda: plan(clip_schedule=GivenFactors(levels=(1.0,) * 4), steps=3), "4 levels for 3 st"),
        (lambda: plan(noise_schedule=Exponential(gamma=0.01)), "nearer to 1"),
        (lambda: plan(noise_schedule=FALLING, mechanism=MEZO), "nothing to act on"),
        (lambda: plan(clip_schedule=LinearFactors(end=0.5), mechanism=adaptive()),
         "follows the releases already"),
        (lambda: full(noise_schedule=FALLING, accountant="advanced_composition",
                      relation="replace_one"), "knows equal steps only"),
        (lambda: noise_schedule_from_dict({"name": "none"}), "'none' is unknown"),
        (lambda: noise_schedule_from_dict({"name": "exp"}), "needs gamma"),
        (lambda: noise_schedule_from_dict({"name": "exp", "gama": 1}), "has no 'gama'"),
    ],
    "plans": [
        (lambda: plan(mechanism=mechanism(expected_batch_size=17)),
         r"batches of 10\.0, the mechanism divides by 17\.0"),
        *[(lambda steps=steps: plan(steps=steps), "must be an integer of at least 1")
          for steps in (0, -1, 2.0, True)],
        (lambda: plan(sampler=FIXED_SIZE), "; use neighboring_relation='replace_one' or sampling"),
        (lambda: PrivacyPlan.from_dict({**plan().to_dict(), "epsilon": 1.0}),
         r"has no fields \['epsilon'\]"),
        (lambda: PrivacyPlan.from_dict({k: v for k, v in plan().to_dict().items() if k != "steps"}),
         r"PrivacyPlan needs \['steps'\]"),
        *[(lambda cls=cls: plan(mechanism=cls(expected_batch_size=10)).calibrate(
            epsilon=1.0, delta=DELTA), f"no noise to calibrate; use method '{instead}', or drop")
          for cls, instead in (
            (NonPrivateMean, "dpzero"), (PlainSGD, "dp-sgd"), (PlainAdamW, "dp-adamw"))],
        (lambda: after(plan(), plan(relation="replace_one"), 18), "relation=add_or_remove_one"),
        (lambda: after(plan(), plan(sampler=sampler(num_examples=50)), 18), "examples=60, and 50"),
        (lambda: after(plan(), plan(), 19), "at least one"),
        (lambda: after(plan(), plan(), 0), "at least one"),
        (lambda: after(plan(), plan(mechanism=MEZO), 18), "must be private"),
        (lambda: after(plan(mechanism=MEZO), plan(), 18), "not private"),
        (lambda: after(plan(), plan(accountant="rdp"), 18), "no common account"),
        (lambda: after(plan(relation="replace_one"), full(
            relation="replace_one", numbers={"distribution": "laplace"}), 3), "no common account"),
        (lambda: after(plan(), after(plan(), plan(), 3), 18), "listed beside"),
        (lambda: after(plan(), plan(steps=10**5), 10**5).epsilon(2e-11), "floating-point error"),
        (lambda: composed_epsilon([after(plan(), plan(), 3), plan()], DELTA), "extends another"),
        (lambda: selection_epsilon(after(plan(), plan(), 3), TrialCount(mean=8.0), DELTA),
         "extends another"),
    ],
    "searches": [
        (lambda: TrialCount(mean=0.5), "mean_trials=0.5"),
        (lambda: TrialCount(mean=1e6), "mean_trials=1000000"),
        *[(lambda c=changes: selection_epsilon(plan(**c), TrialCount(mean=4.0), DELTA), message)
          for changes, message in (
            ({"relation": "replace_one"}, "accountant='rdp', .*; use accountant='pld' or neigh"),
            ({"sampler": CAPPED}, "; use accountant='pld' or sampling='poisson'"),
            ({"mechanism": LAPLACE}, "; use accountant='pld' or noise_distribution='gaussian'"))],
        (lambda: composed_epsilon([plan(), plan(accountant="rdp")], DELTA), "vary settings"),
        (lambda: composed_epsilon([plan(), plan(relation="replace_one")], DELTA), "one relation"),
        (lambda: composed_epsilon([], DELTA), "grid is empty"),
        (lambda: selection_epsilon(full(numbers={"distribution": "laplace"}), TrialCount(mean=2.0),
                                   0.0), "private selection has no pure epsilon"),
    ],
}  # fmt: skip
ROWS = [pytest.param(make, message, id=f"{part}: {message}")
        for part, rows in REFUSED.items() for make, message in rows]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), ROWS)
def test_what_has_no_meaning_or_no_account_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


LEAVE_RELATION = "; use neighboring_relation='replace_one' or sampling='poisson'"
UNSOUND = [
    ({"accountant": "advanced_composition", "relation": "replace_one"},
     "; use accountant='pld' or sampling='full_batch'"),
    ({**TRUNCATED, "accountant": "advanced_composition"}, "='gaussian', sampling='truncated.*'pld'"),
    ({**FIXED, "accountant": "advanced_composition"}, "accountant='rdp' or sampling='full_batch'"),
    ({**LEMMA, "relation": "add_or_remove_one"}, "or neighboring_relation='replace_one'"),
    ({**LEMMA, "relation": "replace_special"}, "neighboring_relation='replace_special', .*; use"),
    ({**LEMMA, "distribution": "laplace"}, "; use accountant='pld' or accountant='rdp' or noise_dis"),
    ({**FIXED, "relation": "add_or_remove_one"}, LEAVE_RELATION),
    ({**FIXED, "relation": "replace_special"}, LEAVE_RELATION),
    ({**FIXED, "distribution": "laplace"}, "; use noise_distribution='gaussian' or sampling='full"),
    ({**TRUNCATED, "distribution": "laplace"}, "; use noise_distribution='gaussian' or sampling='p"),
    ({**TRUNCATED, "accountant": "rdp"}, "; use accountant='pld' or sampling='poisson'"),
    ({"distribution": "laplace", "relation": "replace_one"}, "neighboring_relation='add_or_remove"),
    ({"distribution": "laplace", "accountant": "rdp"}, "; use accountant='pld' or noise_distribution"),
    ({"relation": "replace_one", "accountant": "rdp"}, "'pld' or neighboring_relation='add_or"),
    ({"distribution": "laplace", **TRUNCATED, "accountant": "rdp"}, "use sampling='full_batch'"),
    ({**TRUNCATED, "distribution": "laplace", "accountant": "advanced_composition"}, "one more of"),
    ({"relation": "swap"}, "neighboring_relation='swap' is unknown; use one of"),
    ({"accountant": "gdp"}, "accountant='gdp' is unknown; use one of"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), UNSOUND)
def test_unsound_combinations_are_refused(changes, message):
    for refuse in (check_sound, lambda x: epsilon_after(x, 1, DELTA), step_event):
        with pytest.raises(ValueError, match=message):
            refuse(spec(**changes))


@pytest.mark.parametrize("delta", [0.0, -1e-5, 1.0, 1e-13, math.nan])
def test_delta_out_of_range_is_refused(delta):
    with pytest.raises(ValueError, match=r"is outside \[1e-12, 1\)"):
        epsilon_after(spec(), 10, delta)


def test_unreachable_targets_say_so():
    def at(steps):
        step = spec(**FULL)
        return lambda sigma: ((dataclasses.replace(step, noise_multiplier=sigma), steps),)

    with pytest.raises(ValueError, match=r"cannot be reached.*use fewer steps"):
        calibrated_noise_multiplier(at(10**8), epsilon=1e-6, delta=1e-10)
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="must be finite and positive"):
            calibrated_noise_multiplier(at(10), epsilon=bad, delta=DELTA)
    assert calibrated_noise_multiplier(at(1), epsilon=1e9, delta=DELTA) == 2.0**-10
