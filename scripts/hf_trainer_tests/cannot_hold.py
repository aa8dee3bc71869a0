"""Hugging Face's tests that no trainer of this kind can pass, each under its reason."""

from __future__ import annotations

from collections.abc import Mapping

CANNOT_HOLD: Mapping[str, tuple[str, ...]] = {
    "batches and directions have keys of their own, which no seed fixes": (
        "TrainerGradientAccumulationTest::test_gradient_accumulation",
        "TrainerIntegrationPrerunTest::test_model_init",
        "TrainerIntegrationPrerunTest::test_reproducible_training",
        "TrainerIntegrationPrerunTest::test_trainer_with_datasets",
    ),
    "the training loss is private, and shown nowhere": (
        "TrainerLoggingTest::test_logging_inf_nan_filter",
        "TrainerStepCountingTest::test_training_loss",
    ),
    "steps run in eval mode, where transformers adds no noise to embeddings": (
        "TrainerNEFTuneTest::test_neftune",
    ),
}
"""Why -> tests, as `Class::test`, in every arm."""

CANNOT_HOLD_PRIVATELY: Mapping[str, tuple[str, ...]] = {}
"""The same, of tests that hold without privacy."""
