"""The perturbation engine: exact in float32, unbiased where it rounds, small in memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import os
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from whole_directions import direction_vector

from hf_dpzero.ledger.digests import digest_model
from hf_dpzero.perturbation import coordinates
from hf_dpzero.perturbation.directions import DISTRIBUTIONS, Direction
from hf_dpzero.perturbation.kernels import dispatch, torch_reference
from hf_dpzero.perturbation.parameter_space import ParameterSpace

KEY = 0xA5A5_0123_4567_89AB_CDEF_0000_FFFF_1234
SMOOTHING = 1e-3
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def directions_of(step: int, count: int) -> list[Direction]:
    return [Direction(KEY, step, k) for k in range(count)]


def some_tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Five shapes, scales from 1e-3 to 30, one all zeros of both signs, one empty."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"matrix": (33, 17), "row": (1000,), "tiny": (1,), "large": (3000,), "zero": (40,)}
    scales = {"matrix": 0.05, "row": 1e-3, "tiny": 1.0, "large": 30.0, "zero": 0.0}
    made = {n: torch.randn(*s, generator=generator) * scales[n] for n, s in sizes.items()}
    made["empty"] = torch.empty(0, 4)
    return {name: tensor.to(dtype) for name, tensor in made.items()}


def space_of(tensors: dict[str, Tensor], **settings: object) -> ParameterSpace:
    space = ParameterSpace(tensors.items(), **{"smoothing": SMOOTHING, **settings})
    space.snap_()
    return space


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def same(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    """Bit for bit: -0 is not +0."""
    pairs = [[t.detach().reshape(-1) for t in pair] for pair in zip(left, right, strict=True)]
    return all(
        a.dtype == b.dtype and torch.equal(a.view(torch.int16), b.view(torch.int16))
        for a, b in pairs
    )


def flat(space: ParameterSpace) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in space.tensors]).double()


def spacings(space: ParameterSpace) -> Tensor:
    """Each coordinate's grid step."""
    parts = []
    for number, tensor in enumerate(space.tensors):
        segment, m = space._places[number]
        parts.append(torch.full((tensor.numel(),), segment.spacing[m], dtype=torch.float64))
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_restore_is_bit_exact_after_many_cycles(distribution, dtype):
    space = space_of(some_tensors(dtype), distribution=distribution)
    before = copies(space.tensors)
    for step in range(30):
        (u,) = directions_of(step, 1)
        space.move_to_(((u, SMOOTHING),))
        assert not same(space.tensors, before)
        space.move_to_(((u, -SMOOTHING),))
        space.settle_()
    assert same(space.tensors, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_restore_after_an_exception_in_the_body(distribution, dtype):
    space = space_of(some_tensors(dtype), distribution=distribution)
    before, (u, v) = copies(space.tensors), directions_of(0, 2)
    with pytest.raises(ZeroDivisionError), space.perturbed(u, 0.4 * SMOOTHING):
        inside = copies(space.tensors)
        with pytest.raises(KeyError), space.perturbed(v, -0.6 * SMOOTHING):
            raise KeyError
        assert same(space.tensors, inside)
        raise ZeroDivisionError
    assert space.position == ()
    assert same(space.tensors, before)


def test_perturbation_is_lambda_u_to_half_a_grid_step():
    for distribution in DISTRIBUTIONS:
        space = space_of(some_tensors(), distribution=distribution)
        before, (u,) = flat(space), directions_of(3, 1)
        expected = before + SMOOTHING * direction_vector(u, distribution, space.layout).double()
        with space.perturbed(u, SMOOTHING):
            error = (flat(space) - expected).abs() / spacings(space)
        assert float(error.max()) <= 0.5 + 0.05  # float32 rounding of lambda u itself


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_any_fusion_and_order_gives_the_same_weights(distribution, dtype):
    """Updates from a settled start (a replay) and fused with three other positions are equal."""
    results = []
    for visit in range(4):
        space = space_of(some_tensors(dtype), distribution=distribution)
        for step in range(10):
            us = directions_of(step, 3)
            if visit == 1:
                for u in us:
                    space.move_to_(((u, SMOOTHING),))
                    space.move_to_(((u, -SMOOTHING),))
            if visit == 2:
                space.move_to_(((us[1], 0.5 * SMOOTHING), (us[2], -0.5 * SMOOTHING)))
            if visit == 3:
                space.move_to_(((Direction(KEY ^ 1, step), SMOOTHING),))
            space.step_(us, [3e-4, -2e-4, 1e-6], decay=1e-3 if step % 2 else 0.0)
        results.append(copies(space.tensors))
    for other in results[1:]:
        assert same(results[0], other)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_update_is_the_float64_reference_within_a_grid_step(distribution):
    """K = 2; each term may round by one step, weight decay by one more."""
    space = space_of(some_tensors(), distribution=distribution)
    before, us, coefficients = flat(space), directions_of(0, 2), [7e-4, -1.3e-6]
    space.move_to_(((us[1], -SMOOTHING),))
    space.step_(us, coefficients, decay=0.01)
    expected = before * (1 - 0.01)
    for u, c in zip(us, coefficients, strict=True):
        expected += c * direction_vector(u, distribution, space.layout).double()
    error = (flat(space) - expected).abs() / spacings(space)
    assert float(error.max()) <= 3.0 + 0.01
    assert float(error.mean()) < 1.5


def mixed_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Tensors of all three dtypes, next to each other and apart."""
    made = some_tensors(seed=seed)
    made["half"] = torch.linspace(-1, 1, 777).bfloat16()
    made["short"] = torch.linspace(-2, 1e-3, 350).half()
    made["norm"] = torch.ones(70).half()
    made["last"] = torch.linspace(-1e-5, 1, 100)
    return made


def short_training(distribution: str, dense: bool = False) -> tuple[list[Tensor], dict]:
    space = space_of(mixed_tensors(), distribution=distribution)
    for step in range(3):
        us = directions_of(step, 2)
        space.move_to_(((us[0], SMOOTHING),))
        space.step_(us, [1e-3, 2e-7], decay=1e-6)
    if dense:
        noise = lambda part, total: total.float() + torch.linspace(-1e-4, 1e-4, len(total))  # noqa: E731
        space.dense_step_([us[0]], [1e-3], noise)
    space.move_to_(((us[1], -SMOOTHING),))
    standing = copies(space.tensors)
    space.settle_()
    return standing + copies(space.tensors), space.state_dict()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_neither_chunks_nor_the_backend_matter(distribution, monkeypatch):
    expected = short_training(distribution)
    monkeypatch.setattr(dispatch, "_cpu_kernels", lambda: None)
    monkeypatch.setattr(torch_reference, "_CHUNK", 352)
    tensors, state = short_training(distribution)
    assert same(tensors, expected[0])
    assert state == expected[1]


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_which_tensors_share_a_segment_does_not_matter(distribution, monkeypatch):
    """All alone, some together, all of a kind together, and each where it is, as on a GPU: the same
    bits, with dense steps too."""
    results = []
    for small, reached, count in [
        (0, False, 10), (500, False, 8), (1 << 16, False, 4), (0, True, 3),
    ]:  # fmt: skip
        monkeypatch.setattr(coordinates, "SMALL", small)
        monkeypatch.setattr(dispatch, "together_on", lambda device, reached=reached: reached)
        assert len(space_of(mixed_tensors())._segments) == count
        results.append(short_training(distribution, dense=True))
    for tensors, state in results[1:]:
        assert same(tensors, results[0][0])
        assert state == results[0][1]


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_exact_at_the_very_edge_of_the_grid(distribution):
    """theta is led to the range's end by updates; positions replace each other there, exactly."""
    smoothing = 0.05
    space = space_of({"w": torch.full((64,), 0.2)}, distribution=distribution, smoothing=smoothing)
    exponents = set()
    for step in range(100):
        u, v = Direction(KEY, step), Direction(KEY, step, 1)
        space.step_([u], [0.01])
        state = space.state_dict()["w"]
        exponents.add(state["exponent"])
        before = flat(space)
        assert float(before.abs().max()) <= state["bound"]
        space.move_to_(((u, 0.5 * smoothing), (v, 0.5 * smoothing)))
        space.move_to_(((v, -smoothing),))
        space.move_to_(((u, smoothing),))
        space.settle_()
        assert torch.equal(flat(space), before)
        assert state["bound"] + 2 * smoothing < 2.0 ** state["exponent"]
    assert len(exponents) > 1


@pytest.mark.parametrize("coefficient", [17.5, 0.5])
def test_the_bound_holds_though_updates_round_up(coefficient):
    """Every update pushes the one coordinate up; rounding adds up to a step each time."""
    space = space_of({"w": torch.tensor([1.0])})
    spacing = float(spacings(space)[0])
    for step in range(300):
        u = Direction(KEY, step)
        sign = float(direction_vector(u, "rademacher", space.layout))
        space.step_([u], [sign * coefficient * spacing])
        assert float(flat(space)) <= space.state_dict()["w"]["bound"]


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_growth_regrids_at_the_same_step_under_replay(distribution):
    """Updates of 0.3 carry zeros far past the first grid; visits in between change nothing."""
    trained = space_of({"b": torch.zeros(50), "w": torch.ones(9)}, distribution=distribution)
    replayed = space_of({"b": torch.zeros(50), "w": torch.ones(9)}, distribution=distribution)
    seen = []
    for step in range(60):
        us = directions_of(step, 2)
        trained.move_to_(((us[1], -SMOOTHING),))
        trained.step_(us, [0.3, 0.1 * (step + 1)], decay=0.01 if step % 2 else 0.0)
        replayed.step_(us, [0.3, 0.1 * (step + 1)], decay=0.01 if step % 2 else 0.0)
        assert trained.state_dict() == replayed.state_dict()
        assert same(trained.tensors, replayed.tensors)
        seen.append(trained.state_dict()["b"]["exponent"])
    assert seen == sorted(seen)
    assert seen[-1] >= seen[0] + 3
    grid = flat(trained) / spacings(trained)
    assert torch.equal(grid, grid.round())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e35])
