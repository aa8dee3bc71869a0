"""Checks of the model: before step 0, around the trial of the objective, and before saving.

Nothing here is released: what is read decides only whether training starts or a model is saved.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from hf_dpzero.estimators.ghost_clipping import opacus_rules
from hf_dpzero.ledger.digests import checksums, digest_tensors
from hf_dpzero.objectives.losses import base_model, is_compiled, single_pass
from hf_dpzero.parallel.offload import accelerate_hooks
from hf_dpzero.perturbation.trainable import PROMPT, check_dtype, check_storage, has_plain_storage

if TYPE_CHECKING:
    from hf_dpzero.run import Run
    from hf_dpzero.settings.config import DPZeroConfig


def check_installed(args: DPZeroConfig) -> None:
    """Refuses settings that need a package which is not installed.

    Raises:
      ImportError: Opacus for the method, or the package of a tracking service in `report_to`.
    """
    from transformers.integrations import integration_utils

    for name in args.report_to or ():
        has = getattr(integration_utils, f"is_{name.replace('_', '')}_available", None)
        if has is not None and not has():
            raise ImportError(
                f"report_to={name!r} needs its package, which is not installed: `pip install {name}`, "
                "or set report_to: none."
            )
    if args.first_order and not args.not_private and args.clipping != "averaged":
        opacus_rules()


def check_trained(model: nn.Module) -> None:
    """Refuses parameters that cannot be perturbed exactly, in place.

    Raises:
      ValueError: one of a dtype other than float32, bfloat16 and float16, or with memory that something
        else uses too (see `check_storage`).
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            check_dtype(name, parameter)
    check_storage(model)


def check_not_compiled(run: Run) -> None:
    """Refuses compiled code where hooks take gradients of single rows.

    Raises:
      ValueError: the model is compiled, or `torch_compile` would do it.
    """
    args, objective = run.args, run.objective
    compiled = args.torch_compile or is_compiled(run.model)
    whole = args.clipping == "averaged" or run.units is not None
    if compiled and not whole and (objective is None or single_pass(objective)):
        raise ValueError(
            f"method={args.method!r} takes per-example gradients by hooks, which compiled code does "
            "not call: turn torch_compile off, or use method='dpzero'."
        )


