"""Direction subspaces: exact as the full space is, and the directions that they say they are."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dpzero.estimators.deferred_updates import WeightReads
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.ledger.digests import digest_model
from hf_dpzero.ledger.trajectory import Trajectory, replay, space_from_header
from hf_dpzero.perturbation import low_rank_subspace, masks, vectors
from hf_dpzero.perturbation import segments as tensor_kinds
from hf_dpzero.perturbation.directions import (
    Direction,
    DirectionStream,
    coordinates,
    direction_vector,
)
from hf_dpzero.perturbation.kernels import dispatch, torch_reference
from hf_dpzero.perturbation.low_rank_subspace import LowRankSpace
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.perturbation.philox import stream_key
from hf_dpzero.perturbation.sparse_space import SparseSpace
from hf_dpzero.perturbation.subspaces import Full, LowRank, Sparse, Subspace, subspace_from_dict
from hf_dpzero.privacy.mechanisms import ScalarMechanism, VectorMechanism
from hf_dpzero.privacy.noise import InsecureSeededNoise
from hf_dpzero.training.zeroth_order_step import PrivateStep

KEY = 0x0123_4567_89AB_CDEF_0000_FFFF_1234_A5A5
SMOOTHING = 1e-3
SUBSPACES = [Sparse(0.1), Sparse(0.37), LowRank(2, 3), LowRank(4, 50)]
SPARSE = [("sparse", d) for d in ("rademacher", "gaussian", "sphere")]


def some_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Matrices, a small one, rows, a scalar, zeros of both signs, an empty tensor, a 3-D one."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"wide": (33, 57), "tall": (90, 21), "small": (2, 100), "row": (1000,), "one": (),
             "cube": (5, 6, 7), "large": (300, 230)}  # fmt: skip
    scales = {"row": 1e-3, "one": 1.0, "cube": 30.0}
    made = {n: torch.randn(s, generator=generator) * scales.get(n, 0.05) for n, s in sizes.items()}
    made["zero"], made["empty"] = torch.zeros(40), torch.empty(0, 4)
    made["zero"][::2] = -0.0
    return made


def space_of(subspace: Subspace, tensors: dict[str, Tensor], **settings: Any) -> ParameterSpace:
    kind: dict[str, Any] = {"full": ParameterSpace, "sparse": SparseSpace, "low_rank": LowRankSpace}
    own = subspace.to_dict()
    space = kind[own.pop("name")](tensors.items(), **own, **{"smoothing": SMOOTHING, **settings})
    space.snap_()
    return space


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def same(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    """Bit for bit: -0 is not +0."""
    pairs = [
        (a.detach().contiguous(), b.detach().contiguous()) for a, b in zip(left, right, strict=True)
    ]
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


def vector_of(space: ParameterSpace, u: Direction) -> list[Tensor]:
    """The direction, tensor by tensor, float64, from the numpy source alone."""
    if isinstance(space, SparseSpace):
        whole = direction_vector(u, space.distribution, space.layout).double()
        parts = whole.split([size for _, size in space.layout])
        made = [torch.zeros(t.numel(), dtype=torch.float64) for t in space.tensors]
        for row, (_, _, chosen), part in zip(made, space._masks(), parts, strict=True):
            row[chosen.long()] = part
        return [row.view(t.shape) for row, t in zip(made, space.tensors, strict=True)]
    assert isinstance(space, LowRankSpace)
    pairs = zip(space.offsets, space.tensors, strict=True)
    return [_matrix_or_signs(space, u, offset, tensor) for offset, tensor in pairs]


def _matrix_or_signs(space: LowRankSpace, u: Direction, offset: int, tensor: Tensor) -> Tensor:
    own = stream_key(u.key, u.step, u.query, 0)
    held = stream_key(u.key, u.step // space.hold, u.query, 3)

    def signs(key: Any, rows: int, columns: int) -> Tensor:
        found = coordinates(key, False, offset, rows * columns)
        return torch.from_numpy(found).double().view(rows, columns)

    if tensor.dim() == 2 and min(tensor.shape) > space.rank:
        (m, n), r = tensor.shape, space.rank
        return signs(own, m, r) @ signs(held, n, r).T / math.sqrt(r)
    return signs(own, 1, tensor.numel()).view(tensor.shape)


def flat(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([part.detach().double().reshape(-1) for part in parts])


def spacing_of(space: ParameterSpace) -> float:
    """The coarsest grid step of any tensor."""
    return max(float(segment.spacing.max()) for segment in space._segments)


# ---------------------------------------------------------------- exactness


@pytest.mark.parametrize("subspace", SUBSPACES, ids=str)
def test_500_moves_and_restores_change_no_bit(subspace: Subspace):
    space = space_of(subspace, some_tensors())
    before = copies(space.tensors)
    for step in range(500):
        u, v = Direction(KEY, step), Direction(KEY, step, 1)
        space.move_to_(((u, SMOOTHING),))
        if step % 50 == 0:
            assert not same(space.tensors, before)
            space.move_to_(((u, 0.3 * SMOOTHING), (v, -0.7 * SMOOTHING)))
        space.move_to_(((u, -SMOOTHING),))
        if step % 3 == 0:
            space.settle_()
    space.settle_()
    assert same(space.tensors, before)


@pytest.mark.parametrize("subspace", SUBSPACES, ids=str)
def test_a_move_is_lambda_u(subspace: Subspace):
    """Half a grid step for the coefficient's rounding, times the integers it multiplies (r)."""
    space = space_of(subspace, some_tensors())
    before, most = flat(space.tensors), getattr(subspace, "rank", 1)
    for u, scale in [(Direction(KEY, 7), SMOOTHING), (Direction(KEY, 8, 2), -0.6 * SMOOTHING)]:
        expected = before + scale * flat(vector_of(space, u))
        with space.perturbed(u, scale):
            error = (flat(space.tensors) - expected).abs()
            assert float(error.max()) <= (0.5 * most + 0.01) * spacing_of(space)
            assert float((flat(space.tensors) - before).abs().max()) > 0.5 * SMOOTHING


