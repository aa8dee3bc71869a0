"""The weights that a run starts from: whether they are those of the base that the model names.

An epsilon speaks of the steps of one run. If the model was trained on the same rows before, by another
`DPZeroTrainer` or by any other means, the claim is of a part of what was released. So a model is
compared with the checkpoint that it names, where that lies on this machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_dpzero.ledger.digests import checksums, state_digest
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import SHIPPING_NAME, Trajectory
from hf_dpzero.objectives.losses import base_model
from hf_dpzero.perturbation.sharding import address, whole
from hf_dpzero.perturbation.trainable import is_trained, quantised_kind
from hf_dpzero.reporting.provenance import base_names, resolve_path
from hf_dpzero.reporting.weights import (
    JOINED,
    names_on_disk,
    open_each,
    open_weights,
    plain_name,
    saved_tensors,
)
from hf_dpzero.reporting.wording import (
    DECLARED,
    EQUAL,
    EQUAL_BUT_NEW,
    EXTENDED,
    NOT_COMPARED,
    TRAINED,
)

_MARK, _END = "_hf_dpzero_started_from", "_hf_dpzero_ended_in"
_ADVICE = (
    "load the base model again, or set base_is_public: true if what it is now may be taken as public; "
    "the report then says so."
)
LOST_TO_ROUNDING = 1e-3
"""Of a weight's standard deviation, at most; in half precision 16 of its steps."""
_ROUNDING = 64 * torch.finfo(torch.float32).eps
SUBTRACTED = frozenset(("pissa", "olora"))
"""Those that are computed from the weights alone, and taken off them; a script's own may read rows."""
UNRELATED = 0.1
"""Cosine of two matrices, below which neither came out of the other."""


class Comparison(NamedTuple):
    """A model's parameters beside the tensors of the base that it names.

    Attributes:
      differing: names of parameters and buffers whose values are not the base's.
      fresh: names of parameters that the base does not have, such as a new head or adapter.
      residual: names of weights that are the base's without what the adapter on them adds.
    """

    differing: list[str]
    fresh: list[str]
    residual: list[str]


def mark_as_trained(model: nn.Module, started_from: str, ended_in: str) -> None:
    """Notes on a model, and on all its parts, that a run has changed it.

    The note survives copies, and adapters that are put on or taken off.
    """
    # On every part: a head or an encoder may go on alone, in another model.
    for module in model.modules():
        vars(module).setdefault(_MARK, started_from)
        vars(module)[_END] = ended_in


def check_start(
    model: nn.Module, declared_public: bool, extended: str | None = None, private: bool = True
) -> tuple[str, Comparison | None]:
    """Refuses a model that was trained before, unless the user declares it public.

    A model that was put back to what it was before training passes. What no name leads to, and what
    the base does not have, is taken as it is; a LoRA adapter that already does something is not.

    Args:
      model: as the run starts with it.
      declared_public: the setting `base_is_public`.
      extended: folder of a run that this one continues from (see `check_extended_start`).
      private: whether the run claims anything; else nothing is refused.

    Returns:
      The report's `base_weights`, and the comparison with the named base, if there was one.

    Raises:
      ValueError: it was trained by a run of this process, or differs from the base that it names.
    """
    if extended is not None:
        return check_extended_start(model, extended), None
    marks = {vars(module).get(_MARK) for module in model.modules()} - {None}
    # A model that was put back to what it was has forgotten the rows.
    marks -= {state_digest(model)} if marks else set()
    refused = private and not declared_public
    if marks and refused:
        raise ValueError(
            "this model was trained on the private data already, by an earlier run of this process, "
            f"whose cost is not in this run's epsilon: {_ADVICE} To continue that run, use "
            "resume_from_checkpoint; to spend more on its result, extends_run."
        )
    compared = compare_with_named(model)
    changed = _changed(model, compared)
    if changed and refused:
        own = sorted({str(init) for init in initialisations(model).values()} - {"True"})
        cause = f" or started so by init_lora_weights={', '.join(own)}" if own else ""
        raise ValueError(
            f"{changed[0]} and {len(changed) - 1} more tensors are not what the base model "
            f"{', '.join(base_names(model)) or '(fresh adapters)'} has: the model was changed after it "
            f"was loaded{cause}, and if private rows did it, this run's epsilon does not cover that: "
            f"{_ADVICE}"
        )
    if marks or changed:
        return (DECLARED if declared_public else TRAINED), compared
    if compared:
        return (EQUAL_BUT_NEW if compared.fresh else EQUAL), compared
    return DECLARED if declared_public else NOT_COMPARED, None


