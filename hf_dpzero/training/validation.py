"""Refusals that need the model or the data set: everything that is checked before step 0.

Nothing here releases anything: what is looked at decides only whether training starts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils.data import Subset

from hf_dpzero.estimators.parameter_guard import ParameterChanged, ParameterGuard
from hf_dpzero.ledger.digests import checksums, digest_tensors, is_packed
from hf_dpzero.perturbation.trainable import (
    check_dtype,
    check_storage,
    has_plain_storage,
    quantised_kind,
)

LABEL_COLUMNS = ("labels", "label", "label_ids", "start_positions", "decoder_input_ids")


def num_examples(dataset: Any) -> int:
    """n, which the privacy plan is computed from.

    Raises:
      ValueError: no data set, one without a length, or an empty one.
    """
    if dataset is None:
        raise ValueError("train_dataset is None: the privacy plan needs the training data's size.")
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"train_dataset is a {type(dataset).__name__} without length or random access: a "
            "streamed data set cannot be sampled as the plan accounts; load it as a map-style one."
        )
    if len(dataset) == 0:
        raise ValueError("train_dataset is empty.")
    return len(dataset)


def check_labels(dataset: Any) -> None:
    """Refuses a data set whose columns hold no labels (needs `column_names`; else looks at row 0)."""
    columns = getattr(dataset, "column_names", None) or _keys(dataset[0])
    if columns is not None and not set(columns) & set(LABEL_COLUMNS):
        raise ValueError(
            f"train_dataset has columns {sorted(columns)} but no labels: name the label column "
            "'labels', or pass compute_per_example_loss."
        )


def _keys(row: Any) -> list[str] | None:
    return list(row) if hasattr(row, "keys") else None


def check_model(model: nn.Module) -> None:
    """Refuses what cannot be perturbed exactly, and layers that couple examples.

    Raises:
      ValueError: weights that are not in memory (see `check_placement`); a trainable parameter of a
        dtype other than float32, bfloat16 and float16, or with memory that something else uses too
        (see `check_storage`); batch normalisation with batch statistics; an embedding that
        renormalises its weight.
    """
    check_placement(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            check_dtype(name, parameter)
    check_storage(model)
    _check_batch_statistics(model)
    _check_renormalisation(model)


def _check_renormalisation(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and hasattr(module, "weight"):
            raise ValueError(
                f"{name} with max_norm={module.max_norm} rewrites the rows of its weight that private "
                "examples look up: set max_norm=None."
            )


def _check_batch_statistics(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (
            not module.track_running_stats or module.running_mean is None
        ):
            raise ValueError(
                f"{name} normalises with the statistics of its batch, so one example's loss depends "
                "on the others and cannot be clipped: use track_running_stats=True, LayerNorm or "
                "GroupNorm."
            )


def check_placement(model: nn.Module) -> None:
    """Refuses weights that are not in memory during the whole run, trainable or frozen.

    Several devices without offload (accelerate's `device_map`) are fine.

    Raises:
      ValueError: offload to the CPU or the disk, the meta device, lazy layers.
    """
    for name, module in model.named_modules():
        if any(map(_offloads, _hooks(getattr(module, "_hf_hook", None)))):
            raise ValueError(
                f"{name or 'the model'} is offloaded (device_map, cpu_offload or disk_offload) and "
                "comes into memory as a copy for each forward pass, which a perturbation in place "
                "does not reach: load it without offload, in a smaller dtype, or freeze a base that "
                "fits (quantised, say) and train adapters."
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{name} has no shape yet (a lazy layer): run one forward pass first.")
        if tensor.device.type == "meta":
            raise ValueError(
                f"{name} is on the meta device, so it has no values: load its weights (and without "
                "offload) before training."
            )


def _hooks(hook: Any) -> Iterator[Any]:
    """An accelerate hook and the hooks inside it (`SequentialHook`)."""
    if hook is not None:
        yield hook
        for inner in getattr(hook, "hooks", ()):
            yield from _hooks(inner)


def _offloads(hook: Any) -> bool:
    return bool(getattr(hook, "offload", False)) or type(hook).__name__ == "CpuOffload"


@contextlib.contextmanager
def parameters_left_alone(model: nn.Module) -> Iterator[None]:
    """Refuses a model whose forward passes inside the block write to its parameters.

    They are compared by checksum, which also sees writes through `.data`, and by version counter and
    address, for a write that is undone again would stop every later step.

    Raises:
      ValueError: names the parameter.
    """
    named = list(model.named_parameters())
    before = checksums(named)
    guard = ParameterGuard((name, p) for name, p in named if has_plain_storage(p))
    unwritten = guard.state()
    yield
    changed = _first_change(named, list(model.named_parameters()), before)
    if changed is None:
        try:
            guard.check(unwritten)
        except ParameterChanged as error:
            raise ValueError(str(error)) from None
    else:
        raise ValueError(
            f"{changed} during a forward pass in eval mode: that would carry un-noised private data "
            "into the weights. Load the model anew, and make forward() leave its parameters alone: "
            "compute into new tensors, and keep what it must update in a buffer."
        )


def _first_change(
    before: list[tuple[str, nn.Parameter]],
    after: list[tuple[str, nn.Parameter]],
    sums: Mapping[str, str],
) -> str | None:
    """What the forward passes did to the parameters, in words."""
    known = {name: id(p) for name, p in before}
    for name, parameter in after:
        if known.pop(name, None) != id(parameter):
            return f"{name} was replaced by another parameter"
    if known:
        return f"{next(iter(known))} was removed"
    now = checksums(after)
    return next((f"{name} changed its value" for name in now if now[name] != sums[name]), None)


def check_evaluation_mode(model: nn.Module) -> None:
    """After model.eval(): refuses batch normalisation that stays in training mode.

    Raises:
      ValueError: names the layer.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            raise ValueError(
                f"{name} stays in training mode after model.eval(): its batch statistics couple the "
                "examples. Do not override its train()/eval()."
            )


def check_precision(model: nn.Module, args: Any) -> None:
    """Refuses low-precision arithmetic where it would let examples influence each other.

    Matrix kernels round differently for other batch shapes, and the rounding is divided by 2 lambda.
    In float32 that is negligible; in bfloat16, TF32 or quantised arithmetic it can exceed the clip.
    With one example in each forward pass nothing of another example is in reach.

    Raises:
      ValueError: bf16 (from the arguments or from accelerate's configuration), tf32, half-precision
        or quantised weights (see `_low_precision`), with a larger microbatch.
    """
    if args.physical_batch_size == 1:
        return
    causes = [f"{name}=True" for name in ("bf16", "tf32") if getattr(args, name, False)]
    if not causes and getattr(args, "mixed_precision", "no") != "no":
        causes.append(f"mixed_precision={args.mixed_precision!r} (accelerate's configuration)")
    of_model = _low_precision(model)
    if of_model is not None:
        causes.append(of_model)
    if causes:
        raise ValueError(
            f"{' and '.join(causes)} with microbatch_size={args.physical_batch_size}: low-precision "
            "rounding depends on what else is in the microbatch, which the sensitivity does not "
            "cover. Set microbatch_size=1, or compute in float32."
        )


def _low_precision(model: nn.Module) -> str | None:
    """The first sign, in words, that the model does not compute in float32; None if it does.

    Looked at: parameters, frozen ones too; buffers, where GPTQ, AWQ and BitNet keep their weights;
    tensor subclasses, whose dtype says nothing; and configurations that quantise only while running.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            return f"parameters that are not float32 ({name}, ...)"
        kind = quantised_kind(parameter)
        if kind is not None:
            return f"quantised parameters ({name}: {kind})"
    for name, buffer in model.named_buffers():
        kind = _coarse_kind(buffer)
        if kind is not None:
            return f"buffers of low precision, as quantised layers have ({name}: {kind})"
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if getattr(config, "quantization_config", None) is not None:
            return f"a quantization_config in the configuration of {name or 'the model'}"
    return None


def _coarse_kind(buffer: Tensor) -> str | None:
    """What a buffer's numbers are if they can be weights or scales of low precision, else None."""
    if type(buffer.data) is not Tensor:
        return f"{type(buffer.data).__name__}, {buffer.dtype}"
    half = buffer.is_floating_point() and buffer.element_size() < 4
    return str(buffer.dtype) if half or is_packed(buffer) else None


def check_buffers(model: nn.Module, digest: str) -> None:
    """Refuses to save a model whose buffers the forward passes have changed.

    Raises:
      ValueError: they would carry un-noised statistics of the private data into the saved model.
    """
    if digest_tensors(model.named_buffers()) != digest:
        raise ValueError(
            "a forward pass changed the model's buffers (running statistics, counters): they hold "
            "un-noised traces of the private data and are not saved. Make them constant in eval mode."
        )


def refuse_tainted(tainted: bool) -> None:
    """Refuses to save after a forward pass wrote into the parameters.

    Raises:
      ValueError: the weights carry un-noised private data.
    """
    if tainted:
        raise ValueError(
            "a forward pass wrote into the trained parameters, which now carry un-noised private data "
            "and are not saved: make the module leave them alone and start again from the base model."
        )


def refuse_training_rows(dataset: Any, private: Any) -> None:
    """Refuses evaluation on rows of the training set: the metrics would be un-noised releases.

    Recognised: the data set itself, views of it (`datasets` selections, `torch.utils.data.Subset`)
    that share a row, and a data set with the same fingerprint. A copy made elsewhere is not.

    Raises:
      ValueError: `dataset` shares rows with `private`.
    """
    if dataset is None or private is None or not _shares_rows(dataset, private):
        return
    raise ValueError(
        "the evaluation data holds rows of train_dataset: evaluating on the private data would "
        "release un-noised statistics of it. Pass public or separately budgeted data."
    )


def _shares_rows(dataset: Any, private: Any) -> bool:
    same_print = getattr(dataset, "_fingerprint", None), getattr(private, "_fingerprint", None)
    if dataset is private or (same_print[0] is not None and same_print[0] == same_print[1]):
        return True
    if isinstance(dataset, Subset) or isinstance(private, Subset):
        return _subsets_overlap(dataset, private)
    if hasattr(dataset, "_data") and hasattr(private, "_data"):
        return not _places(dataset).isdisjoint(_places(private))
    return False


def _subsets_overlap(first: Any, second: Any) -> bool:
    """Whether `torch.utils.data.Subset` views of one data set show a row in common."""
    (source, rows), (other, other_rows) = (
        (d.dataset, set(d.indices)) if isinstance(d, Subset) else (d, None) for d in (first, second)
    )
    if source is not other:
        return False
    return rows is None or other_rows is None or not rows.isdisjoint(other_rows)


def _places(dataset: Any) -> set[tuple[int, int]]:
    """Where in memory a `datasets.Dataset` keeps each of its rows: (buffer address, position).

    Selections, splits and shuffles of one table share its buffers.
    """
    chunks = dataset._data.table.column(0).chunks if dataset._data.num_columns else []
    places = [
        (next((b.address for b in reversed(chunk.buffers()) if b), 0), chunk.offset + i)
        for chunk in chunks
        for i in range(len(chunk))
    ]
    if dataset._indices is None:
        return set(places)
    return {places[i] for i in dataset._indices.table.column(0).to_pylist()}


def check_launch(trainer: Any) -> None:
    """Refuses sharding that `accelerate launch` asks for through the environment.

    Raises:
      ValueError: the accelerator does anything but plain data parallelism.
    """
    kind = str(getattr(trainer.accelerator.distributed_type, "value", ""))
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TP"):
        raise ValueError(
            f"distributed_type={kind} shards or copies parameters in ways that the in-place "
            "perturbation does not follow: use MULTI_GPU, MULTI_CPU or one process."
        )


def check_processes(args: Any) -> None:
    """Refuses methods that work in one process only.

    Raises:
      ValueError: dpgd-0th or averaged clipping on several processes.
    """
    if args.world_size == 1:
        return
    if args.method == "dpgd-0th":
        raise ValueError(
            f"dpgd-0th on {args.world_size} processes: its d-dimensional noise is drawn in one "
            "process only; run it in one, or use method='dpzero'."
        )
    if args.clipping == "averaged":
        raise ValueError(
            f"clipping='averaged' on {args.world_size} processes: a group's mean is clipped in one "
            "process only; run it in one, or use clipping='fixed'."
        )


def check_single_strategy(args: Any) -> None:
    """Refuses ways of running that the step does not cover.

    Raises:
      ValueError: FSDP, DeepSpeed or nn.DataParallel.
    """
    if args.deepspeed or args.fsdp:
        raise ValueError(
            "FSDP and DeepSpeed shard or copy parameters in ways that the in-place perturbation does "
            "not follow: run on one device or with plain data parallelism (accelerate launch)."
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs in one process would use nn.DataParallel, which averages before "
            "clipping: start one process per GPU with `accelerate launch`, or set "
            "CUDA_VISIBLE_DEVICES to one."
        )


def check_adapters(model: nn.Module) -> None:
    """Refuses a PEFT model whose adapter is not trained, or that trains an idle copy of the head.

    Other models pass. To be called after `select_trainable`, whose pattern sees PEFT's names:
    "classifier" finds the idle copy of the head too, and not the adapter.

    Raises:
      ValueError: says which parameters would be trained, and a pattern that fits.
    """
    if not hasattr(model, "peft_config"):
        return
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    idle = [name for name in names if ".original_module." in name]
    if idle:
        raise ValueError(
            f"{idle[0]} would be trained, but PEFT runs the copy of it called modules_to_save; "
            f"leave `trainable` at null, which trains the adapter and the head, or set it to "
            f"{_pattern(model)!r}."
        )
    if not any(_prefix(model) in name for name in names):
        raise ValueError(
            f"no parameter of the adapter would be trained (but {', '.join(names[:3]) or 'none'}); "
            f"leave `trainable` at null or set it to {_pattern(model)!r}. To train the head alone, "
            "drop peft_method."
        )


def _prefix(model: Any) -> str:
    """What the adapter's parameters have in their names: PEFT's "lora_", or "prompt_encoder"."""
    return str(getattr(model.base_model, "prefix", "prompt_encoder"))


def _pattern(model: nn.Module) -> str:
    return f"{_prefix(model)}|modules_to_save"
