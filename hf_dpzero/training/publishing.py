"""The plan of a run, and what it saves and publishes: checkpoints, weights, report and card."""

from __future__ import annotations

import copy
import functools
import inspect
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from transformers import Trainer
from transformers.utils import logging

from hf_dpzero.checks import data as data_checks
from hf_dpzero.checks.model import SavedBesides
from hf_dpzero.ledger.digests import state_digest
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import SHIPPING_NAME, Trajectory
from hf_dpzero.parallel import distributed
from hf_dpzero.parallel.offloading import settle_offloaded
from hf_dpzero.perturbation.trainable import num_trainable
from hf_dpzero.privacy.noise import NoiseSource
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.reporting import hub
from hf_dpzero.reporting.budget import BudgetMeter
from hf_dpzero.reporting.extension import header_entries, worst_tuning
from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport
from hf_dpzero.reporting.provenance import base_origins, earlier_runs
from hf_dpzero.reporting.verification import bound_to
from hf_dpzero.reporting.wording import NOT_COMPARED, delta_words
from hf_dpzero.run_folder import checkpoint_files
from hf_dpzero.run_folder.base_model import check_frozen
from hf_dpzero.run_folder.initial_values import copy_initial_values
from hf_dpzero.settings.config import DPZeroConfig
from hf_dpzero.settings.defaults import learning_rate, resolve
from hf_dpzero.training import termination
from hf_dpzero.training.between_steps import WeightsBetweenSteps
from hf_dpzero.training.prediction import PredictingTrainer

logger = logging.get_logger(__name__)


class Decided(NamedTuple):
    """What `given` arguments, rows and parameters made of a run: resolved arguments, plan, budget."""

    given: tuple[Any, ...]
    args: DPZeroConfig
    plan: PrivacyPlan
    delta: float
    meter: BudgetMeter


