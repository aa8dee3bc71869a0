"""The census finds training arguments in scripts and notebooks, and says what is refused of them."""

from __future__ import annotations

import json

from scripts.census import census, report

PLAIN = """
from transformers import Trainer, TrainingArguments
args = TrainingArguments("out", evaluation_strategy="epoch", warmup_ratio=0.1, logging_dir="logs",
                         learning_rate=rate, fp16=torch.cuda.is_available(), bf16=half)
Trainer(model, args)
"""
REFUSED = """
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments
args = Seq2SeqTrainingArguments("out", predict_with_generate=True, debug="x", deepspeed=made)
"""
OTHERS = """
from setfit import Trainer, TrainingArguments
Trainer(model, TrainingArguments(batch_size=16))
"""


def test_a_folder_of_scripts_is_counted(tmp_path):
    """A copy, another library's class, no trainer and broken files count for nothing."""
    cells = [
        "!pip install transformers",
        REFUSED,
        "this is no Python",
        "Seq2SeqTrainer(model, args)",
    ]
    notebook = {
        "cells": [{"cell_type": "code", "source": [*text.splitlines(True)]} for text in cells]
    }
    files = {
        **{"a.py": PLAIN, "copy/a.py": PLAIN, "b.ipynb": json.dumps(notebook), "c.py": OTHERS},
        **{"d.py": REFUSED, "e.py": "def", "f.ipynb": "{}"},
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    kept, refused = sorted(census([tmp_path]), key=lambda v: v.script.name)
    assert (kept.script.name, kept.reasons, kept.dropped) == ("a.py", (), ("logging_dir",))
    assert (refused.script.name, set(refused.reasons)) == ("b.ipynb", {"`debug`", "`deepspeed`"})
    words = report([kept, refused])
    assert words.startswith("1 of 2 scripts are accepted")
    assert "| `debug` | 1 |" in words and "`logging_dir` (1)" in words
