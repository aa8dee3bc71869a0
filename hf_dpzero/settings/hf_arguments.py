"""What each field of Hugging Face's training arguments does in a run of `DPZeroTrainer`.

Nothing is ignored in silence: a field works as in Trainer, is refused, or is named in one warning where
it was changed. `docs/training_arguments.md` is written from these tables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import Seq2SeqTrainingArguments
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import SchedulerType

from hf_dpzero.settings.defaults import CLASSIC
from hf_dpzero.settings.nested import (
    ADAMW,
    FIRST_ORDER,
    METHODS,
    NESTED,
    PRIVATE,
    SGD,
    ZEROTH_ORDER,
)
from hf_dpzero.settings.setting import (
    BELOW_ONE,
    BITS_32,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    Allowed,
    out_of_range,
    settings_of,
)

if TYPE_CHECKING:
    from hf_dpzero.settings.config import DPZeroConfig

WORKS, OTHER, UNUSED, REFUSED = "works", "another meaning", "no effect", "refused"


class Use(NamedTuple):
    """What a field does.

    Attributes:
      kind: WORKS, OTHER, UNUSED or REFUSED.
      text: of a refusal, what follows on `field=value `; else a reason or a meaning.
      methods: that it holds for.
      where: a field that must be set for it to hold; "" if it always does.
    """

    kind: str
    text: str = ""
    methods: tuple[str, ...] = METHODS
    where: str = ""


_WORKS = {
    "output_dir max_steps learning_rate lr_scheduler_kwargs warmup_steps warmup_ratio weight_decay bf16 "
    "tf32 use_cache logging_strategy logging_steps logging_first_step logging_dir log_on_each_node "
    "log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id "
    "trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay "
    "per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches "
    "eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics "
    "save_strategy save_steps save_on_each_node save_total_limit push_to_hub hub_token hub_model_id "
    "load_best_model_at_end metric_for_best_model greater_is_better "
    "restore_callback_states_from_checkpoint use_cpu "
    "dataloader_num_workers remove_unused_columns ddp_backend ddp_timeout do_train do_eval do_predict "
    "resume_from_checkpoint local_rank": "",
    "num_train_epochs": "ceil(n / expected_batch_size) steps an epoch; each row takes part about once",
    "lr_scheduler_type": "also those that follow a metric: evaluation data is public",
    "label_smoothing_factor": "of the model's own classification and token losses, example by example",
    "seed": "of the global generators; batches, directions and noise have keys of their own (mezo, "
    "sgd and adamw: batches and directions follow the seed)",
    "full_determinism": "the sampler's key and the noise stay secret and random",
    "ignore_data_skip": "always on: batches are a function of the step's number",
    "hub_private_repo": "True where it is not given",
    "torch_compile torch_compile_backend torch_compile_mode": "train() refuses compiled models of "
    "dp-sgd and dp-adamw (unless clipping='averaged')",
    "predict_with_generate generation_max_length generation_num_beams generation_config": "of "
    "DPZeroSeq2SeqConfig, with a trainer that is a Seq2SeqTrainer",
    "hub_revision": "an existing branch",
}
_OTHER = {
    "fp16": "without a scaler in zeroth-order runs on CUDA; elsewhere it is bf16",
    "gradient_accumulation_steps": "times per_device_train_batch_size times processes it makes "
    "expected_batch_size, where that is not given",
    "save_only_model": "resuming from its checkpoints is refused",
    "logging_nan_inf_filter": "in evaluation only: the training loss is not logged",
    "label_names": "for evaluation, and columns to keep; the head's objective is trained on",
    "accelerator_config dataloader_drop_last dataloader_pin_memory dataloader_persistent_workers "
    "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order": "in evaluation "
    "only: training has a data loader of its own",
}
_UNUSED = {
    "per_device_train_batch_size": "a step has expected_batch_size rows, a forward pass at most "
    "microbatch_size; a factor of the former with gradient_accumulation_steps, and 1 lets rows "
    "without an attention_mask have any size",
    "auto_find_batch_size": "forward passes are sized by the memory that is free",
    "train_sampling_strategy": "sampling draws the rows",
    "enable_jit_checkpoint": "SIGTERM ends the step and writes a whole checkpoint without it",
    "optim_target_modules": "trainable chooses the parameters",
    "average_tokens_across_devices": "a loss is the mean over its own row's tokens",
    "activation_checkpointing_kwargs gradient_checkpointing_kwargs": "no method checkpoints",
    "liger_kernel_config": "use_liger_kernel is refused",
    "torch_empty_cache_steps": "steps do not empty the cache",
    "data_seed": "batches are drawn with a secret key; tests set testing.sampler_key",
    "length_column_name": "batches are not grouped by length",
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph": "steps do "
    "not run DistributedDataParallel",
    "hub_always_push hub_strategy": "files of an allow list are pushed when training ends",
    "include_num_input_tokens_seen": "Trainer does not see a step's tokens, and logs 0",
    "sortish_sampler": "transformers does not read it either",
}
_REFUSED = {
    "neftune_noise_alpha": "adds noise to embeddings in training mode, and steps run in eval mode: "
    "leave it out.",
    "bf16_full_eval fp16_full_eval": "casts the model itself in evaluate(), which then is not what the "
    "trajectory ends in: leave it False, and evaluate the saved model in that dtype with a plain "
    "Trainer.",
    "use_liger_kernel": "replaces layers when train() starts, after the checks that were made of them: "
    "leave it False.",
    "deepspeed": "wraps the model in an engine whose parameters the perturbation does not follow: use "
    "plain data parallelism (accelerate launch --multi_gpu, one process a GPU). For a model that does "
    "not fit on one device use FSDP2 (--config_file configs/accelerate/fsdp2.yaml) or one process "
    "with offload (configs/accelerate/offload.yaml).",
    "parallelism_config": "shards or copies parameters as the in-place perturbation does not follow: "
    "run on one device or with plain data parallelism (accelerate launch).",
}
_NO_ADAM = Use(UNUSED, "update_rule, momentum and update_window are the settings", ZEROTH_ORDER)
_PLAIN_SGD = Use(UNUSED, "the optimizer is torch's SGD", SGD)
_BY_METHOD = {
    "optim": (
        Use(UNUSED, "update_rule says what is made of the released numbers", ZEROTH_ORDER),
        _PLAIN_SGD,
        Use(WORKS, "one of the adamw optimizers", ADAMW),
    ),
    "optim_args": (_NO_ADAM, Use(WORKS)),
    "adam_beta1 adam_beta2 adam_epsilon": (_NO_ADAM, _PLAIN_SGD, Use(WORKS)),
    "max_grad_norm": (
        Use(UNUSED, "there is no gradient; clip bounds the finite differences", ZEROTH_ORDER),
        Use(
            WORKS, "of the noised gradient, after clip; 0 (off) where it is not given", FIRST_ORDER
        ),
    ),
    "activation_checkpointing gradient_checkpointing": (
        Use(
            REFUSED,
            "runs layers twice, which per-example gradients do not follow: turn it off and lower "
            "microbatch_size.",
            ("dp-sgd", "dp-adamw"),
        ),
        Use(UNUSED, "there is no backward pass", ZEROTH_ORDER),
        Use(UNUSED, "steps run in eval mode, where models do not checkpoint"),
    ),
    "debug": (
        Use(
            REFUSED,
            "prints statistics of private activations; leave it empty, or debug on public data with a "
            "plain Trainer.",
            PRIVATE,
        ),
        Use(WORKS),
    ),
    "skip_memory_metrics": (
        Use(
            REFUSED,
            "logs peaks of memory, which tell the sizes of private batches: leave it True, and look at "
            "hf_dpzero.training.step_meter.StepMeter.",
            PRIVATE,
        ),
        Use(WORKS),
    ),
    "fsdp": (
        Use(
            REFUSED,
            "shards parameters, of which gradients of single examples are not taken: use "
            "method='dpzero', or plain data parallelism (accelerate launch).",
            FIRST_ORDER,
        ),
        Use(WORKS, "version 2 only, over zeroth-order methods"),
    ),
    "fsdp_config": (Use(WORKS, where="fsdp"), Use(UNUSED, "fsdp is off")),
}

_SAME_FOR_ALL = ((WORKS, _WORKS), (OTHER, _OTHER), (UNUSED, _UNUSED), (REFUSED, _REFUSED))
FIELDS: dict[str, tuple[Use, ...]] = {
    name: (Use(kind, text),)
    for kind, table in _SAME_FOR_ALL
    for names, text in table.items()
    for name in names.split()
} | {name: uses for names, uses in _BY_METHOD.items() for name in names.split()}
"""Field of any supported version -> what it does; the first entry that holds counts."""

NAMES = tuple(f.name for f in dataclasses.fields(Seq2SeqTrainingArguments) if f.init)
"""Fields of `TrainingArguments` and `Seq2SeqTrainingArguments` of the installed version."""

_DEFAULTS = {
    f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
    for f in dataclasses.fields(Seq2SeqTrainingArguments)
} | {"hub_strategy": "end", "hub_private_repo": True, "max_grad_norm": 0.0}

_STRATEGIES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("eval_steps", "eval_strategy", ("steps",)),
    ("eval_delay metric_for_best_model greater_is_better load_best_model_at_end", "eval_strategy",
     ("steps", "epoch")),
    ("save_steps", "save_strategy", ("steps",)),
    ("save_total_limit", "save_strategy", ("steps", "epoch", "best")),
    ("logging_steps", "logging_strategy", ("steps",)),
)  # fmt: skip
"""Fields, the setting that they need, and its values where they have an effect."""


_CONSTANT = ("constant", "constant_with_warmup")
"""Schedules that Trainer passes nothing on to."""

_INTERVAL = Allowed(
    "an integer of at least 1, or a share of the steps below 1 (to switch it off, the strategy is 'no')",
    lambda x: 0 < x < 1 or COUNT.holds(x),
)
RANGES: Mapping[str, Allowed] = {
    "seed": BITS_32,
    **dict.fromkeys(("weight_decay", "adam_epsilon", "eval_delay"), NOT_NEGATIVE),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor"), BELOW_ONE),
    "warmup_steps": Allowed(
        "an integer of at least 0, or a share of the steps below 1",
        lambda x: 0 <= x < 1 or COUNT.holds(x),
    ),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), COUNT),
    "gradient_accumulation_steps": COUNT,
    **dict.fromkeys(("eval_steps", "save_steps", "logging_steps"), _INTERVAL),
    "save_total_limit": Allowed(
        "an integer of at least 0; 0, or left out, keeps all", lambda x: x == 0 or COUNT.holds(x)
    ),
    "max_steps": Allowed(
        "an integer of at least 1, or -1 for num_train_epochs",
        lambda x: x == -1 or COUNT.holds(x),
    ),
    "output_dir": Allowed("a text, or left out", lambda x: isinstance(x, str | os.PathLike), object),
    "include_for_metrics": Allowed(
        "a list of 'inputs' and 'loss'",
        lambda x: isinstance(x, list | tuple) and set(x) <= {"inputs", "loss"}, object,
    ),
}  # fmt: skip
"""Ranges of Hugging Face's fields, which `TrainingArguments` does not check itself."""


