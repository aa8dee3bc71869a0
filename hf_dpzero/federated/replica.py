"""A copy of the weights that follows a run by its released numbers and measures along its directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_dpzero.estimators.random_state import isolated_randomness
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.replay import apply_release, directions_of
from hf_dpzero.ledger.trajectory import Release, Trajectory
from hf_dpzero.objectives.losses import Filled, num_examples
from hf_dpzero.training.before_training import check_before_training
from hf_dpzero.training.methods import ZerothOrderMethod


class Replica:
    """theta^r of a run, moved by its releases alone, and finite differences of rows at theta^r.

    The server keeps one to evaluate, every client process one to take part. All that a private run is
    checked for (an example's loss is a function of that example alone, fixed shapes, a public trial of
    the forward passes) is checked here by the trainer's own code, before the first round.

    Args:
      trainer: a `DPZeroTrainer` of the recipe, on its base weights.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        check_before_training(trainer)
        self.method: Any = None

    def follow(self, contract: Mapping[str, Any]) -> None:
        """Snaps the base weights to the contract's grid; from then on the replica is at round 0."""
        self.trainer.trajectory = Trajectory(contract)
        self.method = ZerothOrderMethod(self.trainer, None)

    @property
    def round(self) -> int:
        """r: so many releases are in the weights."""
        return int(self.trainer.trajectory.next_step)

    def catch_up(self, releases: Sequence[Release]) -> None:
        """Applies the releases that the weights lack: K numbers for each missed round.

        Args:
          releases: of rounds 0, 1, ...; what was applied already must be the same.

        Raises:
          LedgerError: they are another run's.
        """
        applied = self.trainer.trajectory
        common = min(self.round, len(releases))
        if common and applied.releases[common - 1] != releases[common - 1]:
            raise LedgerError(
                f"round {common - 1} was another one here: these releases are another run's."
            )
        for release in releases[self.round :]:
            applied.append(release)
            apply_release(self.method.space, applied, release)

    def differences(self, indices: Sequence[int]) -> Tensor:
        """Finite differences along this round's K directions; leaves the weights at theta^r.

        Args:
          indices: rows of the trainer's data, perhaps none.

        Returns:
          Private: float64 [B, K], neither clipped nor noised.
        """
        rows, shapes = self.trainer.training_rows(), self.trainer.shapes
        if shapes is not None:
            parts: list[Any] = list(shapes.microbatches(list(indices)))
        else:
            size = self.trainer.args.physical_batch_size
            batches = [
                rows.collate_rows(list(indices[i : i + size])) for i in range(0, len(indices), size)
            ]
            parts = [Filled(batch, num_examples(batch)) for batch in batches]
        directions = directions_of(self.round, self.trainer.trajectory.header)
        with self.method.reads.own_step(), isolated_randomness():
            differences = self.method.step.differences(parts, directions)
            self.method.settle_()
        return differences

    def evaluate(self) -> dict[str, float]:
        """The recipe's metrics on its validation rows, at theta^r."""
        return dict(self.trainer.evaluate())

    def close(self) -> None:
        """Leaves the weights at theta^r and takes the watchers off the model."""
        self.trainer._reads.close()
