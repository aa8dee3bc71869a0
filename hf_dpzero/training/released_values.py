"""A step's release on all processes: drawn and written down by one, then told to the others."""

from __future__ import annotations

from collections.abc import Callable

from hf_dpzero.ledger.trajectory import Release, Trajectory
from hf_dpzero.parallel.distributed import is_main, numbers_of_main


def release_on_all(
    trajectory: Trajectory,
    step: int,
    learning_rate: float,
    values: Callable[[], tuple[float, ...]],
) -> Release:
    """Appends a step's release to the ledger, on rank 0 before any other rank knows of it.

    So no process holds a release that is not paid for, wherever rank 0 is killed or its disk is full.

    Args:
      trajectory: on disk on rank 0, in memory on the others.
      step: its number.
      learning_rate: written beside the values.
      values: draws noise; called on rank 0 only.

    Returns:
      The release, the same on all ranks.

    Raises:
      LedgerWriteError: on rank 0, where it could not be written; the others hear nothing of it.
    """

    def written() -> tuple[float, ...]:
        drawn = values()
        trajectory.append(Release(step, drawn, learning_rate))
        return drawn

    told = numbers_of_main(written, trajectory.num_values)
    if not is_main():
        trajectory.append(Release(step, told, learning_rate))
    return trajectory.releases[step]