def wrong_values(config: DPZeroConfig) -> Iterator[str]:
    """Says which of Hugging Face's fields are out of range: name, value and what it must be."""
    epochs = {"num_train_epochs": POSITIVE} if config.max_steps == -1 else {}
    # 0 in a strategy that is off says so too, and eval_steps=0 stands for logging_steps.
    may_be_0 = {"eval_steps", *(name for name, *_ in _without_strategy(config))}
    ranges = {
        name: allowed
        for name, allowed in RANGES.items()
        if allowed is not _INTERVAL or name not in may_be_0 or getattr(config, name) != 0
    }
    yield from out_of_range(config, {**ranges, **epochs})
    yield from _scheduler_settings(config)
    folder = Path(config.output_dir if isinstance(config.output_dir, str | os.PathLike) else ".")
    if file := next(filter(os.path.isfile, (folder, *folder.parents)), None):
        yield f"output_dir={str(folder)!r}: {str(file)!r} is a file; give a folder."


def _scheduler_settings(config: DPZeroConfig) -> Iterator[str]:
    """Says which `lr_scheduler_kwargs` the scheduler does not take, and what it does."""
    given = config.lr_scheduler_kwargs or {}
    try:
        kind = SchedulerType(config.lr_scheduler_type)
    except ValueError as error:
        yield f"lr_scheduler_type={config.lr_scheduler_type!r}: {error}."
        return
    with contextlib.suppress(json.JSONDecodeError):  # then it is no mapping
        given = json.loads(given) if isinstance(given, str) else given
    if not isinstance(given, Mapping):
        yield f"lr_scheduler_kwargs={given!r} must be a mapping, {{name: value}}."
        return
    # A schedule without a function of its own is Trainer's affair, as is one that takes anything.
    schedule: Any = TYPE_TO_SCHEDULER_FUNCTION.get(kind)
    if schedule is None or kind.value in _CONSTANT:
        return
    parameters = inspect.signature(schedule).parameters.values()
    own = ("optimizer", "num_warmup_steps", "num_training_steps")
    takes = [p.name for p in parameters if p.name not in own]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    for name in given:
        if name not in takes:
            yield (
                f"lr_scheduler_kwargs has {name!r}, and lr_scheduler_type={kind.value!r} takes "
                f"{', '.join(takes) or 'nothing'}: leave it out, or choose another schedule."
            )