@pytest.mark.parametrize("where", ["coefficient", "decay"])
def test_numbers_that_are_not_usable_are_refused_and_settled(bad, where):
    space = space_of(some_tensors())
    before, us = copies(space.tensors), directions_of(0, 2)
    space.move_to_(((us[0], SMOOTHING),))
    coefficients, decay = ([1e-3, bad], 0.0) if where == "coefficient" else ([1e-3, 1e-3], bad)
    with pytest.raises(ValueError, match=r"(not finite|out of range).*Lower learning_rate"):
        space.step_(us, coefficients, decay=decay)
    assert space.position == ()
    assert same(space.tensors, before)


def test_directions_and_coefficients_must_pair_up():
    space = space_of(some_tensors())
    before, us = copies(space.tensors), directions_of(0, 2)
    for chosen, coefficients in [(us, [1.0]), ([us[0], us[0]], [1.0, 2.0]), (us[:1], [1.0, 2.0])]:
        space.move_to_(((us[0], SMOOTHING),))
        with pytest.raises(ValueError, match="as many distinct directions as coefficients"):
            space.step_(chosen, coefficients)
        assert same(space.tensors, before)


@pytest.mark.parametrize("scale", [1.01 * SMOOTHING, -2 * SMOOTHING, math.nan, math.inf])
def test_positions_beyond_smoothing_are_refused(scale):
    space = space_of(some_tensors())
    before, (u,) = copies(space.tensors), directions_of(0, 1)
    with pytest.raises(ValueError, match=r"larger than smoothing=0\.001"):
        space.move_to_(((u, scale),))
    with pytest.raises(ValueError, match="larger than smoothing"), space.perturbed(u, scale):
        pytest.fail("the body must not run")
    with pytest.raises(ValueError, match="larger than smoothing"):
        space.write_perturbed_(0, ((u, scale),), torch.empty(33, 17))
    with pytest.raises(ValueError, match="names a direction twice"):
        space.move_to_(((u, 1e-4), (u, 1e-4)))
    assert same(space.tensors, before)
    assert space.position == ()


