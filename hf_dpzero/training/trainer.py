"""`DPZeroMixin` and `DPZeroTrainer`: between Hugging Face's Trainer and the privacy plan and ledger."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from hf_dpzero.batches.logical_batch import LogicalBatch, Rows, StepBatches, StepSampler
from hf_dpzero.batches.shapes import FixedShapes
from hf_dpzero.checks import data as data_checks
from hf_dpzero.checks import model as validation
from hf_dpzero.checks.evaluation_rows import PrivateRows
from hf_dpzero.checks.overrides import check_overrides, refuse_overrides
from hf_dpzero.estimators.forward_passes import ParameterChanged
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.objectives.losses import PerExampleLoss, Within
from hf_dpzero.parallel import distributed, sharded_runs
from hf_dpzero.parallel.rank_agreement import watched_training
from hf_dpzero.parallel.split import ALONE
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.privacy.noise import InsecureSeededNoise, NoiseSource, SecureNoise
from hf_dpzero.reporting.budget import budget_metrics
from hf_dpzero.reporting.wording import base_caveats
from hf_dpzero.run_folder import noise_keys, opening
from hf_dpzero.run_folder.base_model import check_frozen, mark_as_trained
from hf_dpzero.settings.config import DPZeroConfig
from hf_dpzero.settings.row_groups import row_groups
from hf_dpzero.training import precision, screen, termination
from hf_dpzero.training.before_training import check_before_training
from hf_dpzero.training.group_training import group_logs
from hf_dpzero.training.methods import (
    FirstOrderMethod,
    TrainingMethod,
    ZerothOrderMethod,
    private_diagnostics,
)
from hf_dpzero.training.preparation import by_name, checked_config, prepare
from hf_dpzero.training.publishing import PublishingTrainer
from hf_dpzero.training.signal_callback import SignalCallback
from hf_dpzero.training.text_rows import TextRows

logger = logging.get_logger(__name__)

_WRITTEN = (
    "a forward pass wrote into the trained parameters, which now carry un-noised private data and are "
    "not saved: make the module leave them alone and start again from the base model."
)
_MODEL_INIT = "model_init makes a new model after the checks: pass the model itself as `model`."


class DPZeroMixin(PublishingTrainer):
    """Makes any subclass of `transformers.Trainer` train privately (DPZero, Algorithm 2).

        class PrivateTrainer(DPZeroMixin, QuestionAnsweringTrainer):
            pass

    It stands first among the parents, so that its training is what runs. `evaluate`, `predict` and
    whatever else the other class adds stay that class's; its arguments are passed on by name.

    A model given by name is loaded, `peft_config` puts an adapter on it, and rows of text are tokenised
    for a causal language model (see `conversations`). Trainers of TRL, those whose __init__ names
    `peft_config` and those with `prepares_inputs = False` do that themselves.

    Args:
      model: any model with an objective (see `objectives.select_objective`); parameters with
        requires_grad (and found by `args.trainable`) are trained.
      args: a `DPZeroConfig`.
      compute_per_example_loss: optional (model, inputs) -> losses [B] float, each a function of its
        own example alone. A `PromptObjective` is also what evaluation predicts with.
      noise: optional `NoiseSource`; default operating-system entropy.

    Raises:
      ValueError: whatever cannot be accounted or would break the guarantee, before any training.
    """

    args: DPZeroConfig
    model: Any
    train_dataset: Any
    prepares_inputs: bool = True
    _private_rows: Sequence[PrivateRows] = ()
    _compared: Any = None  # the last loader whose rows were
    rows_are_examples = False  # known by their form
    _texts: TextRows | None = None
    _row_groups: np.ndarray | None = None  # private
    longest_row: int | None = None  # tokens that rows were cut to by whoever made them
    compiling: contextlib.ExitStack | None = None  # open inside train()
    split = ALONE
    _rate = math.nan  # of the last step

    def __init__(
        self,
        model: nn.Module | str | None = None,
        args: DPZeroConfig | None = None,
        *positional: Any,
        compute_per_example_loss: PerExampleLoss | None = None,
        noise: NoiseSource | None = None,
        **settings: Any,
    ) -> None:
        args = checked_config(args)
        screen.quiet_replicas(args)
        distributed.check_single_strategy(args, model)
        if settings.get("model_init") is not None:
            raise ValueError(_MODEL_INIT)
        if noise is not None and not isinstance(noise, NoiseSource):
            raise ValueError(
                f"noise is a {type(noise).__name__}: pass a NoiseSource, or leave it out."
            )
        settings = by_name(type(self), positional, settings)
        own_loss = compute_per_example_loss
        model, self._texts = prepare(type(self), model, args, settings, own_loss)
        if isinstance(model, nn.Module):  # some subclasses take a name, and load it themselves
            validation.check_placement(model)
            model = precision.unwrapped(model)
            if compute_per_example_loss is None:
                select_objective(model)  # refuses a head without an objective
        given = data_checks.passed_rows(super().__init__, (), settings)
        data_checks.check_rows(given)
        super().__init__(model, args, **settings)  # type: ignore[arg-type] # a name goes to who loads it
        data_checks.check_all_kept(given, self.train_dataset)
        self.rows_are_examples = self._texts is not None and self._texts.examples
        distributed.check_launch(self)
        sharded_runs.take_over(self)
        self.refuse_private(self.eval_dataset)
        self.per_example_loss = compute_per_example_loss
        check_overrides(self)
        seed = args.testing.insecure_noise_seed
        self.noise = noise or (SecureNoise() if seed is None else InsecureSeededNoise(seed))
        self.trajectory: Trajectory | None = None
        self._method_state: Mapping[str, Any] | None = None
        self.shapes: FixedShapes | None = None
        self._keys: noise_keys.RunKeys | None = None
        self._diagnostics: dict[str, float] = {}
        self._started_from = ""  # digest of the model; of a resumed run's it is not known
        self._reads = contextlib.ExitStack()
        screen.replace_progress(self)
        self.watch = SignalCallback(self)
        self._termination = termination.TerminationCallback()
        self.callback_handler.callbacks[:0] = [
            self._termination,
            screen.RunCallback(self),
            self.watch,
        ]

    def refuse_private(self, dataset: Any) -> None:
        """Refuses a data set, or a dictionary of them, with rows of the private training data.

        Raises:
          ValueError: see `evaluation_data.PrivateRows`.
        """
        known = self._private_rows
        if all(rows.dataset is not self.train_dataset for rows in known):
            known = known if getattr(self, "trajectory", None) else ()  # stays private
            self._private_rows = known = [*known, PrivateRows(self.train_dataset)]
        for rows in known:
            rows.refuse(dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """As in Trainer; texts are tokenised, and the private training rows are refused."""
        if self._texts is not None:
            eval_dataset = self._texts.evaluated(eval_dataset)
        chosen: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = self.eval_dataset[chosen]  # type: ignore[index]
        self.refuse_private(chosen)
        self._compared = super().get_eval_dataloader(eval_dataset)
        return self._compared

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """As in Trainer; texts are tokenised, and the private training rows are refused."""
        if self._texts is not None:
            test_dataset = self._texts.evaluated(test_dataset)
        self.refuse_private(test_dataset)
        self._compared = super().get_test_dataloader(test_dataset)
        return self._compared

    def evaluation_loop(self, dataloader: DataLoader, *args: Any, **settings: Any) -> Any:
        """As in Trainer; a loader of private training rows, made by hand, is refused."""
        if dataloader is not self._compared:
            rows = getattr(dataloader, "dataset", None)
            self.refuse_private(self.train_dataset if isinstance(rows, StepBatches) else rows)
        return precision.evaluated(self, super().evaluation_loop, dataloader, *args, **settings)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: every trial would spend budget that no report counts."""
        raise ValueError(
            "hyperparameter_search on private data spends privacy in every trial: search on public "
            "data, then train once."
        )

    @precision.with_own_compiling
    @watched_training
    @termination.heeding()
    def train(
        self, resume_from_checkpoint: str | bool | None = None, **settings: Any
    ) -> TrainOutput:
        """Trains as `Trainer.train` does; what cannot be accounted is refused before it starts.

        Args:
          resume_from_checkpoint: a checkpoint folder, or True for the last one in output_dir (without
            one, for the base model). Steps that the ledger holds beyond it are replayed, never
            sampled or paid again.
          settings: as in Trainer.

        Returns:
          Hugging Face's output without the training loss, which is private (NaN); the metrics of a
          private run have `epsilon` (spent), `delta` and `target_epsilon`.

        Raises:
          ValueError: what cannot be accounted, or nothing to resume from.
          LedgerError: the ledger is missing, damaged, of another run, or there already.
          Terminated: SIGTERM came, and a whole checkpoint is there; exits with 143.
        """
        if self.model_init is not None:
            raise ValueError(_MODEL_INIT)
        refuse_overrides(self)
        if self.trajectory is None:
            self._given_scheduler = self.lr_scheduler
        self.decide()
        resume = opening.checkpoint_of(self.output_dir, resume_from_checkpoint)
        self._besides = self.saved_besides()
        if self.plan.groups is not None:
            column = str(self.args.group_robust.column)
            self._row_groups = row_groups(self.plan.groups, column, self.train_dataset)
        noise_keys.check_uploads(self)
        check_before_training(self)
        self._besides.check()
        for caveat in base_caveats(self.earlier_runs):
            logger.warning(caveat)
        try:
            opened = opening.open_run(self, resume, resumes=bool(resume_from_checkpoint))
            self.optimizer, self.lr_scheduler = None, self._given_scheduler  # for this ledger
            self.trajectory, self._method_state, self._started_from = opened
            self._keys = noise_keys.open_keys(self)
            self.watch.open()
            self._trained_digest = self._saved_step = None
            self.args.trains_privately = True
            output = super().train(resume_from_checkpoint=resume, **settings)
            if distributed.stop_agreed(ask=True):
                self._stop()
            self.method.settle_()
            self._besides.check()
            self.check_frozen()
            try:
                noise_keys.check_kept(self)
            except LedgerError as error:
                self._tainted = f"not saved: {error}"
                raise
            if self.trajectory.next_step == self.plan.steps:
                self._keys.forget()
        except (termination.Terminated, KeyboardInterrupt) as error:
            termination.say(self, error)
            raise
        finally:
            vars(self.args).pop("trains_privately", None)
            self._keys = None
            if self.trajectory is not None:
                self.trajectory.close()
            self._reads.close()
            released = self.trajectory is not None and self.trajectory.releases
            if released and self._trained_digest is None:
                self._trained_digest = digest = sharded_runs.final_digest(self)
                mark_as_trained(self.model, self._started_from, digest or "")
        for name in ("train_loss", "total_flos", "train_samples_per_second"):  # depend on the data
            output.metrics.pop(name, None)
        output.metrics.update(budget_metrics(self.privacy_report()))
        return screen.PrivateOutput(output.global_step, math.nan, output.metrics)

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> contextlib.AbstractContextManager[None]:
        """The run's mixed precision, wherever losses are computed (see `precision`)."""
        return precision.uncached_autocast(self.accelerator)

    def probe(self) -> Mapping[str, Tensor]:
        """The first and the last example, for checks whose results are not released."""
        return self.training_rows().collate_rows([0, len(self.train_dataset) - 1])

    def get_train_dataloader(self) -> DataLoader:
        """Logical batches of this process, one item per step, split into microbatches."""
        assert self._keys and self.trajectory, "batches are drawn inside train() only"
        batches = StepBatches(
            rows=self.training_rows(),
            plan=self.plan,
            key=self._keys.sampler,
            microbatch_size=self.args.physical_batch_size,
            share=self.split.row,
            shares=self.split.rows,
            paid=self.trajectory.next_step,
            shapes=self.shapes,
            row_groups=self._row_groups,
        )
        return DataLoader(
            batches,
            batch_size=None,
            sampler=StepSampler(self),
            num_workers=self.args.dataloader_num_workers,
            worker_init_fn=termination.left_to_parent,
            pin_memory=False,
        )

    def training_rows(self) -> Rows:
        """The private rows, as the step's microbatches are collated from."""
        return self.rows_of(self.train_dataset)

    def rows_of(self, dataset: Any) -> Rows:
        """A data set without the columns that the model does not take, and its collator."""
        if isinstance(dataset, datasets.Dataset):
            kept = self._remove_unused_columns(dataset, description="training")
            return Rows(kept, self.data_collator)
        collate = self._get_collator_with_removed_columns(self.data_collator, "training")
        return Rows(dataset, collate)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Makes the run's method; its optimizer only carries the learning rate, or is `optim`."""
        if self.optimizer is None:
            assert self.trajectory is not None and self.per_example_loss is not None
            if self._method_state is not None:
                try:
                    check_frozen(self.model, self.trajectory.header)
                except LedgerError:
                    self.trajectory.close()
                    self.trajectory = None  # these weights are not its
                    raise
            assert self._besides is not None
            self._besides.take_configuration()  # Trainer has set the tokenizer's special tokens
            if self._method_state is not None:
                self._besides.take_state()  # a checkpoint's, which passed this check when it was written
            kind: type[TrainingMethod] = (
                FirstOrderMethod if self.args.first_order else ZerothOrderMethod
            )
            self.method: TrainingMethod = kind(self, self._method_state)
            self.optimizer = self.method.optimizer or super().create_optimizer(model)
            self.optimizer.register_step_pre_hook(self._check_rate)
            self._weights = weights = self.method.weights
            self.while_training(weights)
            if self.args.first_order:
                self.optimizer.register_step_pre_hook(lambda *_: weights.check())
                self.optimizer.register_step_post_hook(lambda *_: weights.note())
        return self.optimizer

    def _get_learning_rate(self) -> float:
        """The last step's, for logs."""
        return self._rate

    def _optimizer_rate(self) -> float:
        """The rate of the next update, which a callback may have set.

        Raises:
          ValueError: groups of parameters have several rates.
        """
        assert self.optimizer is not None
        rates = sorted({float(group["lr"]) for group in self.optimizer.param_groups})
        if len(rates) > 1:
            raise ValueError(
                f"learning rates {rates} of several groups of parameters, and the ledger writes one for "
                "each step: set the same in all of optimizer.param_groups."
            )
        return rates[0]

    def follow_scheduler(self) -> None:
        """Sets the rate by a scheduler that was made with another optimizer: optimizers=(None, it)."""
        scheduler, optimizer = self.lr_scheduler, self.optimizer
        assert scheduler is not None and optimizer is not None
        groups = optimizer.param_groups
        if getattr(getattr(scheduler, "optimizer", None), "param_groups", None) is not groups:
            for group in groups:
                group["lr"] = scheduler.get_last_lr()[0]

    def _check_rate(self, *_: Any) -> None:
        """Refuses an update with another rate than that of the step's release."""
        if (rate := self._optimizer_rate()) != self._rate:
            raise ValueError(
                f"a callback set the learning rate from {self._rate:g} to {rate:g} between a step's "
                "release, which the ledger has, and its update: set it in on_step_begin or on_step_end."
            )

    @property
    def space(self) -> ParameterSpace:
        """The trainable coordinates of a zeroth-order run."""
        assert isinstance(self.method, ZerothOrderMethod)
        return self.method.space

    @property
    def step(self) -> Any:
        """The run's `ZerothOrderStep` or `FirstOrderStep`."""
        return self.method.step

    def step_noise(self) -> NoiseSource:
        """What steps draw from; with correlated noise a source that knows earlier draws."""
        if self._keys is None:  # no run of this trainer's own: a replica, which draws nothing
            assert self.plan.correlation is None, "correlated noise is drawn inside train() only"
            return self.noise
        return noise_keys.noise_of_steps(self, self._keys)

    def while_training(self, context: contextlib.AbstractContextManager[Any]) -> None:
        """Enters `context` until `train` returns or raises."""
        self._reads.enter_context(context)

    def evaluated_objective(self) -> Within:
        """(model, inputs) -> losses [B], on the run's device and in its precision."""
        assert self.per_example_loss is not None

        def on_device(objective: PerExampleLoss) -> PerExampleLoss:
            def evaluate(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
                with self.compute_loss_context_manager():
                    losses = objective(model, self._prepare_inputs(dict(inputs)))
                if self.shards:
                    sharded_runs.give_back(model)
                return losses

            return evaluate

        return Within(self.per_example_loss, on_device)

    def training_step(  # type: ignore[override]
        self, model: nn.Module, inputs: LogicalBatch, num_items_in_batch: Any = None
    ) -> Tensor:
        """Takes one private step.

        Args:
          model: as Trainer passes it; the method has its own reference.
          inputs: the step's number and microbatches.
          num_items_in_batch: unused.

        Returns:
          0, because the loss is private.
        """
        assert self.step.trajectory is self.trajectory
        logged, self._diagnostics = self.trajectory.header["log_private_diagnostics"], {}
        if self.args.testing.log_private_diagnostics is not logged:
            logger.warning_once(
                "testing.log_private_diagnostics was changed during the run, which goes "
                "on as it began, with "
                f"{logged}: its report speaks of all steps. Set it before train(), in a new output_dir."
            )
        try:
            self._rate = self._optimizer_rate()
            statistics = self.method.take(inputs, self._rate)
        except ParameterChanged:
            self._tainted = _WRITTEN
            raise
        if logged and statistics is not None:
            self._diagnostics = private_diagnostics(statistics, self.plan.mechanism)
        return torch.zeros((), device=self.args.device)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs released values and spent budget in place of the private loss.

        Args:
          logs: what the Trainer would log.
          start_time: not passed on: checkpoints keep what is logged, and no step's time may be there.
        """
        for key in ("loss", "grad_norm", "train_loss", "total_flos", "train_samples_per_second"):
            logs.pop(key, None)
        if self.trajectory is not None and "learning_rate" in logs:
            logs["epsilon"] = self.epsilon_spent
            last = self.trajectory.get(self.state.global_step - 1)
            if last is not None and self.plan.mechanism.replayable:
                logs["released_value"] = math.hypot(
                    *last.values[: self.resolved_args.num_directions]
                )
            logs.update(self.watch.logs())
            logs.update(group_logs(self.step.weighting))
            logs.update(self._diagnostics)
        super().log(logs)

    @property
    def epsilon_spent(self) -> float:
        """An upper bound on the epsilon of the steps taken so far."""
        taken = self.trajectory.next_step if self.trajectory else 0
        return self.decide().meter.at(min(taken, self.plan.steps))
