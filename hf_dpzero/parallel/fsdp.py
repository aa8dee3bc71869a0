"""Runs whose parameters lie in parts on several processes: FSDP2, `torch.distributed.fsdp.fully_shard`.

Every process perturbs and updates its own part (see `perturbation.sharding`) and evaluates its own rows.
A forward pass gathers one block of layers after another on all processes, so all of them must make the
same passes: a process with fewer microbatches than another makes passes of blanks (`Lockstep`). Files
are those of a run that is not split, whole tensors written by the first process; so any number of
processes goes on from them.

Accelerate's plugin says how the model is cut. hf_dpzero cuts it itself, before the checks before
training, and with two settings of its own: layers are given back after every pass (the next is at other
weights), and weights are gathered as they are, for autocast to round where it would in one process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.utils import logging

from hf_dpzero.objectives.losses import PaddedMicrobatch, PerExampleLoss, single_pass
from hf_dpzero.parallel import collectives
from hf_dpzero.perturbation.sharding import is_sharded, on_first, own_part, whole
from hf_dpzero.perturbation.trainable import is_prompt, quantised_kind
from hf_dpzero.reporting.weights import open_weights, saved_tensors
from hf_dpzero.settings.setting import refuse

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from hf_dpzero.settings.config import DPZeroConfig


logger = logging.get_logger(__name__)

T = TypeVar("T")
_MARK = "_hf_dpzero_cut"
_CONFIG = "configs/accelerate/fsdp2.yaml"
_INSTEAD = "use plain data parallelism (MULTI_GPU, MULTI_CPU) or one process"


def cut_(model: nn.Module, accelerator: Accelerator, args: DPZeroConfig) -> None:
    """Cuts a model over the processes, in place, as Accelerate's plugin says.

    Raises:
      ValueError: a model that cannot be cut.
    """
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

    check_splittable(model, args)
    plugin = accelerator.state.fsdp_plugin
    named = plugin.transformer_cls_names_to_wrap
    plugin.transformer_cls_names_to_wrap = named or layer_classes(model)
    try:
        fsdp2_prepare_model(accelerator, model)
    finally:
        plugin.transformer_cls_names_to_wrap = named
    vars(model)[_MARK] = True  # a later run of this process takes it as it is
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_forward(True)
    if hasattr(model, "generate"):  # it calls layers that are gathered by `forward` alone
        register_fsdp_forward_method(model, "generate")


def uses_fsdp2(accelerator: Accelerator, model: nn.Module | None, args: DPZeroConfig) -> bool:
    """Whether Accelerate was told to cut the model by FSDP2; sets what a run needs of its plugin.

    Raises:
      ValueError: sharding of another kind, a setting that does not go with parts of parameters, or a
        model that others have cut: its passes may keep layers, or round them.
    """
    kind = accelerator.distributed_type.value
    if kind in ("MEGATRON_LM", "XLA", "TP"):
        raise ValueError(
            f"distributed_type={kind} shards or copies parameters in ways that the in-place "
            "perturbation does not follow: use MULTI_GPU, MULTI_CPU or one process, or fsdp_version: 2 "
            f"({_CONFIG}) for a model that does not fit on one device."
        )
    if model is not None and is_split(model) and _MARK not in vars(model):
        raise ValueError(
            "the model's parameters are parts of DTensors already (fully_shard, or a model loaded in "
            "parts): pass the whole model, and have it cut by `accelerate launch --config_file "
            f"{_CONFIG}` or TrainingArguments(fsdp=True)."
        )
    plugin: FullyShardedDataParallelPlugin | None = getattr(accelerator.state, "fsdp_plugin", None)
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" or args.fsdp
    if plugin is None and collectives.active() and asked:
        # Accelerate leaves the settings aside where processes are on CPUs.
        from accelerate.utils import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(**(args.fsdp_plugin_args or {}))
        accelerator.state.fsdp_plugin = plugin
    if plugin is None:
        return False
    _check_settings(plugin, args)
    if plugin.reshard_after_forward is False:
        logger.info("reshard_after_forward=False has no effect: every pass is at other weights.")
    plugin.mixed_precision_policy = None  # autocast rounds, as it would in one process
    return True


def _check_settings(plugin: FullyShardedDataParallelPlugin, args: DPZeroConfig) -> None:
    strategy = args.performance.perturbation_strategy
    whole = "needs whole parameters, and FSDP keeps parts of them"
    refused = (
        (
            plugin.cpu_offload and type(plugin.cpu_offload).__name__ != "OffloadPolicy",
            "fsdp_offload_params (cpu_offload) keeps parts in the CPU's memory, from where they are "
            "copied while the next perturbation may already be written: set it to false, and take more "
            "processes or a model in bfloat16.",
        ),
        (
            plugin.fsdp_version != 2,
            f"fsdp_version={plugin.fsdp_version} keeps parameters as parts of flat buffers, which the "
            f"in-place perturbation does not follow: set fsdp_version: 2, as in {_CONFIG} (with "
            'TrainingArguments fsdp_config={"version": 2}).',
        ),
        (
            args.first_order,
            f"method={args.method!r} under FSDP: gradients of single examples are not taken of parts of "
            f"parameters; use method='dpzero', or {_INSTEAD}.",
        ),
        (args.torch_compile, f"torch_compile=True {whole}: leave it off."),
        (
            strategy in ("layerwise", "stacked"),
            f"performance.perturbation_strategy={strategy!r} {whole}: use 'whole_model'.",
        ),
        (
            not getattr(args.accelerator_config, "even_batches", True),
            "accelerator_config['even_batches']=False under FSDP: processes with fewer batches of "
            "evaluation would wait for ever; leave it at True.",
        ),
    )
    refuse(words for is_refused, words in refused if is_refused)


def is_split(model: nn.Module) -> bool:
    """Whether FSDP2 has cut a model."""
    return any(is_sharded(parameter) for parameter in model.parameters())


def layer_classes(model: nn.Module) -> list[str]:
    """Classes of the blocks that are gathered one at a time, where nobody has named them.

    Those that the model's class names (`_no_split_modules`), without any around an embedding, which
    Accelerate cuts by itself; else what the longest list of modules holds.
    """
    wholes = set(getattr(model, "_no_split_modules", None) or ())
    ends = (getattr(model, f"get_{part}_embeddings", lambda: None) for part in ("input", "output"))
    apart = {id(end()) for end in ends}
    found = {
        type(module).__name__
        for module in model.modules()
        if type(module).__name__ in wholes and not apart & set(map(id, module.modules()))
    }
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    if not found and lists:
        found = {type(module).__name__ for module in max(lists, key=len)}
    return sorted(found)


def check_splittable(model: nn.Module, args: DPZeroConfig) -> None:
    """Refuses weights that FSDP2 would change or cannot cut.

    Raises:
      ValueError: quantised weights; prompts of PEFT's; or weights in low precision under mixed
        precision, which Accelerate would turn into float32.
    """
    for name, parameter in model.named_parameters():
        if is_prompt(name):
            raise ValueError(
                f"{name} is a prompt of PEFT's, which is whole where it is saved and FSDP keeps parts "
                f"of it: train LoRA, or {_INSTEAD}."
            )
        if (kind := quantised_kind(parameter)) is not None:
            raise ValueError(
                f"{name} is quantised ({kind}), which FSDP does not cut into rows: {_INSTEAD}."
            )
        low = parameter.requires_grad and parameter.dtype != torch.float32
        if low and args.mixed_precision != "no":
            raise ValueError(
                f"{name} is {parameter.dtype} and mixed_precision={args.mixed_precision!r}: Accelerate "
                "would make it float32 under FSDP. Leave bf16 out, or load the model in float32."
            )


@contextlib.contextmanager
def prepared(accelerator: Accelerator) -> Iterator[None]:
    """Inside, `accelerator.prepare(model, optimizer)` leaves the model as it is: it is cut already."""

    def prepare(model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        accelerator._models.append(model)
        return model, accelerator.prepare_optimizer(optimizer, device_placement=False)

    accelerator.prepare = prepare
    try:
        yield
    finally:
        del accelerator.prepare


def give_back(model: nn.Module) -> None:
    """Frees what forward passes have gathered: nothing may read weights of before an update."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class Lockstep:
    """Adds passes of blanks to a process' microbatches until every process has as many.

    Args:
      objective: of the run.
      blank: a microbatch of a shape that the run has; its losses are dropped.

    Raises:
      ValueError: an objective whose number of passes follows from its rows.
    """

    def __init__(self, objective: PerExampleLoss, blank: Mapping[str, Tensor]) -> None:
        if not single_pass(objective):
            raise ValueError(
                "the objective runs the model a number of times that follows from its rows, and under "
                "FSDP all processes must run it as often: use a loss of one pass (cross_entropy in "
                f"place of accuracy or F1 of generated texts), or {_INSTEAD}."
            )
        self.idle = PaddedMicrobatch(blank, 0, [])

    def __call__(self, microbatches: Sequence[Mapping[str, Tensor]]) -> list[Mapping[str, Tensor]]:
        """The microbatches, and blank ones up to the number that the process with most has."""
        most = max(collectives.gather_numbers(len(microbatches)))
        return [*microbatches, *[self.idle] * (most - len(microbatches))]