def drift_of(space: ParameterSpace, coefficient: float, steps: int) -> tuple[Tensor, Tensor]:
    """(what `steps` updates did, what they should have done), in grid steps, and applies them."""
    before, wanted = flat(space), torch.zeros(space.dimension, dtype=torch.float64)
    for step in range(steps):
        (u,) = directions_of(step, 1)
        space.step_([u], [coefficient])
        wanted += coefficient * direction_vector(u, space.distribution, space.layout).double()
    return flat(space) - before, wanted


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_updates_far_below_the_grid_are_not_lost(distribution):
    """Updates of f = 0.1 grid steps: nearest rounding would do nothing at all in any of them.

    A coordinate's rounding error over T steps has variance below f T, so the slope of what was done
    on what was wanted (deviation f sqrt(T) in each of n coordinates) is known to 1/sqrt(f n), and,
    where one rounding serves a whole tensor, to 1/sqrt(f T) more.
    """
    f, steps, n = 0.1, 500, 4096
    space = space_of({"w": torch.full((n,), 0.9)}, distribution=distribution)
    spacing = float(spacings(space)[0])
    done, wanted = (part / spacing for part in drift_of(space, f * spacing, steps))
    assert float((done - wanted).abs().max()) < 6 * math.sqrt(f * steps)
    slope = float((done * wanted).sum() / wanted.square().sum())
    uncertainty = math.hypot(1 / math.sqrt(f * n), 1 / math.sqrt(f * steps))
    assert 4 * uncertainty < 0.7
    assert slope == pytest.approx(1, abs=4 * uncertainty)  # nearest rounding: 0


