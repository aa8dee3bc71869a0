"""What every mechanism and every sampler must do. A new one is one row here."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from hf_dpzero.privacy.mechanisms import (
    DPSGD,
    MECHANISMS,
    RELATIONS,
    AdaptiveDPAdamW,
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
from hf_dpzero.privacy.noise import InsecureSeededNoise, SecureNoise
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import (
    SAMPLERS,
    FixedBatchesSampler,
    FixedSizeSampler,
    FullBatchSampler,
    PoissonSampler,
    TruncatedPoissonSampler,
    sampler_from_dict,
)

KEY = bytes(range(32))

MECHANISM_ROWS = [
    ScalarMechanism(clip=3.0, noise_multiplier=1.5, expected_batch_size=8),
    ScalarMechanism(clip=0.1, noise_multiplier=0.5, expected_batch_size=7.5, num_directions=4),
    ScalarMechanism(
        clip=0.1, noise_multiplier=0.5, expected_batch_size=8, num_directions=3,
        distribution="laplace",
    ),
    AveragedScalarMechanism(clip=3.0, noise_multiplier=1.5, expected_batch_size=8, clip_groups=2,
                            num_directions=3),
    NonPrivateMean(expected_batch_size=8, num_directions=2),
    VectorMechanism(clip=3.0, noise_multiplier=1.5, expected_batch_size=8),
    VectorMechanism(clip=3.0, noise_multiplier=1.5, expected_batch_size=8, num_directions=3),
    DPSGD(clip=3.0, noise_multiplier=1.5, expected_batch_size=8),
    DPAdamW(clip=3.0, noise_multiplier=1.5, expected_batch_size=8, clipping="automatic"),
    DPAdamW(clip=3.0, noise_multiplier=1.5, expected_batch_size=8, clipping="averaged",
            clip_groups=2),
    PlainSGD(expected_batch_size=8),
    PlainAdamW(expected_batch_size=8),
    AdaptiveScalarMechanism(clip=3.0, noise_multiplier=1.5, expected_batch_size=8,
                            clip_count_noise=1.0, num_directions=3),
    AdaptiveDPSGD(clip=3.0, noise_multiplier=1.5, expected_batch_size=8, clip_count_noise=1.0),
    AdaptiveDPAdamW(clip=3.0, noise_multiplier=1.5, expected_batch_size=8, clip_count_noise=2.0),
]  # fmt: skip

SAMPLER_ROWS = [
    PoissonSampler(num_examples=40, expected_batch_size=8),
    TruncatedPoissonSampler(num_examples=40, expected_batch_size=8, max_batch_size=12),
    FixedSizeSampler(num_examples=40, expected_batch_size=8),
    FullBatchSampler(num_examples=40, expected_batch_size=40),
    FixedBatchesSampler(num_examples=40, expected_batch_size=8),
]

mechanisms = pytest.mark.parametrize("mechanism", MECHANISM_ROWS, ids=lambda m: m.name)
samplers = pytest.mark.parametrize("sampler", SAMPLER_ROWS, ids=lambda s: s.name)


def width(mechanism) -> int:
    """Numbers in a row: K finite differences, or the coordinates of a small gradient."""
    return getattr(mechanism, "num_directions", 3)


def total(mechanism, x: torch.Tensor) -> list[float]:
    """The clipped sum (and no count) in the units of the rows."""
    if isinstance(mechanism, VectorMechanism):
        return list(mechanism.clip_sum(x, gram=torch.eye(width(mechanism))))
    if isinstance(mechanism, AveragedScalarMechanism):  # the first 15 rows with numbers, and others
        before = x.isfinite().all(dim=1).cumsum(0)
        groups = [int(count > 15) for count in before]
        return [n * mechanism.granularity for n in mechanism.clip_sum(x, groups)]
    if hasattr(mechanism, "clip_sum"):
        return [n * mechanism.granularity for n in mechanism.clip_sum(x)[: width(mechanism)]]
    return weighted_sum(mechanism, x.double())


def weighted_sum(mechanism, gradients: torch.Tensor) -> list[float]:
    """What a step does with gradients [B, d]: weigh each, or each group's mean, and add up."""
    gradients = gradients[gradients.isfinite().all(dim=1)]
    if mechanism.clipping == "averaged":  # the first 15 rows, and the others
        groups = [group for group in (gradients[:15], gradients[15:]) if len(group)]
        gradients = torch.stack([group.mean(dim=0) for group in groups] or [torch.zeros(3)])
    weights = mechanism.weights(gradients.norm(dim=1))
    return (weights.double()[:, None] * gradients).sum(dim=0).tolist()


