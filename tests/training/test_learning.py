"""Tiny language models learn prompted tasks under a private budget, and only from an honest objective.

A RoBERTa and an OPT read the toy language of `toy_tasks` here. Then they are fine-tuned as a recipe
says: tokenizer, prompts, collator, objective, sampler, clip, calibrated noise from the operating
system. What is fixed in these runs is public (models, rows, settings); directions, batches and noise
are drawn anew each time, so the bounds below are far from what the runs reach.

Every bound stands between what learning reaches and what a broken objective can: labels that have
nothing to do with their texts, no signal at all, or the loss of other tokens than the answer's.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import toy_tasks
from filelock import FileLock
from torch import Tensor, nn

from hf_dpzero.recipes.build import build_trainer
from hf_dpzero.recipes.recipe import load_recipe
from hf_dpzero.training.dpzero_trainer import DPZeroTrainer

Rows = list[dict[str, Any]]

PRIVATE_ROWS = 4000
SETTINGS = {
    "method": "dpzero", "target_epsilon": 8.0, "num_directions": 8, "max_steps": 40, "clip": 2.0,
    "smoothing": 0.01, "lr_scheduler_type": "linear", "max_seq_length": 48,
    "per_device_train_batch_size": 64, "per_device_eval_batch_size": 100, "logging_strategy": "no",
    "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
}  # fmt: skip


REVIEWS = {"task": "sst2", "expected_batch_size": 64}
ROOMS = {
    "name": "rooms", "fields": ["context", "question"], "answers": "answer", "metric": "squad",
    "prompts": {"causal_lm": {"template": toy_tasks.ROOM_TEMPLATE}},
}  # fmt: skip
MASKED = {**REVIEWS, "prompt": "masked_lm", "learning_rate": 0.01}
CAUSAL = {**REVIEWS, "prompt": "causal_lm", "learning_rate": 0.02}
CANDIDATES = {
    **CAUSAL,
    "label_words": ["a terrible one", "a great one"],
    "expected_batch_size": 32,
}
ANSWERS = {
    "prompt": "causal_lm", "max_new_tokens": 4, "peft_method": "lora", "lora_r": 2,
    "learning_rate": 0.03, "expected_batch_size": 32,
}  # fmt: skip
"""Settings of recipes; without `task` it is that of `ROOMS`."""


@dataclass(frozen=True)
class Broken:
    """An objective that gets another batch than the task's collator made.

    Not one that predicts: the trainer evaluates by the honest one.
    """

    objective: Any
    change: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]

    @property
    def columns(self) -> tuple[str, ...]:
        return self.objective.columns

    def __call__(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.objective(model, self.change(inputs))


def prompt_instead(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The prompt is labelled, and the answer is not."""
    prompt = (inputs["labels"] == -100) & (inputs["attention_mask"] > 0)
    return {**inputs, "labels": inputs["input_ids"].masked_fill(~prompt, -100)}


def shuffled(rows: Rows, label: str) -> Rows:
    """Every row with the answer of another one: as many of each, and none has to do with its text."""
    answers = [row[label] for row in rows]
    random.Random(0).shuffle(answers)
    return [{**row, label: answer} for row, answer in zip(rows, answers)]


@dataclass(frozen=True)
class Outcome:
    """Scores of public rows before and after: "loss", and "accuracy" or "f1"."""

    before: Mapping[str, float]
    after: Mapping[str, float]
    trainer: DPZeroTrainer

    @property
    def loss(self) -> float:
        """Share of the first loss that is left."""
        return self.after["loss"] / self.before["loss"]

    def check_private(self) -> None:
        """The run spent the budget that it was given, with noise of the operating system."""
        assert self.trainer.privacy_report().private and 0 < self.trainer.epsilon_spent <= 8.0
        assert self.trainer.trajectory.next_step == self.trainer.plan.steps


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Callable[[str], Path]:
    """ "masked_lm" or "causal_lm" -> the folder of the model, which reads on first use.

    Processes of one run of the tests share the folders.
    """
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    make = {
        "masked_lm": toy_tasks.pretrained_masked_lm,
        "causal_lm": toy_tasks.pretrained_causal_lm,
    }

    def folder(name: str) -> Path:
        place = shared / f"read-{name}"
        with FileLock(f"{place}.lock"):
            if not place.exists():
                make[name](tmp_path_factory.mktemp(name)).rename(place)
        return place

    return folder


