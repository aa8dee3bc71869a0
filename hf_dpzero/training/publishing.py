"""The plan of a run, and what it publishes of itself: privacy report, model card, files on the Hub."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.perturbation.trainable import num_trainable
from hf_dpzero.privacy.noise import NoiseSource
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.reporting import hub
from hf_dpzero.reporting.budget import BudgetMeter
from hf_dpzero.reporting.extension import header_entries, worst_tuning
from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport
from hf_dpzero.reporting.provenance import base_origins, earlier_runs
from hf_dpzero.reporting.wording import NOT_COMPARED, delta_words
from hf_dpzero.training import data_checks
from hf_dpzero.training.config import DPZeroConfig
from hf_dpzero.training.offloading import settle_offloaded
from hf_dpzero.training.prediction import PredictingTrainer
from hf_dpzero.training.validation import SavedBesides

logger = logging.get_logger(__name__)


class PublishingTrainer(PredictingTrainer):
    """A Trainer with a privacy plan, whose report, card and uploads are those of a private run.

    Attributes:
      noise: that steps draw from.
      trajectory: what was released; None before training.
      process_starts: how many processes took its steps (`process_notes.note_start`).
    """

    args: DPZeroConfig
    model: Any
    train_dataset: Any
    noise: NoiseSource
    trajectory: Trajectory | None = None
    process_starts: Sequence[Mapping[str, Any]] = ()
    _plan: PrivacyPlan | None = None
    _delta: float | None = None

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
        if self._plan is None:
            self._plan = self.args.plan(
                data_checks.num_examples(self.train_dataset),
                num_trainable(self.model, self.args.trainable),
            )
            self.meter = BudgetMeter(self._plan, self.delta)
        return self._plan

    @property
    def delta(self) -> float:
        """The delta that epsilon is stated at; fixed with the plan."""
        if self._delta is None:
            self._delta = self.args.delta(data_checks.num_examples(self.train_dataset))
        return self._delta

    def privacy_report(self) -> PrivacyReport:
        """The privacy that the run has spent so far, in numbers and words."""
        started: Mapping[str, Any] = self.trajectory.header if self.trajectory else {}
        return PrivacyReport.from_run(
            self.plan,
            delta=self.delta,
            target_epsilon=self.args.target_epsilon,
            steps_completed=self.trajectory.next_step if self.trajectory else 0,
            noise=self.noise,
            direction=self.args.direction_settings()["direction"],
            log_private_diagnostics=started.get(
                "log_private_diagnostics", self.args.log_private_diagnostics
            ),
            sampler_key_is_secret=self.args.sampler_key is None,
            privacy_unit=self.args.privacy_unit,
            earlier_runs=started.get("earlier_runs", self.earlier_runs),
            base_weights=started.get("base_weights", NOT_COMPARED),
            forward_passes=started.get("forward_passes", ""),
            row_parts=started.get("row_parts"),
            processes=self.process_starts if self.trajectory else (),
            extends=self._extended,
        ).with_tuning(worst_tuning(self.args.tuning, self._extended), self.plan)

    @functools.cached_property
    def _extended(self) -> list[dict[str, Any]]:
        return header_entries(self.args.extends_run)

    @functools.cached_property
    def earlier_runs(self) -> list[dict[str, Any]]:
        """Runs that the base model came out of; read once, before this run writes anything."""
        covered = [run["weights_digest"] for run in self._extended]
        return earlier_runs(base_origins(self.model), covered)

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
        self, commit_message: str | None = "End of training", **kwargs: Any
    ) -> str | None:
        """Saves, then uploads the weights, report, trajectory and card; nothing secret."""
        self.save_model(_internal_call=True)
        if not self.args.should_save:
            return None
        repo = self.args.hub_model_id or Path(self.output_dir).absolute().name
        token = kwargs.get("token") or self.args.hub_token
        private = self.args.hub_private_repo is not False
        return hub.push(self.output_dir, repo, token=token, private=private)

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