def check_layers(model: nn.Module) -> None:
    """Refuses batch statistics, and embeddings that a look-up rewrites.

    Raises:
      ValueError: batch normalisation with batch statistics; an embedding that renormalises its weight.
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
        if getattr(module, "max_norm", None) is not None and hasattr(module, "weight"):
            raise ValueError(
                f"{name} with max_norm={module.max_norm} rewrites the rows of its weight that private "
                "examples look up: set max_norm=None."
            )


def check_placement(model: nn.Module) -> None:
    """Refuses weights that are not in memory during the whole run, trainable or frozen.

    Several devices are fine, and so are offloaded weights once `offload.settle_offloaded` has given
    them a place to live.

    Raises:
      ValueError: a model that moves as a whole between devices, the meta device, lazy layers.
    """
    for name, module in model.named_modules():
        hooks = accelerate_hooks(getattr(module, "_hf_hook", None))
        if any(type(hook).__name__ == "CpuOffload" for hook in hooks):
            raise ValueError(
                f"{name or 'the model'} moves as a whole between the CPU and the device "
                "(cpu_offload_with_hook), which a perturbation in place does not follow: use "
                "accelerate.cpu_offload(model, device), which brings one layer at a time, or "
                "device_map='auto' of from_pretrained."
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{name} has no shape yet (a lazy layer): run one forward pass first.")
        if tensor.device.type == "meta":
            raise ValueError(
                f"{name} is on the meta device, so it has no values: load its weights before training "
                "(offload is fine: device_map of from_pretrained, or Accelerate's cpu_offload). An "
                "adapter that PEFT puts on an offloaded model has none: pass peft_config= to "
                "DPZeroTrainer, or call settle_offloaded(model) of hf_dpzero.parallel.offload before "
                "get_peft_model."
            )


def check_adapters(model: nn.Module) -> None:
    """Refuses untrained adapters of PEFT, and a trained copy of the head that is unused.

    Also adapters that would be saved without a report, or loaded wrongly. Other models pass. To be
    called after `select_trainable`, whose pattern sees PEFT's names: "classifier" matches the unused
    copy of the head too, and not the adapter.

    Raises:
      ValueError: says what would be trained, and a pattern that fits.
    """
    configs: Any = getattr(model, "peft_config", None)
    if configs is None:
        return
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for adapter, config in configs.items():
        start = str(getattr(config, "init_lora_weights", ""))
        if "_niter_" in start or start in ("corda", "lora_ga"):
            raise ValueError(
                f"init_lora_weights={start!r} changes base weights in a way that loading the saved "
                "adapter does not repeat: use 'pissa' or 'olora', which are computed again."
            )
        if adapter != "default" and any(adapter in name.split(".") for name in names):
            raise ValueError(
                f"the adapter {adapter!r} would be saved in a folder of its own, without a report: call "
                "it 'default', PEFT's name where none is given."
            )
    own = "adaption_" if "AdaptionPrompt" in type(model.base_model).__name__ else PROMPT
    own = "lora_" if getattr(model, "_hf_peft_config_loaded", False) else own  # by its add_adapter
    prefix = getattr(model.base_model, "prefix", own)  # of PEFT's names, e.g. "lora_"
    unused = [name for name in names if ".original_module." in name]
    if unused or not any(str(prefix) in name for name in names):
        what = "of which PEFT runs a copy" if unused else "and no parameter of the adapter"
        raise ValueError(
            f"{(unused or names or ['nothing'])[0]} would be trained, {what}: leave `trainable` at "
            "null, which trains the adapter and the head, or set it to "
            f"'{prefix}|modules_to_save'; load a saved adapter with is_trainable=True. To train the "
            "head alone, drop peft_method."
        )


def check_saving(model: nn.Module) -> None:
    """Refuses weights that are used twice and could not be saved.

    Raises:
      ValueError: tied weights that the class of the model does not name; an adapter's base may have any.
    """
    from safetensors.torch import _find_shared_tensors
    from transformers import PreTrainedModel
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    if hasattr(model, "peft_config"):
        return
    state = {n: t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    state = {name: t for name, t in state.items() if has_plain_storage(t)}
    try:
        if isinstance(model, PreTrainedModel):
            remove_tied_weights_from_state_dict(state, model)
        elif twice := [names for names in _find_shared_tensors(state) if len(names) > 1]:
            raise RuntimeError(f"Shared tensors {twice}.")
    except RuntimeError as error:
        raise ValueError(
            f"save_model() could not write this model after training: {str(error).splitlines()[0]} Give "
            "one of them weights of its own (clone()), or name it in the class' _tied_weights_keys."
        ) from error


@contextlib.contextmanager
def parameters_left_alone(model: nn.Module) -> Iterator[None]:
    """Refuses a model whose forward passes inside the block write to its parameters.

    Compared by checksum, which also sees writes through `.data`. A write that is undone again is refused
    at the first step, by the version counter.

    Raises:
      ValueError: names the parameter.
    """
    before = dict(model.named_parameters())
    # Sums and not copies: a model may fill most of the memory.
    sums = checksums(list(before.items()))
    try:
        yield
    finally:  # a write is the cause of whatever else was found
        after = dict(model.named_parameters())
        changed = sorted(n for n in before | after if before.get(n) is not after.get(n))
        if not changed:
            now = checksums(list(after.items()))
            changed = [name for name in now if now[name] != sums[name]]
        if changed:
            raise ValueError(
                f"{changed[0]} was changed by a forward pass in eval mode: that would carry un-noised "
                "private data into the weights. Load the model anew, and make forward() leave its "
                "parameters alone: compute into new tensors, and keep what it must update in a buffer."
            )


class SavedBesides:
    """What a model saves beside its parameters: buffers, extra state and its configuration.

    Forward passes read private rows, so whatever they leave there would be saved without noise.

    Args:
      model: before its first forward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.take_state()
        self.take_configuration()

    def take_state(self) -> None:
        """Notes buffers and extra state as they are now."""
        self._state = _extra_state(self.model)

    def take_configuration(self) -> None:
        """Notes the configuration as it is now."""
        self._config = _configuration(self.model)

    def check(self, configuration: bool = True) -> None:
        """Compares with what was noted.

        Args:
          configuration: False leaves it out: before a save it may be set on purpose.

        Raises:
          ValueError: names what changed, which would carry un-noised traces of the private data into
            the saved model.
        """
        before, now = self._state, _extra_state(self.model)
        if configuration:
            before, now = before | self._config, now | _configuration(self.model)
        changed = [name for name in before | now if before.get(name) != now.get(name)]
        if changed:
            raise ValueError(
                f"a forward pass changed {min(changed)}, which is saved with the model: such buffers, "
                "extra state and settings hold un-noised traces of the private data. Make them constant "
                "in eval mode, and initialise them on public data before training."
            )


