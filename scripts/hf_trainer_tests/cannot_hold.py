"""Hugging Face's tests that no trainer of this kind can pass, each under its reason."""

from __future__ import annotations

from collections.abc import Mapping

CANNOT_HOLD: Mapping[str, tuple[str, ...]] = {
    "the training loss is not shown": (
        "TrainerLoggingTest::test_logging_inf_nan_filter",
        "TrainerStepCountingTest::test_training_loss",
    ),
    "the update is the method's: a given optimizer moves nothing; a schedule that follows one, or an "
    "argument that it does not take, is refused": (
        "TestTrainingArguments::test_dict_field_parsing",
        "TrainerLRTest::test_greedy_lr_args",
        "TrainerLRTest::test_reduce_lr_on_plateau_args",
        "TrainerOptimizerIntegrationTest::test_adafactor_lr_none",
        "TrainerOptimizerTest::test_custom_optimizer",
    ),
    "batches are drawn by the sampler that is accounted: no other loader, no stream, no last batch to "
    "drop, no other batch after an error of memory": (
        "TrainerAutoBatchSizeTest::test_auto_batch_size_with_resume_from_checkpoint",
        "TrainerDataloaderTest::test_dataloader_without_dataset",
        "TrainerDataloaderTest::test_train_and_eval_dataloaders",
        "TrainerDynamicShapesAndIterableTest::test_training_iterable_dataset",
    ),
    "gradient accumulation is turned into the batch of a step before Trainer sees it": (
        "TrainerAcceleratorConfigTest::test_accelerator_config_from_dict_grad_accum_num_steps",
    ),
    "a resumed run keeps its plan, its ledger's folder and its checkpoints as they were written": (
        "TrainerCheckpointRotationTest::test_compare_trainer_and_checkpoint_args_logging",
        "TrainerInterruptedTrainingTest::test_resume_from_interrupted_training",
        "TrainerResumeTrainingTest::test_resume_training_with_checkpoint",
        "TrainerResumeTrainingTest::test_resume_training_with_different_batch_size",
        "TrainerResumeTrainingTest::test_resume_training_with_shard_checkpoint",
    ),
    "the ledger lies in output_dir, whose files the test counts": (
        "TrainerBestModelTest::test_best_model_checkpoint_behavior",
        "TrainerBestModelTest::test_save_best_checkpoint",
    ),
    "callbacks of its own are in the list that the test compares": (
        "JITCheckpointTest::test_integration_with_trainer",
        "TrainerCallbackTest::test_custom_callback_added_at_init",
        "TrainerCallbackTest::test_default_callbacks_are_present",
        "TrainerCallbackTest::test_printer_callback_when_tqdm_disabled",
    ),
    "models that keep the rows they see are refused": (
        "TrainerInterruptedTrainingTest::test_resume_batch_order",
    ),
    "steps run in eval mode, where transformers adds no noise to embeddings": (
        "TrainerNEFTuneTest::test_neftune",
    ),
    "model_init is called once": ("TrainerIntegrationPrerunTest::test_model_init",),
}
"""Why -> tests, as `Class::test`, in every arm."""

CANNOT_HOLD_PRIVATELY: Mapping[str, tuple[str, ...]] = {
    "no seed fixes private batches, directions and noise": (
        "TrainerGradientAccumulationTest::test_gradient_accumulation",
        "TrainerIntegrationPrerunTest::test_reproducible_training",
        "TrainerIntegrationPrerunTest::test_trainer_with_datasets",
    ),
    "memory, activations and passes tell of private rows": (
        "TestTrainingArguments::test_debug_option_parsing",
        "TrainerMetricsTest::test_mem_metrics",
    ),
    "what was spent counts: trained weights start no second run, and a resume states the whole ledger": (
        "TrainerIntegrationTest::test_double_train_wrap_once",
        "TrainerResumeTrainingTest::test_can_resume_training",
    ),
}
"""The same, of tests that hold without privacy."""
