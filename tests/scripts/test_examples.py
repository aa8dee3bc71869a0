"""Every example of scripts/examples runs on a tiny model and tiny data, and its README shows it."""

from __future__ import annotations

import csv
import functools
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import transformers
from PIL import Image
from tiny_language_models import (
    WORDS,
    roberta_tokenizer,
    save_causal_lm,
    save_encoder,
    seeded,
)
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

EXAMPLES = Path(__file__).resolve().parents[2] / "scripts" / "examples"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
Row = dict[str, Any]


def sentence(number: int) -> str:
    """Eight words that tell rows apart."""
    generator = np.random.default_rng(number)
    return " ".join(WORDS[2 + int(place)] for place in generator.integers(0, len(WORDS) - 2, 8))


def classified(number: int) -> Row:
    return {"text": sentence(number), "label": ("good", "bad")[number % 2]}


def asked(number: int) -> Row:
    context = sentence(number)
    start = context.rindex(" ") + 1
    answer = {"text": [context[start:]], "answer_start": [start]}
    return {"question": "was it", "context": context, "answers": answer}


def tagged(number: int) -> Row:
    words = sentence(number).split()
    return {"tokens": words, "ner_tags": ["X" if "film" in word else "O" for word in words]}


def chosen(number: int) -> Row:
    question, *choices = (sentence(5 * number + i) for i in range(4))
    return {
        "question": question,
        **{f"choice{i}": text for i, text in enumerate(choices)},
        "label": number % 3,
    }


def summarised(number: int) -> Row:
    return {"document": sentence(number), "summary": sentence(number)[:9]}


def told(number: int) -> Row:
    return {"text": sentence(number)}


def chatted(number: int) -> Row:
    turns = {"user": sentence(number), "assistant": "good"}
    return {"messages": [{"role": role, "content": text} for role, text in turns.items()]}


def save_chat_model(folder: Path) -> Path:
    save_causal_lm(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def save_summariser(folder: Path) -> Path:
    tokenizer = roberta_tokenizer()
    sides = {
        f"{part}_{what}": number
        for part in ("encoder", "decoder")
        for what, number in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 24))
    }
    sizes = {"vocab_size": len(tokenizer), "d_model": 16, "max_position_embeddings": 64, **sides}
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    model = seeded(lambda: BartForConditionalGeneration(BartConfig(**sizes, **ids)), 0)
    model.generation_config.max_length = 12
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_image_model(folder: Path) -> Path:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "image_size": 8, "patch_size": 4}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3}
    config = ViTConfig(**sizes, **layers)
    seeded(lambda: ViTForImageClassification(config), 0).save_pretrained(folder)
    # the one without torchvision, which older releases call by the plain name
    plain = getattr(transformers, "ViTImageProcessorPil", None) or transformers.ViTImageProcessor
    plain(size={"height": 8, "width": 8}).save_pretrained(folder)
    return folder


def write(path: Path, rows: list[Row]) -> str:
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def draw(folder: Path) -> str:
    for split, (first, count) in {"train": (0, 24), "validation": (50, 8)}.items():
        for number in range(first, first + count):
            path = folder / split / ("dark", "light")[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
    return str(folder)


CASES: dict[str, tuple[Callable[[Path], Path], Callable[[int], Row] | None, str, str]] = {
    "text_classification": (save_encoder, classified, ".csv", "eval_accuracy"),
    "question_answering": (save_encoder, asked, ".json", "eval_exact_match"),
    "token_classification": (save_encoder, tagged, ".json", "eval_accuracy"),
    "multiple_choice": (save_encoder, chosen, ".csv", "eval_accuracy"),
    "summarization": (save_summariser, summarised, ".csv", "eval_f1"),
    "causal_lm": (save_causal_lm, told, ".csv", "eval_loss"),
    "sft": (save_chat_model, chatted, ".json", "eval_loss"),
    "image_classification": (save_image_model, None, "", "eval_accuracy"),
}


@pytest.mark.parametrize("name", list(CASES))
def test_the_example_trains_privately(name, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    save, row, kind, metric = CASES[name]
    if row is None:
        source = ["--dataset_name", draw(tmp_path / "pictures")]
    else:
        train, validation = (
            write(tmp_path / f"{split}{kind}", [row(number) for number in numbers])
            for split, numbers in {"train": range(24), "validation": range(50, 58)}.items()
        )
        source = ["--train_file", train, "--validation_file", validation]
    metrics = importlib.import_module(name).main(
        [
            *("--model_name_or_path", str(save(tmp_path / "model")), *source, "--max_tokens", "24"),
            *("--output_dir", str(tmp_path / "out"), "--target_epsilon", "8", "--max_steps", "2"),
            *("--expected_batch_size", "8", "--microbatch_size", "4", "--learning_rate", "1e-3"),
            *("--use_cpu", "--report_to", "none", "--disable_tqdm", "True"),
        ]
    )
    assert np.isfinite(metrics[metric])
    assert "differentially private under adding or removing one" in capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "privacy_report.json").read_text())
    assert report["private"] and report["steps"] == 2 and report["num_examples"] == 24


def test_the_readme_has_a_row_for_every_example():
    files = {path.stem for path in EXAMPLES.glob("*.py")} - {"reading", "first_run"}
    table = re.findall(r"^\| \[`(\w+)\.py`\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert files == CASES.keys() == set(table) and len(table) == len(files)


def test_the_readmes_first_run_trains_a_head_with_nothing_chosen(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    script = importlib.import_module("first_run")
    save_encoder(tmp_path / "model")
    few = {"train": datasets.Dataset.from_list([{"text": "good film", "label": 1}] * 40)}
    few["validation"] = datasets.Dataset.from_list([{"text": "bad film", "label": 0}] * 8)
    monkeypatch.setattr(script, "files", lambda _: tmp_path)
    monkeypatch.setattr(script, "generate", lambda: datasets.DatasetDict(few))
    given = functools.partial(script.DPZeroConfig, max_steps=2, expected_batch_size=8, use_cpu=True)
    monkeypatch.setattr(script, "DPZeroConfig", given)
    monkeypatch.chdir(tmp_path)
    script.main()
    shown = capsys.readouterr().out
    assert "accuracy after:" in shown and "dpzero-adaptive, K = 32" in shown


@pytest.mark.parametrize("name", list(CASES))
def test_an_example_is_short_and_marks_what_is_private(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert 20 < len(text.splitlines()) < 100
    private = [line for line in text.splitlines() if "DPZero" in line and "import" not in line]
    marked = [line for line in text.splitlines() if "# private: " in line]
    assert 3 <= len(marked) <= 5 and all("# private: " in line for line in private)
