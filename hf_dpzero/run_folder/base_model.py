"""What the weights are when a run starts: the named base's, or somebody's who has seen the data.

An epsilon speaks of the steps of one run. If the model was trained on the same rows before, by another
`DPZeroTrainer` or by any other means, the claim is of a part of what was released.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_dpzero.ledger.digests import checksums, state_digest
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.objectives.losses import base_model
from hf_dpzero.perturbation.sharding import address, whole
from hf_dpzero.perturbation.trainable import quantised_kind
from hf_dpzero.reporting.provenance import base_names, resolve_path
from hf_dpzero.reporting.weights import open_each, open_weights, plain_name, saved_tensors
from hf_dpzero.reporting.wording import DECLARED, EQUAL, EQUAL_BUT_NEW, EXTENDED, NOT_COMPARED

_MARK, _END = "_hf_dpzero_started_from", "_hf_dpzero_ended_in"
_ADVICE = (
    "load the base model again, or set base_is_public: true if what it is now may be taken as public; "
    "the report then says so."
)


class Comparison(NamedTuple):
    """A model's parameters beside the tensors of the base that it names.

    Attributes:
      differing: names of parameters and buffers whose values are not the base's.
      fresh: names of parameters that the base does not have, such as a new head or adapter.
    """

    differing: list[str]
    fresh: list[str]


def mark_as_trained(model: nn.Module, started_from: str, ended_in: str) -> None:
    """Notes on a model, and on all its parts, that a run has changed it.

    The note survives copies, and adapters that are put on or taken off.

    Args:
      model: after training.
      started_from: its `state_digest` before training.
      ended_in: its `state_digest` now.
    """
    for module in model.modules():
        vars(module).setdefault(_MARK, started_from)
        vars(module)[_END] = ended_in


def check_start(
    model: nn.Module, declared_public: bool, extended: str | None = None
) -> tuple[str, Comparison | None]:
    """Refuses a model that was trained before, unless the user declares it public.

    A model that was put back to what it was before training passes. What no name leads to, and what
    the base does not have, is taken as it is; a LoRA adapter that already does something is not.

    Args:
      model: as the run starts with it.
      declared_public: the setting `base_is_public`.
      extended: folder of a run that this one continues from (see `check_extended_start`).

    Returns:
      The report's `base_weights`, and the comparison with the named base, if there was one.

    Raises:
      ValueError: it was trained by a run of this process, or differs from the base that it names.
    """
    if extended is not None:
        return check_extended_start(model, extended), None
    marks = {vars(module).get(_MARK) for module in model.modules()} - {None}
    marks -= {state_digest(model)} if marks else set()
    if marks and not declared_public:
        raise ValueError(
            "this model was trained on the private data already, by an earlier run of this process, "
            f"whose cost is not in this run's epsilon: {_ADVICE} To continue that run, use "
            "resume_from_checkpoint; to spend more on its result, extends_run."
        )
    compared = compare_with_named(model)
    changed = [*(compared.differing if compared else ()), *trained_adapters(model)]
    if changed and not declared_public:
        raise ValueError(
            f"{changed[0]} and {len(changed) - 1} more tensors are not what the base model "
            f"{', '.join(base_names(model)) or '(fresh adapters)'} has: the model was changed after it "
            f"was loaded, and if private rows did it, this run's epsilon does not cover that: {_ADVICE}"
        )
    if marks or changed:
        return DECLARED, compared
    if compared:
        return (EQUAL_BUT_NEW if compared.fresh else EQUAL), compared
    return DECLARED if declared_public else NOT_COMPARED, None


def check_extended_start(model: nn.Module, folder: str) -> str:
    """Refuses a model that is not what the run in `folder` ended in.

    Every tensor that was saved there must be in the model, with the saved values (in its dtype); what
    else the model has must be its base's, or fresh. The object that the run itself has trained passes
    while nothing has changed it since.

    Args:
      model: as the run starts with it.
      folder: of the run that it extends, whose report has been compared with its weights.

    Returns:
      The report's `base_weights`: "not_compared" if there is more to the model, and no base to hold it
      against; "equal_to_named_but_new_parts" if that base does not have it.

    Raises:
      ValueError: other weights, or a model that another run has changed.
    """
    load = f"load the model from {folder!r} (an adapter on its base, with is_trainable=True)."
    modules = list(model.modules())
    if any(_MARK in vars(module) for module in modules):
        now = state_digest(model)
        if {vars(module).get(_END) for module in modules} != {now}:
            raise ValueError(
                "this model was trained in this process and then changed, by another run or by hand, "
                f"whose cost no report has: {load}"
            )
    held, other = saved_tensors(model), []
    with open_weights(folder) as files:
        for name in files:
            kept = held.get(name)
            saved = files[name].get_tensor(name)
            if kept is None or not torch.equal(saved.to(kept.dtype), whole(kept).detach().cpu()):
                other.append(name)
        covered = {address(held[name]) for name in files if name in held}
    compared, named = compare_with_named(model), dict(model.named_parameters())
    for name in compared.differing if compared else ():
        if name not in named or address(named[name]) not in covered:
            other.append(name)
    other += trained_adapters(model, covered)
    if other:
        raise ValueError(
            f"{other[0]} and {len(other) - 1} more tensors are not what the run in {folder!r} ended in, "
            f"and this run's epsilon covers what that one released and nothing else: {load}"
        )
    unknown = {name for name, parameter in named.items() if address(parameter) not in covered}
    if unknown and compared is None:
        return NOT_COMPARED
    return EQUAL_BUT_NEW if compared and unknown.intersection(compared.fresh) else EXTENDED


def digest_frozen(model: nn.Module) -> str:
    """SHA-256 (hex) over the parameters that do not train, which a resumed run must find unchanged."""
    frozen = ((name, p) for name, p in model.named_parameters() if not p.requires_grad)
    return hashlib.sha256(json.dumps(checksums(frozen), sort_keys=True).encode()).hexdigest()


def check_frozen(model: nn.Module, header: Mapping[str, Any]) -> None:
    """Refuses to continue a run on other frozen weights than it began with.

    Args:
      model: after the checkpoint was loaded into it; an adapter's does not bring its base.
      header: of the run's ledger.

    Raises:
      LedgerError: the frozen parameters are others.
    """
    found = digest_frozen(model)
    if header.get("frozen_digest", found) != found:
        raise LedgerError(
            "the frozen parameters are not those that this run began with, and whatever was done to "
            "them is not in its epsilon: load the same base model again to resume."
        )


def trained_adapters(model: nn.Module, covered: Collection[int] = ()) -> list[str]:
    """Names of LoRA layers whose product B A is not zero, as it is in a fresh adapter.

    Args:
      model: any.
      covered: addresses (`data_ptr`) of tensors that are known; layers of these are left out.
    """
    found = []
    for name, module in model.named_modules():
        for kind in ("lora", "lora_embedding"):
            down, up = (getattr(module, f"{kind}_{part}", None) or {} for part in "AB")
            for key in down:
                pair = [getattr(part[key], "weight", part[key]) for part in (down, up)]
                known = all(address(tensor) in covered for tensor in pair)
                if not known and all(bool(whole(tensor).detach().ne(0).any()) for tensor in pair):
                    found.append(f"{name}.{kind}.{key}")
    return found


@torch.no_grad()
def compare_with_named(model: nn.Module) -> Comparison | None:
    """Compares a model with the checkpoints that its configuration names, where they lie here.

    A parameter belongs to a tensor of the checkpoint if one's name ends in the other's and the shapes
    are equal; so do saved buffers that the checkpoint has. Of token embeddings that were resized, the
    tokens that both have are compared. The checkpoint's values are taken in the parameter's dtype.

    Args:
      model: any; parts such as an encoder may name their own base.

    Returns:
      None if nothing could be compared: no name, not on this machine, no safetensors, other names, or
      quantised weights.
    """
    named = dict(model.named_parameters())
    if any(quantised_kind(parameter) is not None for parameter in named.values()):
        return None
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    differing, fresh, embeddings = [], [], _token_embeddings(model)
    with _named_weights(model) as sources:
        for name, parameter in {**named, **buffers}.items():
            tensors = [
                tensor
                for tensor in _candidates(plain_name(name), sources)
                if tensor.shape == parameter.shape
                or (id(parameter) in embeddings and tensor.shape[1:] == parameter.shape[1:])
            ]
            if not any(tensor.shape == parameter.shape for tensor in tensors):
                fresh += [name] if name in named else []
            if tensors and not any(_as_saved(parameter, tensor) for tensor in tensors):
                differing.append(name)
    return Comparison(differing, fresh) if len(fresh) < len(named) else None


def _token_embeddings(model: Any) -> set[int]:
    """The ids of the parameters with one row a token, in and out."""
    base, found = base_model(model), set()
    for part in ("get_input_embeddings", "get_output_embeddings"):
        with contextlib.suppress(NotImplementedError, AttributeError):
            found.add(id(getattr(getattr(base, part)(), "weight", None)))
    return found


def _as_saved(parameter: Tensor, tensor: Tensor) -> bool:
    """Whether the rows that both have are equal."""
    rows = min(len(parameter), len(tensor)) if parameter.dim() else None
    saved, own = (t[:rows] if rows is not None else t for t in (tensor, whole(parameter).detach()))
    return torch.equal(saved.to(parameter.dtype), own.cpu())


@contextlib.contextmanager
def _named_weights(model: nn.Module) -> Iterator[list[Mapping[str, Any]]]:
    """The opened checkpoints of every base that the model names and that lies on this machine."""
    with contextlib.ExitStack() as stack:
        folders = {folder for name in base_names(model) for folder in _folders_of(name)}
        opened = (stack.enter_context(open_each(folder)) for folder in sorted(folders))
        yield [tensors for files in opened for tensors in files]


def _folders_of(name: str) -> list[Path]:
    """Where a name leads to without the network: a folder, or every revision in the Hub's cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import validate_repo_id

    folder = Path(resolve_path(name))
    if folder.is_dir():
        return [folder.resolve()]
    with contextlib.suppress(ValueError):
        validate_repo_id(name)
        cached = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"))
        return list(cached.glob("snapshots/*"))
    return []


def _candidates(name: str, sources: list[Mapping[str, Any]]) -> Iterator[Tensor]:
    """Tensors that `name` may have been loaded from: of the same name, but for a prefix of either."""
    parts = name.split(".")
    suffixes = [".".join(parts[i:]) for i in range(max(1, len(parts) - 1))]
    for files in sources:
        for suffix in suffixes:
            if suffix in files:
                yield files[suffix].get_tensor(suffix)
                break
        else:
            for key in files:
                if key.partition(".")[2] == name:
                    yield files[key].get_tensor(key)