def test_weight_decay_far_below_the_grid_is_not_lost():
    """lr * weight_decay = 2e-8: one float32 multiplication by 1 - 2e-8 changes nothing, ever.

    Here 1000 steps must shrink the weights by 2e-5 of themselves on average; the noise of the
    mean over 4096 coordinates of about 2^22 grid steps is sqrt(0.08 * 1000 / 4096) steps.
    """
    assert torch.tensor(0.9) * (1 - 2e-8) == torch.tensor(0.9)
    generator = torch.Generator().manual_seed(0)
    space = space_of({"w": 0.5 + 0.5 * torch.rand(4096, generator=generator)})
    before, spacing = flat(space), float(spacings(space)[0])
    for step in range(1000):
        space.step_(directions_of(step, 1), [0.0], decay=2e-8)
    shrunk = float((before - flat(space)).mean()) / spacing
    wanted = float(before.mean()) * 2e-5 / spacing
    assert wanted > 50
    assert shrunk == pytest.approx(wanted, abs=6 * math.sqrt(0.08 * 1000 / 4096) + 0.05)


def test_weight_decay_touches_only_decayed():
    tensors = {"w": torch.ones(100), "b": torch.ones(100), "h": torch.ones(100).bfloat16()}
    space = space_of(tensors, decayed=["w", "h"])
    space.step_(directions_of(0, 1), [0.0], decay=0.25)
    assert torch.equal(tensors["w"], torch.full((100,), 0.75))
    assert torch.equal(tensors["b"], torch.ones(100))
    assert torch.equal(tensors["h"], torch.full((100,), 0.75).bfloat16())


def test_bfloat16_layer_norm_weights_of_one_are_perturbed_right_on_average():
    """lambda = 1e-3 at a spacing of 2^-7: nearest rounding leaves every weight where it is.

    theta+ moves by 2^-7 with probability p = lambda 2^7, theta- by 2^-8 with q = lambda 2^8, so that
    (theta+ - theta-) u / (2 lambda) has mean 1 and, whatever their dependence, a deviation of at most
    (2^-7 sqrt(p (1 - p)) + 2^-8 sqrt(q (1 - q))) / (2 lambda) < 2.2. The mean over the coordinates of
    one direction has no more, and directions are independent.
    """
    ones, count = torch.ones(96).bfloat16(), 300
    assert torch.equal((ones + SMOOTHING).bfloat16(), ones)
    space = space_of({"w": ones})
    means = []
    for step in range(count):
        u = Direction(KEY, step)
        space.move_to_(((u, SMOOTHING),))
        plus = space.tensors[0].double()
        space.move_to_(((u, -SMOOTHING),))
        difference = (plus - space.tensors[0].double()) / (2 * SMOOTHING)
        means.append(float(difference @ direction_vector(u, "rademacher", [(0, 96)]).double()) / 96)
    space.settle_()
    assert torch.equal(space.tensors[0], torch.ones(96).bfloat16())
    p, q = SMOOTHING * 2**7, SMOOTHING * 2**8
    deviation = 2**-7 * math.sqrt(p * (1 - p)) + 2**-8 * math.sqrt(q * (1 - q))
    deviation /= 2 * SMOOTHING
    assert deviation < 2.2
    assert float(np.mean(means)) == pytest.approx(1, abs=5 * deviation / math.sqrt(count))


def random_position(draw: np.random.Generator, us: list[Direction]) -> Any:
    """Up to three of the directions, in any order, together within half of the smoothing."""
    chosen = draw.permutation(len(us))[: draw.integers(0, 4)]
    return tuple((us[i], float(draw.uniform(-0.5, 0.5)) * SMOOTHING / 3) for i in chosen)


def dense_noise(part: int, total: Tensor) -> Tensor:
    noise = torch.randn(len(total), generator=torch.Generator().manual_seed(part))
    return total.float() + 1e-3 * noise


