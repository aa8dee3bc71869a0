"""What a private run evaluates, saves and publishes, in place of what Hugging Face's Trainer would."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import datasets
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler
from transformers import Trainer
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.utils import logging

from hf_dpzero.batches.logical_batch import Rows, StepBatches
from hf_dpzero.checks.evaluation_rows import PrivateRows
from hf_dpzero.checks.model import SavedBesides
from hf_dpzero.checks.overrides import loss_by_row
from hf_dpzero.estimators.arithmetic import uncached_autocast, uncompiled
from hf_dpzero.estimators.random_state import isolated_randomness
from hf_dpzero.ledger.digests import state_digest
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import SHIPPING_NAME, Trajectory
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.objectives.losses import PerExampleLoss
from hf_dpzero.objectives.prompted import PromptObjective
from hf_dpzero.parallel import collectives, fsdp
from hf_dpzero.parallel.offload import settle_offloaded
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.reporting import hub
from hf_dpzero.reporting.plan_facts import BudgetMeter
from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport
from hf_dpzero.reporting.verification import bound_to
from hf_dpzero.reporting.weights import JOINED, names_on_disk
from hf_dpzero.reporting.wording import delta_words
from hf_dpzero.run import Run
from hf_dpzero.run_folder import checkpoints
from hf_dpzero.run_folder.base_model import check_frozen
from hf_dpzero.run_folder.folder import report_of
from hf_dpzero.run_folder.initial_values import copy_initial_values
from hf_dpzero.settings.config import DPZeroConfig
from hf_dpzero.settings.defaults import Rate
from hf_dpzero.training import evaluation, termination
from hf_dpzero.training.first_order_method import FirstOrderMethod
from hf_dpzero.training.first_order_step import FirstOrderStep
from hf_dpzero.training.private_evaluation import evaluate_privately
from hf_dpzero.training.texts import TextRows
from hf_dpzero.training.zeroth_order_method import ZerothOrderMethod
from hf_dpzero.training.zeroth_order_step import ZerothOrderStep

logger = logging.get_logger(__name__)


class Decided(NamedTuple):
    """What `given` arguments, rows and parameters made of a run."""

    given: tuple[Any, ...]
    args: DPZeroConfig
    plan: PrivacyPlan
    delta: float
    meter: BudgetMeter
    rate: Rate


class PublishingTrainer(Trainer):
    """A Trainer over a `Run`: private rows are not evaluated, checkpoints are whole, pushes safe.

    Attributes:
      per_example_loss: as the user gave it; one that predicts is asked in evaluation.
      shards: whether FSDP2 cuts the model over the processes.
    """

    args: DPZeroConfig
    model: Any
    train_dataset: Any
    per_example_loss: PerExampleLoss | None = None
    shards = False
    _run: Run | None = None
    _private_rows: Sequence[PrivateRows] = ()
    _evaluated_privately: Sequence[PrivateRows] = ()
    _texts: TextRows | None = None
    _evaluated: tuple[Any, Any] = (None, None)  # the last loader whose rows were compared, and they
    _losses: list[Tensor] | None = None  # of evaluated rows, where those of groups are measured
    _besides: SavedBesides | None = None
    _termination: termination.TerminationCallback
    _tainted = ""  # why the weights may not be saved
    _trained_digest: str | None = None  # of the weights that training ended in
    _saved_step: int | None = None  # of the last checkpoint that this call of train() wrote

    def decide(self) -> Decided:
        """Makes the plan, and chooses what the arguments leave open, unless that was done for the same.

        Raises:
          ValueError: what cannot be accounted; or a run of this trainer began under another plan.
        """
        raise NotImplementedError

    def _new_run(self) -> Run:
        """Returns a run of the trainer's arguments, rows and model, of which nothing was checked."""
        raise NotImplementedError

    @property
    def run(self) -> Run:
        """The training that was begun last, or is yet to begin."""
        if self._run is None or (not self._run.ledger and self._run.args is not self.decide().args):
            self._run = self._new_run()
        return self._run

    @property
    def output_dir(self) -> Path:
        """Where the run keeps its files."""
        return Path(str(self.args.output_dir))

    @property
    def trajectory(self) -> Trajectory | None:
        """What was released; None before training."""
        return self._run.ledger if self._run else None

    @property
    def method(self) -> ZerothOrderMethod | FirstOrderMethod:
        """What takes the run's steps."""
        method = self.run.method
        assert isinstance(method, ZerothOrderMethod | FirstOrderMethod)
        return method

    @property
    def step(self) -> ZerothOrderStep | FirstOrderStep:
        """The run's `ZerothOrderStep` or `FirstOrderStep`."""
        return self.method.step

    @property
    def space(self) -> ParameterSpace:
        """The trainable coordinates of a zeroth-order run."""
        assert isinstance(self.method, ZerothOrderMethod)
        return self.method.space

    @property
    def epsilon_spent(self) -> float:
        """An upper bound on the epsilon of the steps taken so far."""
        return self.run.epsilon_spent

    def privacy_report(self) -> PrivacyReport:
        """Returns the privacy that the run has spent so far, in numbers and words."""
        return report_of(self.run, in_other_terms=True)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """As in Trainer, which prints four decimals; delta in full, and epsilon rounded up."""
        shown = dict(metrics)
        if isinstance(spent := shown.get("epsilon"), float) and math.isfinite(spent):
            shown["epsilon"] = math.ceil(spent * 1e4) / 1e4
        if isinstance(shown.get("delta"), float):
            shown["delta"] = delta_words(shown["delta"])
        super().log_metrics(split, shown)

    # ------------------------------------------------------------------ evaluation

    def refuse_private(self, dataset: Any) -> None:
        """Refuses a data set, or a dictionary of them, with rows trained on or evaluated privately.

        A run that is not private evaluates what it was trained on as it likes.

        Raises:
          ValueError: see `evaluation_rows.PrivateRows`.
        """
        known = self._private_rows
        protects = self.train_dataset is not None and not self.args.not_private
        if protects and all(rows.dataset is not self.train_dataset for rows in known):
            known = known if self.trajectory else ()  # what was trained on stays private
            private = PrivateRows(self.train_dataset, unit_column=self.args.unit_column)
            self._private_rows = known = [*known, private]
        for rows in (*(known if protects else ()), *self._evaluated_privately):
            rows.refuse(dataset)

    evaluate_privately = evaluate_privately

    def rows_of(self, dataset: Any) -> Rows:
        """Returns a data set without the columns that the model does not take, and its collator."""
        if isinstance(dataset, datasets.Dataset):
            kept = self._remove_unused_columns(dataset, description="training")
            return Rows(kept, self.data_collator)
        collate = self._get_collator_with_removed_columns(self.data_collator, "training")
        return Rows(dataset, collate)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """As in Trainer; texts are tokenised, and the private training rows are refused."""
        if self._texts is not None:
            eval_dataset = self._texts.evaluated(eval_dataset)
        rows: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        rows = self.eval_dataset[rows] if isinstance(rows, str) else rows  # type: ignore[index]
        self.refuse_private(rows)
        self._evaluated = super().get_eval_dataloader(eval_dataset), rows
        return self._evaluated[0]

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """As in Trainer; texts are tokenised, and the private training rows are refused."""
        if self._texts is not None:
            test_dataset = self._texts.evaluated(test_dataset)
        self.refuse_private(test_dataset)
        self._evaluated = super().get_test_dataloader(test_dataset), test_dataset
        return self._evaluated[0]

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        given = super()._get_eval_sampler(eval_dataset)  # None: in order, of several processes
        in_order = given is None or type(given) is SequentialSampler
        return evaluation.RowOrder(eval_dataset) if in_order else given

    def evaluation_loop(self, dataloader: DataLoader, *args: Any, **settings: Any) -> Any:
        """As in Trainer, with metrics of each group where `group_robust.column` is set.

        Rows may run by length (`evaluation.longest_first`), and come back in the order of the data. A
        loader of private training rows, made by hand, is refused. Groups' losses, where there is no
        `compute_metrics`, take a forward pass of their own.
        """
        known, rows = self._evaluated
        if dataloader is not known:
            own = getattr(dataloader, "dataset", None)
            self.refuse_private(self.train_dataset if isinstance(own, StepBatches) else own)
        groups = evaluation.groups_of_rows(self.args, rows) if dataloader is known else None
        compute, order = self.compute_metrics, evaluation.longest_first(self, dataloader)
        self.compute_metrics = order.metrics(evaluation.by_group(compute, groups, self.args))
        self._losses = [] if groups is not None and compute is None else None
        self.shard_()
        # Trainer prepares, and so wraps, a model that Accelerate does not know.
        if self.shards and not self.accelerator._models:
            self.accelerator._models.append(self.model)
        # Compiled code would make a graph for each shape of an evaluation.
        fixed = self._run is not None and self._run.shapes is not None
        try:
            with uncompiled(self.model) if fixed else contextlib.nullcontext():
                output = super().evaluation_loop(dataloader, *args, **settings)
            if groups is not None and self._losses:
                prefix = args[3] if len(args) > 3 else settings.get("metric_key_prefix", "eval")
                found = groups.losses(order.restored(torch.cat(self._losses).numpy()))
                named = {f"{prefix}_{name}": loss for name, loss in found.items()}
                (output.metrics or {}).update(named)
            predictions, labels = order.restored((output.predictions, output.label_ids))
            return output._replace(predictions=predictions, label_ids=labels)
        finally:
            self.compute_metrics, self._losses, order.order = compute, None, None
            fsdp.give_back(self.model)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **settings: Any,
    ) -> tuple[Tensor | None, Any, Any]:
        """As in Trainer, with the objective's predictions where that is one that predicts.

        Args:
          model: evaluated without gradients.
          inputs: a batch with labels.
          prediction_loss_only: leave out predictions and targets.
          ignore_keys: of model outputs; unused with a `PromptObjective`.
          settings: of generation, for `Seq2SeqTrainer`; likewise.

        Returns:
          Mean loss, predictions, and what they are compared with: labels, or row numbers.
        """
        objective, found = self.per_example_loss, None
        if not isinstance(objective, PromptObjective):
            with evaluation.own_mean(self.args):
                found = super().prediction_step(
                    model, inputs, prediction_loss_only, ignore_keys, **settings
                )
            if self._losses is None or found[0] is None:
                return found
        batch, predictions = self._prepare_inputs(dict(inputs)), None
        with torch.no_grad(), self.compute_loss_context_manager():
            if not isinstance(objective, PromptObjective):
                losses_of = objective or loss_by_row(self) or select_objective(model)
                losses = losses_of(model, batch)
            elif prediction_loss_only:  # of the smooth objective, where another one wraps it
                losses = getattr(objective, "objective", objective)(model, batch)
            else:
                losses, predictions = objective.evaluate(model, batch)
        if self._losses is not None:
            every = self.accelerator.gather_for_metrics(losses.detach())
            self._losses.append(every.double().cpu())
        targets = None if prediction_loss_only else batch.get("references", batch["labels"])
        return found or (losses.mean(), predictions, targets)

    def _set_signature_columns_if_needed(self) -> None:
        """Keeps the columns that only the objective or the collator reads."""
        super()._set_signature_columns_if_needed()
        read = {
            name
            for reader in (self.per_example_loss, self.data_collator)
            for name in getattr(reader, "columns", ())
        }
        known: list[str] = self._signature_columns or []
        self._signature_columns = [*known, *sorted(read - set(known))]  # type: ignore[assignment]

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> contextlib.AbstractContextManager[None]:
        """The run's mixed precision, wherever losses are computed (see `estimators.arithmetic`)."""
        return uncached_autocast(self.accelerator, self.args.mixed_precision == "fp16")

    # ------------------------------------------------------------------ devices and processes

    def create_accelerator_and_postprocess(self) -> None:
        """As in Trainer; of float16 Accelerate does not know, so that it makes no scaler."""
        chosen = self.args.mixed_precision
        self.args.mixed_precision = "no" if chosen == "fp16" else chosen
        try:
            super().create_accelerator_and_postprocess()
        finally:
            self.args.mixed_precision = chosen

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """As in Trainer; the weights of an offloaded model stay where they live."""
        settle_offloaded(model)
        super()._move_model_to_device(model, device)

    def shard_(self) -> None:
        """Cuts the model over the processes, if that was asked for and is not done yet; in place."""
        if self.shards and not fsdp.is_split(self.model):
            fsdp.cut_(self.model, self.accelerator, self.args)

    def _prepare_for_training(self, *args: Any, **settings: Any) -> Any:
        with fsdp.prepared(self.accelerator) if self.shards else contextlib.nullcontext():
            prepared = super()._prepare_for_training(*args, **settings)
        # The public part of it.
        self.callback_handler.train_dataloader = self.get_train_dataloader()
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # Trainer leaves out, with a warning, what was saved under another name than the module's.
        renamed = names_on_disk(self.model)
        if not self.shards and (hasattr(self.model, "peft_config") or not renamed):
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        if not self.shards and JOINED in renamed.values():
            with isolated_randomness():
                loaded = type(self.model).from_pretrained(resume_from_checkpoint)
            self.model.load_state_dict(loaded.state_dict())
            return
        fsdp.load_gathered_(self.model, resume_from_checkpoint)

    # ------------------------------------------------------------------ what is saved and published

    def check_frozen(self) -> None:
        """Refuses frozen weights that something wrote to since the run began, here and in `_save`.

        Raises:
          LedgerError: see `base_model.check_frozen`.
        """
        try:
            check_frozen(self.model, self.run.header)
        except LedgerError as error:
            self._tainted = f"not saved: {error}"
            raise

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        assert self._besides is not None
        self._besides.check()
        self.method.settle_()
        if not hasattr(self.model, "peft_config"):  # else the checkpoint is the adapter alone
            self.check_frozen()
        save = super()._save_checkpoint

        def write(folder: str) -> None:
            # Into a draft, which becomes the checkpoint once it is whole.
            self._get_output_dir = lambda trial=None: folder  # type: ignore[method-assign,misc]
            try:
                save(model, trial)
            finally:
                del self._get_output_dir

        ledger, step = self.run.opened, self.state.global_step
        # A resumed run writes checkpoints of steps that the ledger is ahead of.
        ledger.shipped_step = step if step < ledger.next_step else None
        try:
            checkpoints.save_checkpoint(self.run, self.state, write)
        finally:
            ledger.shipped_step = None
        self._saved_step = step

    def _load_best_model(self) -> None:
        """As in Trainer, from a checkpoint of this run; the report and the trajectory say its step."""
        if collectives.stop_agreed(ask=True):
            self._stop()  # later the weights are not those that a run goes on from
        best, ledger = str(self.state.best_model_checkpoint), self.run.opened
        checkpoints.load_state(best, ledger, goes_on=False)
        self.method.settle_()
        with self.method.weights.own_write():
            self._load_from_checkpoint(best)
        step = checkpoints.step_of(Path(best))
        ledger.shipped_step = step if step < ledger.next_step else None
        if self.args.save_total_limit == 1 and self.args.should_save:
            # Trainer would remove them file by file.
            checkpoints.remove_older(1, self.state, self.output_dir, Path(best))

    def _maybe_log_save_evaluate(self, *given: Any, **named: Any) -> None:
        evaluates, control = self.control.should_evaluate, self.control
        if stops := collectives.stop_agreed():
            control.should_evaluate = control.should_save = False
        self._termination.cuts = True
        try:
            super()._maybe_log_save_evaluate(*given, **named)
        except (
            Exception,
            termination.Terminated,
        ):  # a cut evaluation's; the second is no Exception
            if collectives.active() or not collectives.stop.asked:
                raise
        finally:
            self._termination.cuts = False
        if stops or collectives.stop_agreed(ask=evaluates):
            self._stop()

    def _stop(self) -> NoReturn:
        """Leaves training after SIGTERM, with a checkpoint of this step that can be resumed."""
        weights_alone = self.args.save_only_model
        if self.run.opened.shipped_step is not None:
            raise termination.Terminated  # the weights are those of the best checkpoint
        if self._saved_step != self.state.global_step or weights_alone:
            self.args.save_only_model = False  # nothing goes on from weights alone
            try:
                self._save_checkpoint(self.model, None)
            finally:
                self.args.save_only_model = weights_alone
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        raise termination.Terminated

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder, run = Path(output_dir or self.output_dir), self._run
        checkpoints.refuse_checkpoint(self.output_dir, folder)
        if self._tainted:
            raise ValueError(self._tainted)
        if run is not None and run.begun:
            run.method.settle_()
        if self._trained_digest not in (None, state_digest(self.model)):
            raise ValueError(
                "the model was changed after training, so it is not what the privacy report speaks of: "
                "save_model() before anything else changes it, or save it elsewhere with "
                "model.save_pretrained(), without a report."
            )
        if self._besides is not None:
            self._besides.check(configuration=False)
        if self.shards and state_dict is None:
            state_dict = fsdp.gathered_state(self.model, keep=self.args.should_save)
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            (arguments := folder / TRAINING_ARGS_NAME).touch()
            arguments.chmod(0o600)  # before it is written: it holds hub_token
        super()._save(output_dir, state_dict)
        if run is not None and run.ledger is not None and self.args.should_save:
            run.ledger.to_safetensors(folder / SHIPPING_NAME)
            whole = folder.parent.name != checkpoints.UNFINISHED
            report = bound_to(report_of(run, in_other_terms=whole), folder)
            report.save(folder / REPORT_FILE)
            copy_initial_values(self.output_dir, folder)
            if whole:
                hub.write_page(folder, report, run.ledger, self.state.log_history)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes the privacy card as README.md in output_dir, once `save_model` wrote a report there."""
        if not self.args.should_save:
            return
        if (self.output_dir / REPORT_FILE).exists():
            hub.write_model_card(self.output_dir)
        else:  # some trainers ask for a card at every checkpoint
            logger.warning_once(
                f"no model card: {self.output_dir} has no {REPORT_FILE}, which save_model() without a "
                "folder writes."
            )

    def push_to_hub(  # type: ignore[override]
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card: Any,
    ) -> str | None:
        """Saves, then uploads the weights, report, trajectory and card; nothing secret.

        Args:
          commit_message: as in Trainer.
          blocking: True: returns when the files are there.
          token: default `hub_token`.
          revision: branch; default `hub_revision`.
          private: visibility of the repository; default `hub_private_repo`.
          card: entries of Trainer's card are named in a warning; this one follows from the run.

        Raises:
          ValueError: an argument that Trainer does not take, or blocking=False; see `hub.push`.
        """
        known = inspect.signature(Trainer.create_model_card).parameters
        refused = [name for name in card if name not in known] + ["blocking"] * (not blocking)
        if refused:
            raise ValueError(
                f"push_to_hub({refused[0]}={card.get(refused[0], False)!r}) is not done here: leave it "
                "out. To upload otherwise, take the folder of hf_dpzero.reporting.hub.build_hub_folder."
            )
        if card:
            logger.warning(
                f"not used by the model card, which follows from the run: {', '.join(card)}"
            )
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)  # else it would push by itself
        if not self.args.should_save:
            return None
        return hub.push(
            self.output_dir,
            self.args.hub_model_id or self.output_dir.absolute().name,
            private=(self.args.hub_private_repo if private is None else private) is not False,
            token=token or self.args.hub_token,
            commit_message=commit_message,
            revision=revision or getattr(self.args, "hub_revision", None),
        )

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """As in Trainer; a metric that is not there is a mistake of the settings."""
        try:
            return super()._determine_best_metric(metrics, trial)
        except KeyError as error:
            raise ValueError(
                f"metric_for_best_model={self.args.metric_for_best_model!r} is none of the metrics of "
                f"evaluation: {', '.join(metrics)}."
            ) from error

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Does nothing: checkpoints hold more than may be shipped; `push_to_hub` uses an allow list."""
