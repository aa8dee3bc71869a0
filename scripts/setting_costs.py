"""What a recipe's settings of model and rows, and Hugging Face's, cost in privacy and in time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

NOTHING = "nothing"


class Cost(NamedTuple):
    """What a setting costs.

    Attributes:
      privacy: budget, noise at the same epsilon, or what is published.
      time: and memory.
      none: what None stands for, where that is the default.
      unit: of a number; "" if it has none.
    """

    privacy: str
    time: str = NOTHING
    none: str = ""
    unit: str = ""


_MODEL = {
    "Checkpoint": {
        "model_name_or_path": Cost(
            "nothing, if no private row went into it. A base that was trained privately adds its "
            "epsilon, which a caveat names",
            "of its size",
        ),
        "model_revision": Cost(NOTHING, none="the newest"),
        "torch_dtype": Cost(
            "nothing; half precision in dp-sgd and dp-adamw needs `microbatch_size: 1`",
            "half precision: half the memory",
        ),
        "load_in_4bit": Cost("nothing; as half precision", "an eighth of float32's memory"),
        "load_in_8bit": Cost(
            "nothing; as half precision",
            "a quarter of float32's memory; one example in each forward pass",
        ),
        "device_map": Cost(
            NOTHING,
            "offload: memory of two layers on the device; all weights move in each forward pass",
            none="one device",
        ),
        "offload_folder": Cost(
            "nothing: it holds weights; those that train lie in a file without a name",
            none="no disk offload",
        ),
        "max_memory": Cost(NOTHING, none="what is free"),
    },
    "Head": {
        "architecture": Cost(NOTHING, "sentence_classifier: only a head is evaluated again"),
        "pooling": Cost(NOTHING),
        "normalize": Cost(NOTHING),
        "features": Cost(NOTHING, "more layers: wider states; layers above them are not run"),
        "components": Cost(
            "nothing: they are fitted to public text", "a narrower head", none="the pooled vector"
        ),
        "public_file": Cost("nothing, if it is public", none="no components"),
        "pair_features": Cost(NOTHING, "siamese: two texts to encode, a head four times as wide"),
        "head_init": Cost("nothing, with descriptions that were written without the private rows"),
        "label_texts": Cost("nothing; they are published with the recipe", none="no descriptions"),
        "logit_scale": Cost(NOTHING),
        "init_seed": Cost("nothing: it is public"),
        "precompute_features": Cost(
            NOTHING,
            "each text is encoded once in the whole run; memory of the stored vectors",
        ),
    },
    "Adapters": {
        "peft_method": Cost(
            "as `trainable`", "fewer trained parameters", none="`trainable` chooses what is trained"
        ),
        "lora_r": Cost("as `trainable`", "little"),
        "lora_alpha": Cost(NOTHING),
        "lora_target_modules": Cost(
            "as `trainable`", "little", none="PEFT's default for the model"
        ),
        "num_virtual_tokens": Cost("as `trainable`", "longer sequences", unit="tokens"),
    },
}
_ROWS = {
    "Task and rows": {
        "task": Cost("nothing; the names of its labels are public"),
        "dataset_name": Cost(NOTHING, none="the task's own"),
        "dataset_config_name": Cost(NOTHING, none="the data set's default"),
        "train_file": Cost(
            "these are the rows that epsilon protects; n, their number, is public",
            none="the rows come from the Hub",
        ),
        "validation_file": Cost(
            "outside of epsilon: its metrics are published without noise, so its rows must be public",
            "evaluation",
            none="the rows come from the Hub",
        ),
        "text_column": Cost(NOTHING, none="the task's own"),
        "text_pair_column": Cost(NOTHING, none="single sentences"),
        "label_column": Cost(NOTHING, none="the task's own"),
        "class_names": Cost(
            "the names are published, in config.json", none="those of the validation rows"
        ),
        "keep_column": Cost(NOTHING, none="`group_robust.column`"),
        "whole_units": Cost(NOTHING),
        "max_seq_length": Cost(NOTHING, "longer texts take longer and more memory", unit="tokens"),
    },
    "Which rows": {
        "max_train_samples": Cost(
            "fewer rows, more noise at the same epsilon, B and T; the guarantee is for the drawn rows",
            none="all",
        ),
        "max_eval_samples": Cost(NOTHING, "shorter evaluation", none="all"),
        "holdout": Cost("fewer rows to train on; with their evaluation the larger epsilon holds"),
        "num_examples_per_class": Cost(
            "as `max_train_samples`; that each class has so many rows becomes public", none="all"
        ),
        "allow_fewer_per_class": Cost("n then tells the size of a small class"),
        "subset_seed": Cost("nothing: it is public, and says which rows of a file may be drawn"),
    },
    "Prompts": {
        "prompt": Cost(
            NOTHING, "no new head; the whole language model runs", none="a classification head"
        ),
        "template": Cost("nothing; it is published with the recipe", none="the task's own"),
        "label_words": Cost(
            "nothing; they are published with the recipe",
            "causal_lm, words of several tokens: a forward pass for each word",
            none="the task's own",
        ),
        "objective": Cost(
            NOTHING, "accuracy and f1: one example in each pass; f1 also generates an answer"
        ),
        "max_new_tokens": Cost(NOTHING, "of generated answers", unit="tokens"),
        "num_demonstrations": Cost(
            "everything: the result of an evaluation with them says NOT PRIVATE; refused in training",
            "longer prompts",
            unit="rows",
        ),
    },
}
COSTS: Mapping[str, Mapping[str, Mapping[str, Cost]]] = {
    "ModelArguments": _MODEL,
    "DataArguments": _ROWS,
}
"""Class -> group -> setting -> cost; a test keeps it complete."""

INHERITED: Mapping[str, tuple[str, Cost]] = {
    "max_steps": (
        "T, the steps of the whole run",
        Cost(
            "at the same epsilon more steps mean more noise in each: like sqrt(T) for many, less for "
            "few",
            "in proportion",
        ),
    ),
    "num_train_epochs": (
        "without `max_steps`: T = ceil(num_train_epochs ceil(n / B))",
        Cost("as `max_steps`", "in proportion"),
    ),
    "per_device_train_batch_size": (
        "a factor of B with `gradient_accumulation_steps`; else nothing, see `expected_batch_size` and "
        "`microbatch_size`",
        Cost("as `expected_batch_size`", "as `expected_batch_size`"),
    ),
    "gradient_accumulation_steps": (
        "above 1, without `expected_batch_size`: B is per_device_train_batch_size times that times the "
        "number of processes; a step is one batch",
        Cost("as `expected_batch_size`", "as `expected_batch_size`"),
    ),
    "lr_scheduler_type": ("as in Trainer", Cost("nothing: rates are public")),
    "weight_decay": ("as in Trainer", Cost(NOTHING)),
    "bf16": (
        "forward passes under autocast",
        Cost("nothing; dp-sgd and dp-adamw need `microbatch_size: 1`"),
    ),
    "eval_strategy": (
        "evaluation on public rows, as in Trainer",
        Cost("nothing, if `eval_dataset` is public", "evaluation"),
    ),
    "load_best_model_at_end": (
        "the weights of the step that evaluated best, as in Trainer",
        Cost("nothing, if `eval_dataset` is public; epsilon is that of all steps", "disk"),
    ),
    "save_strategy": (
        "checkpoints, as in Trainer",
        Cost("nothing: they are functions of what was released", "disk"),
    ),
    "logging_steps": (
        "epsilon, released values and `released_signal`; no training loss",
        Cost("nothing in what is logged; when it was logged tells time, so logs stay at home"),
    ),
    "resume_from_checkpoint": (
        "continues under the run's own ledger",
        Cost("nothing twice: steps that were paid for are applied again", "of the steps left"),
    ),
    "seed": ("as in Trainer", Cost("nothing: batches and noise have secret sources of their own")),
}
"""Fields of `TrainingArguments` with a cost, or that are asked about: what they do, and the cost."""
