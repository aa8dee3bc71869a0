"""The quickstart's data: messages to a clinic, urgent or routine, written by this project.

No network and no real person: every message is a situation, filled with a person and a time,
between an opening and a closing (`configs/quickstart_messages.yaml`). Patients' messages are the sort
of text that differential privacy is for, and "urgent or routine" is a distinction that a sentence
encoder only half sees before training, because urgent messages may sound calm and routine ones may
mention pain or a hospital.

A validation message shares no opening, closing, person or time with any training message, and its
situations are the training situations and a fifth more that training never shows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

import datasets

from hf_dpzero.shipped import shipped_folder
from hf_dpzero.tasks.description import DataArguments
from hf_dpzero.values import parse_yaml

_SIZES = {"train": 8192, "validation": 1024}


def generated(data: DataArguments) -> datasets.DatasetDict:
    """Generates the task's rows, as `generate`.

    Raises:
      ValueError: a recipe that names rows of its own.
    """
    for name in ("dataset_name", "train_file", "validation_file"):
        if (value := getattr(data, name)) is not None:
            raise ValueError(
                f"{name}={value!r}: the quickstart task generates its own text; "
                "set task to text_classification to use your data."
            )
    return generate()


def generate() -> datasets.DatasetDict:
    """Generates 8192 distinct training and 1024 distinct validation rows, half of them urgent.

    Guarantee: always the same rows; no text occurs twice, in either split.
    """
    written = (shipped_folder("configs") / "quickstart_messages.yaml").read_text(encoding="utf-8")
    parts = parse_yaml(written)
    # The seed is part of the published figures, which are for exactly these rows.
    generator, splits = random.Random(20240503), datasets.DatasetDict()
    label = datasets.ClassLabel(names=["routine", "urgent"])
    features = datasets.Features({"text": datasets.Value("string"), "label": label})
    for split, size in _SIZES.items():
        rows: list[dict[str, str | int]] = []
        for index, name in enumerate(label.names):
            situations = parts[name][: parts[split]["situations"]]
            texts = generator.sample(list(_messages(situations, parts[split])), size // 2)
            rows += [{"text": text, "label": index} for text in texts]
        generator.shuffle(rows)
        splits[split] = datasets.Dataset.from_list(rows, features=features)
    return splits


def _messages(situations: Sequence[str], fillings: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Every message that the situations and fillings can make."""
    openings, closings, people = (fillings[part] for part in ("openings", "closings", "people"))
    times = zip(fillings["past"], fillings["future"], strict=True)
    parts = itertools.product(situations, openings, closings, people, times)
    for situation, opening, closing, person, (past, future) in parts:
        core = situation.format(who=person, past=past, future=future)
        # A message without an opening begins with the situation, as a sentence does.
        first = core if opening else core[0].upper() + core[1:]
        yield " ".join(part for part in (opening, f"{first}.", closing) if part)