_FILLED_IN = ("problem_type", "architectures", "dtype", "transformers_version")
"""From the labels' type when it computes a loss, and from the model's class when it saves it."""


def _extra_state(model: nn.Module) -> dict[str, str]:
    """Digests of what `state_dict` has beside parameters: saved buffers and extra state, by name."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    besides = {n: v for n, v in model.state_dict().items() if n not in parameters}
    tensors = {name: value for name, value in besides.items() if isinstance(value, Tensor)}
    # extra state may be any object
    others = {n: repr(pickle.dumps(v)) for n, v in besides.items() if n not in tensors}
    return {name: digest_tensors([(name, value)]) for name, value in tensors.items()} | others


def _configuration(model: nn.Module) -> dict[str, str]:
    """The settings that are saved, but for those that transformers itself fills in."""
    config: Any = getattr(base_model(model), "config", None)
    settings = config.to_dict() if hasattr(config, "to_dict") else {}
    return {
        f"config.{name}": repr(value) for name, value in settings.items() if name not in _FILLED_IN
    }


def check_widths(model: nn.Module) -> None:
    """Refuses attention that follows from what was seen before.

    Args:
      model: judged by its configuration.

    Raises:
      ValueError: block-sparse attention (BigBird, which leaves it for good at the first short batch), or
        rotary positions of type `dynamic` (which remember the longest text).
    """
    config: Any = getattr(base_model(model), "config", None)
    if getattr(config, "attention_type", None) == "block_sparse":
        raise ValueError(
            "attention_type='block_sparse' changes for all later texts once a short one was seen: load "
            "the model with attention_type='original_full'."
        )
    rotary = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    if "'dynamic'" in repr(rotary):  # also nested, where kinds of layers have their own
        raise ValueError(
            "rope_type='dynamic' remembers the longest text, so losses depend on earlier examples: load "
            "the model with a rope_type that does not (default, linear, yarn, llama3)."
        )


def check_kernels_are_fixed(device: str) -> None:
    """Refuses kernels that are chosen by timing, and so by private rows.

    Args:
      device: type of the device that the model runs on.

    Raises:
      ValueError: cudnn.benchmark or TunableOp is on, on a GPU.
    """
    if device != "cuda":
        return
    # Two kernels round differently, so a row's loss would follow from which rows were timed first.
    if torch.backends.cudnn.benchmark:
        raise ValueError(
            "torch.backends.cudnn.benchmark=True chooses convolutions by timing them on private "
            "batches: set it to False."
        )
    if torch.cuda.tunable.is_enabled():
        raise ValueError(
            "torch.cuda.tunable is enabled (PYTORCH_TUNABLEOP_ENABLED) and chooses products by timing "
            "them on private batches: call torch.cuda.tunable.enable(False)."
        )