def started_from(model: nn.Module, folder: str) -> tuple[str, int]:
    """Compares a model with the folder that it was loaded from.

    Returns:
      Its `base_weights`, and how many of its tensors the folder does not have.
    """
    compared = compare_with_named(model, [folder])
    if _changed(model, compared):
        return TRAINED, 0
    if compared is None:
        return NOT_COMPARED, 0
    return (EQUAL_BUT_NEW if compared.fresh else EQUAL), len(compared.fresh)


def _changed(model: nn.Module, compared: Comparison | None) -> list[str]:
    residual = compared.residual if compared else ()
    return [*(compared.differing if compared else ()), *trained_adapters(model, (), residual)]


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
    if compared and compared.differing:  # by that run's start, such as PiSSA's
        header = Trajectory.load(Path(folder) / SHIPPING_NAME).header
        if header.get("frozen_digest") == digest_frozen(model):
            covered |= {address(p) for p in named.values() if not p.requires_grad}
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


def digest_frozen(model: nn.Module, known: Mapping[str, str] | None = None) -> str:
    """Returns SHA-256 (hex) over the frozen parameters, which a resumed run must find unchanged.

    `known` are `checksums` of all parameters, which are not read again then.
    """
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    sums = (
        checksums(frozen.items()) if known is None else {n: known[n] for n in known.keys() & frozen}
    )
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()


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


def initialisations(model: nn.Module) -> dict[str, Any]:
    """Returns `init_lora_weights` of the LoRA adapters of a PEFT model, by name."""
    configs = getattr(model, "peft_config", None)
    every = configs.items() if isinstance(configs, Mapping) else ()
    return {k: c.init_lora_weights for k, c in every if hasattr(c, "init_lora_weights")}


@torch.no_grad()
def trained_adapters(
    model: nn.Module, covered: Collection[int] = (), residual: Collection[str] = ()
) -> list[str]:
    """Returns the names of LoRA layers that add something, or were initialised from rows.

    Args:
      model: any.
      covered: addresses (`data_ptr`) of tensors that are known; layers of these are left out.
      residual: weights that lack what their layers add, which may then add something.
    """
    # PEFT has other kinds that read rows; `check_adapters` refuses them, for they change the base.
    of_rows = {key for key, init in initialisations(model).items() if init == "eva"}
    found = []
    for name, layer in model.named_modules():
        balanced = f"{name}.base_layer.weight" in residual
        for key, factors in _adapters_on(layer):
            if all(address(factor) in covered for factor in factors):
                continue
            added, rounding = _added(layer, key, factors)
            if key in of_rows or not (balanced or float(added.abs().max()) <= rounding):
                found.append(f"{name}.lora.{key}")
    return found


def _adapters_on(layer: nn.Module) -> Iterator[tuple[str, list[Tensor]]]:
    """The LoRA adapters of a layer by name, each with the factors A, B (and of AdaLoRA E)."""
    for kind in ("lora", "lora_embedding"):
        parts = [getattr(layer, f"{kind}_{part}", None) or {} for part in "ABE"]
        for key in parts[0]:
            yield key, [getattr(p[key], "weight", p[key]) for p in parts if key in p]


