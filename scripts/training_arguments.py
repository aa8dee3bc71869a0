"""What Hugging Face's training arguments do: `python -m scripts.training_arguments` writes the page."""

from __future__ import annotations

from pathlib import Path

from hf_dpzero.checks.overrides import INSTEAD
from hf_dpzero.settings.hf_arguments import FIELDS, OTHER, REFUSED, UNUSED, WORKS, Use
from hf_dpzero.settings.nested import FIRST_ORDER, METHODS, PRIVATE, ZEROTH_ORDER
from scripts.hf_trainer_tests.cannot_hold import CANNOT_HOLD, CANNOT_HOLD_PRIVATELY
from scripts.markdown import table

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "training_arguments.md"

_INTRODUCTION = """\
# Training arguments

Written by `python -m scripts.training_arguments` from the tables of `settings/hf_arguments.py`.

`DPZeroConfig` has all fields of `TrainingArguments`, `DPZeroSeq2SeqConfig` those of
`Seq2SeqTrainingArguments` too. A field that would break a run or its guarantee is refused with a
`ValueError` when the configuration is made. A changed field without effect
or of another meaning is named in one warning, and so is a field of a later version of transformers.
Where no [method](methods.md) is named, all are meant.
"""
_TRAINER = {
    "`compute_per_example_loss`": "is trained on",
    "`compute_loss_func`, an overridden `compute_loss`": "trained on, one row at a time, with "
    "`num_items_in_batch=None`; beside `compute_per_example_loss`, which is faster, evaluation uses it. "
    "It may not log, or keep anything of rows",
    "`optimizers=(None, scheduler)`": "zeroth order: its learning rates are used; else refused",
    "`optimizers=(optimizer, ...)`, `optimizer_cls_and_kwargs`": "first order: an AdamW or SGD as the "
    "method has it is used, with its scheduler; zeroth order: no effect, but a scheduler gives the "
    "shape of `learning_rate`",
    "`create_optimizer()`, `create_scheduler()`, `args.get_warmup_steps()`": "as in Trainer; train() "
    "makes its own",
    "`get_train_dataloader()`, `train_dataloader` of callbacks": "has a length; which rows are in a "
    "batch is secret, so only the training loop iterates over it",
    "`model_init`": "called once, before the checks",
    "`hyperparameter_search()`": "refused",
    "an overridden `create_scheduler`": "is used",
    f"an overridden {', '.join(f'`{name}`' for name in INSTEAD)}": "refused, with what to use instead",
    "`preprocess_logits_for_metrics`, `compute_metrics`, `data_collator`": "as in Trainer",
    "callbacks that stop the training or end an epoch": "as in Trainer; the report counts the "
    "steps taken",
    "callbacks that set `optimizer.param_groups[i]['lr']`": "before a step: taken, written to the "
    "ledger and logged; several rates are refused",
    "`push_to_hub(...)`": "as in Trainer, but for `blocking=False`; entries of its card are named in a "
    "warning",
}
_TESTS = """\
## Hugging Face's own trainer tests

`python -m scripts.hf_trainer_tests` runs `tests/trainer` of a checkout of transformers with
`DPZeroTrainer` in place of `Trainer`. Of transformers 5.5.0.dev0 (March 2026), under 5.23: 194 pass with
Trainer, without accelerators, a network or optional packages; of these 168 pass with ours and method
mezo, and 161 with dpzero at epsilon 8. B is `per_device_train_batch_size` there, and evaluated rows
differ a little from training rows in private runs.
"""
_NAMED = {
    frozenset(METHODS): "",
    frozenset(PRIVATE): "private",
    frozenset(ZEROTH_ORDER): "zeroth order",
    frozenset(FIRST_ORDER): "first order",
}
"""Sets of methods with a name; all need none."""
_SECTIONS = {
    REFUSED: ("Refused", "why, and what to do"),
    UNUSED: ("Without effect", "why"),
    OTHER: ("Of another meaning", "what it means"),
    WORKS: ("As in Trainer, with a remark", "remark"),
}


def page() -> str:
    """The Markdown, ending in a new line."""
    parts = [_INTRODUCTION]
    for kind, (title, column) in _SECTIONS.items():
        lines = []
        for text, uses in _by_text(kind).items():
            use = next(iter(uses.values()))
            where = f", with `{use.where}`" if use.where else ""
            methods = _NAMED.get(frozenset(use.methods), ", ".join(use.methods))
            names = ", ".join(f"`{name}`" for name in uses)
            lines.append([names, methods + where, text.rstrip(".")])
        parts.append(f"## {title}\n\n{table(('field', 'methods', column), lines)}")
    plain = [name for name, uses in FIELDS.items() if uses == (Use(WORKS),)]
    parts.append(f"All others work as in Trainer: {', '.join(f'`{name}`' for name in plain)}.\n")
    given = table(("given", "what happens"), _TRAINER.items())
    parts.append(f"## What is passed to the trainer, or overridden\n\n{given}")
    lists = {"": CANNOT_HOLD, " (private runs)": CANNOT_HOLD_PRIVATELY}
    cannot = [(why + of, len(t)) for of, each in lists.items() for why, t in each.items()]
    return "\n".join([*parts, _TESTS, table(("cannot hold, because", "tests"), cannot)])


def _by_text(kind: str) -> dict[str, dict[str, Use]]:
    """Text -> the fields that have it."""
    found: dict[str, dict[str, Use]] = {}
    for name, uses in FIELDS.items():
        taken: tuple[str, ...] = ()
        for use in uses:
            rest = use._replace(methods=tuple(m for m in use.methods if m not in taken))
            if use.kind == kind and use.text:
                found.setdefault(use.text, {})[name] = rest
            taken += () if use.where else use.methods
    return found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
