"""Refusals that need the model or the data set: everything that is checked before step 0.

Nothing here releases anything: what is looked at decides only whether training starts.
"""

from __future__ import annotations

import re
from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import Subset

from hf_dpzero.perturbation import digest_tensors

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


def select_trainable(model: nn.Module, pattern: str | None) -> None:
    """Freezes every parameter whose name `pattern` (re.search) does not find; None changes nothing.

    Raises:
      ValueError: the pattern finds no parameter.
    """
    if pattern is None:
        return
    names = [name for name, _ in model.named_parameters()]
    if not any(re.search(pattern, name) for name in names):
        raise ValueError(
            f"trainable={pattern!r} matches no parameter; there are e.g. {names[-3:]}."
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.search(pattern, name) is not None)


def check_model(model: nn.Module, smoothing: float) -> None:
    """Refuses layers that couple examples, and half-precision weights that smoothing cannot move.

    Raises:
      ValueError: batch normalisation with batch statistics; a trainable tensor in which more than
        half of the coordinates would not change under +-smoothing.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (
            not module.track_running_stats or module.running_mean is None
        ):
            raise ValueError(
                f"{name} normalises with the statistics of its batch, so one example's loss depends "
                "on the others and cannot be clipped: use track_running_stats=True, LayerNorm or "
                "GroupNorm."
            )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            _check_smoothing(name, parameter, smoothing)


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


@torch.no_grad()
def vanishing_fraction(parameter: Tensor, smoothing: float) -> float:
    """The fraction of coordinates that theta + smoothing leaves unchanged in the tensor's dtype."""
    if parameter.numel() == 0:
        return 0.0
    moved = (parameter.float() + smoothing).to(parameter.dtype)
    return float((moved == parameter).float().mean())


def _check_smoothing(name: str, parameter: Tensor, smoothing: float) -> None:
    if parameter.dtype not in (torch.bfloat16, torch.float16):
        return
    fraction = vanishing_fraction(parameter, smoothing)
    if fraction > 0.5:
        raise ValueError(
            f"smoothing={smoothing} vanishes in rounding for {fraction:.0%} of {name} "
            f"({parameter.dtype}): load the trainable weights in float32, or raise smoothing."
        )


def check_uncoupled(together: Tensor, again: Tensor, alone: Tensor) -> None:
    """Refuses a loss that depends on the other examples of its batch.

    Args:
      together: losses of a few examples evaluated as one batch, float32 [B].
      again: the same once more; where it differs, the collator or the model draws random numbers and
        nothing can be compared.
      alone: each example in a batch of its own.

    Raises:
      ValueError: `together` and `alone` differ by more than a tenth of a percent.
    """
    if not torch.equal(together.nan_to_num(), again.nan_to_num()):
        return
    tolerance = 1e-3 * together.abs() + 1e-4
    differs = (together - alone).abs() > tolerance
    if bool(differs.any()):
        i = int(differs.nonzero()[0])
        raise ValueError(
            f"an example's loss depends on the other examples of its batch (row {i} differs between a "
            "batch of several and a batch of one): clipping it would not bound one example's "
            "influence. Compute each loss from its own row only (no batch mean, no in-batch "
            "negatives, no batch statistics)."
        )


def check_precision(model: nn.Module, args: Any) -> None:
    """Refuses low-precision arithmetic where it would let examples influence each other.

    Matrix kernels round differently for other batch shapes, and the rounding is divided by 2 lambda.
    In float32 that is negligible; in bfloat16, TF32 or quantised arithmetic it can exceed the clip.
    With one example in each forward pass nothing of another example is in reach.

    Raises:
      ValueError: bf16, tf32, or a half-precision or quantised parameter, with a larger microbatch.
    """
    if args.physical_batch_size == 1:
        return
    odd = [name for name, p in model.named_parameters() if p.dtype != torch.float32]
    causes = [f"{name}=True" for name in ("bf16", "tf32") if getattr(args, name, False)]
    if odd:
        causes.append(f"parameters that are not float32 ({odd[0]}, ...)")
    if causes:
        raise ValueError(
            f"{' and '.join(causes)} with microbatch_size={args.physical_batch_size}: low-precision "
            "rounding depends on what else is in the microbatch, which the sensitivity does not "
            "cover. Set microbatch_size=1, or compute in float32."
        )


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
