"""What each setting costs in privacy and in time; `scripts.settings_reference` prints these tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

NOTHING = "nothing"
_NOT_PRIVATE = "everything: the report says NOT PRIVATE"


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


_PRIVACY = {
    "Method and budget": {
        "method": Cost(
            "what a step releases: K numbers, a vector of d numbers, or something without noise "
            "(mezo, sgd, adamw: the report says NOT PRIVATE)",
            "zeroth order: 2 K forward passes a step, memory of inference; first order: a backward "
            "pass, memory of gradients (dp-sgd, dp-adamw: of each example's)",
        ),
        "target_epsilon": Cost(
            "the whole run's epsilon: the smaller, the more noise",
            none="`noise_multiplier` is given, or the method is not private",
        ),
        "target_delta": Cost(
            "additive slack of the (epsilon, delta) bound: choose it well below 1 / n; the smaller, "
            "the more noise. A warning above 1 / n",
            none="1 / (10 n); 0 with Laplace noise",
        ),
        "noise_multiplier": Cost(
            "more noise, smaller epsilon; 0: the report says NOT PRIVATE",
            none="calibrated for `target_epsilon`",
            unit="clips C",
        ),
        "noise_distribution": Cost(
            "laplace: delta 0, mostly at much more noise; `hf-dpzero plan` tells"
        ),
        "neighboring_relation": Cost(
            "replace_one: up to twice the noise at the same epsilon; epsilons of different relations "
            "cannot be compared"
        ),
        "accountant": Cost(
            "pld is tight; rdp and advanced_composition say more epsilon for the same noise",
            "pld: seconds more for many steps",
        ),
        "extends_run": Cost(
            "`target_epsilon` is the total of all runs of the chain, so a later run has what is left",
            none="a run of its own",
        ),
        "tuning": Cost("nothing; it says in the report what a search may have cost"),
        "rows_are": Cost(
            "nothing; it says what one epsilon protects: an example, or a block of text",
            none="an example; rows of a language model that look packed are refused until it is said",
        ),
        "base_is_public": Cost(
            "not counted: what the base has seen before is yours to answer for, and the report says so"
        ),
    },
    "Sampling": {
        "expected_batch_size": Cost(
            "q = B / n grows with it, and the noise on the sum too, but less than B: the noise on the "
            "mean falls",
            "a step takes time in proportion to it; no memory, see `microbatch_size`",
            unit="examples",
        ),
        "sampling": Cost(
            "truncated_poisson: more noise the nearer the cap is to B; fixed_size_without_replacement: "
            "accounted loosely, so much more; full_batch and fixed_batches: no amplification, so a far "
            "larger multiplier, which `noise_correlation` pays for in a long run",
            "full_batch: every example in every step",
        ),
        "max_batch_size": Cost(
            "the lower, the more noise: a cap is part of what is accounted",
            "an upper bound on the time of a step",
            none="no cap",
            unit="examples",
        ),
        "microbatch_size": Cost(
            NOTHING,
            "the memory of a step; too small a value is slow, on a GPU above all",
            none="64, or 32, 16 or 1 where more does not fit into what is free at the start",
            unit="examples",
        ),
        "direction_parallel_size": Cost(
            NOTHING,
            "of each process: passes along that many times fewer directions, over that many times more "
            "rows; sends 8 B K / D bytes more in a step",
            none="1, or more where rows do not fill the processes",
            unit="processes",
        ),
        "max_length": Cost(
            "nothing: long rows are cut, none is dropped",
            "longer rows take longer and more memory",
            unit="tokens",
        ),
    },
    "Clipping": {
        "clip": Cost(
            "nothing: the noise is proportional to it. Choosing it by a look at private rows is not "
            "covered",
            none="50, and dpzero's clip then adapts from there",
            unit="loss / smoothing; dp-sgd and dp-adamw: norm of a gradient",
        ),
        "clipping": Cost(
            "adaptive: a noised count in each step, out of the same budget, so a little more noise on "
            "the sum; averaged: sensitivity 2C",
            "averaged: no per-example gradients, one ordinary backward pass a group",
            none="adaptive of dpzero without a given `clip` and with Gaussian noise, else fixed",
        ),
        "clip_quantile": Cost(NOTHING),
        "clip_learning_rate": Cost(NOTHING),
        "clip_count_noise": Cost(
            "the smaller, the more of the budget goes to the count",
            none="B / 20, or the step's noise multiplier where that is larger",
            unit="examples",
        ),
        "clip_schedule": Cost(
            "nothing: it is fixed before the run, and the noise follows the clip",
            none="a clip that stays",
        ),
        "noise_schedule": Cost(
            "nothing: more noise in some steps pays for less in others, at the same epsilon",
            "seconds of calibration; nothing in a step",
            none="the same noise in every step",
        ),
        "noise_correlation": Cost(
            "nothing: one Gaussian for the whole run, whose noise cancels in sums over steps; their "
            "number is fixed in advance",
            "toeplitz and optimized: draws of all steps so far in memory, or made again in each step",
        ),
        "noise_bands": Cost(
            "nothing; more bands leave less noise in sums over steps, up to a point",
            "8 bytes a trained coordinate and band",
            none="32",
            unit="draws",
        ),
        "clip_stability": Cost(NOTHING, unit="norm of a gradient"),
        "clip_groups": Cost(NOTHING, "one backward pass for each group", unit="groups"),
        "per_example_gradients": Cost(
            NOTHING,
            "dense: memory of one gradient for each example of a microbatch; ghost: less where weights "
            "are large and sequences short",
        ),
    },
    "Groups": {
        "group_column": Cost(
            "`group_budget`; which group a row is in stays private",
            none="no group-robust training",
        ),
        "group_shares": Cost(
            "published as it is, with the names: it must not be counted on the private rows",
            none="there is no `group_column`",
        ),
        "group_weights": Cost(
            "balanced: nothing; per_step: shares the amplified budget of the steps; prefix_sum and "
            "vertex: `sampling='fixed_batches'` or a full batch, without amplification"
        ),
        "group_loss_bound": Cost(
            "nothing: noise on the groups' losses is proportional to it", unit="loss"
        ),
        "group_rate": Cost(
            "nothing; of vertex it follows from `group_budget`",
            none="sqrt(2 log m / T) / b",
            unit="1 / loss",
        ),
        "group_budget": Cost(
            "the larger, the more noise on the weights, and the less on the losses"
        ),
        "group_draws": Cost("the more, the smaller the rate that the same budget pays for"),
    },
}
_OPTIMISATION = {
    "Directions and steps": {
        "learning_rate": Cost(
            "nothing in one run; trying several on private rows does, and is not counted "
            "(`hf-dpzero sweep` counts it)",
            none="of dpzero with Gaussian noise and `update_rule: sgd`: from noise, clip, B and T; else "
            "5e-5",
        ),
        "smoothing_schedule": Cost(NOTHING, none="a smoothing that stays"),
        "smoothing": Cost(NOTHING, unit="units of a parameter"),
        "direction": Cost(
            NOTHING, "gaussian takes longer to generate: 1.23 against 1.06 (docs/performance.md)"
        ),
        "num_directions": Cost(
            "nothing: an example's K differences are clipped as one vector and released at once. Each "
            "direction then has a smaller part of C, and the same noise",
            "2 K forward passes a step, of what follows the first trained parameter",
            none="32 of dpzero without a given `clip`, where at most a million parameters follow the "
            "first trained one; else 1",
        ),
        "hold_direction_for": Cost(
            "nothing; with `noise_correlation` the noise cancels within so many steps",
            "the run sees fewer directions",
            unit="steps",
        ),
        "direction_key": Cost("nothing: it is public", none="drawn at random"),
        "update_rule": Cost(
            "nothing: a function of what was released",
            "momentum follows W K directions in each update instead of K",
        ),
        "momentum": Cost(NOTHING, "a larger one makes the default `update_window` longer"),
        "update_window": Cost(
            NOTHING,
            "W K directions in each update",
            none="the first W with beta^W <= 0.01",
            unit="steps",
        ),
        "max_grad_norm": Cost("nothing: it acts on the noised gradient"),
        "on_no_signal": Cost(
            "nothing. stop: the report counts the completed steps, and the epsilon to claim is that of "
            "the whole plan",
            "stop may end a run early",
        ),
        "log_private_diagnostics": Cost(_NOT_PRIVATE, "little"),
    },
    "Speed and memory": {
        "trainable": Cost(
            "dpzero: nothing, its noise has K numbers whatever d is; dp-sgd, dp-adamw and dpgd-0th: "
            "fewer parameters, less noise in all",
            "layers before the first trained parameter run once for all 2 K passes",
            none="all parameters with `requires_grad`",
        ),
        "reuse_frozen_prefix": Cost(
            NOTHING,
            "saves the passes through frozen first layers; keeps their outputs of a microbatch",
        ),
        "perturbation_strategy": Cost(
            NOTHING, "the [table of the guide](guide.md#where-the-perturbation-is)"
        ),
        "defer_updates": Cost(NOTHING, "saves one pass over the parameters a step"),
    },
    "Tests and publishing": {
        "insecure_noise_seed": Cost(
            "everything: noise that is known can be subtracted, and the report says NOT PRIVATE. For "
            "tests",
            none="noise from the operating system's entropy",
        ),
        "sampler_key": Cost(
            "everything: batches that can be known are not amplified, and the report says NOT PRIVATE "
            "(full batches excepted). For tests",
            none="drawn in secret, and kept nowhere",
        ),
        "hub_strategy": Cost("nothing: any other value is refused"),
        "hub_private_repo": Cost(
            "who may read the weights; epsilon holds whoever does",
        ),
    },
}
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
            "nothing; it holds weights, and no name of a file of this run", none="no disk offload"
        ),
        "max_memory": Cost(NOTHING, none="what is free"),
    },
    "Head": {
        "architecture": Cost(NOTHING, "sentence_classifier: only a head is evaluated again"),
        "pooling": Cost(NOTHING),
        "normalize": Cost(NOTHING),
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
        "keep_column": Cost(NOTHING, none="`group_column`"),
        "max_seq_length": Cost(NOTHING, "longer texts take longer and more memory", unit="tokens"),
    },
    "Which rows": {
        "max_train_samples": Cost(
            "fewer rows, more noise at the same epsilon, B and T; the guarantee is for the drawn rows",
            none="all",
        ),
        "max_eval_samples": Cost(NOTHING, "shorter evaluation", none="all"),
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
    "DPZeroConfig": {**_PRIVACY, **_OPTIMISATION},
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
        "nothing: `expected_batch_size` and `microbatch_size` say what it says elsewhere",
        Cost(NOTHING),
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
