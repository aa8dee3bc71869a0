"""What a trainer is given becomes what it trains: a model by name, an adapter, rows of text."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import nn

from hf_dpzero.checks.overrides import own_loss_name
from hf_dpzero.estimators.random_state import isolated_randomness
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.objectives.losses import PerExampleLoss
from hf_dpzero.parallel.offload import settle_offloaded
from hf_dpzero.settings.config import DPZeroConfig
from hf_dpzero.training.texts import TextRows

FUNCTIONS = (
    *("data_collator", "compute_metrics", "compute_per_example_loss", "compute_loss_func"),
    *("preprocess_logits_for_metrics", "formatting_func"),
)


def made_once(make: Callable[..., Any]) -> Any:
    """Returns the model of a script's `model_init`; a search would give it a trial, here None."""
    needed = [p for p in inspect.signature(make).parameters.values() if p.default is p.empty]
    takes_trial = any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in needed)
    return make(None) if takes_trial else make()


def by_name(kind: type, positional: Sequence[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments behind `model` and `args` by their names in the class that the mixin stands over.

    Args:
      kind: a class under `DPZeroMixin`.
      positional: what was passed without a name.
      settings: what was passed by name.

    Raises:
      TypeError: more arguments than there are names, or one given twice.
    """
    names: list[str] = []
    for parent in _beneath(kind):
        parameters = list(inspect.signature(parent.__init__).parameters.values())[1:]  # type: ignore[misc]
        here = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        names += [name for name in here if name not in names]
        if "__init__" in vars(parent) and all(p.kind is not p.VAR_POSITIONAL for p in parameters):
            break
    given = dict(zip(names[2:], positional, strict=False))  # the first two are model and args
    if len(given) < len(positional) or given.keys() & settings.keys():
        raise TypeError(
            f"{kind.__name__} takes {names}: {len(positional) + 2} arguments without a name are too "
            "many, or one was given by name as well."
        )
    return {**given, **settings}


def load_inputs(
    kind: type,
    model: nn.Module | str | None,
    args: DPZeroConfig,
    settings: dict[str, Any],
    own_loss: PerExampleLoss | None,
) -> tuple[nn.Module | str | None, TextRows | None]:
    """Loads a model given by name, puts the adapter on it and tokenises rows of text.

    Args:
      kind: class of the trainer; nothing is done for one that does it itself (`prepares_itself`).
      model: a model or a name.
      args: of the run.
      settings: the trainer's arguments by name; changed in place to what the class beneath takes.
      own_loss: `compute_per_example_loss`, with which any head will do; or None.

    Returns:
      The model, and what encodes rows of evaluation; None where nothing was done.

    Raises:
      ValueError: an argument of another kind, or rows that the model cannot be trained on.
    """
    if isinstance(model, nn.Module):
        settle_offloaded(model)  # adapters are put on weights that are there
    if prepares_itself(kind):
        _check_config(kind, args)
        return model, None
    _check_kinds(kind, model, {**settings, "compute_per_example_loss": own_loss})
    has_loss = own_loss is not None or bool(own_loss_name(kind, settings))
    peft_config = settings.pop("peft_config", None)
    if isinstance(model, (str, os.PathLike)):
        name = os.fspath(model)
        if settings.get("processing_class") is None:
            with contextlib.suppress(OSError, ValueError):  # the folder has none
                settings["processing_class"] = transformers.AutoProcessor.from_pretrained(name)
        model = load_named(name, args.seed, has_loss)
    if peft_config is not None:
        model = with_adapter(model, peft_config, args.seed)
    texts = TextRows(
        model,
        args,
        settings.get("processing_class"),
        settings.get("data_collator"),
        settings.pop("formatting_func", None),
    )
    for name, encode in (("train_dataset", texts.train), ("eval_dataset", texts.evaluated)):
        if settings.get(name) is not None:
            settings[name] = encode(settings[name])
    if texts.collator is not None:
        settings["data_collator"] = texts.collator
    return model, texts


def _check_config(kind: type, args: DPZeroConfig) -> None:
    """Refuses arguments that a trainer of TRL would make its own of, without the private ones."""
    parent = next((k for k in _beneath(kind) if k.__module__.startswith("trl.")), kind)
    config = parent.__name__.replace("Trainer", "Config")
    if parent is not kind and config not in {base.__name__ for base in type(args).__mro__}:
        raise ValueError(
            f"args is a {type(args).__name__}, and {parent.__name__} takes a {config}: make a dataclass "
            f"Config(DPZeroConfig, trl.{config}) and pass that."
        )


def prepares_itself(kind: type) -> bool:
    """Whether the class that the mixin stands over loads models and tokenises rows: TRL's do.

    Also one whose __init__ names `peft_config`, and one with `prepares_inputs = False`.
    """
    taken = [
        parent.__module__.partition(".")[0] == "trl" or "peft_config" in _parameters(parent)
        for parent in _beneath(kind)
    ]
    return any(taken) or not getattr(kind, "prepares_inputs", True)


def _parameters(parent: type) -> Sequence[str]:
    own = vars(parent).get("__init__")
    return () if own is None else tuple(inspect.signature(own).parameters)


def _beneath(kind: type) -> list[type]:
    """The classes that come after all of hf_dpzero's, `object` aside."""
    ours = [parent.__module__.startswith("hf_dpzero.") for parent in kind.__mro__]
    last = max(place for place, is_ours in enumerate(ours) if is_ours)
    return [parent for parent in kind.__mro__[last + 1 :] if parent is not object]


def _check_kinds(kind: type, model: object, settings: Mapping[str, Any]) -> None:
    if not (model is None or isinstance(model, (nn.Module, str, os.PathLike))):
        given = model.__name__ if isinstance(model, type) else f"a {type(model).__name__}"
        raise ValueError(
            f"model is {given}: pass a model, AutoModelForCausalLM.from_pretrained(name) say, or the "
            "name of one."
        )
    for name in FUNCTIONS:
        if settings.get(name) is not None and not callable(settings[name]):
            raise ValueError(
                f"{name} is a {type(settings[name]).__name__}, {settings[name]!r}: pass a function."
            )
    if not isinstance(settings.get("callbacks", []), (list, tuple, type(None))):
        raise ValueError(f"callbacks={settings['callbacks']!r} is no list: pass callbacks=[...].")
    for name in ("eval_dataset", "processing_class"):
        if isinstance(settings.get(name), bool):
            raise ValueError(f"{name}={settings[name]} is no {name}: leave it out.")
        if isinstance(settings.get(name), str):
            instead = "load_dataset" if name == "eval_dataset" else "AutoTokenizer.from_pretrained"
            raise ValueError(f"{name}={settings[name]!r} is a text: load it first, {instead}(...).")
    if "tokenizer" in settings and not any("tokenizer" in _parameters(p) for p in _beneath(kind)):
        raise ValueError(
            "tokenizer= is called processing_class= in a Trainer: rename the argument."
        )


def load_named(name: str, seed: int, has_loss: bool = False) -> nn.Module:
    """The model of a folder or Hub id, in float32, of the class that its configuration names.

    Args:
      name: a folder or a Hub id.
      seed: of the weights that the checkpoint lacks, such as a fresh head.
      has_loss: a loss was given, so that any class will do.

    Raises:
      ValueError: transformers does not have that class, or it is a base without a head.
    """
    from safetensors import SafetensorError

    config = transformers.AutoConfig.from_pretrained(name)
    names = getattr(config, "architectures", None) or [None]
    kind = getattr(transformers, str(names[0]), None)
    if kind is None:
        raise ValueError(
            f"model={name!r}: its config has architectures={names}, a class that transformers does not "
            "have: load it yourself (from_pretrained) and pass the model."
        )
    with isolated_randomness(seed):
        try:
            model = kind.from_pretrained(name, dtype=torch.float32)
        except SafetensorError as error:
            raise ValueError(f"model={name!r}: its weights are damaged ({error}).") from error
    try:
        if not has_loss:
            select_objective(model)
    except ValueError:
        raise ValueError(
            f"model={name!r} was saved as a {type(model).__name__}, without a head with a loss: load "
            "it with the head to be trained, AutoModelForCausalLM.from_pretrained say, and pass that."
        ) from None
    return model


def with_adapter(model: Any, peft_config: object, seed: int) -> nn.Module:
    """The model under a new adapter of PEFT; all else is frozen.

    Args:
      model: a plain model.
      peft_config: a `peft.PeftConfig`.
      seed: of the adapter's weights.

    Raises:
      ValueError: another kind of configuration, or a model that has an adapter.
    """
    import peft

    if not isinstance(peft_config, peft.PeftConfig):
        raise ValueError(
            f"peft_config is a {type(peft_config).__name__}: give a peft.PeftConfig, say LoraConfig()."
        )
    if isinstance(model, peft.PeftModel):
        raise ValueError(
            "peft_config was given for a model that has an adapter: leave peft_config out to train that "
            "one, or merge it first with model.merge_and_unload()."
        )
    with isolated_randomness(seed):
        return peft.get_peft_model(model, peft_config)