def released(mechanism, source, step: int = 0) -> tuple[float, ...]:
    """Everything that leaves a step on an empty batch, four coordinates of dense noise included."""
    values: tuple[float, ...] = ()
    if hasattr(mechanism, "release"):
        empty = torch.empty(0, width(mechanism))
        values += mechanism.release(mechanism.clip_sum(empty), step, source)
    if hasattr(mechanism, "count"):
        values += mechanism.release_count(mechanism.count(torch.empty(0)), step, source)
    assert len(values) == mechanism.values_per_release
    if hasattr(mechanism, "release_part"):
        cells = mechanism.release_part(
            np.zeros(4), source, step, 0
        )  # on a grid: alike now and then
        values += (float(cells @ np.array([1.0, 1e3, 1e6, 1e9])),)
    return values


def random_rows(mechanism, batch: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, width(mechanism), generator=generator)


def test_every_registered_class_has_a_row():
    assert {type(m) for m in MECHANISM_ROWS} == set(MECHANISMS.values())
    assert {type(s) for s in SAMPLER_ROWS} == set(SAMPLERS.values())
    assert all(MECHANISMS[m.name] is type(m) for m in MECHANISM_ROWS)
    assert all(SAMPLERS[s.name] is type(s) for s in SAMPLER_ROWS)


@mechanisms
def test_mechanism_round_trips_through_json(mechanism):
    text = json.dumps(mechanism.to_dict(), allow_nan=False)
    assert mechanism_from_dict(json.loads(text)) == mechanism
    assert hash(mechanism_from_dict(json.loads(text))) == hash(mechanism)


@mechanisms
def test_mechanism_states_what_it_is(mechanism):
    assert isinstance(mechanism.private, bool)
    assert isinstance(mechanism.replayable, bool)
    assert all(isinstance(c, str) for c in mechanism.caveats)
    assert mechanism.private == math.isfinite(mechanism.clip)
    assert mechanism.noise_scale >= 0
    assert mechanism.values_per_release >= 0
    assert mechanism.values_per_release > 0 or not mechanism.replayable
    assert math.isinf(mechanism.clip) == (mechanism.distribution == "none")
    stated = [mechanism.sensitivity(relation) for relation in RELATIONS]
    assert all(math.isfinite(size) == mechanism.private for size in stated)


@mechanisms
def test_mechanism_is_deterministic_before_the_noise(mechanism):
    rows = random_rows(mechanism)
    assert total(mechanism, rows) == total(mechanism, rows.clone())
    if getattr(mechanism, "clipping", None) != "averaged":  # `total` groups by place
        flipped = total(mechanism, rows.flip(0))
        exact = hasattr(mechanism, "clip_sum")
        assert total(mechanism, rows) == pytest.approx(flipped, rel=0 if exact else 1e-12)


@mechanisms
def test_parts_of_a_batch_add_up_exactly(mechanism):
    """Microbatches and processes: sums of integers, or of multiples of one grid."""
    rows = random_rows(mechanism, 64)
    if hasattr(mechanism, "count"):
        norms = rows.double().norm(dim=1)
        assert sum(mechanism.count(part)[0] for part in norms.split(7)) == mechanism.count(norms)[0]
    if hasattr(mechanism, "clip_sum") and getattr(mechanism, "clipping", "") != "averaged":
        more = (torch.eye(width(mechanism)),) if isinstance(mechanism, VectorMechanism) else ()
        parts = [mechanism.clip_sum(part, *more) for part in rows.split(13)]
        sums = [sum(column) for column in zip(*parts, strict=True)]
        whole = list(mechanism.clip_sum(rows, *more))
        assert sums == (whole if mechanism.private else pytest.approx(whole, rel=1e-12))


@pytest.mark.false_alarm(1e-7)  # a draw of 0
@mechanisms
def test_mechanism_sums_an_empty_batch_to_zero_and_still_releases(mechanism):
    assert not any(total(mechanism, torch.empty(0, width(mechanism))))
    values = released(mechanism, SecureNoise())
    assert values
    assert all(np.float32(v) == v for v in values)
    assert all(v != 0 for v in values) == mechanism.private


@mechanisms
def test_mechanism_keeps_bad_rows_out(mechanism):
    rows = random_rows(mechanism)
    bad = torch.full((2, width(mechanism)), math.nan)
    bad[1] = math.inf
    assert total(mechanism, torch.cat([bad, rows])) == total(mechanism, rows)


