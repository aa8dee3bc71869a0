"""How many forward passes a run takes before step 0 and inside its first three steps."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from tiny_runs import tiny_model
from tiny_texts import pad
from transformers import TrainerCallback

from hf_dpzero import DPZeroConfig, DPZeroTrainer
from hf_dpzero.training.zeroth_order_step import ZerothOrderStep


class Passes(NamedTuple):
    """Forward passes: before step 0; of three steps; inside them, but not the steps' own."""

    before: int
    own: int
    beside: int


DEMANDED = Passes(before=32, own=24, beside=0)
ONE = {"num_directions": 1, "clip": 50.0, "microbatch_size": 64}
RUNS = {
    "default": (32, False, {}),
    "default, evaluated": (32, True, {}),
    "one direction, wide": (256, True, ONE),
}
"""Name -> width of the model, whether there are public rows to evaluate on, settings. `own` of the
bound holds for default settings: 32 directions, stacked, of an expected 64 rows."""
WIDEST = 64


def rows(count, seed):
    """Rows of 3 to 61 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, WIDEST - 2, (count,), generator=generator).tolist()
    tokens = [torch.randint(5, 200, (n,), generator=generator).tolist() for n in lengths]
    return [{"input_ids": t, "attention_mask": [1] * len(t), "labels": t[0] % 2} for t in tokens]


class Counter(TrainerCallback):
    """Sorts a model's forward passes by when they are made."""

    def __init__(self, model, monkeypatch):
        self.before = self.own = self.beside = 0
        self.begun = self.inside = False
        model.register_forward_pre_hook(self.count)
        step = ZerothOrderStep.__call__

        def counted(*args, **kwargs):
            self.inside = True
            try:
                return step(*args, **kwargs)
            finally:
                self.inside = False

        monkeypatch.setattr(ZerothOrderStep, "__call__", counted)

    def on_step_begin(self, args, state, control, **kwargs):
        self.begun = True

    def count(self, *_):
        if self.inside:
            self.own += 1
        elif self.begun:
            self.beside += 1
        else:
            self.before += 1


@pytest.mark.parametrize("name", RUNS)
def test_passes_before_and_inside_the_first_three_steps(tmp_path, monkeypatch, name):
    width, evaluated, settings = RUNS[name]
    model = tiny_model(
        vocab_size=200,
        hidden_size=width,
        intermediate_size=2 * width,
        max_position_embeddings=WIDEST,
    )
    counter = Counter(model, monkeypatch)
    trainer = DPZeroTrainer(
        model=model,
        args=DPZeroConfig(
            output_dir=str(tmp_path), target_epsilon=4, target_delta=1e-3, max_steps=3,
            testing={"direction_key": 7, "sampler_key": "ab" * 32, "insecure_noise_seed": 3},
            learning_rate=1e-3,
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, **settings,
        ),
        train_dataset=rows(2000, seed=1),
        eval_dataset=rows(300, seed=2) if evaluated else None,
        data_collator=pad,
        callbacks=[counter],
    )  # fmt: skip
    trainer.train()
    found = Passes(counter.before, counter.own, counter.beside)
    assert trainer.run.args.num_directions == settings.get("num_directions", 8)
    assert trainer.args.expected_batch_size == 64 and found.own > 0
    assert found.before <= DEMANDED.before and found.beside <= DEMANDED.beside, found
    if not settings:
        assert found.own <= DEMANDED.own, found