@pytest.mark.parametrize("subspace", SUBSPACES, ids=str)
def test_plus_minus_and_update_are_an_exact_sum(subspace: Subspace):
    """theta+ - theta and theta - theta- are equal to the bit, and the update is the same from
    wherever it is made."""
    space, other = (space_of(subspace, some_tensors()) for _ in range(2))
    theta, u = copies(space.tensors), Direction(KEY, 3)
    space.move_to_(((u, SMOOTHING),))
    plus = copies(space.tensors)
    space.move_to_(((u, -SMOOTHING),))
    for t, p, m in zip(theta, plus, space.tensors, strict=True):
        assert torch.equal(p.double() - t.double(), t.double() - m.double())
    space.step_([u], [7e-4], defer=True)
    space.move_to_(((Direction(KEY, 4), SMOOTHING),))
    space.settle_()
    other.step_([u], [7e-4])
    assert same(space.tensors, other.tensors)
    most = getattr(subspace, "rank", 1)
    wanted = flat(theta) + 7e-4 * flat(vector_of(space, u))
    assert float((flat(other.tensors) - wanted).abs().max()) <= most * spacing_of(other) * 1.01


@pytest.mark.parametrize("subspace", SUBSPACES, ids=str)
def test_any_fusion_gives_the_same_weights(subspace: Subspace):
    """With growth through several grids, two directions, weight decay and deferral."""
    results = []
    for visit in range(3):
        space = space_of(subspace, some_tensors())
        for step in range(12):
            us = [Direction(KEY, step, k) for k in range(2)]
            if visit:
                for scale in (SMOOTHING, -SMOOTHING):
                    space.move_to_(((us[visit - 1], scale),))
            decay = 1e-2 if step % 2 else 0.0
            space.step_(us, [0.2, -1e-6 * step], decay=decay, defer=visit == 2)
        space.settle_()
        results.append((copies(space.tensors), space.state_dict()))
    for tensors, state in results[1:]:
        assert same(tensors, results[0][0])
        assert state == results[0][1]
    exponents = {name: s["exponent"] for name, s in _grids(results[0][1]).items()}
    first = _grids(space_of(subspace, some_tensors()).state_dict())
    assert any(exponents[name] > first[name]["exponent"] for name in exponents)