def operate(space: ParameterSpace, seed: int, step: int, defer: bool) -> tuple[str, list[Tensor]]:
    """One random operation; (its name, everything that may be read after it)."""
    draw = np.random.default_rng((seed, step))
    us = [*directions_of(step, 2), *directions_of(step - 1 if step else 99, 2)]
    name = str(draw.choice(["step", "step", "step", "decay", "regrid", "dense", "move", "move",
                            "perturbed", "settle", "write", "state"]))  # fmt: skip
    scale = {"regrid": 3.0 * 2 ** (step % 3)}.get(name, float(10 ** draw.uniform(-8, -2)))
    coefficients = (draw.standard_normal(2) * scale * (draw.random(2) < 0.8)).tolist()
    position = random_position(draw, us)
    if name in ("step", "decay", "regrid"):
        decay = 0.01 if name == "decay" else 0.0
        space.step_([us[i] for i in draw.permutation(2)], coefficients, decay=decay, defer=defer)
        return name, []
    if name == "dense":
        space.dense_step_([us[0]], [coefficients[0]], dense_noise)
    elif name == "move":
        space.move_to_(position)
    elif name == "perturbed":
        with space.perturbed(Direction(KEY, step, 9), 0.4 * SMOOTHING):
            inside = copies(space.tensors)
        return name, [*inside, *copies(space.tensors)]
    else:
        space.settle_()
        assert space.settled
    if name == "write" and position:
        outs = [torch.empty_like(tensor) for tensor in space.tensors]
        for number, out in enumerate(outs):
            space.write_perturbed_(number, position, out)
        return name, [*outs, *copies(space.tensors)]
    if name == "state":
        space.load_state_dict(json.loads(json.dumps(space.state_dict())))
    return name, copies(space.tensors)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_deferred_updates_equal_eager_ones_bit_for_bit(distribution, monkeypatch):
    """15 random programs of 12 operations, all dtypes: the same wherever one may look. Every third pair
    also differs in where its tensors lie: in runs, and each where it is, as on a GPU."""
    seen, waited = set(), 0
    for seed in range(15):
        eager = space_of(mixed_tensors(), distribution=distribution)
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "together_on", lambda device, seed=seed: seed % 3 == 0)
            deferred = space_of(mixed_tensors(), distribution=distribution)
        for step in range(12):
            name, readable = operate(eager, seed, step, defer=False)
            found = operate(deferred, seed, step, defer=True)[1]
            assert same(readable, found), (seed, step, name)
            seen.add((name, deferred.waiting))
            waited += deferred.waiting
        eager.settle_()
        deferred.settle_()
        assert same(eager.tensors, deferred.tensors), seed
        assert eager.state_dict() == deferred.state_dict()
    assert len({name for name, _ in seen}) == 9
    assert waited > 20


def test_a_refused_move_leaves_the_waiting_update_waiting():
    eager, space = space_of(some_tensors()), space_of(some_tensors())
    u, v = directions_of(0, 2)
    eager.step_([u], [1e-3])
    space.step_([u], [1e-3], defer=True)
    with pytest.raises(ValueError, match="larger than smoothing"):
        space.move_to_(((v, 2 * SMOOTHING),))
    assert space.waiting
    with pytest.raises(ValueError, match="not finite"):
        space.step_([v], [math.nan], defer=True)
    assert space.settled
    assert same(space.tensors, eager.tensors)


def test_what_needs_theta_refuses_unsettled_tensors():
    space = space_of(some_tensors())
    u, out = Direction(KEY, 0), torch.empty(33, 17)
    for unsettle in (
        lambda: space.move_to_(((u, SMOOTHING),)),
        lambda: space.step_([u], [1e-3], defer=True),
    ):
        unsettle()
        with pytest.raises(AssertionError, match="settle_"):
            space.state_dict()
        with pytest.raises(AssertionError, match="settle_"):
            space.write_perturbed_(0, ((u, SMOOTHING),), out)
        space.settle_()


@pytest.mark.parametrize(
    ("dtype", "eager", "deferred"),
    [(torch.float32, 24, 16), (torch.bfloat16, 16, 10), (torch.float16, 16, 10)],
)
def test_traffic_of_a_step_in_bytes_of_a_parameter(dtype, eager, deferred):
    """K = 1. float32: to theta + lambda u, to theta - lambda u, home with the update, the last of them
    saved by deferral; 8 bytes each, read and written. Half precision: a copy, a pass for each sign and
    the update; deferred, settled values are read, updated and read on the fly, perturbed ones written,
    and again read and written for the other sign."""
    space, n = space_of({"w": torch.ones(100_000).to(dtype)}), 100_000
    for defer, expected in [(False, eager), (True, None), (True, deferred), (True, deferred)]:
        before, u = space.traffic, Direction(KEY, space.traffic)
        space.move_to_(((u, SMOOTHING),))
        space.move_to_(((u, -SMOOTHING),))
        space.step_([u], [1e-3], defer=defer)
        assert expected is None or space.traffic - before == expected * n
    space.settle_()
    before = space.traffic
    space.settle_()  # nothing left to do
    assert space.traffic == before