@pytest.fixture
def fine_tune(models, tmp_path_factory) -> Callable[..., Outcome]:
    """(settings, rows=..., broken=..., **settings) -> what a run of the recipe reaches."""

    def run(
        task: Mapping[str, Any],
        rows: Callable[[Rows, str], Rows] = lambda rows, label: rows,
        broken: Callable[[Any], Any] = lambda honest: honest,
        **settings: Any,
    ) -> Outcome:
        folder = tmp_path_factory.mktemp("run")
        reviews = "task" in task
        made = toy_tasks.review_rows if reviews else toy_tasks.room_rows
        private = rows(made(PRIVATE_ROWS, 1), "label" if reviews else "answer")
        files = {
            "train_file": str(toy_tasks.write_rows(folder / "train.jsonl", private)),
            "validation_file": str(toy_tasks.write_rows(folder / "public.jsonl", made(100, 2))),
            "model_name_or_path": str(models(task["prompt"])),
            "output_dir": str(folder / "out"),
            "task": str(folder / "task.yaml"),
        }
        (folder / "task.yaml").write_text(json.dumps(ROOMS))
        (folder / "recipe.yaml").write_text(json.dumps(files))
        overrides = {**SETTINGS, **task, **settings}
        trainer = build_trainer(load_recipe(folder / "recipe.yaml", overrides))
        honest, before = trainer.per_example_loss, scores(trainer)
        # What is broken predicts nothing.
        scored, trainer.compute_metrics = trainer.compute_metrics, None
        trainer.per_example_loss = broken(honest)
        trainer.train()
        trainer.per_example_loss, trainer.compute_metrics = honest, scored
        return Outcome(before, scores(trainer), trainer)

    return run


def scores(trainer: DPZeroTrainer) -> dict[str, float]:
    found, names = trainer.evaluate(), ("loss", "accuracy", "f1")
    return {name: found[f"eval_{name}"] for name in names if f"eval_{name}" in found}


def flipped(rows: Rows, label: str) -> Rows:
    """Praise is called blame, and blame praise."""
    return [{**row, label: 1 - row[label]} for row in rows]


# ---- the loss

LEARNT, NOTHING = 0.3, 0.6
"""Shares of the first loss: an honest run leaves less than the one, a broken run more than the other."""


def test_masked_lm_learns_what_its_label_words_mean(models, fine_tune):
    """At first both words are as likely; the labels alone say which of them praises."""
    learnt = fine_tune(MASKED)
    learnt.check_private()
    assert learnt.before["loss"] == pytest.approx(0.693, abs=0.05)  # log 2: it knows nothing
    assert learnt.loss < LEARNT
    assert learnt.after["accuracy"] > 0.95
    assert fine_tune(MASKED, rows=shuffled).loss > NOTHING


@pytest.mark.slow
@pytest.mark.parametrize("task", [CAUSAL, CANDIDATES], ids=["one_token", "several_tokens"])
def test_causal_lm_learns_what_its_label_words_mean(fine_tune, task):
    """ " great" and " terrible" after the prompt; " a great one" and " a terrible one"."""
    learnt = fine_tune(task)
    learnt.check_private()
    assert learnt.loss < LEARNT
    assert learnt.after["accuracy"] > 0.95


@pytest.mark.slow
def test_causal_lm_learns_to_answer(fine_tune):
    """At first it names the second thing; greedy answers become right, word for word."""
    learnt = fine_tune(ANSWERS)
    learnt.check_private()
    assert learnt.loss < LEARNT
    assert learnt.before["f1"] < 0.1
    assert learnt.after["f1"] > 0.9


@pytest.mark.slow
def test_causal_lm_does_not_learn_to_answer_from_the_loss_of_the_prompt(fine_tune):
    # Half as many steps, one row a pass; with them honest runs leave 0.1 to 0.3.
    broken = fine_tune(ANSWERS, broken=lambda honest: Broken(honest, prompt_instead), max_steps=20)
    assert broken.loss > NOTHING


# ---- what has no gradient

BY_ACCURACY = {
    "objective": "accuracy", "trainable": "layer.1|lm_head", "num_directions": 4,
    "expected_batch_size": 16, "max_steps": 15, "smoothing": 0.05, "learning_rate": 0.05,
}  # fmt: skip
"""Every example is evaluated alone, so few of them, and fewer weights, which need fewer steps."""


@pytest.mark.slow
def test_accuracy_itself_is_trained_on(fine_tune):
    """It follows the labels both ways, so it is they that move it and no drift.

    Near a tie a drift alone may call nearly every review right, or nearly every one wrong; the loss of
    the cross entropy, which nobody trained on here, falls only where the right words gain.
    """
    right = fine_tune(MASKED, **BY_ACCURACY)
    wrong = fine_tune(MASKED, rows=flipped, **BY_ACCURACY)
    right.check_private()
    assert right.before["accuracy"] < 0.6
    assert right.after["accuracy"] > 0.85
    assert right.loss < 0.8
    assert wrong.after["accuracy"] < 0.15
    assert wrong.loss > 1.2


BY_F1 = {
    "objective": "f1", "max_new_tokens": 2, "num_directions": 8, "expected_batch_size": 8,
    "max_steps": 45, "smoothing": 0.1, "learning_rate": 0.02,
}  # fmt: skip


@pytest.mark.slow
def test_f1_itself_is_trained_on(fine_tune):
    """At first nearly no token of a greedy answer is right, in the end most are.

    The bound is no proof against drift, which may also come to prefer the first thing: of these very
    settings on shuffled answers four runs reached 0 to 0.17, of honest ones seven 0.72 to 0.97.
    """
    learnt = fine_tune(ANSWERS, **BY_F1)
    learnt.check_private()
    assert learnt.before["f1"] < 0.1
    assert learnt.after["f1"] > 0.5