def _grids(state: dict[str, Any]) -> dict[str, Any]:
    return state.get("tensors", state)


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_the_grid_leaves_room_for_coordinates_of_sqrt_r(rank: int):
    """Values at the edge of the range, led there by updates; every move back and forth is exact."""
    smoothing = 0.05
    tensors = {"w": torch.full((24, 40), 0.2)}
    space = space_of(LowRank(rank, 2), tensors, smoothing=smoothing)
    exponents = set()
    for step in range(100):
        u, v = Direction(KEY, step), Direction(KEY, step, 1)
        space.step_([u, v], [0.03, -0.01])
        state = space.state_dict()["w"]
        exponents.add(state["exponent"])
        before = copies(space.tensors)
        largest = float(before[0].abs().max())
        assert largest <= state["bound"]
        assert state["bound"] + 2 * smoothing * math.sqrt(rank) < 2.0 ** state["exponent"]
        for position in [((u, 0.5 * smoothing), (v, 0.5 * smoothing)), ((v, -smoothing),), ()]:
            space.move_to_(position)
        assert same(space.tensors, before)
    assert len(exponents) > 1
    assert largest > 0.2 + 0.03 * math.sqrt(rank)


# ---------------------------------------------------------------- backends


def short_run(subspace: Subspace, distribution: str = "rademacher") -> list[Tensor]:
    space = space_of(subspace, some_tensors(), distribution=distribution)
    found = []
    for step in range(4):
        us = [Direction(KEY, step, k) for k in range(2)]
        space.move_to_(((us[0], SMOOTHING),))
        found += copies(space.tensors)
        space.step_(us, [0.3, 2e-7], decay=1e-6)
    gram = space.gram([Direction(KEY, 0, k) for k in range(3)])
    return found + copies(space.tensors) + [gram.float()]


@pytest.mark.parametrize("subspace", SUBSPACES, ids=str)
def test_chunks_and_backends_give_the_same_bits(
    subspace: Subspace, monkeypatch: pytest.MonkeyPatch
):
    expected = short_run(subspace)
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(dispatch, "_cpu_kernels", lambda: None)
        for chunk in (352, 4096):
            for module, name in [(low_rank_subspace, "_CHUNK"), (masks, "CHUNK"),
                                 (tensor_kinds, "_SLICE"), (torch_reference, "_CHUNK"),
                                 (vectors, "_CHUNK")]:  # fmt: skip
                monkeypatch.setattr(module, name, chunk)
            assert same(short_run(subspace), expected)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_lower_matmul_precision_and_autocast_do_not_matter(precision: str):
    """Products of signs are small integers: exact in TF32 and bfloat16."""
    expected, before = short_run(LowRank(4, 50)), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert same(short_run(LowRank(4, 50)), expected)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.parametrize("subspace", SUBSPACES, ids=str)
def test_cuda_gives_the_bits_of_the_cpu(subspace: Subspace, monkeypatch: pytest.MonkeyPatch):
    expected, made = short_run(subspace), some_tensors()
    monkeypatch.setitem(globals(), "some_tensors", lambda: {n: t.cuda() for n, t in made.items()})
    for allow in (False, True):
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allow)
        assert same([t.cpu() for t in short_run(subspace)], expected)


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian", "sphere"])
def test_density_one_is_the_full_space(distribution: str):
    assert same(short_run(Sparse(1.0), distribution), short_run(Full(), distribution))


# ---------------------------------------------------------------- sparse: which coordinates


def sorted_choice(values: Tensor, count: int) -> list[int]:
    """The definition: a stable sort by magnitude."""
    return sorted(torch.sort(values.abs(), stable=True).indices[:count].tolist())


def test_the_smallest_are_chosen_and_of_equals_the_first(monkeypatch: pytest.MonkeyPatch):
    generator = torch.Generator().manual_seed(1)
    coarse = (torch.randn(999, generator=generator) * 4).round() / 4  # many ties and zeros
    wide = torch.randn(999, generator=generator) * 10.0 ** torch.randint(
        -30, 30, (999,), generator=generator
    )
    signed_zeros = torch.tensor([-0.0, 0.0, -0.0, 1.0])
    cases = [(v, n) for v in (coarse, wide) for n in (0, 1, 2, 100, 500, 998, 999)]
    cases += [(signed_zeros, n) for n in range(5)] + [(torch.empty(0), 0)]
    for chunk in (64, 1 << 18):
        monkeypatch.setattr(masks, "CHUNK", chunk)
        for values, count in cases:
            found = masks.smallest(values, count)
            assert found.tolist() == sorted_choice(values, count)
            assert found.dtype == torch.int32