_PUT_BACK: Mapping[str, tuple[Any, str]] = {
    "gradient_accumulation_steps": (1, "would split a logical batch"),
    "auto_find_batch_size": (False, "would repeat steps"),
    "hub_strategy": ("end", "would upload output_dir as it is, secrets and all"),
}
"""Fields that a configuration keeps from Hugging Face's Trainer: the value that it sees, and why."""


def put_back(config: DPZeroConfig) -> None:
    """Switches off what would do harm in Hugging Face's loop, after `warning` has named it."""
    for name, (off, _) in _PUT_BACK.items():
        if hasattr(config, name):
            setattr(config, name, off)


def take_half(config: DPZeroConfig) -> None:
    """Puts bfloat16 in place of float16 on other devices than CUDA, and where gradients are taken.

    Gradients in float16 need a scaler, which looks at un-noised ones.
    """
    if config.mixed_precision == "fp16" and (config.first_order or config.device.type != "cuda"):
        config.mixed_precision = "bf16"


def use_of(name: str, config: DPZeroConfig) -> Use:
    """What a field does in the run that `config` describes; unknown ones have no known effect."""
    unknown = Use(UNUSED, "this version of hf_dpzero does not know it")
    return next(
        (
            use
            for use in FIELDS.get(name, ())
            if config.method in use.methods and (not use.where or getattr(config, use.where))
        ),
        unknown,
    )


