"""One training, as its checks, steps, files and processes see it. Knows nothing of Trainer.

`DPZeroMixin.train` makes a `Run` and fills it in, in this order: checks and the objective, shapes and
mesh of the forward passes (`training.preparation.prepare`), ledger and keys (`run_folder`), then the
method, which takes the steps. A federated replica makes one too, whose ledger is another's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hf_dpzero.objectives.losses import Inputs, PerExampleLoss, WrappedObjective
from hf_dpzero.parallel.mesh import ALONE, ProcessMesh

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from hf_dpzero.batches.logical_batch import LogicalBatch, Rows
    from hf_dpzero.batches.shapes import PassShapes
    from hf_dpzero.batches.units import Units
    from hf_dpzero.estimators.landscape import Landscape
    from hf_dpzero.ledger.trajectory import Trajectory
    from hf_dpzero.privacy.noise import NoiseSource
    from hf_dpzero.privacy.plan import PrivacyPlan
    from hf_dpzero.reporting.plan_facts import BudgetMeter
    from hf_dpzero.settings.config import DPZeroConfig


class Weights(Protocol):
    """A note of the trained weights (see `checks.between_steps`)."""

    def note(self) -> None:
        """Notes them as they are: others may write to them from here on."""


class Method(Protocol):
    """What takes the steps (see `training.zeroth_order_method`, `training.first_order_method`)."""

    @property
    def weights(self) -> Weights:
        """Noted where the run leaves them, compared before it goes on."""

    def take(self, batch: LogicalBatch, learning_rate: float) -> Tensor | None:
        """Takes a step; returns its un-noised statistics (private), None if no data was read."""

    def lower_rate(self) -> float:
        """Lowers a chosen rate where public rows' losses curve more by now; returns by what factor."""

    def settle_(self) -> None:
        """Makes the parameters hold theta."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint needs beyond weights and optimizer; public, JSON-safe."""


@runtime_checkable
class Dataset(Protocol):
    """Rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass
class Run:
    """One training.

    Attributes:
      model: to be trained; parameters with requires_grad are.
      args: its settings, with T as `max_steps`, the first learning rate and K filled in.
      plan: sampler, mechanism, steps.
      delta: that epsilon is stated at.
      meter: of the budget that is spent.
      dataset: the private rows.
      evaluation: the public rows, one data set or none.
      rows_of: a data set -> its rows without the columns that the model does not take, and a collator.
      noise: what the user passed, or operating-system entropy.
      around: evaluates an objective on the run's device, in its precision.
      cut_model: splits the model over the processes, where FSDP2 was asked for.
      check_evaluation_rows: refuses evaluation data with private rows in it.
      readers: the trainer and its callbacks, which may read the weights between two steps.
      decayed: names of parameters that weight decay is for.
      collator: as the user gave it.
      objective: (model, inputs) -> losses [B]; None until the checks chose it by the model's head.
      tokenizer: pads; None for data that is not text.
      longest_row: tokens that rows were cut to by whoever made them, or None.
      examples_known: whether one row is one example by the rows' form.
      earlier_runs: entries of the report on runs that the base came out of.
      extended: likewise on the run that this one extends.
      sharded: whether parameters lie in parts on several processes.
      row_groups: group-robust training: the group of each row, int64 [n]; private.
      units: what the sampler draws, where several rows are one unit; private.
      shapes: of the forward passes; None where neighbours are collated together.
      mesh: which rows and directions this process takes.
      ledger: what was released; None until it is open.
      step_noise: what steps draw from: `noise`, or correlated noise.
      chosen: settings that were left open and chosen for this run.
      rate_said: what to say of a learning rate that was given; "" for nothing.
      landscape: of public rows at the start, from which the learning rate was chosen; None where it was
        not.
      resources: closed when training ends: hooks on the model, compiler settings.
      compared: whether the processes have compared their weights since training began.
    """

    model: nn.Module
    args: DPZeroConfig
    plan: PrivacyPlan
    delta: float
    meter: BudgetMeter
    dataset: Dataset
    rows_of: Callable[[Any], Rows]
    noise: NoiseSource
    around: Callable[[PerExampleLoss, nn.Module, Inputs], Tensor]
    cut_model: Callable[[], None]
    check_evaluation_rows: Callable[[], None]
    readers: Callable[[], Sequence[object]]
    decayed: Callable[[], list[str]]
    collator: Callable[[list[Any]], Mapping[str, Any]]
    evaluation: Dataset | None = None
    objective: PerExampleLoss | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    longest_row: int | None = None
    examples_known: bool = False
    earlier_runs: list[dict[str, Any]] = field(default_factory=list)
    extended: list[dict[str, Any]] = field(default_factory=list)
    sharded: bool = False
    row_groups: np.ndarray | None = None
    units: Units | None = None
    shapes: PassShapes | None = None
    mesh: ProcessMesh = ALONE
    ledger: Trajectory | None = None
    step_noise: NoiseSource | None = None
    chosen: frozenset[str] = frozenset()
    rate_said: str = ""
    landscape: Landscape | None = None
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    compared: bool = False
    _method: Method | None = None

    @property
    def output_dir(self) -> Path:
        """Where the run keeps its files; `args.output_dir` may be None in Hugging Face's types."""
        return Path(str(self.args.output_dir))

    @property
    def rows(self) -> Rows:
        """The private rows, as the step's microbatches are collated from."""
        return self.rows_of(self.dataset)

    @property
    def evaluate(self) -> WrappedObjective:
        """(model, inputs) -> losses [B], on the run's device and in its precision."""
        assert self.objective is not None
        return WrappedObjective(self.objective, self.around)

    @property
    def header(self) -> Mapping[str, Any]:
        """The ledger's: what was public when the run began."""
        return self.opened.header

    @property
    def opened(self) -> Trajectory:
        """The ledger of a run that has one."""
        assert self.ledger is not None, "the ledger is opened by train()"
        return self.ledger

    @property
    def epsilon_spent(self) -> float:
        """An upper bound on the epsilon of the steps taken so far."""
        taken = self.ledger.next_step if self.ledger else 0
        return self.meter.at(min(taken, self.plan.steps))

    @property
    def begun(self) -> bool:
        """Whether the method was made: from then on the weights are the run's to settle."""
        return self._method is not None

    @property
    def method(self) -> Method:
        """What takes the steps, once it was made."""
        assert self._method is not None, "the method is made when training begins"
        return self._method

    @method.setter
    def method(self, method: Method) -> None:
        self._method = method

    @property
    def expected_rows(self) -> float:
        """Rows that a step is expected to have at most, by public numbers."""
        of_unit = 1 if self.units is None else self.units.most
        return self.plan.sampler.expected_batch_size * of_unit

    @property
    def expected_passes(self) -> float:
        """Microbatches that a step is expected to have on this process, by public numbers."""
        if self.shapes is None:
            rows = self.expected_rows / self.mesh.rows
            return float(rows / self.args.physical_batch_size)
        return float(self.shapes.placement.expected_passes() / self.mesh.rows)

    def probe(self) -> Mapping[str, Tensor]:
        """The first and the last example, for checks whose results are not released.

        The first alone where the collator cannot put both into one batch.
        """
        try:
            return self.rows.collate_rows([0, len(self.dataset) - 1])
        except (RuntimeError, ValueError):
            return self.rows.collate_rows([0])