def written_tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    """Matrices of widths that are and are not multiples of 32, alone and among others."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"a": (9, 64), "b": (7, 20), "norm": (33,), "big": (1100, 64), "odd": (1400, 50)}
    return {n: torch.randn(*s, generator=generator).to(dtype) for n, s in shapes.items()}


def positions() -> list[Any]:
    u, v = directions_of(6, 2)
    return [((u, SMOOTHING),), ((u, -SMOOTHING),), ((v, 0.3 * SMOOTHING), (u, 0.7 * SMOOTHING))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_written_copies_are_what_a_move_puts_there(distribution, dtype):
    """Whole tensors and rows (in any order, repeated); theta stays as it is."""
    space = space_of(written_tensors(dtype), distribution=distribution)
    before = copies(space.tensors)
    rows = torch.tensor([5, 0, 6, 5, 3])
    for position in positions():
        space.move_to_(position)
        expected = copies(space.tensors)
        space.settle_()
        for number, wanted in enumerate(expected):
            out = torch.full_like(wanted, 7.0)
            space.write_perturbed_(number, position, out)
            assert torch.equal(out, wanted), space.names[number]
            if wanted.dim() == 2:
                few = torch.full((5, wanted.shape[1]), 7.0, dtype=dtype)
                space.write_perturbed_rows_(number, rows, position, few)
                assert torch.equal(few, wanted[rows]), space.names[number]
    assert same(space.tensors, before)
    assert space.settled


class Blocks(nn.Module):
    """Many small tensors of two kinds around one large one, one tied and one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1200, 64)
        self.first, self.norm = nn.Linear(64, 8), nn.LayerNorm(8)
        self.second, self.head = nn.Linear(8, 64), nn.Linear(64, 1200, bias=False)
        self.head.weight = self.embed.weight
        self.norm.half()
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)


def test_small_tensors_are_moved_but_stay_the_same_parameters():
    model = Blocks()
    objects = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in objects.items()}
    space = ParameterSpace.from_model(model, smoothing=SMOOTHING)
    assert dict(model.named_parameters()) == objects
    assert all(p is objects[name] for name, p in model.named_parameters())
    assert all(torch.equal(p, values[name]) for name, p in objects.items())
    assert model.head.weight is model.embed.weight
    assert space.dimension == sum(v.numel() for v in values.values()) - 3  # tied weights count once
    storages = {name: p.untyped_storage().data_ptr() for name, p in objects.items()}
    assert storages["first.weight"] == storages["first.bias"]
    assert storages["norm.weight"] == storages["norm.bias"] != storages["first.bias"]
    assert storages["second.weight"] == storages["second.bias"] != storages["first.bias"]
    assert storages["frozen"] not in [v for n, v in storages.items() if n != "frozen"]
    space.check_is_of(model)
    space.snap_()
    before = {name: p.detach().clone() for name, p in objects.items()}
    with space.perturbed(Direction(KEY, 0), SMOOTHING):
        moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
        assert moved == set(objects) - {"frozen"}


