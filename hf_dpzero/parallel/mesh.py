"""Which forward passes of a step each process makes: a mesh of shares of the rows and of the directions.

A step evaluates B rows along K directions. R x D processes split them so: process r D + d takes the r-th
share of the rows along the d-th share of the directions. Clipping is per example over its K values
together, so the D processes that hold the same rows first gather each other's losses, [2, B_r, K / D]
float32 each; then one of them clips and sums. With D = 1, plain data parallelism, nothing of the batch's
size is sent.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_dpzero.batches.placement import Placement
from hf_dpzero.estimators.finite_differences import passes_of
from hf_dpzero.estimators.stacked import STACK_BYTES
from hf_dpzero.parallel.collectives import active, control_group, gather_blocks, sum_checked
from hf_dpzero.privacy.mechanisms import VectorMechanism
from hf_dpzero.settings.setting import refuse

if TYPE_CHECKING:
    from hf_dpzero.privacy.plan import PrivacyPlan
    from hf_dpzero.settings.config import DPZeroConfig


T = TypeVar("T")
N = TypeVar("N", int, float)

WORTH = 0.9
"""Directions are split only where the busiest process then has at most this share of the work: what is
sent then grows with B K, and every process collates more rows."""

_OTHER_BATCH = (
    "in this step's batch or number, so a row could count twice; nothing was released. The data set or "
    "the collator must give every process the same widths: if it draws from a random generator of its "
    "own, use torch's, numpy's or Python's global one, or microbatch_size=1."
)


@dataclass(frozen=True)
class ProcessMesh:
    """This process' place in the mesh.

    Attributes:
      rank: of this process.
      rows: R, shares of the rows.
      directions: D, shares of the directions.
    """

    rank: int = 0
    rows: int = 1
    directions: int = 1

    @property
    def row(self) -> int:
        """r, which share of the rows is this process'."""
        return self.rank // self.directions

    @property
    def counts(self) -> bool:
        """Whether this process adds its rows to the sums: one of those that hold the same rows."""
        return self.rank % self.directions == 0

    def own(self, directions: Sequence[T]) -> Sequence[T]:
        """This process' directions: the d-th of D runs, whose lengths differ by at most one.

        >>> [list(ProcessMesh(rank, 1, 2).own("abc")) for rank in (0, 1)]
        [['a'], ['b', 'c']]
        """
        part = self.rank % self.directions
        return directions[slice(*self._bounds(len(directions))[part : part + 2])]

    def _bounds(self, total: int) -> list[int]:
        return [total * part // self.directions for part in range(self.directions + 1)]

    @functools.cached_property
    def _group(self) -> dist.ProcessGroup | None:
        """The gloo group of the processes with the same rows; made on all processes at once."""
        if self.rows == 1:
            return control_group()
        starts = range(0, self.rows * self.directions, self.directions)
        groups = [dist.new_group(range(i, i + self.directions), backend="gloo") for i in starts]
        return groups[self.row]

    def connect(self) -> None:
        """Makes the group that gathers, on all processes, before a step needs it."""
        if self.directions > 1:
            self._group  # noqa: B018

    def gathered(self, plus: Tensor, minus: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """The losses along all directions, from those along this process'.

        Args:
          plus: [B, own directions] float32 on the CPU; B > 0, as on the others with the same rows.
          minus: likewise.
          total: K.

        Returns:
          Two tensors [B, K], with the bits that one process would have.
        """
        if self.directions == 1:
            return plus, minus
        # A gather needs blocks of one shape: those of fewer directions are padded, and cut again.
        widths = [end - start for start, end in itertools.pairwise(self._bounds(total))]
        block = plus.new_zeros(2, len(plus), max(widths))
        block[:, :, : plus.shape[1]] = torch.stack([plus, minus])
        blocks = gather_blocks(block, self._group)
        both = torch.cat([b[:, :, :w] for b, w in zip(blocks, widths, strict=True)], dim=2)
        return both[0], both[1]

    def sum_checked(self, values: Sequence[N], batch_digest: int) -> list[N]:
        """Sums over the rows of all processes, each row once, if all took part in the same step.

        Raises:
          RankError: another process has another step or batch; on all, before anything is released.
        """
        own = values if self.counts else [value * 0 for value in values]
        return sum_checked(own, batch_digest, _OTHER_BATCH)


ALONE = ProcessMesh()
"""One process."""


def direction_shares(
    world: int,
    num_directions: int,
    work_of: Callable[[int], float],
    may: bool = True,
    differences: str = "central",
) -> int:
    """D of the mesh that leaves the busiest process the fewest forward passes.

    D divides the number of processes and is at most K. The work is the passes of ceil(K / D) directions
    times what the busiest of R = world / D shares evaluates (`Placement.busiest`). Shares of the rows
    alone (D = 1) stay unless another mesh saves a tenth: then K is large and B small, so that rows do
    not fill R shares.

    Args:
      world: processes.
      num_directions: K.
      work_of: R -> work of the busiest share for one direction.
      may: False keeps D = 1.
      differences: "central", or "forward", where each of the D processes evaluates f(theta) too.

    >>> direction_shares(4, 16, Placement(512, (1, 16), {8: 0.5, 16: 0.5}, 40.0).busiest)
    1
    >>> direction_shares(4, 16, Placement(4, (1, 4), {8: 1.0}, 40.0).busiest)
    4
    """
    meshes = [d for d in range(1, world + 1) if world % d == 0 and d <= num_directions]
    passes = {d: passes_of(differences, math.ceil(num_directions / d)) for d in meshes}
    work = {d: passes[d] * work_of(world // d) for d in meshes}
    least = min(work.values())
    if not may or work[1] * WORTH <= least:
        return 1
    return min(d for d in meshes if work[d] <= least * (1 + 1e-9))  # sums of floats: equal is close


def place_on_mesh(
    args: DPZeroConfig, model: nn.Module, placement: Placement, sharded: bool
) -> tuple[Placement, ProcessMesh]:
    """Returns the placement of a run, and its mesh.

    The placement is that of one process, so that losses have the same bits whatever the number of
    processes, unless that takes the busiest one over a tenth longer than one for its share of the
    rows. So it is where one process needs few passes: rows of one width, that go through one; or a GPU,
    where a pass costs much beside its rows. There `microbatch_size` can keep the bits.

    Raises:
      ValueError: `performance.direction_parallel_size` does not fit the processes, K or the method.
    """

    def best(shares: int) -> Placement:
        own = dataclasses.replace(placement, repeats=shares)
        return own if own.busiest(shares) < WORTH * placement.busiest(shares) else placement

    mesh = choose_mesh(args, model, lambda shares: best(shares).busiest(shares), sharded)
    return best(mesh.rows), mesh


def choose_mesh(
    args: DPZeroConfig, model: nn.Module, work: Callable[[int], float], sharded: bool
) -> ProcessMesh:
    """The mesh that `direction_parallel_size` asks for, or the one that leaves the least work.

    Args:
      work: R -> what the busiest share evaluates for one direction and sign.

    Raises:
      ValueError: as in `place_on_mesh`.
    """
    world, asked = args.world_size, args.performance.direction_parallel_size
    splits, averaged = asked not in (None, 1), args.clipping == "averaged"
    # Processes that share directions must stand their rows alike, which draws of a collator may decide.
    whole = averaged or args.unit_column is not None
    # A gradient has no directions to share, and one process nobody to share with.
    if not splits and (args.first_order or not active()):
        return ProcessMesh(args.process_index, world)
    asked_for = asked or 1
    refused = (
        (args.first_order, f"with {args.method}, which has no directions: leave it out."),
        (
            bool(world % asked_for) or asked_for > args.num_directions,
            f"with {world} processes and {args.num_directions} directions: give a divisor of the number "
            "of processes, at most num_directions.",
        ),
        (
            sharded,
            "under FSDP, whose passes of all processes stand at one direction: leave it out.",
        ),
        (averaged, "with clipping='averaged', whose groups go to processes whole: leave it out."),
        (
            args.unit_column is not None,
            "with unit_column, whose units go to processes whole: leave it out.",
        ),
    )
    setting = f"performance.direction_parallel_size={asked}"
    refuse(f"{setting} {words}" for is_refused, words in refused if splits and is_refused)
    # Many directions may go through one pass, whose bits follow from how many they are.
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    strategy = args.performance.perturbation_strategy
    copies = passes_of(args.differences, args.num_directions) * trained
    small = strategy == "auto" and copies <= STACK_BYTES
    may = not (whole or sharded or small or strategy == "stacked")
    shares = asked or direction_shares(world, args.num_directions, work, may, args.differences)
    return ProcessMesh(args.process_index, world // shares, shares)


def step_bytes(
    plan: PrivacyPlan, args: DPZeroConfig, mesh: ProcessMesh, sharded: bool, dimension: int
) -> tuple[int, int]:
    """Bytes that a process puts into collective operations in a step (`collectives.sent_bytes`).

    V released numbers: an all-reduce of V + 2 integers and a broadcast of V floats, of 8 bytes each. So
    16 K + 16 for K directions, and 16 more with adaptive clipping. m groups: 2 m more, and what they
    release. A dense release of d coordinates: 4 d for the noised one, and of first-order methods 8 d for
    the sums in float64. Under FSDP2 8 more, which agree on the number of passes; what
    torch gathers is left out. Comparing the weights
    (`checks.processes.EVERY`) is left out: 8 bytes in a hundred steps.

    Args:
      plan, args: of the run.
      mesh: its processes.
      sharded: whether parameters lie in parts.
      dimension: d.

    Returns:
      (those that no batch changes; those for each row of this process' share of the batch).
    """
    mechanism, groups = plan.mechanism, plan.groups
    vector = isinstance(mechanism, VectorMechanism)
    numbers = args.num_directions if vector else mechanism.values_per_release
    fixed = 8 * (numbers + 2) + 8 * numbers * (not vector)
    if groups is not None:
        fixed += 8 * (2 * groups.num_groups + groups.num_values)
    fixed += 12 * dimension if args.first_order else 4 * dimension * vector
    fixed += 8 * sharded  # the number of passes
    shared = -(-args.num_directions // mesh.directions) if mesh.directions > 1 else 0
    return fixed, 8 * shared


def mesh_words(mesh: ProcessMesh, sharded: bool) -> str:
    """How many processes run, and how they share the work, for the ledger's header and the report."""
    if mesh.rows * mesh.directions == 1:
        return "1"
    shares = {"rows": mesh.rows, "directions": mesh.directions}
    words = " x ".join(f"{n} shares of the {of}" for of, n in shares.items() if n > 1)
    parts = ", parameters in parts by FSDP2" if sharded else ""
    return f"{mesh.rows * mesh.directions} ({words}{parts})"


def process_words(
    plan: PrivacyPlan, args: DPZeroConfig, mesh: ProcessMesh, sharded: bool, dimension: int
) -> str:
    """The mesh and what a step sends, for a run's first lines."""
    fixed, row = step_bytes(plan, args, mesh, sharded, dimension)
    shares = [f"{mesh.rows} shares of the rows"] * (mesh.rows > 1)
    shares += [f"{mesh.directions} of the directions"] * (mesh.directions > 1)
    each = f" and {row} for each row of its share" if row else ""
    sent = f"{mesh.rows * mesh.directions}: {' by '.join(shares)}; each sends {fixed:,} bytes{each}"
    if sharded:
        return f"{sent} in a step, and every pass gathers the parameters (FSDP2)"
    return f"{sent} in a step (float32 gradients: {4 * dimension:,})"
