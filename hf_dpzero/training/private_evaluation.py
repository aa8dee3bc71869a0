"""Evaluation of private rows: how many are answered right, counted row by row, released with noise."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, Subset
from transformers import EvalPrediction
from transformers.trainer_pt_utils import nested_numpify

from hf_dpzero.batches.units import Units
from hf_dpzero.checks.data import check_draws, unit_values
from hf_dpzero.checks.evaluation_rows import PrivateRows, refuse_units
from hf_dpzero.checks.model import check_kernels_are_fixed, check_layers, check_widths
from hf_dpzero.estimators.random_state import isolated_randomness
from hf_dpzero.objectives.losses import evaluation_mode
from hf_dpzero.privacy.counting import PrivateCount
from hf_dpzero.privacy.noise import SecureNoise, is_seeded
from hf_dpzero.reporting import budget_file as budgets
from hf_dpzero.reporting.budget_file import Charge
from hf_dpzero.reporting.private_evaluations import (
    PrivateEvaluation,
    append_evaluation,
    check_printed,
    evaluations_in,
)
from hf_dpzero.run_folder.left_on_disk import note_caches

if TYPE_CHECKING:
    from hf_dpzero.training.publishing import PublishingTrainer

METRICS = ("exact_match", "accuracy")
"""What is counted where `metric` is not given: the first that `compute_metrics` returns."""

TRAINED_ON = (
    "the private evaluation rows hold rows of train_dataset, whose epsilons add up: pass "
    "trained_on=True (--trained_on) to say so in the record, or give rows that were held out."
)
PUBLIC = (
    "eval_dataset holds rows that are to be evaluated privately: its metrics are published without "
    "noise, which no noise mends. Take these rows out of one of the two."
)
EVALUATED = (
    "the evaluation data holds rows that were evaluated privately: their metrics are released by "
    "evaluate_privately, with noise, and not otherwise."
)


def evaluate_privately(
    self: PublishingTrainer,
    dataset: Any,
    epsilon: float,
    *,
    metric: str | None = None,
    rows: str = "evaluation rows",
    trained_on: bool = False,
    step: int | None = None,
    budget_file: str | None = None,
) -> PrivateEvaluation:
    """Releases how many private rows the model answers right, with exact discrete Laplace noise.

    A row is evaluated and scored by itself, so whether it counts follows from it and the weights, and
    one row more, one less or another in its place moves the count by at most 1: the release is
    (epsilon, 0)-differentially private. With `unit_column` one row of each unit is drawn anew, so it is
    so for a unit, whose rows are right as often as the count expects. It is on disk, in
    `private_evaluations.jsonl` of output_dir, before this returns; on the same rows epsilons add up.
    From then on these rows are refused as evaluation data.

    Args:
      dataset: private rows of the form of eval_dataset; their number counts as public.
      epsilon: of this release.
      metric: of `compute_metrics`, 1 for a row that is right; default exact_match, else accuracy.
      rows: a public name of the data, for the record.
      trained_on: rows of train_dataset may be among them, and spend both epsilons.
      step: the weights are those after so many steps; default the run's own.
      budget_file: pays for it, or it is refused; default that of the arguments.

    Raises:
      LedgerError: budget_file lacks what an earlier evaluation paid: an older copy was put back.
      ValueError: rows that are public or were trained on, no metric, or one that keeps something between
        rows, several processes, no budget left.
      OSError: the record cannot be written; nothing was released.
    """
    check_printed(rows)
    mechanism = PrivateCount(epsilon)
    made = _checked(self, dataset, trained_on)
    counted = _one_of_each_unit(dataset, made, self.args.unit_column)
    earlier = evaluations_in(self.output_dir)  # refuses a damaged record before minutes of passes
    noise = getattr(self, "noise", None) or SecureNoise()
    budget_file = budget_file or self.args.budget_file
    charge = Charge(
        what="evaluate_privately",
        name=rows,
        privacy_unit=self.args.privacy_unit,
        epsilon=float(epsilon),
    )
    if budget_file is None and any(one.budget_entry for one in earlier):
        raise ValueError(
            "a budget file paid for an earlier evaluation of this model, and none is named now: give "
            "budget_file (--budget_file), so that all releases are added up."
        )
    if budget_file is not None:
        if is_seeded(noise.stated_name):
            raise ValueError(
                f"budget_file={budget_file!r} with {noise.stated_name}: noise that anybody can subtract "
                "is not private, and no budget pays for it. Leave the seed out."
            )
        budget = budgets.read(budget_file)
        paid = self.trajectory.header.get("budget") if self.trajectory is not None else None
        if paid and trained_on:
            budget.check_holds(paid["entry"], "the run that trained on these rows")
        for one in earlier:
            if one.budget_entry and one.rows == rows:
                budget.check_holds(one.budget_entry, f"an earlier evaluation of {rows}")
        budget.epsilon_with(charge)  # before minutes of passes
    note_caches(self.output_dir, made)
    run, values = self._run, []
    if run is not None and run.begun:
        run.method.settle_()
    with isolated_randomness(), evaluation_mode(self.model):
        for scores in _scores(self, counted):  # the first row's twice
            metric = metric or next((name for name in METRICS if name in scores), METRICS[-1])
            if metric not in scores:
                raise ValueError(
                    f"metric={metric!r} is none of what compute_metrics returns ({', '.join(scores)}): "
                    "name the one that is 1 for a right answer and less for a wrong one."
                )
            values.append(scores[metric])
    if repr(values.pop()) != repr(values[0]):
        raise ValueError(
            f"compute_metrics gives the first row another {metric} after the others: it keeps something "
            "between calls, so that one row moves the count by more than 1. Let each call score its row "
            "alone; nothing was released."
        )
    if step is None and self.trajectory is not None:
        best = self.trajectory.shipped_step
        step = self.state.global_step if best is None else best
    entry = "" if budget_file is None else budgets.pay(budget_file, charge)["entry"]
    evaluation = PrivateEvaluation(
        rows=rows,
        num_rows=len(counted),
        privacy_unit=self.args.privacy_unit,
        budget_entry=entry,
        metric=str(metric),
        step=step,
        epsilon=float(epsilon),
        sensitivity=mechanism.sensitivity,
        noise_source=noise.stated_name,
        trained_on=trained_on,
        released=mechanism.release(sum(bool(v >= 1) for v in values), noise, len(earlier)),
    )
    append_evaluation(self.output_dir, evaluation)
    self._evaluated_privately = [*self._evaluated_privately, PrivateRows(made, EVALUATED, None)]
    return evaluation


def _checked(trainer: PublishingTrainer, dataset: Any, trained_on: bool) -> Any:
    """The rows, tokenised where they are texts; refuses what would not be one count of private rows."""
    if trainer.args.world_size > 1 or trainer.shards:
        raise ValueError(
            f"evaluate_privately in {trainer.args.world_size} processes would release one count each: "
            "save the model, and evaluate it in one process."
        )
    if trainer.args.batch_eval_metrics or trainer.compute_metrics is None:
        raise ValueError(
            "evaluate_privately scores one row at a time by compute_metrics: let it return accuracy or "
            "exact_match of the rows it is given, without batch_eval_metrics."
        )
    made = dataset if trainer._texts is None else trainer._texts.evaluated(dataset, private=True)
    if isinstance(made, Mapping | IterableDataset) or not getattr(made, "__len__", int)():
        raise ValueError(
            f"evaluate_privately was given a {type(dataset).__name__}: give one data set with at least "
            "one row, and with a length."
        )
    PrivateRows(made, PUBLIC, None).refuse(trainer.eval_dataset)
    column = trainer.args.unit_column
    known = [trainer.train_dataset, *(rows.dataset for rows in trainer._private_rows)]
    for private in () if trained_on else known:
        PrivateRows(private, TRAINED_ON, None).refuse(made)
        if not (column is None or private is None):
            refuse_units(private, dataset, column, TRAINED_ON)
    check_layers(trainer.model)
    check_widths(trainer.model)
    check_kernels_are_fixed(trainer.args.device.type)
    check_draws(trainer.data_collator, made)
    return made


def _one_of_each_unit(dataset: Any, made: Any, column: str | None) -> Any:
    """Of rows `made` of a data set one of each unit, so that the counted ones are independent too."""
    if column is None:
        return made
    units = Units.of(unit_values(dataset, column, "the private rows"), most=1)
    # By the unit's number, which one unit more may change: so the key is secret, and of this draw.
    drawn, _ = units.drawn(range(len(units)), 0, secrets.token_bytes(32))
    return made.select(drawn) if hasattr(made, "select") else Subset(made, drawn.tolist())


def _scores(trainer: PublishingTrainer, dataset: Any) -> Iterator[Mapping[str, Any]]:
    """What `compute_metrics` returns of each row alone, and at last of the first one again."""
    rows, compute = trainer.rows_of(dataset), trainer.compute_metrics
    first: Any = None
    assert compute is not None  # `_checked`
    for number in range(len(rows.dataset)):
        batch = rows.collate_rows([number])
        _, predictions, labels = trainer.prediction_step(
            trainer.model, dict(batch), prediction_loss_only=False
        )
        if trainer.preprocess_logits_for_metrics is not None:
            predictions = trainer.preprocess_logits_for_metrics(predictions, labels)
        made = EvalPrediction(*nested_numpify((predictions, labels)))
        first = first or made
        yield compute(made)
    yield compute(first)
