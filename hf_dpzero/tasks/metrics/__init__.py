"""Metrics of the tasks: computed offline, one module each, imported on first use (PEP 562).

`evaluate.load` asks the network for a script, so each metric is an `evaluate.Metric` class of
ours with a short function in front of it. Questions with several right answers also have scores
of one example, pure functions that import neither `evaluate` nor `datasets`: they serve as
training objectives too. Every number is a fraction in [0, 1].

| function | returns | class |
|---|---|---|
| `accuracy(predictions, references)` | "accuracy" | `Accuracy` |
| `macro_f1(predictions, references)` | "macro_f1" | `MacroF1` |
| `squad_scores(predictions, references)` | "exact_match", "f1" | `Squad` |
| `drop_scores(predictions, references)` | "exact_match", "f1" | `Drop` |
| `squad_exact_match(prediction, golds)`, `squad_f1(prediction, golds)` | one example's score | |
| `drop_exact_match(prediction, golds)`, `drop_f1(prediction, golds)` | one example's score | |

>>> from hf_dpzero.tasks.metrics import squad_f1
>>> squad_f1("in October", ["October"]) == 2 / 3
True
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_dpzero.tasks.metrics.answer_scores import Drop as Drop
    from hf_dpzero.tasks.metrics.answer_scores import Squad as Squad
    from hf_dpzero.tasks.metrics.answer_scores import drop_scores as drop_scores
    from hf_dpzero.tasks.metrics.answer_scores import squad_scores as squad_scores
    from hf_dpzero.tasks.metrics.class_accuracy import Accuracy as Accuracy
    from hf_dpzero.tasks.metrics.class_accuracy import accuracy as accuracy
    from hf_dpzero.tasks.metrics.class_f1 import MacroF1 as MacroF1
    from hf_dpzero.tasks.metrics.class_f1 import macro_f1 as macro_f1
    from hf_dpzero.tasks.metrics.drop import drop_exact_match as drop_exact_match
    from hf_dpzero.tasks.metrics.drop import drop_f1 as drop_f1
    from hf_dpzero.tasks.metrics.squad import squad_exact_match as squad_exact_match
    from hf_dpzero.tasks.metrics.squad import squad_f1 as squad_f1

# No name below may be a module's: importing that module would put it in the name's place.
_HOME = {
    "Accuracy": "class_accuracy",
    "Drop": "answer_scores",
    "MacroF1": "class_f1",
    "Squad": "answer_scores",
    "accuracy": "class_accuracy",
    "drop_exact_match": "drop",
    "drop_f1": "drop",
    "drop_scores": "answer_scores",
    "macro_f1": "class_f1",
    "squad_exact_match": "squad",
    "squad_f1": "squad",
    "squad_scores": "answer_scores",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