class PublishingTrainer(PredictingTrainer):
    """A Trainer with a privacy plan, whose report, card and uploads are those of a private run.

    Attributes:
      noise: that steps draw from.
      trajectory: what was released; None before training.
    """

    args: DPZeroConfig
    model: Any
    method: Any
    train_dataset: Any
    noise: NoiseSource
    trajectory: Trajectory | None = None
    _decided: Decided | None = None
    _termination: termination.TerminationCallback
    _besides: SavedBesides | None = None
    _weights: WeightsBetweenSteps | None = None
    _tainted = ""  # why the weights may not be saved
    _trained_digest: str | None = None  # of the weights that training ended in
    _saved_step: int | None = None  # of the last checkpoint that this call of train() wrote

    @property
    def output_dir(self) -> str:
        """Where the run keeps its files."""
        return str(self.args.output_dir)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """As in Trainer; the weights of an offloaded model stay where they live."""
        settle_offloaded(model)
        super()._move_model_to_device(model, device)

    def saved_besides(self) -> SavedBesides:
        """What the model saves beside its parameters, which live somewhere from here on."""
        settle_offloaded(self.model)
        return SavedBesides(self.model)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """As in Trainer, which prints four decimals; delta, mostly smaller than that, in full."""
        shown = dict(metrics)
        if isinstance(shown.get("delta"), float):
            shown["delta"] = delta_words(shown["delta"])
        super().log_metrics(split, shown)

    @property
    def plan(self) -> PrivacyPlan:
        """The run's `PrivacyPlan`, calibrated on first use."""
        return (self._decided or self.decide()).plan

    @property
    def resolved_args(self) -> DPZeroConfig:
        """A copy of `args` with T as `max_steps`, and the run's `learning_rate` and `num_directions`."""
        return (self._decided or self.decide()).args

    @property
    def delta(self) -> float:
        """The delta that epsilon is stated at; fixed with the plan."""
        return (self._decided or self.decide()).delta

    def decide(self) -> Decided:
        """Makes the plan, and chooses what the arguments leave open, unless that was done for the same.

        Raises:
          ValueError: what cannot be accounted; or a run of this trainer began under another plan.
        """
        rows = data_checks.num_examples(self.train_dataset)
        dimension, before = num_trainable(self.model, self.args.trainable), self._decided
        given = copy.copy(self.args), rows, dimension
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
        if args.learning_rate is None:
            args.learning_rate = learning_rate(plan, args.lr_scheduler_type)
        delta = args.delta(rows)
        self._decided = Decided(given, args, plan, delta, BudgetMeter(plan, delta))
        return self._decided

    def privacy_report(self) -> PrivacyReport:
        """The privacy that the run has spent so far, in numbers and words."""
        started: dict[str, Any] = {
            "target_epsilon": self.args.target_epsilon,
            "direction": self.args.direction_settings()["direction"],
            "log_private_diagnostics": self.args.testing.log_private_diagnostics,
            "sampler_key_is_secret": self.args.testing.sampler_key is None,
            "privacy_unit": self.args.privacy_unit,
            "tuning": worst_tuning(self.args.tuning, self._extended),
            **(self.trajectory.header if self.trajectory else {}),  # what the run began with counts
        }
        return PrivacyReport.from_run(
            self.plan,
            delta=self.delta,
            target_epsilon=started["target_epsilon"],
            steps_completed=self.trajectory.next_step if self.trajectory else 0,
            noise=self.noise,
            direction=started["direction"],
            log_private_diagnostics=started["log_private_diagnostics"],
            sampler_key_is_secret=started["sampler_key_is_secret"],
            privacy_unit=started["privacy_unit"],
            earlier_runs=started.get("earlier_runs", self.earlier_runs),
            base_weights=started.get("base_weights", NOT_COMPARED),
            forward_passes=started.get("forward_passes", ""),
            row_parts=started.get("row_parts"),
            processes=started.get("processes", ""),
            extends=self._extended,
        ).with_tuning(started["tuning"], self.plan)

    @functools.cached_property
    def _extended(self) -> list[dict[str, Any]]:
        return header_entries(self.args.extends_run)

    @functools.cached_property
    def earlier_runs(self) -> list[dict[str, Any]]:
        """Runs that the base model came out of; read once, before this run writes anything."""
        covered = [run["weights_digest"] for run in self._extended]
        return earlier_runs(base_origins(self.model), covered)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        assert self._besides is not None
        self._besides.check()
        self.method.settle_()
        if not hasattr(self.model, "peft_config"):  # else the checkpoint is the adapter alone
            self.check_frozen()
        write = super()._save_checkpoint
        checkpoint_files.save_whole(self, lambda: write(model, trial))
        self._saved_step = self.state.global_step

    def check_frozen(self) -> None:
        """Refuses frozen weights that something wrote to since the run began, here and in `_save`.

        Raises:
          LedgerError: see `base_weights.check_frozen`.
        """
        assert self.trajectory is not None
        try:
            check_frozen(self.model, self.trajectory.header)
        except LedgerError as error:
            self._tainted = f"not saved: {error}"
            raise

    def _maybe_log_save_evaluate(self, *given: Any, **named: Any) -> None:
        evaluates, control = self.control.should_evaluate, self.control
        if stops := distributed.stop_agreed():
            control.should_evaluate = control.should_save = False
        self._termination.cuts = True
        try:
            super()._maybe_log_save_evaluate(*given, **named)
        except (Exception, termination.Terminated):  # an evaluation that is cut short
            if distributed.active() or not distributed.stop.asked:
                raise
        finally:
            self._termination.cuts = False
        if stops or distributed.stop_agreed(ask=evaluates):
            self._stop()

    def _stop(self) -> NoReturn:
        """Leaves training after SIGTERM, with a checkpoint of this step that can be resumed."""
        weights_alone = self.args.save_only_model
        if self._saved_step != self.state.global_step or weights_alone:
            self.args.save_only_model = False
            try:
                self._save_checkpoint(self.model, None)
            finally:
                self.args.save_only_model = weights_alone
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        raise termination.Terminated

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.output_dir)
        checkpoint_files.refuse_checkpoint(Path(self.output_dir), folder)
        if self._tainted:
            raise ValueError(self._tainted)
        if self._weights is not None:
            self.method.settle_()
        if self._trained_digest not in (None, state_digest(self.model)):
            raise ValueError(
                "the model was changed after training, so it is not what the privacy report speaks of: "
                "save_model() before anything else changes it, or save it elsewhere with "
                "model.save_pretrained(), without a report."
            )
        if self._besides is not None:
            self._besides.check_state()
        super()._save(output_dir, state_dict)
        if self.trajectory is not None and self.args.should_save:
            self.trajectory.to_safetensors(folder / SHIPPING_NAME)
            bound_to(self.privacy_report(), folder).save(folder / REPORT_FILE)
            copy_initial_values(self.output_dir, folder)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes the privacy card as README.md in output_dir, once `save_model` wrote a report there."""
        if not self.args.should_save:
            return
        if (Path(self.output_dir) / REPORT_FILE).exists():
            hub.write_model_card(self.output_dir)
        else:  # some trainers ask for a card at every checkpoint
            logger.warning_once(
                "no model card yet: save_model() writes the report that it is made of."
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
        if refused := [
            *(name for name in card if name not in known),
            *["blocking"] * (not blocking),
        ]:
            raise ValueError(
                f"push_to_hub({refused[0]}={card.get(refused[0], False)!r}) is not done here: leave it "
                "out. To upload otherwise, take the folder of hf_dpzero.reporting.hub.build_hub_folder."
            )
        if card:
            logger.warning(
                f"not used by the model card, which follows from the run: {', '.join(card)}"
            )
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)
        if not self.args.should_save:
            return None
        return hub.push(
            self.output_dir,
            self.args.hub_model_id or Path(self.output_dir).absolute().name,
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