def refused_fields(config: DPZeroConfig) -> Iterator[str]:
    """Says which changed fields would break the run or its guarantee, and what to do instead.

    DeepSpeed also where `accelerate launch` asks for it, before transformers asks for its package.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() in ("1", "true", "yes"):
        yield f"distributed_type: DEEPSPEED {FIELDS['deepspeed'][0].text}"
    for name, (off, why) in _PUT_BACK.items():
        if getattr(config, name, off) != off:
            yield (
                f"{name}={getattr(config, name)!r} {why}, and was set where DPZeroConfig does not see "
                "it: give it to DPZeroConfig (not to accelerator_config, and not later)."
            )
    for name, value in _changed(config):
        use = use_of(name, config)
        if use.kind == REFUSED:
            yield f"{name}={_shown(name, value)} {use.text}"


def warning(config: DPZeroConfig) -> str:
    """One message about all changed fields without effect or of another meaning; "" if there are none.

    To be asked for before `TrainingArguments.__post_init__` puts values into the form that it keeps.
    """
    uses = [(name, value, use_of(name, config)) for name, value in _changed(config)]
    uses += [(name, value, Use(UNUSED, why)) for name, value, why in _own_unused(config)]
    parts = []
    for kind, title in ((UNUSED, f"no effect in a {config.method} run"), (OTHER, OTHER)):
        by_reason: dict[str, list[str]] = {}
        for name, value, use in uses:
            if use.kind == kind:
                by_reason.setdefault(use.text, []).append(f"{name}={_shown(name, value)}")
        named = [f"{', '.join(fields)} ({text})" for text, fields in by_reason.items()]
        parts += [f"{title}: {', '.join(named)}"] if named else []
    return "; ".join(parts)


def _changed(config: DPZeroConfig) -> Iterator[tuple[str, Any]]:
    """Fields of Hugging Face's that were set to something else than their default."""
    for name in NAMES:
        value, default = getattr(config, name, _DEFAULTS[name]), _DEFAULTS[name]
        # None, "", [] and False all leave a field off, and versions differ in which they have.
        same = value == default or (not value and not default)
        if not same and not _set_by_itself(name, value, config):
            yield name, value


