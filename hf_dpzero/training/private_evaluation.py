"""Evaluation of private rows: how many are answered right, counted row by row, released with noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import IterableDataset
from transformers import EvalPrediction
from transformers.trainer_pt_utils import nested_numpify

from hf_dpzero.checks.evaluation_rows import PrivateRows
from hf_dpzero.checks.model import check_kernels_are_fixed, check_layers, check_widths
from hf_dpzero.estimators.random_state import isolated_randomness
from hf_dpzero.objectives.heads import is_classifier
from hf_dpzero.objectives.losses import evaluation_mode
from hf_dpzero.privacy.counting import PrivateCount
from hf_dpzero.privacy.noise import SecureNoise
from hf_dpzero.reporting.private_evaluations import (
    PrivateEvaluation,
    append_evaluation,
    evaluations_in,
)

if TYPE_CHECKING:
    from hf_dpzero.training.publishing import PublishingTrainer

METRICS = ("exact_match", "accuracy")
"""What is counted where `metric` is not given: the first that `compute_metrics` returns."""

TRAINED_ON = (
    "the private evaluation rows hold rows of train_dataset, whose epsilons add up: pass "
    "trained_on=True (--trained_on) to say so in the record, or give rows that were held out."
)
_PUBLIC = (
    "eval_dataset holds rows that are to be evaluated privately: its metrics are published without "
    "noise, which no noise mends. Take these rows out of one of the two."
)
EVALUATED = (
    "the evaluation data holds rows that were evaluated privately: their metrics are released by "
    "evaluate_privately, with noise, and not otherwise."
)


def evaluate_privately(
    trainer: PublishingTrainer,
    dataset: Any,
    epsilon: float,
    *,
    metric: str | None,
    rows: str,
    trained_on: bool,
    step: int | None,
) -> PrivateEvaluation:
    """Counts right answers and releases the count; see `PublishingTrainer.evaluate_privately`.

    Args:
      trainer: has the model, the collator, `compute_metrics` and the folder of the record.
      dataset: private rows, by number.
      epsilon, metric, rows, trained_on: as there.
      step: the weights are those after so many steps.
    """
    mechanism = PrivateCount(epsilon)  # of units with several rows: their number is its sensitivity
    if trainer.args.world_size > 1 or trainer.shards:
        raise ValueError(
            f"evaluate_privately in {trainer.args.world_size} processes would release one count each: "
            "save the model, and evaluate it in one process."
        )
    made = dataset if trainer._texts is None else trainer._texts.evaluated(dataset, private=True)
    if isinstance(made, Mapping | IterableDataset) or not getattr(made, "__len__", int)():
        raise ValueError(
            f"evaluate_privately was given a {type(dataset).__name__}: give one data set with at least "
            "one row, and with a length."
        )
    private = PrivateRows(made, EVALUATED)
    PrivateRows(made, _PUBLIC).refuse(trainer.eval_dataset)
    if not trained_on:
        trained = [known.dataset for known in trainer._private_rows]
        for known in (*trained, trainer.train_dataset):
            PrivateRows(known, TRAINED_ON).refuse(made)
    check_layers(trainer.model)
    check_widths(trainer.model)
    check_kernels_are_fixed(trainer.args.device.type)
    earlier = evaluations_in(
        trainer.output_dir
    )  # refuses a damaged record before minutes of passes
    name, count = _count(trainer, made, metric)
    noise = getattr(trainer, "noise", None) or SecureNoise()
    evaluation = PrivateEvaluation(
        rows=rows,
        num_rows=len(made),
        metric=name,
        step=step,
        epsilon=float(epsilon),
        sensitivity=mechanism.sensitivity,
        noise_source=noise.stated_name,
        trained_on=trained_on,
        released=mechanism.release(count, noise, len(earlier)),
    )
    append_evaluation(trainer.output_dir, evaluation)
    trainer._evaluated_privately = [*trainer._evaluated_privately, private]
    return evaluation


def _count(trainer: PublishingTrainer, dataset: Any, metric: str | None) -> tuple[str, int]:
    """The metric's name, and how many rows have the value 1 of it, each by itself.

    A row is evaluated and scored alone, so whether it counts follows from it and the weights: no row
    stands in another's pass, and no other one's score is looked at.
    """
    if trainer.compute_metrics is None and not is_classifier(trainer.model):
        raise ValueError(
            "evaluate_privately needs compute_metrics to say what a right answer is: return accuracy or "
            "exact_match of the rows it is given."
        )
    if trainer.args.batch_eval_metrics:
        raise ValueError(
            "batch_eval_metrics=True sums over batches in compute_metrics, and evaluate_privately "
            "scores one row at a time: leave it out."
        )
    run, right = trainer._run, 0
    if run is not None and run.begun:
        run.method.settle_()
    with isolated_randomness(), evaluation_mode(trainer.model):
        for scores in _scores(trainer, dataset):
            metric = metric or next((name for name in METRICS if name in scores), METRICS[-1])
            if metric not in scores:
                raise ValueError(
                    f"metric={metric!r} is none of what compute_metrics returns ({', '.join(scores)}): "
                    "name the one that is 1 for a right answer and less for a wrong one."
                )
            right += bool(scores[metric] >= 1)
    return str(metric), right


def _scores(trainer: PublishingTrainer, dataset: Any) -> Iterator[Mapping[str, Any]]:
    """What `compute_metrics` returns of each row alone."""
    rows = trainer.rows_of(dataset)
    compute = trainer.compute_metrics or _classified
    for number in range(len(rows.dataset)):
        batch = rows.collate_rows([number])
        _, predictions, labels = trainer.prediction_step(
            trainer.model, dict(batch), prediction_loss_only=False
        )
        if trainer.preprocess_logits_for_metrics is not None:
            predictions = trainer.preprocess_logits_for_metrics(predictions, labels)
        yield compute(EvalPrediction(*nested_numpify((predictions, labels))))


def _classified(prediction: EvalPrediction) -> dict[str, float]:
    logits = prediction.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    return {"accuracy": float(np.mean(logits.argmax(-1) == prediction.label_ids))}
