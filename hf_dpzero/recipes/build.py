"""Builds the task, model and trainer of a recipe; `train`, `evaluate` and `replay` share it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.recipe import Recipe

if TYPE_CHECKING:
    import datasets
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_dpzero.tasks import AnyTask
    from hf_dpzero.tasks.description import DataArguments
    from hf_dpzero.training.dpzero_trainer import DPZeroTrainer


def build_trainer(recipe: Recipe) -> DPZeroTrainer:
    """Builds the trainer of a recipe, with its untrained model.

    The privacy plan is made once the number of rows is known, so that a combination without sound
    accounting is refused before any text is encoded.

    Raises:
      ValueError, OSError, ImportError: whatever the task, the model or the plan refuses.
    """
    from hf_dpzero.checks.model import check_installed
    from hf_dpzero.recipes.holdout import hold_out
    from hf_dpzero.recipes.models import load_model
    from hf_dpzero.recipes.sentence_classifier import precompute_features
    from hf_dpzero.tasks import build_task
    from hf_dpzero.training.dpzero_trainer import DPZeroTrainer

    data = recipe.data
    if data.objective != "loss" and recipe.training.first_order:
        raise ValueError(
            f"objective={data.objective!r} has no gradient, which method={recipe.training.method!r} "
            "needs: use method: dpzero, mezo or dpgd-0th, or objective: loss."
        )
    if data.num_demonstrations:
        raise ValueError(
            f"num_demonstrations={data.num_demonstrations} would put these training rows into every "
            "example's loss, so that no clip bounds them: it is for `hf-dpzero evaluate` only."
        )
    check_installed(recipe.training)
    task = build_task(data)
    from hf_dpzero.checks.data import num_units

    if data.holdout:
        hold_out(task.splits, recipe)
    # refuses before minutes are spent on encoding
    recipe.training.plan(num_units(task.splits["train"], recipe.training))
    refuse_training_texts(task, trained_on=True)  # by the rows' own content the two sides differ
    task.splits.pop("private", None)
    texts = digest_of_public_texts(recipe.model.public_file, recipe.data, task)
    model, tokenizer = load_model(recipe.model, task)
    if texts is not None and getattr(model.config, "public_texts", None) != texts:
        raise ValueError(
            f"the components of {recipe.model.model_name_or_path} were fitted to other texts than "
            f"public_file={recipe.model.public_file!r} has, and these were compared with no row: give "
            "the file that they were fitted to, or the bare encoder as model_name_or_path."
        )
    check_context(model, recipe)
    rows, collator = task.tokenize(tokenizer, recipe.model.pair_features), task.collator(tokenizer)
    if recipe.model.precompute_features:
        for split in rows:
            rows[split] = precompute_features(
                model,
                rows[split],
                collator,
                trainable=recipe.training.trainable,
                batch_size=recipe.training.per_device_eval_batch_size,
                device=recipe.training.device,
            )
    rows = with_kept_column(rows, task, data.keep_column)
    trainer = DPZeroTrainer(
        model=model,
        args=recipe.training,
        train_dataset=rows["train"],
        eval_dataset=rows.get("validation"),
        processing_class=tokenizer,
        data_collator=collator,
        compute_metrics=task.metrics(tokenizer),
        compute_per_example_loss=task.objective(tokenizer),
    )
    trainer.longest_row, trainer.rates_are_final = data.max_seq_length, True
    return trainer


def with_kept_column(
    rows: datasets.DatasetDict, task: AnyTask, column: str | None
) -> datasets.DatasetDict:
    """Puts the column of groups or units beside encoded rows; a split that has none stays as it is.

    Args:
      rows: of `task.tokenize`, a row an example, by split; changed in place.
      task: has the rows that they were made of.
      column: its name, or None.

    Raises:
      ValueError: the training rows have no such column.
    """
    if column is None:
        return rows
    from hf_dpzero.settings.row_groups import column_values

    if column not in task.splits["train"].column_names:
        raise ValueError(
            f"{column!r} (group_robust.column or unit_column) is no column of the training rows that "
            f"task {task.name!r} keeps: name one of theirs (of the label, its own name), or, of a task "
            "that is no classification, pass a train_dataset with it to DPZeroTrainer."
        )
    for split in rows:
        values = column_values(task.splits[split], column)
        if values is not None:
            rows[split] = rows[split].add_column(column, values)
    return rows


def refuse_training_texts(
    task: AnyTask,
    trained_on: bool = False,
    train: datasets.Dataset | None = None,
    unit_column: str | None = None,
) -> None:
    """Refuses validation rows whose texts are those of private rows, for training or for evaluation.

    Args:
      task: with a split "private" where rows are evaluated with noise.
      trained_on: rows of that split may be training rows.
      train: the training rows; default the task's own.
      unit_column: of the evaluation; of none of its units may there be training rows.

    Raises:
      ValueError: see `checks.evaluation_rows.PrivateRows`.
    """
    from hf_dpzero.checks.evaluation_rows import PrivateRows, refuse_units
    from hf_dpzero.training.private_evaluation import PUBLIC, TRAINED_ON

    # The trainer compares tokens or features, which say less: two texts may be cut to the same tokens,
    # and features of one text differ in the last bit.
    train, private = train or task.splits["train"], task.splits.get("private")
    for rows in (PrivateRows(train, unit_column=unit_column), PrivateRows(private, PUBLIC, None)):
        rows.refuse(task.splits.get("validation"))
    if not trained_on:
        PrivateRows(train, TRAINED_ON, None).refuse(private)
        if unit_column is not None and private is not None:
            refuse_units(train, private, unit_column, TRAINED_ON)


def digest_of_public_texts(file: str | None, data: DataArguments, task: AnyTask) -> str | None:
    """Refuses a public_file with the text of a private row, also of rows that were left out.

    Args:
      file: the recipe's.
      data: of the private rows, all of which count: also those without a label or beyond a subset.
      task: whose text columns are read.

    Returns:
      The digest of its texts; None of no file.

    Raises:
      ValueError: see `recipes.public_features.public_rows`.
    """
    from hf_dpzero.recipes.public_features import digest_of_texts, public_rows
    from hf_dpzero.tasks import description_of
    from hf_dpzero.tasks.classification import Task
    from hf_dpzero.tasks.rows import load_splits

    if file is None or not isinstance(task, Task):
        return None
    if data.task == "quickstart":
        return digest_of_texts(public_rows(task, file))
    known = description_of(data.task)
    whole = load_splits(data, known.source if known else None)["train"]
    return digest_of_texts(public_rows(task, file, whole))


def refuse_rows_of(
    data: DataArguments,
    task: AnyTask,
    public: str | None = None,
    trained_on: bool = False,
    unit_column: str | None = None,
) -> None:
    """Refuses evaluation rows and public text that another recipe's private data has, drawn or not.

    Does nothing where these data cannot be read: a published recipe comes without its rows.

    Args:
      data: of the other recipe, such as the one that the evaluated model was trained with.
      task: what is evaluated.
      public: the `public_file` that components are fitted to, if any are.
      trained_on, unit_column: as in `refuse_training_texts`.

    Raises:
      ValueError: see `checks.evaluation_rows.PrivateRows`.
    """
    from hf_dpzero.recipes.public_features import public_rows
    from hf_dpzero.tasks import build_task
    from hf_dpzero.tasks.classification import Task

    # Rows that its subset left out are as private as those that it drew.
    whole = dataclasses.replace(
        data, max_train_samples=None, num_examples_per_class=None, num_demonstrations=0,
        keep_column=unit_column or data.keep_column,
    )  # fmt: skip
    try:
        private = build_task(whole).splits["train"]
    except (OSError, ValueError):
        return
    refuse_training_texts(task, trained_on, private, unit_column)
    if public is not None and isinstance(task, Task):
        public_rows(task, public, private)


def check_context(model: nn.Module, recipe: Recipe) -> None:
    """Refuses prompts that may be longer than the model's context.

    Args:
      model: with its adapter, whose virtual tokens take positions too.
      recipe: its max_seq_length is compared; without a prompt only a prefix is.

    Raises:
      ValueError: names the largest length that fits.
    """
    from hf_dpzero.batches.shapes import context_length
    from hf_dpzero.objectives.losses import base_model

    length, most = recipe.data.max_seq_length, context_length(model)
    if most is not None and most < 2:
        raise ValueError(
            f"num_virtual_tokens={recipe.model.num_virtual_tokens} leaves no room for text in the "
            "model's positions; lower it."
        )
    if recipe.data.prompt is not None and most is not None and length > most:
        config: Any = base_model(model).config
        adapter = getattr(model, "active_peft_config", None)
        beside = " beside their prefix" if getattr(adapter, "num_virtual_tokens", None) else ""
        raise ValueError(
            f"max_seq_length={length}, but {config.model_type} models of this size "
            f"take {most} tokens{beside}; lower it."
        )


def load_trained(
    arguments: ModelArguments, task: AnyTask, base: str
) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]:
    """Loads a trained model, or a trained adapter onto its base model.

    Args:
      arguments: `model_name_or_path` is the trained model's or adapter's folder or Hub id.
      task: what the model answers.
      base: the model that an adapter was trained on, as the recipe names it.

    Returns:
      Model in eval mode, and tokenizer.
    """
    from hf_dpzero.recipes.adapters import ADAPTER_FILE
    from hf_dpzero.recipes.models import load_model

    folder = Path(arguments.model_name_or_path)
    if not (folder / ADAPTER_FILE).is_file():
        return load_model(arguments, task)
    # PEFT's file names a base too, perhaps a path of the machine that it was trained on.
    of_base = dataclasses.replace(arguments, model_name_or_path=base)
    return load_model(of_base, task, adapter=str(folder))
