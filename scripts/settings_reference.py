"""Every setting and what it costs: `python -m scripts.settings_reference` writes docs/settings.md."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_dpzero.estimators.finite_differences import STRATEGIES
from hf_dpzero.ledger.update_rules import UPDATE_RULES
from hf_dpzero.perturbation.directions import DISTRIBUTIONS
from hf_dpzero.privacy.events import ACCOUNTANTS
from hf_dpzero.privacy.mechanisms.base import RELATIONS
from hf_dpzero.privacy.selection import WORDS
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.settings.config import CLIPPINGS, GRADIENTS, ROWS, SAMPLINGS, DPZeroConfig
from hf_dpzero.settings.correlation_settings import CORRELATIONS
from hf_dpzero.settings.group_settings import GROUP_WEIGHTS
from hf_dpzero.settings.hf_arguments import NEEDS
from hf_dpzero.settings.method_names import METHODS
from hf_dpzero.settings.ranges import RANGES
from hf_dpzero.tasks.arguments import DataArguments
from hf_dpzero.training.released_signal import ON_NO_SIGNAL
from scripts.setting_costs import COSTS, INHERITED, Cost
from scripts.training_arguments import DOCS

PAGE = DOCS / "settings.md"
CLASSES: Mapping[str, type] = {
    kind.__name__: kind for kind in (DPZeroConfig, ModelArguments, DataArguments)
}
CHOICES: Mapping[str, Sequence[str]] = {
    "method": METHODS, "clipping": tuple(CLIPPINGS), "per_example_gradients": GRADIENTS,
    "direction": DISTRIBUTIONS, "sampling": SAMPLINGS, "neighboring_relation": RELATIONS,
    "accountant": ACCOUNTANTS, "noise_distribution": ("gaussian", "laplace"),
    "update_rule": tuple(UPDATE_RULES), "tuning": WORDS,
    "perturbation_strategy": STRATEGIES, "rows_are": ROWS, "on_no_signal": ON_NO_SIGNAL,
    "group_weights": GROUP_WEIGHTS,
    "noise_correlation": CORRELATIONS,
    "torch_dtype": ("float32", "bfloat16", "float16", "auto"), "hub_strategy": ("end",),
}  # fmt: skip
LOWEST: Mapping[str, str] = {
    **dict.fromkeys(("logit_scale", "lora_alpha"), "above 0"),
    **dict.fromkeys(("lora_r", "num_virtual_tokens", "max_new_tokens"), "at least 1"),
    **dict.fromkeys(
        ("max_train_samples", "max_eval_samples", "num_examples_per_class"), "at least 1"
    ),
    **{"max_seq_length": "at least 2", "num_demonstrations": "at least 0"},
    **{"target_delta": "a number in (0, 1); 0 with Laplace noise"},
    **{"direction_key": "128 bits", "sampler_key": "64 hex digits"},
}
"""Ranges that no table of the package holds."""

_INTRODUCTION = """\
# Settings

Written by `python -m scripts.settings_reference`; the costs are in `scripts/setting_costs.py`.

A recipe is a flat YAML file of these settings. In a script `DPZeroConfig` takes those of its own part,
beside all fields of `TrainingArguments`, which have [a page of their own](training_arguments.md).
`DPZeroSeq2SeqConfig` adds no setting of this package: it is `DPZeroConfig` with the fields of
`Seq2SeqTrainingArguments`. On the command line each is an option: `--target_epsilon 2`.

*Costs in privacy* says what a setting does to the budget: to epsilon, to the noise at the same epsilon,
or to what is published. *Costs in time* includes memory. Letters are those of the
[table of symbols](index.md#symbols).
"""
_TITLES = {
    "DPZeroConfig": "`DPZeroConfig`",
    "ModelArguments": "`ModelArguments`, of recipes",
    "DataArguments": "`DataArguments`, of recipes",
}
_HEAD = "| setting | default | values | what it does | costs in privacy | costs in time |"


def page() -> str:
    """The Markdown, ending in a new line."""
    parts = [_INTRODUCTION]
    for name, kind in CLASSES.items():
        parts += [f"## {_TITLES[name]}\n", *_groups(name, kind)]
    parts += ["## Of `TrainingArguments`\n", _inherited()]
    return "\n".join(parts)


def own_fields(kind: type) -> dict[str, dataclasses.Field[Any]]:
    """The fields that a class declares itself, in their order."""
    declared = {field.name: field for field in dataclasses.fields(kind)}
    return {name: declared[name] for name in kind.__annotations__ if name in declared}


def what_they_do(kind: type) -> dict[str, str]:
    """Field -> its help, or its entry under `Attributes` of the class."""
    text = inspect.getdoc(kind) or ""
    section = text.partition("Attributes:\n")[2]
    entries = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", section, re.MULTILINE)
    written = {name: " ".join(entry.split()) for name, entry in entries}
    return {n: f.metadata.get("help", written.get(n, "")) for n, f in own_fields(kind).items()}


def _groups(name: str, kind: type) -> Iterator[str]:
    fields, help_of, hints = own_fields(kind), what_they_do(kind), typing.get_type_hints(kind)
    for title, costs in COSTS[name].items():
        yield f"### {title}\n"
        rows = [_HEAD, "|---|---|---|---|---|---|"]
        for setting, cost in costs.items():
            cells = (
                f"`{setting}`",
                _default(fields[setting].default, cost),
                _values(setting, hints[setting], cost),
                _needed(help_of[setting], setting),
                cost.privacy,
                cost.time,
            )
            rows.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
        yield "\n".join([*rows, ""])


def _default(value: Any, cost: Cost) -> str:
    if value is dataclasses.MISSING:
        return "none: must be given"
    if value is None:
        return f"None: {cost.none}"
    return f"`{value}`"


def _values(name: str, hint: Any, cost: Cost) -> str:
    """Type, range or choices, and unit."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind = next((m for m in members if m is not type(None)), hint)
    words = CHOICES.get(name) or (typing.get_args(kind) if _is_literal(kind) else ())
    if words:
        return ", ".join(f"`{word}`" for word in words)
    allowed = RANGES[name].words if name in RANGES else LOWEST.get(name, "")
    shown = kind.__name__ if kind in (bool, int, float, str) else str(kind)
    return "; ".join(filter(None, (f"`{shown}`", allowed, cost.unit and f"in {cost.unit}")))


def _is_literal(kind: Any) -> bool:
    return typing.get_origin(kind) is typing.Literal


def _needed(text: str, name: str) -> str:
    """The help, and the setting that it needs where it does not say so itself."""
    needed = next(((s, v) for names, s, v in NEEDS if name in names.split()), None)
    if needed is None or text.startswith(needed[1][0]):
        return text
    setting, values = needed
    return f"{text.rstrip('.')}. For `{setting}`: {', '.join(values)}"


def _inherited() -> str:
    head = ["| field | what it does here | costs in privacy | costs in time |", "|---|---|---|---|"]
    rows = [
        f"| `{name}` | {text} | {cost.privacy} | {cost.time} |"
        for name, (text, cost) in INHERITED.items()
    ]
    return "\n".join(
        [*head, *rows, "", "All others: [training arguments](training_arguments.md).", ""]
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").rstrip(".")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