def test_a_model_on_shared_storage_saves_and_loads(tmp_path):
    from safetensors.torch import load_file, save_file

    model = Blocks()
    ParameterSpace.from_model(model, smoothing=SMOOTHING)
    state = {n: t for n, t in model.state_dict().items() if n != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    for found in (load_file(tmp_path / "model.safetensors"), torch.load(tmp_path / "model.pt")):
        assert {n: t.dtype for n, t in found.items()}.items() >= {
            n: t.dtype for n, t in state.items()
        }.items()
        assert all(torch.equal(found[n], t) for n, t in state.items())
    other = Blocks()
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert digest_model(other) == digest_model(model)


@pytest.mark.parametrize(
    "replace",
    [
        lambda m: setattr(m.first, "bias", nn.Parameter(torch.zeros(8))),
        lambda m: m.frozen.requires_grad_(True),
        lambda m: m.first.requires_grad_(False),
    ],
)
def test_other_parameters_after_setup_are_noticed(replace):
    model = Blocks()
    space = ParameterSpace.from_model(model, smoothing=SMOOTHING)
    model.to("cpu")  # a move that moves nothing
    space.check_is_of(model)
    replace(model)
    with pytest.raises(RuntimeError, match="replaced"):
        space.check_is_of(model)


def give_new_storage(model: nn.Module) -> None:
    """What wrappers that flatten or move parameters do: same objects, same values, other memory."""
    for parameter in model.parameters():
        parameter.data = parameter.detach().clone()


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
@pytest.mark.parametrize("defer", [False, True])
def test_new_storage_is_followed_by_every_operation(distribution, defer):
    """What touches parameters is done to those the model has when `check_is_of` looks, once a step."""

    def operations(space: ParameterSpace, between) -> list[Tensor]:
        u, v = directions_of(0, 2)
        between()
        space.snap_()
        between()
        space.step_([u], [1e-3], decay=0.125, defer=defer)
        between()
        space.move_to_(((v, SMOOTHING),))
        between()
        standing = copies(space.tensors)
        space.step_([u, v], [1e-3, 5.0], defer=defer)
        between()
        space.settle_()
        between()
        space.step_([v], [1e-3], decay=0.125, defer=defer)
        between()
        space.dense_step_([u], [1e-3], dense_noise)
        between()
        space.load_state_dict(space.state_dict())
        between()
        return [*standing, *copies(space.tensors)]

    results = []
    for between in (lambda m: None, give_new_storage):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Blocks()
        space = ParameterSpace.from_model(model, smoothing=SMOOTHING, distribution=distribution)

        def exchanged(model=model, space=space, between=between) -> None:
            between(model)
            space.check_is_of(model)

        results.append(operations(space, exchanged))
        space.check_is_of(model)
    assert same(*results)


def test_a_model_converted_after_setup_is_refused():
    """Its grid, and the kind of its arithmetic, were those of another dtype."""
    model = Blocks()
    space = ParameterSpace.from_model(model, smoothing=SMOOTHING)
    space.snap_()
    model.first.to(torch.bfloat16)
    with pytest.raises(
        RuntimeError, match=r"first.weight was torch.float32 .*bfloat16 now: convert"
    ):
        space.move_to_(((Direction(KEY, 0), SMOOTHING),))
    assert space.settled


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:2],
        lambda t: t.t(),  # made contiguous, it would silently stop being shared
        lambda t: t.view(-1)[5:9],
        lambda t: t[:, :1],
    ],
)
def test_shared_memory_that_is_not_one_parameter_is_refused(view):
    base = torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"the trainable (a and b|b and a) use the same memory"):
        ParameterSpace({"a": base, "b": view(base)}.items())


def test_non_contiguous_parameters_are_made_contiguous_in_place():
    layer = nn.Linear(3, 5)
    layer.weight.data = torch.arange(15.0).reshape(3, 5).t()
    value = layer.weight.detach().clone()
    space = ParameterSpace.from_model(layer, smoothing=SMOOTHING)
    assert layer.weight.is_contiguous()
    assert torch.equal(layer.weight, value)
    space.snap_()
    with space.perturbed(Direction(KEY, 0), SMOOTHING):
        assert not torch.equal(layer.weight, value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.complex64])
def test_unsupported_dtypes_are_named(dtype):
    with pytest.raises(ValueError, match=rf"w (has dtype|is quantised) .?{re.escape(str(dtype))}"):
        ParameterSpace([("w", torch.zeros(3, dtype=dtype))])


def test_meta_nan_and_nothing_trainable_are_refused():
    with pytest.raises(ValueError, match="w is on the meta device"):
        ParameterSpace([("w", torch.zeros(3, device="meta"))])
    with pytest.raises(ValueError, match="no parameter is trainable"):
        ParameterSpace.from_model(nn.Linear(2, 2).requires_grad_(False))
    for dtype in DTYPES:
        for bad in (math.nan, math.inf):
            with pytest.raises(ValueError, match="finite weights"):
                ParameterSpace([("w", torch.tensor([1.0, bad], dtype=dtype))]).snap_()
    with pytest.raises(ValueError, match="direction='cauchy'"):
        ParameterSpace([("w", torch.zeros(3))], distribution="cauchy")


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_state_survives_json_and_continues_bit_for_bit(distribution):
    straight = space_of(some_tensors(), distribution=distribution)
    for step in range(5):
        straight.step_(directions_of(step, 2), [0.05, 0.02])
    state = json.loads(json.dumps(straight.state_dict()))
    saved = dict(zip(straight.names, copies(straight.tensors), strict=True))
    resumed = ParameterSpace(saved.items(), distribution=distribution, smoothing=SMOOTHING)
    resumed.load_state_dict(state)
    for step in range(5, 12):
        for space in (straight, resumed):
            space.step_(directions_of(step, 2), [0.05, 0.02])
    assert same(straight.tensors, resumed.tensors)
    assert straight.state_dict() == resumed.state_dict()


def test_state_of_another_model_is_refused():
    state = space_of(some_tensors()).state_dict()
    with pytest.raises(ValueError, match=r"trainable tensors \(6\) are not this model's \(1\)"):
        ParameterSpace([("w", torch.zeros(3))]).load_state_dict(state)