def _set_by_itself(name: str, value: Any, config: DPZeroConfig) -> bool:
    """Whether a value was made use of, or a configuration made from an existing one has it anyhow."""
    # TrainingArguments itself unpins memory under use_cpu, makes an AcceleratorConfig of None, takes
    # False for "no" and, in older releases, fills fsdp_config without fsdp.
    return (
        (name == "optim" and value == "sgd" and config.method in SGD)
        or (name == "per_device_train_batch_size" and config.accumulated_rows > 0)
        or (name == "dataloader_pin_memory" and config.use_cpu)
        or (name == "accelerator_config" and value == AcceleratorConfig())
        or (name == "include_num_input_tokens_seen" and value is False)
        or (name == "fsdp_config" and isinstance(value, dict) and not any(value.values()))
    )


def _own_unused(config: DPZeroConfig) -> Iterator[tuple[str, Any, str]]:
    """Changed settings that have no effect, their value, and what they would need."""
    parts = [("", config), *((f"{name}.", getattr(config, name)) for name in NESTED)]
    for prefix, part in parts:
        for field, described in settings_of(part):
            value = getattr(part, field.name)
            default = CLASSIC.get(prefix + field.name, field.default)
            if described.needs and value not in (None, default):
                setting, values = described.needs
                if operator.attrgetter(setting)(config) not in values:
                    yield prefix + field.name, value, f"it is for {setting}={_one_of(values)}"
    for name, setting, values in _without_strategy(config):
        if getattr(config, name) not in (None, 0, _DEFAULTS[name]):
            yield name, getattr(config, name), f"it is for {setting}={_one_of(values)}"
    schedule = getattr(config.lr_scheduler_type, "value", config.lr_scheduler_type)
    if schedule in _CONSTANT and config.lr_scheduler_kwargs:
        yield "lr_scheduler_kwargs", config.lr_scheduler_kwargs, f"{schedule} takes nothing"
    evaluates = getattr(config.eval_strategy, "value", config.eval_strategy) == "steps"
    if evaluates and 0 < config.max_steps < (config.eval_steps or 0):
        yield "eval_steps", config.eval_steps, f"the run has {config.max_steps} steps"
    if config.max_steps > 0 and config.num_train_epochs != _DEFAULTS["num_train_epochs"]:
        yield "num_train_epochs", config.num_train_epochs, "max_steps is set, which goes first"


def _without_strategy(config: DPZeroConfig) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """The rows of `_STRATEGIES` that say that a field has no effect, one field each."""
    for names, setting, values in _STRATEGIES:
        # text as it was given, or the enumeration that TrainingArguments makes of it
        chosen = getattr(config, setting)
        if getattr(chosen, "value", chosen) not in values:
            yield from ((name, setting, values) for name in names.split())


def _one_of(values: Sequence[str]) -> str:
    return " or ".join(map(repr, values))


def _shown(name: str, value: Any) -> str:
    """The value as the user wrote it, a token hidden, a long one cut."""
    plain = [getattr(v, "value", v) for v in value] if isinstance(value, list) else value
    text = "<hidden>" if name.endswith("_token") else repr(getattr(plain, "value", plain))
    return text if len(text) < 80 else f"{text[:76]}..."