@pytest.mark.false_alarm(2e-6)  # 1e-7 a mechanism
@pytest.mark.parametrize(
    "mechanism", [m for m in MECHANISM_ROWS if m.private], ids=lambda m: m.name
)
def test_mechanism_noise_has_the_accounted_scale_and_no_other(mechanism):
    """sigma C (of adaptive clipping z_d C) over B, or over the groups; not 2/3 or 3/2 of it."""
    if hasattr(mechanism, "release_part"):
        draws = mechanism.release_part(np.zeros(8000), SecureNoise(), 0, 0)
    else:
        wide, empty = dataclasses.replace(mechanism, num_directions=80), torch.empty(0, 80)
        released = [wide.release(wide.clip_sum(empty), 0, SecureNoise())[:80] for _ in range(100)]
        draws = np.array(released).ravel()
    averaged = getattr(mechanism, "clipping", "") == "averaged"
    sigma = getattr(mechanism, "sum_multiplier", mechanism.noise_multiplier)
    scale = sigma * mechanism.clip / (mechanism.clip_groups if averaged else mechanism.divisor)
    law = stats.laplace() if mechanism.distribution == "laplace" else stats.norm()
    edges = law.ppf(np.linspace(0, 1, 51))

    def p(scale: float) -> float:
        return stats.chisquare(np.histogram(draws / scale, edges)[0]).pvalue

    assert p(scale) > 1e-7
    assert max(p(scale * 2 / 3), p(scale * 3 / 2)) < 1e-50


@pytest.mark.false_alarm(3e-6)  # equal float32: 2e-8 a pair, 70 pairs
@mechanisms
def test_mechanism_noise_depends_on_the_source_alone(mechanism):
    seeded = InsecureSeededNoise(4)
    first = released(mechanism, seeded, 1)
    assert first == released(mechanism, seeded, 1)
    if mechanism.private:
        assert not set(first) & set(released(mechanism, seeded, 2))
        assert len(set(first)) == len(first)
        secure = [set(released(mechanism, SecureNoise(), 1)) for _ in range(2)]
        assert not secure[0] & secure[1]


@samplers
def test_sampler_round_trips_and_its_batches_are_sorted_distinct_indices_in_range(sampler):
    assert sampler_from_dict(json.loads(json.dumps(sampler.to_dict(), allow_nan=False))) == sampler
    for step in (0, 1, 2, 10**12):
        batch = sampler.batch(step, KEY)
        assert batch.dtype == np.int64
        assert (np.diff(batch) > 0).all()
        assert batch.size == 0 or (batch[0] >= 0 and batch[-1] < sampler.num_examples)


@samplers
def test_sampler_is_a_pure_function_of_key_and_step(sampler):
    steps = list(range(20))
    forward = [sampler.batch(s, KEY).tolist() for s in steps]
    backward = [sampler_from_dict(sampler.to_dict()).batch(s, KEY).tolist() for s in steps[::-1]]
    assert forward == backward[::-1]
    if sampler.sampling_probability < 1:
        assert len({tuple(b) for b in forward}) == (
            sampler.period if sampler.period > 1 else len(steps)
        )
        assert forward != [sampler.batch(s, bytes(32)).tolist() for s in steps]


@samplers
def test_sampler_keeps_its_expected_size_and_probability(sampler):
    sizes = [len(sampler.batch(step, KEY)) for step in range(400)]
    spread = math.sqrt(sampler.expected_batch_size / len(sizes))
    assert abs(np.mean(sizes) - sampler.expected_batch_size) <= 6 * spread
    expected = sampler.expected_batch_size / sampler.num_examples
    assert sampler.sampling_probability == expected


@samplers
@pytest.mark.parametrize(
    "mechanism", {m.name: m for m in MECHANISM_ROWS}.values(), ids=lambda m: m.name
)
def test_every_pair_is_accounted_or_refused_with_advice(sampler, mechanism):
    fitted = mechanism_from_dict(
        {**mechanism.to_dict(), "expected_batch_size": sampler.expected_batch_size}
    )
    for relation in RELATIONS:
        try:
            plan = PrivacyPlan(sampler=sampler, mechanism=fitted, steps=2, relation=relation)
        except ValueError as refusal:
            assert "use " in str(refusal)  # noqa: PT017
            continue
        epsilon = plan.epsilon(1e-3)
        assert epsilon > 0
        assert math.isfinite(epsilon) == mechanism.private
        assert PrivacyPlan.from_dict(plan.to_dict()).digest() == plan.digest()
