"""Low-rank directions: exact as those of the full space are, and the directions they say they are."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from test_parameter_space import copies, same
from torch import Tensor, nn
from whole_directions import direction_vector

from hf_dpzero.estimators.deferred_updates import WeightReads
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.ledger.digests import digest_model
from hf_dpzero.ledger.replay import replay, space_from_header
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.perturbation import coordinates as shared
from hf_dpzero.perturbation import low_rank_subspace, segments
from hf_dpzero.perturbation.directions import Direction, coordinates
from hf_dpzero.perturbation.kernels import dispatch, torch_reference
from hf_dpzero.perturbation.low_rank_subspace import LowRankSegment, LowRankSpace
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.perturbation.philox import stream_key
from hf_dpzero.perturbation.subspaces import Full, LowRank, Subspace, subspace_from_dict
from hf_dpzero.privacy.mechanisms import ScalarMechanism
from hf_dpzero.privacy.noise import InsecureSeededNoise
from hf_dpzero.training.zeroth_order_step import ZerothOrderStep

KEY = 0x0123_4567_89AB_CDEF_0000_FFFF_1234_A5A5
SMOOTHING = 1e-3


def some_tensors() -> dict[str, Tensor]:
    """Matrices, a small one, rows, a scalar, zeros of both signs, an empty tensor, a 3-D one."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"wide": (33, 57), "tall": (90, 21), "small": (2, 100), "row": (1000,), "one": (),
             "cube": (5, 6, 7), "large": (300, 230)}  # fmt: skip
    scales = {"row": 1e-3, "one": 1.0, "cube": 30.0}
    made = {n: torch.randn(s, generator=generator) * scales.get(n, 0.05) for n, s in sizes.items()}
    made["zero"], made["empty"] = torch.zeros(40), torch.empty(0, 4)
    made["zero"][::2] = -0.0
    return made


def space_of(rank: int, hold: int, tensors: dict[str, Tensor] | None = None, **settings: Any):
    named = (some_tensors() if tensors is None else tensors).items()
    space = LowRankSpace(named, rank=rank, hold=hold, **{"smoothing": SMOOTHING, **settings})
    space.snap_()
    return space