def test_exactly_the_ceiling_of_the_density_is_chosen():
    for density, expected in [(0.07, 7), (0.29, 29), (0.1, 10), (1e-6, 1), (1.0, 100)]:
        assert masks.count_of(100, density) == expected
    space = space_of(Sparse(0.1), some_tensors())
    sizes = [t.numel() for t in space.tensors]
    assert [size for _, size in space.layout] == [-(-size // 10) for size in sizes]
    assert space.dimension == sum(-(-size // 10) for size in sizes)
    assert 0 < space.dimension < sum(sizes) / 9


@pytest.mark.parametrize(("kind", "distribution"), SPARSE)
def test_untouched_coordinates_keep_their_bits(kind: str, distribution: str):
    """Those of larger magnitude: not even put on a grid, through moves, steps and decay."""
    base = some_tensors()
    chosen = {
        n: sorted_choice(t.reshape(-1), masks.count_of(t.numel(), 0.25)) for n, t in base.items()
    }
    tensors = {name: value.clone() for name, value in base.items()}
    space = space_of(Sparse(0.25), tensors, distribution=distribution)
    moved = {name: torch.zeros(t.numel(), dtype=torch.bool) for name, t in base.items()}
    for step in range(5):
        u = Direction(KEY, step)
        space.move_to_(((u, SMOOTHING),))
        space.step_([u], [0.4], decay=0.01)
        space.dense_step_([u], [0.1], lambda part, count: torch.full((count,), 1e-3))
        for name in tensors:
            bits = (t.reshape(-1).view(torch.int32) for t in (tensors[name], base[name]))
            moved[name] |= torch.ne(*bits)
    for name, indices in chosen.items():
        assert moved[name].nonzero().view(-1).tolist() == indices


def test_indices_and_values_are_all_the_extra_memory():
    space = space_of(Sparse(0.2), {"w": torch.linspace(-1, 1, 1000)})
    kept = [*space._indices, *space._compact]
    assert sum(t.numel() * t.element_size() for t in kept) == 200 * (4 + 4)


# ---------------------------------------------------------------- low rank: what a direction is


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("rank", [1, 3])
def test_the_second_moment_is_the_identity(rank: int):
    """E[u u^T] = I over U and V, for a matrix with a vector beside it.

    4000 directions under 2000 V: an entry's estimate is a mean over V of numbers with a variance of
    at most E[(u_i u_j)^2] <= E[u_i^4] = 3 - 2 / r, of which the largest of 276 stays below 5.5
    deviations. One V for all would put entries of size 1 beside the diagonal.
    """
    tensors = {"w": torch.zeros(4, 5), "b": torch.zeros(3)}
    space = space_of(LowRank(rank, 2), tensors)
    us = torch.stack([flat(vector_of(space, Direction(KEY, t))) for t in range(4000)])
    error = (us.T @ us / len(us) - torch.eye(23)).abs()
    assert float(error.max()) < 5.5 * math.sqrt((3 - 2 / rank) / 2000) < 0.25
    assert float(us.mean(dim=0).abs().max()) < 5.5 / math.sqrt(2000)
    assert float((us[::2].T @ us[1::2]).abs().max()) < 0.25 * 2000


def test_v_is_held_and_u_is_fresh():
    tensors = {"w": torch.zeros(30, 20)}
    space = space_of(LowRank(2, 3), tensors)

    def matrix(step: int, query: int = 0) -> Tensor:
        return vector_of(space, Direction(KEY, step, query))[0]

    def rank_of(*parts: Tensor) -> int:
        return int(torch.linalg.matrix_rank(torch.cat(parts)))

    assert rank_of(matrix(0)) == 2
    assert rank_of(matrix(0), matrix(1), matrix(2)) == 2  # one row space
    assert rank_of(matrix(0).T, matrix(1).T, matrix(2).T) == 6
    assert rank_of(matrix(2), matrix(3)) == 4  # another V
    assert rank_of(matrix(0), matrix(0, 1)) == 4
    assert float(matrix(0).abs().max()) == pytest.approx(math.sqrt(2))


def test_streams_of_u_v_and_ordinary_directions_never_meet():
    """Different keys for V; U and vectors lie in disjoint ranges of the direction's own stream."""
    space = space_of(LowRank(4, 1), some_tensors())
    u = Direction(KEY, 5)
    stream, ranges = space.stream(u), []
    for number, (offset, size) in enumerate(space.layout):
        segment, _ = space._places[number]
        factored = isinstance(segment, low_rank_subspace.LowRankSegment)
        used = segment.rows * segment.rank if factored else size
        if factored:
            assert segment.columns * segment.rank <= size
            held = tuple(segment._held_key(u).tolist())
            assert held not in {
                tuple(stream_key(KEY, s, q, d).tolist())
                for s in range(7) for q in range(3) for d in range(3)
            }  # fmt: skip
        assert used <= size
        ranges.append((offset, offset + used))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    assert isinstance(stream, DirectionStream)


def test_only_matrices_larger_than_the_rank_are_factored():
    space = space_of(LowRank(4, 50), some_tensors())
    found = {
        name
        for number, name in enumerate(space.names)
        if isinstance(space._places[number][0], low_rank_subspace.LowRankSegment)
    }
    assert found == {"wide", "tall", "large"}
    assert space.dimension == sum(t.numel() for t in space.tensors)


# ---------------------------------------------------------------- norms and inner products


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian", "sphere"])
@pytest.mark.parametrize("subspace", [Full(), Sparse(0.3)], ids=str)
def test_gram_is_the_inner_products(subspace: Subspace, distribution: str):
    space = space_of(subspace, some_tensors(), distribution=distribution)
    us = [Direction(KEY, 2, k) for k in range(5)]
    rows = [direction_vector(u, distribution, space.layout, torch.float64) for u in us]
    matrix = torch.stack(rows)
    found, expected = space.gram(us), matrix @ matrix.T
    assert found.dtype == torch.float64
    if distribution == "rademacher":
        assert torch.equal(found, expected.round())
    else:
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6 * space.dimension)
    assert found.diag().sqrt().tolist() == pytest.approx([space.direction_norm(u) for u in us])


@pytest.mark.parametrize("subspace", [LowRank(1, 1), LowRank(3, 4)], ids=str)
def test_low_rank_norms_and_inner_products_are_exact(subspace: Subspace):
    space = space_of(subspace, some_tensors())
    us = [Direction(KEY, t, k) for t in (2, 4) for k in range(2)]
    matrix = torch.stack([flat(vector_of(space, u)) for u in us])
    found, expected = space.gram(us), matrix @ matrix.T
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-9)
    assert torch.allclose(3 * found, (3 * found).round(), atol=1e-9)
    for k, u in enumerate(us):
        assert space.direction_norm(u) == math.sqrt(float(found[k, k]))
        assert torch.equal(space.gram([u]), found[k : k + 1, k : k + 1])
    assert len({float(x) for x in found.diag()}) > 1 or subspace == LowRank(1, 1)


def test_gram_of_one_direction_draws_nothing(monkeypatch: pytest.MonkeyPatch):
    space = space_of(Full(), some_tensors())
    monkeypatch.setattr(dispatch, "coordinates", lambda *_: pytest.fail("drew coordinates"))
    assert space.gram([Direction(KEY, 0)]).tolist() == [[float(space.dimension)]]


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian", "sphere"])
def test_dense_step_of_several_directions(distribution: str):
    """The sum of the terms and the noise, on the chosen coordinates, to two grid steps."""
    space = space_of(Sparse(0.5), some_tensors(), distribution=distribution)
    before, us, parts = flat(space.tensors), [Direction(KEY, 1, k) for k in range(3)], []

    def noise(part: int, count: int) -> Tensor:
        parts.append(torch.randn(count, generator=torch.Generator().manual_seed(part)))
        return parts[-1].clone()

    coefficients = [1e-2, -3e-3, 5e-4]
    space.dense_step_(us, coefficients, noise)
    drawn = torch.cat(parts).double()
    assert drawn.numel() == space.dimension
    expected, moves = before.clone(), [flat(vector_of(space, u)) for u in us]
    for move, c in zip(moves, coefficients, strict=True):
        expected += c * move
    expected[flat(vector_of(space, us[0])) != 0] += drawn
    assert float((flat(space.tensors) - expected).abs().max()) <= 2.5 * spacing_of(space)
    with pytest.raises(ValueError, match="2 coefficients for 1 directions"):
        space.dense_step_(us[:1], [1.0, 2.0], noise)


# ---------------------------------------------------------------- with the estimator and the step


class Quadratic(nn.Module):
    """f(theta; x) = 1/2 ||W x - b||^2 - ..., float64 losses: differences are derivatives exactly."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(9, 12, generator=generator))
        self.bias = nn.Parameter(torch.randn(9, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (x.double() @ self.weight.double().T + self.bias.double()).square().sum(dim=1)


def quadratic_loss(model: nn.Module, inputs: Any) -> Tensor:
    return model(inputs["x"])


def batch(count: int, seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(count, 12, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.parametrize("subspace", [Sparse(0.4), LowRank(2, 5)], ids=str)
def test_finite_differences_are_directional_derivatives(subspace: Subspace):
    """d/du 1/2 ||W x + b||^2 = (W x + b) . (U x + u_b). A central difference of a quadratic has no
    truncation error; float32 losses give 2^-24 f / lambda, the move half a grid step (r times)."""
    model, data = Quadratic(), batch(6, 0)
    space = subspace.space_of(model, smoothing=1e-2)
    space.snap_()
    estimate = FiniteDifferences(model, space, quadratic_loss, 1e-2)
    assert estimate.strategy == "whole_model"
    us = [Direction(KEY, 3, k) for k in range(3)]
    found = estimate([data], us)
    space.settle_()
    residual = data["x"].double() @ model.weight.double().T + model.bias.double()
    for k, u in enumerate(us):
        weight, bias = vector_of(space, u)
        slope = (residual * (data["x"].double() @ weight.T + bias)).sum(dim=1).detach()
        assert torch.allclose(found[:, k], slope, rtol=1e-4, atol=2e-3)
        assert float(slope.abs().max()) > 1


def header_of(model: nn.Module, subspace: Subspace | None, **changes: Any) -> dict[str, Any]:
    names = [name for name, _ in model.named_parameters()]
    header = {
        "base_model_digest": digest_model(model),
        "direction_key": f"{KEY:032x}",
        "direction": "rademacher",
        "num_directions": 2,
        "smoothing": SMOOTHING,
        "weight_decay": 0.1,
        "trainable": names,
        "decayed": names,
        "replayable": True,
        "subspace": None if subspace is None else subspace.to_dict(),
        **changes,
    }
    return json.loads(json.dumps({k: v for k, v in header.items() if v is not None}))


def run_of(model: nn.Module, header: dict[str, Any], **settings: Any) -> PrivateStep:
    space = space_from_header(model, header)
    space.snap_()
    mechanism = ScalarMechanism(
        clip=5.0, noise_multiplier=1.0, expected_batch_size=6.0, num_directions=2
    )
    return PrivateStep(
        mechanism=mechanism,
        space=space,
        differences=FiniteDifferences(model, space, quadratic_loss, SMOOTHING),
        noise=InsecureSeededNoise(7),
        trajectory=Trajectory(header),
        **settings,
    )


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("subspace", [Sparse(0.4), LowRank(2, 5), Full(), None], ids=str)
def test_a_replay_is_the_training_bit_for_bit(subspace: Subspace | None, defer: bool):
    model, again = Quadratic(), Quadratic()
    step = run_of(model, header_of(model, subspace), defer=defer)
    with WeightReads(model, step.space):
        for t in range(17):
            assert step(t, [batch(4, t), batch(2, 99 + t)], 0.05) is not None
        trained = {name: value.clone() for name, value in model.state_dict().items()}
    assert not same(model.parameters(), again.parameters())
    replay(again, step.trajectory)
    assert same(again.state_dict().values(), trained.values())
    wrong = Quadratic()
    log = Trajectory(
        {**step.trajectory.header, "subspace": Sparse(0.3).to_dict()}, step.trajectory.releases
    )
    replay(wrong, log)
    assert not same(wrong.parameters(), model.parameters())


def test_dpgd_moves_and_noises_the_chosen_coordinates_only():
    model = Quadratic()
    base = copies(model.parameters())
    header = header_of(model, Sparse(0.25), num_directions=1, replayable=False, weight_decay=0.0)
    space = space_from_header(model, header)
    space.snap_()
    step = PrivateStep(
        mechanism=VectorMechanism(clip=5.0, noise_multiplier=1.0, expected_batch_size=6.0),
        space=space,
        differences=FiniteDifferences(model, space, quadratic_loss, SMOOTHING),
        noise=InsecureSeededNoise(7),
        trajectory=Trajectory(header),
    )
    for t in range(3):
        step(t, [batch(6, t)], 0.05)
    moved = [int((p != b).sum()) for p, b in zip(model.parameters(), base, strict=True)]
    assert moved == [27, 3]  # ceil(108 / 4), ceil(9 / 4)
    assert space.direction_norm(Direction(KEY, 0)) == math.sqrt(30)


# ---------------------------------------------------------------- state


def train(space: ParameterSpace, steps: range) -> None:
    for step in steps:
        us = [Direction(KEY, step, k) for k in range(2)]
        space.move_to_(((us[0], -SMOOTHING),))
        space.step_(us, [0.03, 0.02], decay=1e-3)


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
@pytest.mark.parametrize("subspace", SUBSPACES, ids=str)
def test_a_resumed_run_is_the_straight_run(subspace: Subspace, distribution: str):
    """Also where the chosen weights have long stopped being the smallest."""
    if isinstance(subspace, LowRank) and distribution != "rademacher":
        pytest.skip("refused, see below")
    straight = space_of(subspace, some_tensors(), distribution=distribution)
    train(straight, range(7))
    state = json.loads(json.dumps(straight.state_dict()))
    saved = dict(zip(straight.names, copies(straight.tensors), strict=True))
    if isinstance(straight, SparseSpace):
        crossed = [
            sorted_choice(t.reshape(-1), chosen.numel()) != chosen.tolist()
            for t, chosen in zip(straight.tensors, straight._indices, strict=True)
        ]
        assert sum(crossed) >= 5
    resumed = type(straight)(
        saved.items(), distribution=distribution, smoothing=SMOOTHING, **_settings(subspace)
    )
    resumed.load_state_dict(state)
    for space in (straight, resumed):
        train(space, range(7, 14))
    assert same(straight.tensors, resumed.tensors)
    assert straight.state_dict() == resumed.state_dict()


def _settings(subspace: Subspace) -> dict[str, Any]:
    return {k: v for k, v in subspace.to_dict().items() if k != "name"}


def sparse_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = some_tensors()
    state = space_of(Sparse(0.1), tensors).state_dict()
    return tensors, json.loads(json.dumps(state))


def test_a_changed_mask_is_refused():
    tensors, state = sparse_state()
    size = tensors["row"].numel()
    chosen = masks.from_text(state["masks"]["row"], size)
    chosen[0] = (chosen[0] + 1) % size if int(chosen[0]) + 1 not in chosen else int(chosen[0]) - 1
    forged = copy.deepcopy(state)
    forged["masks"]["row"] = masks.to_text(chosen.unique(), size)
    fewer = copy.deepcopy(state)
    fewer["masks"]["row"] = masks.to_text(chosen[1:], size)
    broken, other = copy.deepcopy(state), copy.deepcopy(state)
    broken["masks"]["row"] = "%%%"
    other["masks"]["row"] = state["masks"]["one"]
    for bad, message in [
        (forged, "masks have digest"),
        (fewer, r"row: the checkpoint's mask chooses 99 coordinates, not 100"),
        (broken, "row: what the checkpoint holds is not a mask"),
        (other, "row: what the checkpoint holds is a mask of 1 bytes, not one of 1000"),
    ]:
        with pytest.raises(ValueError, match=message):
            SparseSpace(tensors.items(), density=0.1).load_state_dict(bad)


def test_the_state_of_another_space_is_refused():
    tensors, state = sparse_state()
    full = space_of(Full(), some_tensors()).state_dict()
    for found, density in [(full, 0.1), (state, 0.2), (state["tensors"], 0.1)]:
        with pytest.raises(
            ValueError, match=rf"not of 9 tensors in a sparse subspace of density {density}"
        ):
            SparseSpace(tensors.items(), density=density).load_state_dict(found)
    with pytest.raises(ValueError, match="not this model's"):
        ParameterSpace(tensors.items()).load_state_dict(state)
    tensors["row"].mul_(1.7)
    with pytest.raises(ValueError, match="row holds values that are not on the grid"):
        SparseSpace(tensors.items(), density=0.1).load_state_dict(state)


@pytest.mark.parametrize("size", [0, 1, 8, 1001])
def test_masks_survive_text(size: int):
    chosen = torch.arange(0, size, 3, dtype=torch.int32)
    text = masks.to_text(chosen, size)
    assert torch.equal(masks.from_text(text, size), chosen)
    assert json.loads(json.dumps(text)) == text


# ---------------------------------------------------------------- definitions and refusals


@pytest.mark.parametrize("subspace", [Full(), *SUBSPACES], ids=str)
def test_a_definition_survives_json(subspace: Subspace):
    assert subspace_from_dict(json.loads(json.dumps(subspace.to_dict()))) == subspace


def test_no_definition_is_the_full_space():
    assert subspace_from_dict(None) == Full()
    assert type(Full().space_of(Quadratic())) is ParameterSpace


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"name": "dense"}, "subspace='dense' is not known; choose one of full, sparse, low_rank"),
        ({}, "subspace=None is not known"),
        (
            {"name": "sparse", "rank": 4},
            r"'sparse' has no setting \['rank'\]; it takes \['density'\]",
        ),
        ({"name": "sparse", "density": 0.0}, r"subspace_density=0\.0 must lie in \(0, 1\]"),
        ({"name": "sparse", "density": 1.5}, r"subspace_density=1\.5"),
        ({"name": "sparse", "density": math.nan}, "subspace_density=nan"),
        ({"name": "low_rank", "rank": 0}, "subspace_rank=0 must lie in 1 .. 256"),
        ({"name": "low_rank", "rank": 257}, "subspace_rank=257"),
        ({"name": "low_rank", "hold": 0}, "subspace_steps=0 must be at least 1"),
    ],
)
def test_what_is_no_subspace_is_refused(found: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        subspace_from_dict(found)


NO_COPIES: list[Callable[[ParameterSpace], object]] = [
    lambda s: s.write_perturbed_(0, (), torch.zeros(1)),
    lambda s: s.write_perturbed_pair_(0, Direction(KEY, 0), 1e-3, torch.zeros(1), torch.zeros(1)),
    lambda s: s.write_perturbed_rows_(0, torch.zeros(1), (), torch.zeros(1)),
]


@pytest.mark.parametrize("subspace", [Sparse(0.1), LowRank(2, 3)], ids=str)
def test_what_a_subspace_cannot_do_is_refused(subspace: Subspace):
    space, name = space_of(subspace, some_tensors()), subspace.name
    for write in NO_COPIES:
        with pytest.raises(ValueError, match=f"'{name}'.*perturbation_strategy: whole_model"):
            write(space)
    for dtype in (torch.bfloat16, torch.float16):
        model = Quadratic()
        model.bias.data = model.bias.data.to(dtype)
        with pytest.raises(ValueError, match=rf"bias has dtype {dtype}: subspace='{name}' moves"):
            subspace.space_of(model)
    with pytest.raises(ValueError, match="no parameter is trainable"):
        subspace.space_of(Quadratic().requires_grad_(False))
    with pytest.raises(ValueError, match="finite weights"):
        space_of(subspace, {"w": torch.full((9, 9), math.nan)})
    with pytest.raises(ValueError, match="larger than smoothing"):
        space.move_to_(((Direction(KEY, 0), 1.0),))


def test_low_rank_refuses_other_distributions_and_dense_noise():
    for distribution in ("gaussian", "sphere"):
        with pytest.raises(ValueError, match=f"direction='{distribution}'.*use rademacher"):
            LowRank().space_of(Quadratic(), distribution=distribution)
    space = space_of(LowRank(2, 3), some_tensors())
    with pytest.raises(ValueError, match="dpgd-0th.*use subspace='full' or 'sparse'"):
        space.dense_step_([Direction(KEY, 0)], [1.0], lambda part, count: torch.zeros(count))


@pytest.mark.parametrize("subspace", [Sparse(0.4), LowRank(2, 5)], ids=str)
def test_new_storage_is_followed_and_replaced_parameters_are_noticed(subspace: Subspace):
    model, other = Quadratic(), Quadratic()
    space, reference = (subspace.space_of(m, smoothing=SMOOTHING) for m in (model, other))
    for each in (space, reference):
        each.snap_()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    for each in (space, reference):
        each.step_([Direction(KEY, 0)], [0.1])
    assert same(model.parameters(), other.parameters())
    model.bias.data = model.bias.data.bfloat16()
    with pytest.raises(RuntimeError, match="bias was torch.float32 when training was set up"):
        space.move_to_(((Direction(KEY, 1), SMOOTHING),))
    model.bias = nn.Parameter(torch.zeros(9))
    with pytest.raises(RuntimeError, match="replaced"):
        space.check_is_of(model)


def test_a_state_dict_loaded_between_steps_is_followed():
    """As in the full space, of which density 1 is another form."""
    found = []
    for subspace in (Full(), Sparse(1.0)):
        model = Quadratic()
        space = subspace.space_of(model, smoothing=SMOOTHING)
        space.snap_()
        early = {name: value.clone() for name, value in model.state_dict().items()}
        train(space, range(3))
        model.load_state_dict(early)
        train(space, range(3, 6))
        found.append(copies(model.parameters()))
    assert same(*found)
    model = Quadratic()
    space = Full().space_of(model, smoothing=SMOOTHING)
    space.snap_()
    train(space, range(6))
    assert not same(model.parameters(), found[0])
