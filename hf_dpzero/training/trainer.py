"""`DPZeroMixin`: Hugging Face's Trainer over a privacy plan, a ledger and private steps."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from hf_dpzero.batches.logical_batch import LogicalBatch, UnreadLoader
from hf_dpzero.batches.units import Units
from hf_dpzero.checks import data as data_checks
from hf_dpzero.checks import overrides
from hf_dpzero.checks.model import SavedBesides, check_placement
from hf_dpzero.checks.processes import check_agreement, check_weights
from hf_dpzero.estimators.arithmetic import unwrapped
from hf_dpzero.estimators.forward_passes import ParameterChanged
from hf_dpzero.ledger.digests import state_digest
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.objectives.host import sent
from hf_dpzero.objectives.losses import Inputs, PerExampleLoss
from hf_dpzero.parallel import collectives, fsdp
from hf_dpzero.parallel.offload import settle_offloaded
from hf_dpzero.perturbation.trainable import num_trainable
from hf_dpzero.privacy.noise import InsecureSeededNoise, NoiseSource, SecureNoise
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.reporting.caveats import base_caveats
from hf_dpzero.reporting.plan_facts import BudgetMeter
from hf_dpzero.reporting.provenance import base_origins, earlier_runs, header_entries
from hf_dpzero.run import Run
from hf_dpzero.run_folder.base_model import are_fresh, check_frozen, mark_as_trained
from hf_dpzero.run_folder.folder import (
    check_folder,
    checkpoint_of,
    keep_batch_size,
    ledger_header,
    report_of,
    start_or_resume,
)
from hf_dpzero.run_folder.keys import RunKeys, check_kept, check_uploads, noise_of_steps, open_keys
from hf_dpzero.run_folder.left_on_disk import note_caches
from hf_dpzero.settings.config import DPZeroConfig
from hf_dpzero.settings.defaults import CLASSIC, copied, decide_rate, resolve
from hf_dpzero.settings.row_groups import row_groups
from hf_dpzero.training import evaluation, progress, termination
from hf_dpzero.training.first_order_method import FirstOrderMethod
from hf_dpzero.training.inputs import by_name, load_inputs, made_once
from hf_dpzero.training.preparation import loader_of, prepare
from hf_dpzero.training.private_step import LearningRates, group_logs, private_diagnostics
from hf_dpzero.training.publishing import Decided, PublishingTrainer
from hf_dpzero.training.signal import SignalCallback
from hf_dpzero.training.zeroth_order_method import LearningRate, ZerothOrderMethod

logger = logging.get_logger(__name__)

_WRITTEN = (
    "a forward pass wrote into the trained parameters, which now carry un-noised private data and are "
    "not saved: make the module leave them alone and start again from the base model."
)
_MODEL_INIT = (
    "model_init beside a model, or set later, makes one after the checks: pass one of them."
)


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

    Attributes:
      run: the training that was begun last, or is yet to begin.
      per_example_loss: `compute_per_example_loss`.
      shards: whether FSDP2 cuts the model over the processes.
      longest_row: tokens that rows were cut to by whoever made them; None where nobody says.
      rates_are_final: a given learning rate is kept whatever it trains; of recipes.

    Raises:
      ValueError: whatever cannot be accounted or would break the guarantee, before any training.
    """

    prepares_inputs: bool = True
    longest_row: int | None = None
    _loop_asks = False  # for the batches of a run that was opened
    _made_outside: torch.optim.Optimizer | None = None  # of train()
    rates_are_final = False
    _decided: Decided | None = None

    def __init__(
        self,
        model: nn.Module | str | None = None,
        args: DPZeroConfig | None = None,
        *positional: Any,
        compute_per_example_loss: PerExampleLoss | None = None,
        noise: NoiseSource | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(args, DPZeroConfig):
            raise ValueError(
                f"args is a {type(args).__name__}: give a DPZeroConfig, which takes what "
                "TrainingArguments does and a budget, e.g. DPZeroConfig(target_epsilon=2)."
            )
        progress.quiet_replicas(args)
        collectives.check_world(args)
        collectives.check_one_device(args, model)
        if noise is not None and not isinstance(noise, NoiseSource):
            raise ValueError(
                f"noise is a {type(noise).__name__}: pass a NoiseSource, or leave it out."
            )
        settings = by_name(type(self), positional, settings)
        if (make := settings.pop("model_init", None)) is not None:
            if model is not None:
                raise ValueError(_MODEL_INIT)
            model = made_once(make)
        given, own_loss = settings.get("train_dataset"), compute_per_example_loss
        data_checks.check_rows(given)
        model, self._texts = load_inputs(type(self), model, args, settings, own_loss)
        if isinstance(model, nn.Module):  # some subclasses take a name, and load it themselves
            check_placement(model)
            model = unwrapped(model)
            own = own_loss is not None or overrides.own_loss_name(type(self), settings)
            if given is not None and not own:
                select_objective(model)  # refuses a head without an objective
        # Trainer's own callback would save in the middle of a step, on SIGTERM; `termination` does it.
        jit_checkpoint = vars(args).pop("enable_jit_checkpoint", False)
        super().__init__(model=model, args=args, **settings)  # type: ignore[arg-type] # or its name
        args.enable_jit_checkpoint = jit_checkpoint
        data_checks.check_all_kept(given, self.train_dataset)
        if fsdp.uses_fsdp2(self.accelerator, self.model, args):
            # Trainer's own FSDP would cut, load and save by other rules.
            self.shards, self.is_fsdp_enabled = True, False
        self.refuse_private(self.eval_dataset)
        self.per_example_loss = own_loss
        if given is not None:
            overrides.refuse_overrides(self, self.per_example_loss, self.trajectory is not None)
        overrides.warn_of_unused(self, self.per_example_loss)
        seed = args.testing.insecure_noise_seed
        self.noise = noise or (SecureNoise() if seed is None else InsecureSeededNoise(seed))
        self._method_state: Mapping[str, Any] | None = None
        self._keys: RunKeys | None = None
        self._units: tuple[Any, str, int, Units] | None = None
        self._diagnostics: dict[str, float] = {}
        self._started_from = ""  # digest of the model; of a resumed run's it is not known
        self._rates = LearningRates()
        self._given = self.optimizer, self.lr_scheduler
        progress.replace_progress(self.callback_handler, args)
        self.watch = SignalCallback()
        self._termination = termination.TerminationCallback()
        self._banner = progress.RunCallback()
        # First, so that the user's callbacks see the rate and the epoch of this step.
        self.callback_handler.callbacks[:0] = [self._termination, self._banner, self.watch]

    # ------------------------------------------------------------------ the run

    @property
    def plan(self) -> PrivacyPlan:
        """The run's `PrivacyPlan`, calibrated on first use."""
        return (self._decided or self.decide()).plan

    def decide(self) -> Decided:
        """Makes the plan, and chooses what the arguments leave open, unless that was done for the same.

        Raises:
          ValueError: what cannot be accounted; or a run of this trainer began under another plan.
        """
        rows = data_checks.num_examples(self.train_dataset)
        if (units := self.units) is not None:
            rows = len(units)
        dimension, before = num_trainable(self.model, self.args.trainable), self._decided
        given = copied(self.args), rows, dimension, self.rates_are_final
        if before is not None and given == before.given:
            return before
        if self.trajectory is None:  # they may be of other arguments
            vars(self).pop("_extended", None), vars(self).pop("earlier_runs", None)
        args = resolve(self.args, self.model)
        plan = args.plan(rows, dimension)
        if before is not None and self.trajectory is not None and plan != before.plan:
            raise ValueError(
                "the arguments or rows were changed after this trainer's run began, and would give it "
                "another plan: make a new trainer, with another output_dir."
            )
        args.max_steps = plan.steps
        fresh = functools.partial(are_fresh, self.model, self.args.trainable)
        rate = decide_rate(self.args, plan, (lambda: False) if self.rates_are_final else fresh)
        args.learning_rate, delta = rate.value, args.delta(rows)
        self._decided = Decided(given, args, plan, delta, BudgetMeter(plan, delta), rate)
        return self._decided

    @property
    def units(self) -> Units | None:
        """What the sampler draws where `unit_column` says whose rows are one; else None."""
        column, most, data = self.args.unit_column, self.args.rows_per_unit, self.train_dataset
        if column is None or data is None:
            return None
        if self._units is None or self._units[0] is not data or self._units[1:3] != (column, most):
            self._units = data, column, most, data_checks.units_of(data, column, most)
        return self._units[3]

    def _new_run(self) -> Run:
        """Returns a run of these arguments, rows and model, of which nothing was checked yet."""
        decided, texts, rows = self.decide(), self._texts, self.eval_dataset
        public = next(iter(rows.values()), None) if isinstance(rows, Mapping) else rows
        looked_at = hasattr(public, "__getitem__") and getattr(public, "__len__", int)()
        return Run(
            model=self.model,
            args=decided.args,
            plan=decided.plan,
            delta=decided.delta,
            meter=decided.meter,
            dataset=self.train_dataset,
            evaluation=public if looked_at else None,  # type: ignore[arg-type]
            rows_of=self.rows_of,
            collator=self.data_collator,
            units=self.units,
            noise=self.noise,
            around=self._on_device,
            cut_model=self.shard_,
            check_evaluation_rows=lambda: self.refuse_private(self.eval_dataset),
            readers=lambda: [self, *self.callback_handler.callbacks],
            decayed=lambda: self.get_decay_parameter_names(self.model),
            objective=self.per_example_loss or overrides.loss_by_row(self),
            tokenizer=self.processing_class,  # type: ignore[arg-type]
            longest_row=self.longest_row or (self.args.max_length if texts else None),
            examples_known=texts is not None and texts.examples,
            earlier_runs=self.earlier_runs,
            extended=self._extended,
            sharded=self.shards,
            chosen=self.args.chosen | ({"learning_rate"} if decided.rate.chosen else set()),
            rate_said=decided.rate.said,
        )

    @functools.cached_property
    def _extended(self) -> list[dict[str, Any]]:
        return header_entries(self.args.extends_run)

    @functools.cached_property
    def earlier_runs(self) -> list[dict[str, Any]]:
        """Runs that the base model came out of; read once, before this run writes anything."""
        covered = [run["weights_digest"] for run in self._extended]
        return earlier_runs(base_origins(self.model), covered)

    def _prepare_input(self, data: Any) -> Any:
        # The base class sends a microbatch anew for each pass, and waits for it.
        if isinstance(data, Tensor):
            return sent(data, self.args.device)
        return super()._prepare_input(data)

    def _on_device(self, objective: PerExampleLoss, model: nn.Module, inputs: Inputs) -> Tensor:
        with self.compute_loss_context_manager():
            losses = objective(model, self._prepare_inputs(dict(inputs)))
        if self.shards:
            fsdp.give_back(model)
        return losses

    # ------------------------------------------------------------------ training

    @termination.heeding()
    def train(  # type: ignore[override]
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
        if self.trajectory is None:
            optimizer = None if self.optimizer is self._made_outside else self.optimizer
            scheduler = None if self._created_lr_scheduler else self.lr_scheduler
            self._given = self.optimizer, self.lr_scheduler = optimizer, scheduler
        overrides.refuse_overrides(self, self.per_example_loss, self.trajectory is not None)
        collectives.control_group(float(self.args.ddp_timeout))
        resume = checkpoint_of(self.output_dir, resume_from_checkpoint)
        if resume_from_checkpoint:
            keep_batch_size(self.args)
        run = self._new_run()
        settle_offloaded(self.model)
        self._besides = SavedBesides(self.model)
        if run.plan.groups is not None:
            column = str(self.args.group_robust.column)
            run.row_groups = row_groups(run.plan.groups, column, self.train_dataset)
        check_folder(run, resume, resumes=bool(resume_from_checkpoint))
        check_uploads(run.plan, self.callback_handler.callbacks)
        if not (resume_from_checkpoint or self.shards or run.plan.groups):
            evaluation.try_metrics(self)
        with run.resources:
            prepare(run)
            self._besides.check()
            for caveat in base_caveats(self.earlier_runs):
                logger.warning(caveat)
            try:
                self._open(run, resume, resumes=bool(resume_from_checkpoint))
                output = super().train(resume_from_checkpoint=resume, **settings)
                if collectives.stop_agreed(ask=True):
                    self._stop()
                self._check_end(run)
            except (Exception, termination.Terminated, KeyboardInterrupt) as error:
                released = run.ledger is not None and run.ledger.releases and not self._tainted
                if self._run is run and (released or not isinstance(error, Exception)):
                    termination.say(run, error)
                raise
            finally:
                self._close(run)
        check_weights(run)
        return progress.public_output(output, report_of(run))

    def _open(self, run: Run, checkpoint: str | None, resumes: bool) -> None:
        """Opens the ledger and the keys; from here on this is the trainer's run."""
        header = ledger_header(run)
        check_agreement(run, header)
        opened = start_or_resume(run, header, checkpoint, resumes)
        self._run, self._trained_digest, self._saved_step = run, None, None
        run.ledger, self._method_state, self._started_from = opened
        self.optimizer, (given, self.lr_scheduler) = None, self._given  # for this ledger
        self._keys = open_keys(run)
        note_caches(run.output_dir, run.dataset)
        run.step_noise = noise_of_steps(run.plan, run.noise, self._keys)
        if resumes and run.opened.next_step == run.plan.steps:
            run.resources.enter_context(progress.finished(run))
        self._banner.run, self._banner.training = run, True
        if given is not None and not self.args.first_order and not self._banner.rescale(given):
            self.lr_scheduler = None  # its optimizer makes the rates, which it only shows
        self._loop_asks = True
        self.watch.open(run)

    def _check_end(self, run: Run) -> None:
        """Settles the weights and refuses to end with what was written beside the steps."""
        assert self._keys is not None and self._besides is not None
        run.method.settle_()
        self._besides.check()
        self.check_frozen()
        try:
            check_kept(run, self._keys)
        except LedgerError as error:
            self._tainted = f"not saved: {error}"
            raise
        if run.opened.next_step == run.plan.steps:
            self._keys.forget()

    def _close(self, run: Run) -> None:
        """Closes the ledger; a model that releases have moved is marked as trained."""
        self._keys, self._banner.training = None, False
        if run.ledger is None:
            return
        try:
            run.ledger.close()
        finally:
            run.resources.close()  # settles the weights
        if run.ledger.releases and self._trained_digest is None:
            # An error may be this process' alone; the others would not join to gather parts.
            alone = self.shards and sys.exc_info()[0] is not None
            self._trained_digest = None if alone else state_digest(self.model)
            mark_as_trained(self.model, self._started_from, self._trained_digest or "")

    def get_train_dataloader(self) -> DataLoader:
        """This process' logical batches for the loop, which asks first; for others `UnreadLoader`."""
        run = self.run
        if not self._loop_asks or self._keys is None:
            return UnreadLoader(self.train_dataset, run.plan.sampler.expected_batch_size)
        self._loop_asks = False
        return loader_of(run, self._keys.sampler, lambda: self.state.global_step)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Makes the run's method; its optimizer only carries the learning rate, or is `optim`.

        Outside train(), which makes its own, one with the same learning rate.
        """
        if self.optimizer is not None:
            return self.optimizer
        if self._keys is None or self.train_dataset is None:
            self._made_outside = self._outside_optimizer(model)
            return self._made_outside
        run = self.run
        assert self._besides is not None
        if self._method_state is not None:
            try:
                check_frozen(self.model, run.header)
            except LedgerError:
                run.opened.close()
                self._run = run.ledger = None  # these weights are not its
                raise
        self._besides.take_configuration()  # Trainer has set the tokenizer's special tokens
        if self._method_state is not None:
            self._besides.take_state()  # a checkpoint's, which passed this check when it was written
        method: ZerothOrderMethod | FirstOrderMethod
        if self.args.first_order:
            method = FirstOrderMethod(run, self.watch.signal)
        else:
            method = ZerothOrderMethod(run, self._method_state)
        run.method = method
        given = method.optimizer or self._given[0]
        self.optimizer = optimizer = given or super().create_optimizer(model)
        hook = optimizer.register_step_pre_hook
        hooks = [hook(self._rates.check)]  # callbacks run after a release
        if self.args.first_order:
            overrides.check_held(optimizer, run.model)
            hooks += [hook(lambda *_: method.weights.check())]  # between steps it alone may write
            hooks += [optimizer.register_step_post_hook(lambda *_: method.weights.note())]
        for own in hooks:  # a given optimizer outlives the run
            run.resources.callback(own.remove)
        run.resources.enter_context(method.weights)
        return optimizer

    def _outside_optimizer(self, model: nn.Module | None) -> torch.optim.Optimizer:
        """One that shows the learning rate; without rows there is no run to choose a rate for."""
        if self.train_dataset is not None and not self.args.first_order:
            self.optimizer = LearningRate(list(self.model.parameters()), self.run.args)
            return self.optimizer
        given = self.args.learning_rate
        self.args.learning_rate = CLASSIC["learning_rate"] if given is None else given
        try:
            return super().create_optimizer(model)
        finally:
            self.args.learning_rate = given

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
        assert self._run is not None and self.optimizer is not None
        logged, self._diagnostics = self._run.header["log_private_diagnostics"], {}
        if self.args.testing.log_private_diagnostics is not logged:
            logger.warning_once(
                "testing.log_private_diagnostics was changed during the run, which goes on as it began, "
                f"with {logged}. Set it before train(), in a new output_dir."
            )
        try:
            statistics = self._run.method.take(inputs, self._rates.take(self.optimizer))
        except ParameterChanged:
            self._tainted = _WRITTEN
            raise
        if logged and statistics is not None:
            examples = sum(inputs["examples"])
            self._diagnostics = private_diagnostics(statistics, self.plan.mechanism, examples)
        return torch.zeros((), device=self.args.device)

    def _get_learning_rate(self) -> float:
        """The last step's, for logs."""
        return self._rates.used

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs released values and spent budget in place of the private loss.

        Args:
          logs: what the Trainer would log.
          start_time: not passed on: checkpoints keep what is logged, and no step's time may be there.
        """
        for key in ("loss", "grad_norm", "train_loss", "total_flos", "train_samples_per_second"):
            logs.pop(key, None)
        run = self._run
        if run is not None and run.ledger is not None and "learning_rate" in logs:
            logs["epsilon"] = run.epsilon_spent
            last = run.ledger.get(self.state.global_step - 1)
            if last is not None and run.plan.mechanism.replayable:
                logs["released_value"] = math.hypot(*last.values[: run.args.num_directions])
            logs.update(self.watch.logs())
            logs.update(group_logs(self.step.weighting))
            logs.update(self._diagnostics)
        super().log(logs)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: every trial would spend budget that no report counts."""
        raise ValueError(
            "hyperparameter_search on private data spends privacy in every trial: search on public "
            "data, then train once."
        )