def vector_of(space: LowRankSpace, u: Direction) -> list[Tensor]:
    """The direction, tensor by tensor, float64, from the numpy source alone."""
    own = stream_key(u.key, u.step, u.query, 0)
    held = stream_key(u.key, u.step // space.hold, u.query, 3)

    def signs(key: Any, offset: int, rows: int, columns: int) -> Tensor:
        drawn = coordinates(key, False, offset, rows * columns)
        return torch.from_numpy(drawn).double().view(rows, columns)

    parts, r = [], space.rank
    for offset, tensor in zip(space.offsets, space.tensors, strict=True):
        if tensor.dim() == 2 and min(tensor.shape) > r:
            m, n = tensor.shape
            parts.append(signs(own, offset, m, r) @ signs(held, offset, n, r).T / math.sqrt(r))
        else:
            parts.append(signs(own, offset, 1, tensor.numel()).view(tensor.shape))
    return parts


def flat(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([part.detach().double().reshape(-1) for part in parts])


def spacing_of(space: ParameterSpace) -> float:
    """The coarsest grid step of any tensor."""
    return max(float(segment.spacing.max()) for segment in space._segments)


def test_many_moves_and_restores_change_no_bit():
    space = space_of(4, 50)
    before = copies(space.tensors)
    for step in range(60):
        u, v = Direction(KEY, step), Direction(KEY, step, 1)
        space.move_to_(((u, SMOOTHING),))
        if step % 20 == 0:
            assert not same(space.tensors, before)
            space.move_to_(((u, 0.3 * SMOOTHING), (v, -0.7 * SMOOTHING)))
        space.move_to_(((u, -SMOOTHING),))
    space.settle_()
    assert same(space.tensors, before)


@pytest.mark.parametrize("rank", [2, 4])
def test_moves_and_updates_are_the_direction_and_an_exact_sum(rank: int):
    """A move is lambda u: half a grid step for the coefficient's rounding, times the integers it
    multiplies (r). theta+ - theta and theta - theta- are equal to the bit, and the update is the same
    from wherever it is made."""
    space, other = space_of(rank, 3), space_of(rank, 3)
    theta, u = copies(space.tensors), Direction(KEY, 7, 2)
    step, vector = spacing_of(space), flat(vector_of(space, u))
    space.move_to_(((u, SMOOTHING),))
    plus = copies(space.tensors)
    assert float((flat(plus) - flat(theta) - SMOOTHING * vector).abs().max()) <= 0.51 * rank * step
    assert float((flat(plus) - flat(theta)).abs().max()) > 0.5 * SMOOTHING
    space.move_to_(((u, -SMOOTHING),))
    for t, p, m in zip(theta, plus, space.tensors, strict=True):
        assert torch.equal(p.double() - t.double(), t.double() - m.double())
    space.step_([u], [7e-4], defer=True)
    space.move_to_(((Direction(KEY, 4), SMOOTHING),))
    space.settle_()
    other.step_([u], [7e-4])
    assert same(space.tensors, other.tensors)
    wanted = flat(theta) + 7e-4 * vector
    assert float((flat(other.tensors) - wanted).abs().max()) <= 1.01 * rank * spacing_of(other)


def test_any_fusion_gives_the_same_weights():
    """With growth through several grids, two directions, weight decay and deferral."""
    results = []
    for visit in range(3):
        space = space_of(4, 5)
        first = space.state_dict()
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
    assert any(state[name]["exponent"] > first[name]["exponent"] for name in first)


@pytest.mark.parametrize("rank", [1, 16])
def test_the_grid_leaves_room_for_coordinates_of_sqrt_r(rank: int):
    """Values at the edge of the range, led there by updates; every move back and forth is exact."""
    smoothing = 0.05
    space = space_of(rank, 2, {"w": torch.full((24, 40), 0.2)}, smoothing=smoothing)
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


def short_run() -> list[Tensor]:
    space, standing = space_of(4, 3), []
    for step in range(4):
        us = [Direction(KEY, step, k) for k in range(2)]
        space.move_to_(((us[0], SMOOTHING),))
        standing += copies(space.tensors)
        space.step_(us, [0.3, 2e-7], decay=1e-6)
    gram = space.gram([Direction(KEY, 0, k) for k in range(3)])
    return standing + copies(space.tensors) + [gram.float()]


def test_chunks_backends_and_matmul_precision_do_not_matter(monkeypatch: pytest.MonkeyPatch):
    """Products of signs are small integers: exact in TF32 and bfloat16."""
    expected, before = short_run(), torch.get_float32_matmul_precision()
    try:
        for precision in ("high", "medium"):
            torch.set_float32_matmul_precision(precision)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert same(short_run(), expected)
    finally:
        torch.set_float32_matmul_precision(before)
    monkeypatch.setattr(dispatch, "_cpu_kernels", lambda: None)
    for module, name in [(low_rank_subspace, "_CHUNK"), (segments, "_SLICE"),
                         (torch_reference, "_CHUNK"), (shared, "_PRODUCT_CHUNK")]:  # fmt: skip
        monkeypatch.setattr(module, name, 352)
    assert same(short_run(), expected)


@pytest.mark.gpu
def test_cuda_gives_the_bits_of_the_cpu(monkeypatch: pytest.MonkeyPatch):
    expected, made = short_run(), some_tensors()
    monkeypatch.setitem(globals(), "some_tensors", lambda: {n: t.cuda() for n, t in made.items()})
    for allow in (False, True):
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allow)
        assert same([t.cpu() for t in short_run()], expected)


@pytest.mark.false_alarm(0)  # a fixed key
@pytest.mark.statistical
def test_the_second_moment_is_the_identity():
    """E[u u^T] = I over U and V, for a matrix with a vector beside it.

    2000 directions under 1000 V: an entry's estimate is a mean over V of numbers with a variance of
    at most E[(u_i u_j)^2] <= E[u_i^4] = 3 - 2 / r, of which the largest of 276 stays below 5.5
    deviations. One V for all would put entries of size 1 beside the diagonal.
    """
    rank = 3
    space = space_of(rank, 2, {"w": torch.zeros(4, 5), "b": torch.zeros(3)})
    us = torch.stack([flat(vector_of(space, Direction(KEY, t))) for t in range(2000)])
    error = (us.T @ us / len(us) - torch.eye(23)).abs()
    assert float(error.max()) < 5.5 * math.sqrt((3 - 2 / rank) / 1000) < 0.3
    assert float(us.mean(dim=0).abs().max()) < 5.5 / math.sqrt(1000)


def test_v_is_held_and_u_is_fresh():
    space = space_of(2, 3, {"w": torch.zeros(30, 20)})

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


def test_matrices_are_factored_and_no_two_streams_meet():
    """Different keys for V; U and vectors lie in disjoint ranges of the direction's own stream."""
    space, u = space_of(4, 1), Direction(KEY, 5)
    ranges, factored = [], set()
    for number, (offset, size) in enumerate(space.layout):
        segment, _ = space._places[number]
        used = size
        if isinstance(segment, LowRankSegment):
            factored.add(space.names[number])
            used = segment.rows * segment.rank
            assert segment.columns * segment.rank <= size
            held = tuple(segment._held_key(u).tolist())
            assert held not in {
                tuple(stream_key(KEY, s, q, d).tolist())
                for s in range(7) for q in range(3) for d in range(3)
            }  # fmt: skip
        assert used <= size
        ranges.append((offset, offset + used))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    assert factored == {"wide", "tall", "large"}
    assert space.dimension == sum(t.numel() for t in space.tensors)


def test_norms_and_inner_products_are_exact():
    space = space_of(3, 4)
    us = [Direction(KEY, t, k) for t in (2, 4) for k in range(2)]
    matrix = torch.stack([flat(vector_of(space, u)) for u in us])
    gram = space.gram(us)
    assert torch.allclose(gram, matrix @ matrix.T, rtol=1e-12, atol=1e-9)
    assert torch.allclose(3 * gram, (3 * gram).round(), atol=1e-9)
    for k, u in enumerate(us):
        assert math.sqrt(space._squared_norm(u)) == math.sqrt(float(gram[k, k]))
        assert torch.equal(space.gram([u]), gram[k : k + 1, k : k + 1])
    assert len({float(x) for x in gram.diag()}) > 1


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian", "sphere"])
def test_gram_of_the_full_space(distribution: str, monkeypatch: pytest.MonkeyPatch):
    """Of one Rademacher direction, without drawing anything."""
    space = ParameterSpace(some_tensors().items(), distribution=distribution)
    us = [Direction(KEY, 2, k) for k in range(5)]
    rows = [direction_vector(u, distribution, space.layout, torch.float64) for u in us]
    matrix = torch.stack(rows)
    gram, expected = space.gram(us), matrix @ matrix.T
    if distribution == "rademacher":
        assert torch.equal(gram, expected.round())
        monkeypatch.setattr(dispatch, "coordinates", lambda *_: pytest.fail("drew coordinates"))
        assert space.gram([Direction(KEY, 0)]).tolist() == [[float(space.dimension)]]
    else:
        assert torch.allclose(gram, expected, rtol=1e-6, atol=1e-6 * space.dimension)
    assert gram.diag().sqrt().tolist() == pytest.approx(
        [math.sqrt(space._squared_norm(u)) for u in us]
    )


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


def header_of(model: nn.Module, subspace: Subspace) -> dict[str, Any]:
    names = [name for name, _ in model.named_parameters()]
    return {
        "base_model_digest": digest_model(model), "direction_key": f"{KEY:032x}",
        "direction": "rademacher", "num_directions": 2, "num_values": 2, "smoothing": SMOOTHING,
        "weight_decay": 0.1, "trainable": names, "decayed": names, "replayable": True,
        "update_rule": {"name": "sgd"},
        "subspace": subspace.to_dict(),
    }  # fmt: skip


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("subspace", [LowRank(2, 5), Full()], ids=str)
def test_a_replay_is_the_training_bit_for_bit(subspace: Subspace, defer: bool):
    model, again, wrong = Quadratic(), Quadratic(), Quadratic()
    header = header_of(model, subspace)
    space = space_from_header(model, header)
    space.snap_()
    step = ZerothOrderStep(
        mechanism=ScalarMechanism(
            clip=5.0, noise_multiplier=1.0, expected_batch_size=6.0, num_directions=2
        ),
        space=space,
        differences=FiniteDifferences(model, space, quadratic_loss, SMOOTHING),
        noise=InsecureSeededNoise(7),
        trajectory=Trajectory(header),
        defer=defer,
    )
    with WeightReads(model, step.space):
        for t in range(17):
            assert step(t, [batch(4, t), batch(2, 99 + t)], 0.05) is not None
        trained = {name: value.clone() for name, value in model.state_dict().items()}
    assert not same(model.parameters(), again.parameters())
    replay(again, step.trajectory)
    assert same(again.state_dict().values(), trained.values())
    other = {**step.trajectory.header, "subspace": LowRank(2, 3).to_dict()}
    replay(wrong, Trajectory(other, step.trajectory.releases))
    assert not same(wrong.parameters(), model.parameters())


def test_a_resumed_run_is_the_straight_run():
    def train(space: ParameterSpace, steps: range) -> None:
        for step in steps:
            us = [Direction(KEY, step, k) for k in range(2)]
            space.move_to_(((us[0], -SMOOTHING),))
            space.step_(us, [0.03, 0.02], decay=1e-3)

    straight = space_of(2, 3)
    train(straight, range(7))
    state = json.loads(json.dumps(straight.state_dict()))
    saved = dict(zip(straight.names, copies(straight.tensors), strict=True))
    resumed = LowRankSpace(saved.items(), rank=2, hold=3, smoothing=SMOOTHING)
    resumed.load_state_dict(state)
    for space in (straight, resumed):
        train(space, range(7, 14))
    assert same(straight.tensors, resumed.tensors)
    assert straight.state_dict() == resumed.state_dict()


@pytest.mark.parametrize("subspace", [Full(), LowRank(2, 3)], ids=str)
def test_a_definition_survives_json(subspace: Subspace):
    assert subspace_from_dict(json.loads(json.dumps(subspace.to_dict()))) == subspace
    assert type(Full().space_of(Quadratic())) is ParameterSpace


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "sparse"}, "subspace='sparse' is not known; choose one of full, low_rank"),
        ({}, "subspace=None is not known"),
        ({"name": "low_rank", "density": 4}, r"has no setting \['density'\]; it takes"),
        ({"name": "low_rank", "rank": 0}, "subspace_rank=0 must lie in 1 .. 256"),
        ({"name": "low_rank", "rank": 257}, "subspace_rank=257"),
        ({"name": "low_rank", "hold": 0}, "subspace_steps=0 must be at least 1"),
    ],
)
def test_what_is_no_subspace_is_refused(given: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        subspace_from_dict(given)


COPIES: list[Callable[[ParameterSpace], object]] = [
    lambda s: s.write_perturbed_(0, (), torch.zeros(1)),
    lambda s: s.write_perturbed_rows_(0, torch.zeros(1), (), torch.zeros(1)),
    lambda s: s.write_stack_([], 1.0, s.new_stack(2)),
]


def test_what_a_low_rank_subspace_cannot_do_is_refused():
    space, subspace = space_of(2, 3), LowRank(2, 3)
    for write in COPIES:
        with pytest.raises(ValueError, match="'low_rank'.*perturbation_strategy: whole_model"):
            write(space)
    with pytest.raises(ValueError, match="dpgd-0th.*use subspace='full', or method='dpzero'"):
        space.dense_step_([Direction(KEY, 0)], [1.0], lambda part, total: total.float())
    model = Quadratic()
    model.bias.data = model.bias.data.half()
    with pytest.raises(
        ValueError, match=r"bias has dtype torch.float16: subspace='low_rank' moves"
    ):
        subspace.space_of(model)
    with pytest.raises(ValueError, match="direction='sphere'.*use rademacher"):
        subspace.space_of(Quadratic(), distribution="sphere")
    with pytest.raises(ValueError, match="no parameter is trainable"):
        subspace.space_of(Quadratic().requires_grad_(False))
    with pytest.raises(ValueError, match="finite weights"):
        space_of(2, 3, {"w": torch.full((9, 9), math.nan)})
    with pytest.raises(ValueError, match="larger than smoothing"):
        space.move_to_(((Direction(KEY, 0), 1.0),))


def test_new_storage_is_followed():
    model, other = Quadratic(), Quadratic()
    spaces = [LowRank(2, 5).space_of(m, smoothing=SMOOTHING) for m in (model, other)]
    for space in spaces:
        space.snap_()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    for space in spaces:
        space.step_([Direction(KEY, 0)], [0.1])
    assert same(model.parameters(), other.parameters())