def test_state_refuses_weights_that_are_not_on_its_grid():
    """Weights that went through bfloat16, or were edited, would make every later move inexact."""
    space = space_of({"w": torch.linspace(0.1, 1, 50)})
    state = space.state_dict()
    space.tensors[0].add_(1e-8)
    other = ParameterSpace([("w", torch.linspace(0.1, 1, 50) / 3)])
    with pytest.raises(ValueError, match="w holds values that are not on the grid"):
        other.load_state_dict(state)


def test_dense_step_adds_u_and_the_noise_within_a_grid_step():
    """DPGD-0th: the noise joins before the rounding; parts arrive in order, each once."""
    space = space_of(some_tensors(), distribution="gaussian")
    before, u, drawn = flat(space), Direction(KEY, 2), []

    def noised(part: int, total: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(part)
        drawn.append((part, torch.randn(len(total), generator=generator)))
        assert total.dtype == torch.float64
        return (total + drawn[-1][1]).float()

    space.move_to_(((u, SMOOTHING),))
    space.dense_step_([u], [1e-3], noised)
    assert [part for part, _ in drawn] == list(range(5))
    noises = torch.cat([values for _, values in drawn]).double()
    expected = before + 1e-3 * direction_vector(u, "gaussian", space.layout).double() + noises
    error = (flat(space) - expected).abs() / spacings(space)
    # A coarser grid on the way (1/2), the rounding itself (1), float32 before it (1/2).
    assert float(error.max()) <= 2.0
    moved = copies(space.tensors)
    with space.perturbed(u, SMOOTHING):
        pass
    assert same(space.tensors, moved)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_gram_of_the_full_space(distribution, monkeypatch):
    """Of one Rademacher direction, without drawing anything."""
    space = space_of(some_tensors(), distribution=distribution)
    us = directions_of(2, 5)
    rows = [direction_vector(u, distribution, space.layout, torch.float64) for u in us]
    matrix = torch.stack(rows)
    gram, expected = space.gram(us), matrix @ matrix.T
    if distribution == "rademacher":
        assert torch.equal(gram, expected.round())
        monkeypatch.setattr(dispatch, "coordinates", lambda *_: pytest.fail("drew coordinates"))
        assert space.gram([Direction(KEY, 0)]).tolist() == [[float(space.dimension)]]
    else:
        assert torch.allclose(gram, expected, rtol=1e-6, atol=1e-6 * space.dimension)
    fixed = distribution != "gaussian"  # the norm of a drawn one is its stream's
    norms = [space.dimension if fixed else space.stream(u).squared_norm() for u in us]
    assert gram.diag().tolist() == pytest.approx(norms)


def peak_resident_bytes() -> int:
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read())[1]) * 1024


def resident_bytes() -> int:
    with open("/proc/self/status") as status:
        return int(re.search(r"VmRSS:\s+(\d+) kB", status.read())[1]) * 1024


def forget_peak() -> None:
    """Garbage and freed heap are given back first, so that neither hides nor feeds what follows."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux /proc")
@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_no_copy_of_the_model_is_made(distribution):
    """64 MiB of weights: snapping, perturbing and updating may not take 24 MiB more; a copy would."""
    short_training(distribution)  # so that compiling is not counted
    weights = torch.full((1 << 24,), 0.5)
    forget_peak()
    before = peak_resident_bytes()
    space = space_of({"w": weights}, distribution=distribution)
    u = Direction(KEY, 0)
    space.move_to_(((u, SMOOTHING),))
    space.step_([u], [1e-4], decay=1e-6, defer=True)
    space.settle_()
    assert peak_resident_bytes() - before < 24 << 20


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux /proc")
def test_half_precision_holds_one_copy_while_perturbed_and_none_when_settled():
    """64 MiB of weights: snapping and updating take no copy; a perturbation one, until it is off."""
    short_training("rademacher")
    weights, size = torch.full((1 << 25,), 0.5, dtype=torch.bfloat16), 64 << 20
    forget_peak()
    before, now = peak_resident_bytes(), resident_bytes()
    space = space_of({"w": weights})
    u, v = directions_of(0, 2)
    space.step_([u], [1e-4], decay=1e-6)
    assert peak_resident_bytes() - before < 24 << 20
    for position in [((u, SMOOTHING),), ((v, -SMOOTHING),)]:
        space.move_to_(position)
        assert size - (8 << 20) < resident_bytes() - now < size + (24 << 20)
    space.settle_()
    assert resident_bytes() - now < 24 << 20
    assert peak_resident_bytes() - before < size + (24 << 20)
