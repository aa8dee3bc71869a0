"""A step's logical batch: which examples, split into microbatches, for this process."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from hf_dpzero.batches.columns import Block, Columns, columns_of
from hf_dpzero.batches.shapes import PassShapes
from hf_dpzero.batches.units import MOST, Units
from hf_dpzero.estimators.random_state import isolated_randomness
from hf_dpzero.objectives.losses import batch_size, num_examples
from hf_dpzero.privacy.sampling import place_order

if TYPE_CHECKING:
    from hf_dpzero.privacy.plan import PrivacyPlan


class LogicalBatch(TypedDict):
    """What a training step gets: its number and its microbatches, perhaps none."""

    step: int
    microbatches: list[Mapping[str, Tensor]]
    examples: list[int]  # rows of each microbatch that count; the others only fill it up
    groups: list[int]  # of each example that counts: its group or unit (losses: its code), or none
    row_groups: list[int]  # group-robust training: the group of each example that counts, in order
    batch_digest: int  # `fingerprint` of the step and of what every process takes


@dataclass(frozen=True)
class Rows:
    """A map-style data set and its collator.

    Attributes:
      dataset: rows by index.
      collate: rows -> tensors with a leading batch dimension.
    """

    dataset: Any
    collate: Callable[[list[Any]], Mapping[str, Tensor]]

    def collate_rows(self, indices: list[int]) -> Mapping[str, Tensor]:
        """The rows of `indices` as one microbatch, with one row for each example.

        Raises:
          ValueError: the data set or the collator merges, splits or drops examples; then a row is
            not an example, and clipping rows would not bound an example.
        """
        blocks = self.collate_blocks(indices) if len(indices) else None
        if blocks and len(blocks) == 1:
            return blocks[0][1]
        with isolated_randomness():
            rows = self._fetched(indices)
            batch = self.collate(rows)
        _check_rows(len(indices), len(rows), batch_size(batch))
        return batch

    def collate_each(self, indices: list[int]) -> list[Mapping[str, Tensor]]:
        """The rows of `indices` as batches of one: no row's tensors depend on another row.

        Raises:
          ValueError: as in `collate_rows`.
        """
        with isolated_randomness():
            rows = self._fetched(indices)
            batches = [self.collate([row]) for row in rows]
        for batch in batches:
            _check_rows(1, 1, batch_size(batch))
        _check_rows(len(indices), len(rows), len(batches))
        return batches

    def collate_blocks(self, indices: list[int]) -> list[Block] | None:
        """The rows of `collate_each` in blocks of one shape, where columns tell them (`Columns`)."""
        return None if self._columns is None else self._columns.blocks(indices)

    @cached_property
    def _columns(self) -> Columns | None:
        return columns_of(self.dataset, self.collate)

    def _transforms(self) -> bool:
        """Whether the data set makes its rows on access (`with_transform`, `set_transform`)."""
        form = getattr(self.dataset, "format", None)
        return isinstance(form, dict) and form.get("type") == "custom"

    def _fetched(self, indices: list[int]) -> list[Any]:
        """The rows, asked for one by one where their data set may compute something of all of them.

        A transform (`with_transform`) that gets the rows of a batch pads each to the longest one.
        """
        stored = isinstance(getattr(self.dataset, "format", None), dict)  # a `datasets.Dataset`
        if stored and not self._transforms():
            return list(self.dataset.__getitems__(indices))
        return [self.dataset[i] for i in indices]


class RowsJoined(ValueError):
    """A data set or a collator does not keep one row for each example."""


def _check_rows(examples: int, rows: int, size: int) -> None:
    if rows != examples or size != examples:
        raise RowsJoined(
            f"{examples} examples became {rows} rows and a batch of {size}: use a data set and a "
            "collator that keep one row for each example (no packing or flattening, no overflowing "
            "windows, no pairs)."
        )


@dataclass(frozen=True)
class StepBatches(Dataset):
    """Item t is step t's logical batch: a pure function of (secret key, step).

    Random access by step makes prefetching workers and resuming harmless: no sampler state.

    Attributes:
      rows: the training data.
      plan: its sampler is the one that is accounted.
      key: 32 secret bytes, the same on every process.
      microbatch_size: rows in one forward pass where there are no `shapes`.
      share, shares: this process takes so many-th of so many shares of the batch.
      paid: steps before this one are replayed: nothing is sampled for them.
      shapes: makes microbatches of fixed shapes; None collates neighbours together.
      row_groups: group-robust training: the group of each row, int64 [n].
      units: what the sampler draws, where that is no row.
      gradients: of units: a pass has rows of one of them.
    """

    rows: Rows
    plan: PrivacyPlan
    key: bytes = field(repr=False)
    microbatch_size: int
    share: int = 0
    shares: int = 1
    paid: int = 0
    shapes: PassShapes | None = None
    row_groups: np.ndarray | None = None
    units: Units | None = None
    gradients: bool = False

    def __len__(self) -> int:
        return self.plan.steps

    def __getitem__(self, step: int) -> LogicalBatch:
        if step < self.paid:
            return self._batch(step, [], [], [])
        chosen = self.plan.sampler.batch(step, self.key)
        if self.units is not None:
            return self._of_units(step, self.units, chosen)
        if self.shapes is not None:  # the placement lemma's order (batches/placement.py)
            chosen = chosen[place_order(len(chosen), step, self.key)]
        if getattr(self.plan.mechanism, "clipping", "fixed") == "averaged":
            return self._grouped(step, chosen)
        rows: list[int] = chosen.tolist()
        if self.shapes is None:
            told = [rows[share :: self.shares] for share in range(self.shares)]
            return self._batch(step, told, self._microbatches(told[self.share]), told[self.share])
        # Of collators: the same on all processes, whatever they share; secret.
        label = b"hf_dpzero.collators." + step.to_bytes(8, "little")
        entropy = hashlib.blake2b(label, key=self.key, digest_size=16).digest()
        made, places = self.shapes.dealt(
            rows, self.share, self.shares, int.from_bytes(entropy, "little")
        )
        told = [[rows[place] for place in share] for share in places]
        return self._batch(step, told, made, [rows[place] for place in places_of(made)])

    def _grouped(self, step: int, chosen: np.ndarray) -> LogicalBatch:
        """The batch of averaged clipping, whose groups are dealt whole: one process takes a mean."""
        mechanism = self.plan.mechanism
        of = mechanism.group_of(chosen, self.key)  # type: ignore[union-attr]
        # A pass of losses may hold examples of several groups, one of gradients may not.
        apart = of if mechanism.values_per_release == 0 else 0 * of
        return self._in_groups(step, chosen, of, apart, of % self.shares)

    def _of_units(self, step: int, units: Units, chosen: np.ndarray) -> LogicalBatch:
        """The batch of units, each whole on one process, in a secret order of their rows."""
        rows, codes = units.drawn(chosen, step, self.key)
        unit = codes // MOST
        shares = units.share_of(unit, self.shares, self.key)
        if self.gradients:
            return self._in_groups(step, rows, unit, unit, shares)
        order = place_order(len(rows), step, self.key)
        rows, codes, shares = rows[order], codes[order], shares[order]
        return self._in_groups(step, rows, codes, 0 * codes, shares)

    def _in_groups(
        self, step: int, chosen: np.ndarray, of: np.ndarray, apart: np.ndarray, shares: np.ndarray
    ) -> LogicalBatch:
        """The rows of this share, each with its `of`; those that differ in `apart` in other passes."""
        told = [chosen[shares == share].tolist() for share in range(self.shares)]
        own = shares == self.share
        chosen, of, apart = chosen[own], of[own], apart[own]
        made, rows, groups = list[Mapping[str, Tensor]](), list[int](), list[int]()
        for part in (apart == value for value in np.unique(apart)):
            passes = self._microbatches(chosen[part].tolist())
            places = places_of(passes)
            made += passes
            rows += [int(row) for row in chosen[part][places]] if places else []
            groups += [int(group) for group in of[part][places]] if places else []
        return {**self._batch(step, told, made, rows), "groups": groups}

    def _batch(
        self,
        step: int,
        told: Sequence[Sequence[int]],
        made: Sequence[Mapping[str, Tensor]],
        rows: list[int],
    ) -> LogicalBatch:
        """The microbatches of `rows`, in the order in which they stand there, one group for all."""
        groups = [] if self.row_groups is None else self.row_groups[rows].tolist()
        return LogicalBatch(
            step=step, microbatches=list(made), examples=[num_examples(part) for part in made],
            groups=[-1] * len(rows), row_groups=groups, batch_digest=fingerprint(step, told),
        )  # fmt: skip

    def _microbatches(self, indices: list[int]) -> Sequence[Mapping[str, Tensor]]:
        if self.shapes is not None:
            return self.shapes.microbatches(indices)
        size = self.microbatch_size
        starts = range(0, len(indices), size)
        try:
            return [self.rows.collate_rows(indices[start : start + size]) for start in starts]
        except RowsJoined:
            raise
        except (RuntimeError, ValueError):  # rows of several lengths: the collator cannot pad
            return self.rows.collate_each(indices)


def places_of(microbatches: Sequence[Mapping[str, Tensor]]) -> list[int]:
    """Places, in the list that was asked for, of the examples of microbatches, as they stand there."""
    found: list[int] = []
    for part in microbatches:
        places = getattr(part, "places", None)
        found += range(len(found), len(found) + batch_size(part)) if places is None else places
    return found


def fingerprint(step: int, shares: Iterable[Sequence[int]]) -> int:
    """A number of a step and of which rows each share has; as good as never the same for another one."""
    told = repr((step, [list(map(int, share)) for share in shares]))
    return int.from_bytes(hashlib.blake2b(told.encode(), digest_size=8).digest(), "little")


class UnreadLoader(DataLoader):
    """What is public of a run's batches: the rows they are drawn from, and how many an epoch has.

    Args:
      dataset: the training rows.
      expected_batch_size: B.
    """

    def __init__(self, dataset: Any, expected_batch_size: float) -> None:
        super().__init__(dataset, math.ceil(expected_batch_size))

    def __iter__(self) -> Any:
        raise ValueError(
            "epsilon counts on nobody knowing which rows are in a training batch, so only the training "
            "loop iterates over them. To look at rows take train_dataset and data_collator."
        )


class StepSampler(Sampler[int]):
    """The next ceil(n / B) steps; at first, after a resume, those that are left of such an epoch.

    Epochs are a reporting unit only (Poisson sampling has none). One that a callback ends early
    (`should_epoch_stop`) has fewer steps, and the next one takes them up.

    Args:
      plan: of the run.
      taken: steps taken so far, asked for when an epoch begins.
    """

    def __init__(self, plan: PrivacyPlan, taken: Callable[[], int]) -> None:
        self.plan, self.taken, self._begun = plan, taken, False

    def __len__(self) -> int:
        return int(self.plan.sampler.steps_per_epoch)

    def __iter__(self) -> Iterator[int]:
        start = self.taken()
        of_epoch = 0 if self._begun else start % len(self)
        self._begun = True
        return iter(range(start, min(start + len(self) - of_epoch, self.plan.steps)))