def assert_same_losses(losses: Tensor) -> Tensor:
    """The losses of rows that every process has evaluated; refuses processes that disagree.

    What the checks before training decide from them, all processes must decide alike.

    Args:
      losses: float32 on the CPU.

    Raises:
      ValueError: on all processes.
    """
    content = losses.detach().contiguous().numpy().tobytes()
    digest = int.from_bytes(hashlib.sha256(content).digest()[:6], "big")
    if len(set(collectives.gather_numbers(digest))) > 1:
        raise ValueError(
            "the processes compute other losses for the same rows of train_dataset: under FSDP all "
            "devices must be of one kind, and rows and collator the same (seed what is random)."
        )
    return losses


def on_first_of(model: nn.Module, work: Callable[[], T]) -> T:
    """What the first process finds, on all; it may ask for whole parameters (`sharding.whole`).

    Args:
      model: cut or not.
      work: called on the first process; its error is raised on all. It must not communicate otherwise.
    """
    found: list[T | Exception] = []

    def tried() -> None:
        try:
            found.append(work())
        except Exception as error:  # raised on all: the others wait for whole parameters
            found.append(error)

    on_first(list(model.parameters()), tried)
    (result,) = collectives.shared(found)
    if isinstance(result, Exception):
        raise result
    return result


def gathered_state(model: nn.Module, keep: bool = True) -> dict[str, Tensor]:
    """`model.state_dict()` with whole tensors on the CPU, of an adapter what is saved with it.

    Called on all processes; a tied weight is one tensor under its names.

    Args:
      model: cut or not.
      keep: whether this process wants it; {} else.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    tied = {n: names[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}
    state, gathered = model.state_dict(), dict[str, Tensor]()
    wanted = _saved_with_adapter(model, state)
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or (wanted is not None and name not in wanted):
            continue
        first = tied.get(name, name)
        if first in gathered:
            gathered[name] = gathered[first]
            continue
        full = whole(tensor)  # on all processes, one tensor at a time
        gathered[first] = gathered[name] = full.detach().cpu() if keep else full.new_empty(0)
    return {name: gathered[name] for name in state if name in gathered} if keep else {}


def _saved_with_adapter(model: nn.Module, state: Mapping[str, Tensor]) -> set[str] | None:
    """Names in `state` of what PEFT saves; None for a model without an adapter."""
    if not isinstance(getattr(model, "peft_config", None), Mapping):
        return None
    from peft import get_peft_model_state_dict

    held = {id(tensor): name for name, tensor in state.items()}
    saved = get_peft_model_state_dict(model, state_dict=dict(state)).values()
    # PEFT renames what it saves, so tensors are known by identity.
    known = {held[id(tensor)] for tensor in saved if id(tensor) in held}
    return known if len(known) == len(list(saved)) else None


@torch.no_grad()
def load_gathered_(model: nn.Module, folder: str) -> None:
    """Loads a checkpoint's weights, of which each process reads its own rows.

    Args:
      model: cut.
      folder: of a checkpoint, of any number of processes.

    Raises:
      ValueError: a tensor in it that the model does not have, or of another shape.
    """
    held = saved_tensors(model)
    with open_weights(folder) as files:
        for name, file in files.items():
            kept = held.get(name)
            rows: Any = file.get_slice(name)
            if kept is None or list(kept.shape) != rows.get_shape():
                raise ValueError(
                    f"{folder} holds {name}, {rows.get_shape()}, which this model does not have: resume "
                    "with the model that wrote it."
                )
            part, first = own_part(name, kept)
            if not kept.dim():
                part.copy_(file.get_tensor(name))
            elif part.numel():
                start = first * len(kept) // kept.numel()  # FSDP2 cuts along rows
                part.copy_(rows[start : start + len(part)])
