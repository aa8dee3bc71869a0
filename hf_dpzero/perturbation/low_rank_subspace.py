r"""Directions that are low-rank matrices: u = U V^T / sqrt(r), U fresh, V held for some steps.

For a matrix W [m, n] the gradient of fine-tuning is nearly of low rank, and so may be the direction:
U [m, r] is drawn for each (step, query), V [n, r] for v steps in a row (LOZO, Chen et al. 2024,
arXiv:2410.07698; a subspace held likewise, SubZero, Yu et al. 2024, arXiv:2410.08989). With independent
signs in both,

    E[u_ij u_kl] = E[sum_ab U_ia V_ja U_kb V_lb] / r = [i = k] [j = l],

the expectation over both: E[u u^T] = I, which is all that a direction needs. Over U alone, with V
held, it is the identity times V V^T / r on the rows.

U V^T holds integers in [-r, r], so the product is exact whatever its order, device and precision. A
coefficient on the grid times an integer is on the grid: moves, restore and update are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from hf_dpzero.perturbation.coordinates import AnySegment, runs, segment_of
from hf_dpzero.perturbation.directions import DOMAIN_HELD, Direction, DirectionStream
from hf_dpzero.perturbation.kernels import dispatch
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.perturbation.philox import Words, stream_key
from hf_dpzero.perturbation.segments import Change, GridSegment
from hf_dpzero.perturbation.sharding import is_sharded
from hf_dpzero.perturbation.trainable import gathered

_CHUNK = 1 << 18  # elements of U and of a product made at a time: 1 MiB each


class LowRankSegment(GridSegment):
    """One matrix W [m, n], moved along U V^T / sqrt(r).

    Row i of U is coordinates r i .. r i + r of the direction's own stream, from the matrix's offset
    on, and V the first n r coordinates from that offset of another stream; both are signs. They take
    less room than the m n coordinates that the matrix has there, so no two tensors share a sign.

    Extra memory: V, 4 n r bytes, and a MiB or two.
    """

    def __init__(
        self, flat: Tensor, shape: Sequence[int], offset: int, number: int, rank: int, hold: int
    ) -> None:
        super().__init__(flat, offset, [flat.numel()], [0], [number])
        self.rows, self.columns, self.rank, self.hold = *shape, rank, hold
        self.unit, self.most = 1.0 / math.sqrt(rank), rank

    def left(self, stream: DirectionStream) -> Iterator[Tensor]:
        """U, a run of rows at a time: float32 [some, r] each, in order."""
        height = max(1, _CHUNK // self.rank)
        for start in range(0, self.rows, height):
            count = min(height, self.rows - start) * self.rank
            yield self._signs(stream.key, self.offset + start * self.rank, count)

    def right(self, stream: DirectionStream) -> Tensor:
        """V, float32 [n, r]."""
        return self._signs(self._held_key(stream.direction), self.offset, self.columns * self.rank)

    def _held_key(self, u: Direction) -> Words:
        """Of the stream that the steps t with the same t // v share, each query having its own."""
        return stream_key(u.key, u.step // self.hold, u.query, DOMAIN_HELD)

    def _signs(self, key: Words, start: int, count: int) -> Tensor:
        return dispatch.coordinates(key, False, start, count, self.flat.device).view(-1, self.rank)

    def _add(self, out: Tensor, source: Tensor, offset: int, changes: Sequence[Change],
             only: int | None, pieces: Any = None) -> None:  # fmt: skip
        assert out is source is self.flat
        for change in changes:
            amount = float(self._amounts([change])[0, 0])
            if amount:
                self._add_product_(amount, change.stream)

    def _add_product_(self, amount: float, stream: DirectionStream) -> None:
        """W += amount U V^T. The product is made of signs alone: exact in TF32 and bfloat16 too."""
        right, start = self.right(stream).T, 0
        height = max(1, _CHUNK // self.columns)
        buffer = self.flat.new_empty(min(height, self.rows), self.columns)
        for left in self.left(stream):
            for rows in left.split(height):
                made = torch.mm(rows, right, out=buffer[: len(rows)]).view(-1)
                self.flat[start : start + made.numel()].add_(made, alpha=amount)
                start += made.numel()

    def products(self, streams: Sequence[DirectionStream]) -> Tensor:
        """r <u_k, u_l> = tr(U_k^T U_l V_l^T V_k), integers below 2^53, float64 [K, K] on the CPU."""
        count, rank = len(streams), self.rank
        rights = torch.cat([self.right(s) for s in streams], dim=1).double()
        left = rights.new_zeros(count * rank, count * rank)
        for rows in zip(*[self.left(s) for s in streams], strict=True):
            some = torch.cat(rows, dim=1).double()
            left += some.T @ some
        both = left * (rights.T @ rights)
        return both.view(count, rank, count, rank).sum(dim=(1, 3)).cpu()


class LowRankSpace(ParameterSpace):
    """Matrices move along U V^T / sqrt(r), everything else along signs; float32 tensors only.

    Args:
      named_tensors: as for `ParameterSpace`. Tensors with two dimensions, both above `rank`, are the
        matrices.
      rank: r, 1 to 256.
      hold: v >= 1, the steps that V is held.
      distribution: `rademacher` only.
      settings: as for `ParameterSpace`.

    Raises:
      ValueError: another distribution, a tensor that is not float32 or that is split over processes, or
        what `ParameterSpace` refuses.
    """

    def __init__(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        *,
        rank: int,
        hold: int,
        distribution: str = "rademacher",
        **settings: Any,
    ) -> None:
        if distribution != "rademacher":
            raise ValueError(
                f"direction={distribution!r} has no exact products of low rank: use rademacher with "
                "subspace='low_rank', or subspace='full'."
            )
        named = list(named_tensors)
        for name, tensor in named:
            if is_sharded(tensor):
                raise ValueError(
                    f"{name} is split over processes (FSDP): subspace='low_rank' moves whole matrices. "
                    "Use subspace='full'."
                )
            if tensor.dtype != torch.float32:
                raise ValueError(
                    f"{name} has dtype {tensor.dtype}: subspace='low_rank' moves float32 tensors "
                    "only. Load the model in float32, train float32 adapters, or use subspace='full'."
                )
        self.rank, self.hold = rank, hold
        super().__init__(named, distribution=distribution, **settings)

    def _make_segments(self) -> Sequence[AnySegment]:
        tensors = enumerate(self.tensors)
        matrices = {n for n, t in tensors if t.dim() == 2 and min(t.shape) > self.rank}
        segments: list[AnySegment] = []
        for run in runs(self.tensors, matrices):
            if run[0] in matrices:  # a run of one
                tensor, offset = self.tensors[run[0]], self.offsets[run[0]]
                flat = gathered([tensor], [0])
                place = (flat, tensor.shape, offset, run[0])
                segments.append(LowRankSegment(*place, self.rank, self.hold))
            else:
                segments.append(segment_of(self.tensors, self.offsets, run))
        return segments

    @torch.no_grad()
    def gram(self, directions: Sequence[Direction]) -> Tensor:
        """<u_k, u_l>, float64 [K, K] on the CPU: sums of integers, the matrices' divided by r last."""
        streams = [self.stream(u) for u in directions]
        total = torch.zeros(2, len(streams), len(streams), dtype=torch.float64)
        for number in range(len(self.tensors)):
            segment, _ = self._places[number]
            if isinstance(segment, LowRankSegment):
                total[1] += segment.products(streams)
            else:
                total[0] += self._products(number, streams)
        return total[0] + total[1] / self.rank

    def _squared_norm(self, direction: Direction) -> float:
        """||u||^2 = sum over matrices of tr(U^T U V^T V) / r, plus 1 for each other coordinate."""
        return float(self.gram([direction]))

    def dense_step_(self, *_: Any) -> NoReturn:
        """Refused: a vector of noise on every coordinate does not lie in a low-rank subspace."""
        raise ValueError(
            "dpgd-0th adds noise to every coordinate, which subspace='low_rank' does not move one by "
            "one: use subspace='full', or method='dpzero'."
        )

    def write_perturbed_(self, *_: Any) -> NoReturn:
        """Refused: there are no copies of single tensors in a subspace."""
        raise ValueError(
            "subspace='low_rank' perturbs the model's own tensors, not copies of them: use "
            "perturbation_strategy: whole_model."
        )

    write_perturbed_rows_ = write_stack_ = write_perturbed_  # type: ignore[assignment]