def _added(layer: Any, key: str, factors: Sequence[Tensor]) -> tuple[Tensor, float]:
    """What an adapter adds to the weight of its layer, and a bound on its rounding."""
    if not all(bool(whole(factor).detach().ne(0).any()) for factor in factors):
        return torch.zeros(1), 0.0
    if len(factors) > 2 or not hasattr(layer, "get_delta_weight"):
        return torch.ones(1), 0.0
    down, up = (whole(factor).detach().float() for factor in factors)
    size = up.flatten(1).norm(dim=1).max() * down.flatten(1).norm(dim=0).max()
    dtype, error = layer.get_base_layer().weight.dtype, _ROUNDING
    # PEFT casts fresh factors to the weight's dtype and then to float32, where training moves them off
    # the coarser numbers.
    on_grid = all(f.dtype != dtype and torch.equal(f, f.to(dtype).to(f.dtype)) for f in factors)
    if dtype.is_floating_point and on_grid:
        error = max(error, torch.finfo(dtype).eps)
    added = whole(layer.get_delta_weight(key)).detach().float().cpu()
    rounding = error * float(size) * abs(layer.scaling[key])
    if dtype.is_floating_point:
        rounding = min(rounding, _most(whole(layer.get_base_layer().weight).detach()))
    return added, rounding


def _most(weight: Tensor) -> float:
    """What rounding may move a weight by (0 with NaN in it); factors could hide anything in more."""
    share = max(LOST_TO_ROUNDING, 16 * torch.finfo(weight.dtype).eps)
    return share * float(weight.float().std(correction=0).nan_to_num(0.0))


def _without_adapters(model: nn.Module, name: str, own: Tensor, tensor: Tensor) -> bool:
    """Whether a weight is a base's `tensor` minus what adapters add to it (PiSSA, OLoRA).

    The model then computes what its base does, up to the rounding of the subtraction.
    """
    layer, own = model.get_submodule(name.rpartition(".base_layer.")[0]), whole(own).detach().cpu()
    saved, rounding = tensor.to(own.dtype).float(), _ROUNDING * float(tensor.abs().max())
    left = saved
    for added, error in (_added(layer, *adapter) for adapter in _adapters_on(layer)):
        left, rounding = left - added, rounding + error
    rounding = min(rounding, _most(tensor.to(own.dtype)))
    low, high = (left - rounding).to(own.dtype), (left + rounding).to(own.dtype)
    return not torch.equal(left, saved) and bool(((low <= own) & (own <= high)).all())


@torch.no_grad()
def compare_with_named(model: nn.Module, names: Sequence[str] | None = None) -> Comparison | None:
    """Compares a model with the checkpoints that its configuration names, where they lie here.

    A parameter belongs to a tensor of the checkpoint if one's name ends in the other's and the shapes
    are equal; so do saved buffers that the checkpoint has. Of token embeddings that were resized, the
    tokens that both have are compared. The checkpoint's values are taken in the parameter's dtype.

    Args:
      model: any; parts such as an encoder may name their own base.
      names: of checkpoints that it was surely loaded from; others are not looked at, and values that
        have nothing to do with theirs differ.

    Returns:
      None if nothing could be compared, or no difference was found and not all could: no name, not on
      this machine, no safetensors, other names, experts saved one by one, quantised weights, or a
      model that was made anew and has the name from its configuration.
    """
    named = dict(model.named_parameters())
    if any(quantised_kind(parameter) is not None for parameter in named.values()):
        return None
    subtracted = SUBTRACTED.issuperset(map(str, initialisations(model).values()))
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    differing, fresh, residual = list[str](), list[str](), list[str]()
    related, embeddings, renamed = set[bool](), set[int](), names_on_disk(model)
    for part in ("get_input_embeddings", "get_output_embeddings"):
        with contextlib.suppress(NotImplementedError, AttributeError):
            embeddings.add(id(getattr(base_model(model), part)().weight))
    with _sources(base_names(model) if names is None else names) as sources:
        for name, parameter in {**named, **buffers}.items():
            tensors = [
                tensor
                for tensor in _candidates(renamed.get(plain_name(name), plain_name(name)), sources)
                if tensor.shape == parameter.shape
                or (id(parameter) in embeddings and tensor.shape[1:] == parameter.shape[1:])
            ]
            if not any(tensor.shape == parameter.shape for tensor in tensors):
                fresh += [name] if name in named else []
            if not tensors:
                continue
            as_saved = any(_as_saved(parameter, tensor) for tensor in tensors)
            if name in named and parameter.dim() > 1:
                related.add(as_saved or any(_related(parameter, tensor) for tensor in tensors))
            if not as_saved:
                whole_ones = [t for t in tensors if t.dim() > 1 and t.shape == parameter.shape]
                adapted = ".base_layer." in name and subtracted
                without = (_without_adapters(model, name, parameter, t) for t in whole_ones)
                (residual if adapted and any(without) else differing).append(name)
    # Where every parameter is fresh the names have nothing in common, or where no matrix is related
    # the values: nothing was compared.
    joined = any(renamed.get(plain_name(name)) == JOINED for name in fresh)
    unrelated = related == {False} and names is None
    unknown = len(fresh) == len(named) or unrelated or (joined and not differing)
    return None if unknown else Comparison(differing, fresh, residual)


def _related(parameter: Tensor, tensor: Tensor) -> bool:
    """Whether two matrices are correlated in the rows that both have."""
    rows = min(len(parameter), len(tensor))
    own, saved = (t[:rows].flatten().double() for t in (whole(parameter).detach().cpu(), tensor))
    least = max(UNRELATED, 6 / math.sqrt(len(own)))  # of random ones, six deviations
    return bool((own @ saved).abs() > least * own.norm() * saved.norm())


def are_fresh(
    model: nn.Module, pattern: str | None, which: Callable[[Iterable[bool]], bool] = all
) -> bool:
    """Whether the checkpoints that a model names are here, and lack `all` trained tensors, or `any`."""
    trained = [(n, p) for n, p in model.named_parameters() if is_trained(n, p, pattern)]
    renamed = names_on_disk(model)
    with _sources(base_names(model)) as sources:
        fresh = (  # read one by one, no more than it takes
            not any(
                tensor.shape == parameter.shape
                for tensor in _candidates(renamed.get(plain_name(name), plain_name(name)), sources)
            )
            for name, parameter in trained
        )
        return bool(trained) and bool(sources) and which(fresh)


@contextlib.contextmanager
def _sources(names: Iterable[str]) -> Iterator[list[Mapping[str, Any]]]:
    """The tensors of the named checkpoints, where they lie here, by file."""
    with contextlib.ExitStack() as stack:
        folders = {folder for name in names for folder in _folders_of(name)}
        opened = [stack.enter_context(open_each(folder)) for folder in sorted(folders)]
        yield [tensors for files in opened for tensors in files]


def _as_saved(parameter: Tensor, tensor: Tensor) -> bool:
    """Whether the rows that both have are equal."""
    own = whole(parameter).detach().cpu()
    if own.dim():
        own, tensor = own[: len(tensor)], tensor[: len(own)]
    return torch.equal(tensor.to(own.dtype), own)


def _folders_of(name: str) -> list[Path]:
    """Where a name leads to without the network: a folder, or every revision in the Hub's cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(resolve_path(name))
    if folder.is_dir():
        return [folder.resolve()]
    cached = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"))
    return list(cached.glob("snapshots/*"))


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
                rest = key.partition(".")[2]
                # a decoder under a sentence_classifier is `encoder`, and `model` in its checkpoint
                if rest == name or ("." in rest and name == f"encoder.{rest}"):
                    yield files[key].get_tensor(key)
