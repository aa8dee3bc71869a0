"""Attacks with rounding by place that no loss shows at first: layers of small outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_runs import build, tiny_model
from tiny_texts import differences, pad, texts
from torch import Tensor, nn

from hf_dpzero.objectives.losses import trial
from hf_dpzero.training import independence_check, shape_choice, shape_trials
from hf_dpzero.training.before_training import check_before_training


class RoundsRest(nn.Linear):
    """Rounds rows beyond whole blocks of 16 otherwise in odd slots, as narrow products on a CPU do."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        slot = torch.arange(len(y))
        odd = (slot % 2 == 1) & (slot >= len(y) // 16 * 16)
        return torch.where(odd[:, None], torch.nextafter(y, torch.ones(())), y)


def with_small_logits(size: float = 1e-3) -> nn.Module:
    """Logits so small that a unit in their last place is lost in log 2."""
    model = tiny_model()
    head = RoundsRest(16, 2)
    with torch.no_grad():
        for old, new in zip(model.classifier.parameters(), head.parameters(), strict=True):
            new.copy_(old * size)
    model.classifier = head
    return model


def trainer_of(folder: Any, model: nn.Module, public: Any = None, **settings: Any) -> Any:
    settings = {"expected_batch_size": 40, "max_steps": 2, "max_length": 16, **settings}
    given = {"eval_dataset": texts(40, 9) if public is None else public}
    trainer = build(folder, model, data=texts(), trainer_settings=given, **settings)
    trainer.data_collator = pad
    return trainer


def grown(trainer: Any) -> None:
    """Logits as later in training."""
    with torch.no_grad():
        trainer.model.classifier.weight.mul_(1e5)
    trainer.space.snap_()


@pytest.mark.parametrize("microbatch_size", [4, 15, 64])
def test_it_is_found_in_the_layer_and_the_run_goes_on_in_blocks_or_one_by_one(
    tmp_path, microbatch_size: int
):
    trainer = trainer_of(tmp_path, with_small_logits(), microbatch_size=microbatch_size)
    trainer.train()
    assert trainer.trajectory.next_step == 2
    sizes = trainer.shapes.sizes.rows.values()
    if microbatch_size == 64:
        assert trainer.shapes.slots >= 16 and all(n % 16 == 0 for n in sizes)
    else:
        assert trainer.shapes.slots == 1
    grown(trainer)
    whole = differences(trainer, list(range(60)))
    for left_out in (1, 2, 7):
        assert differences(trainer, list(range(left_out, 60))).items() <= whole.items()


def test_the_hole_that_this_closes(tmp_path, monkeypatch):
    """Compared by losses, it passes all trials; once logits have grown, rows hang on each other."""
    monkeypatch.setattr(shape_trials, "Traced", trial)
    monkeypatch.setattr(
        shape_choice,
        "check_fixed_shapes",
        lambda *given: independence_check.check_fixed_shapes(*given[:-1]),
    )
    trainer = trainer_of(tmp_path, with_small_logits(), microbatch_size=4)
    trainer.train()
    assert trainer.shapes.slots == 4
    grown(trainer)
    whole = differences(trainer, list(range(60)))
    assert not differences(trainer, list(range(1, 60))).items() <= whole.items()


def test_few_rows_are_rather_run_one_by_one_than_among_blanks(tmp_path):
    trainer = trainer_of(
        tmp_path, with_small_logits(), microbatch_size=64, expected_batch_size=3, max_length=512
    )
    check_before_training(trainer)
    assert trainer.shapes.slots == 1


def test_other_numbers_of_slots_than_public_rows_need_are_tried(tmp_path):
    """All public rows are short, in passes of 8; passes of 16 tokens take 6 rows."""
    public = [row for row in texts(200, 9) if len(row["input_ids"]) <= 8][:40]

    class RoundsSix(RoundsRest):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if len(x) == 6 else nn.Linear.forward(self, x)

    model = with_small_logits()
    model.classifier.__class__ = RoundsSix
    settings = {"microbatch_size": 8, "expected_batch_size": 12}
    trainer = trainer_of(tmp_path, model, public, **settings)
    check_before_training(trainer)
    assert trainer.shapes.sizes.rows == {8: 8, 16: 6} and trainer.shapes.slots == 1


@pytest.mark.parametrize("hidden", [32, 64, 128])
def test_models_as_narrow_as_round_by_slots_on_some_machines_train(tmp_path, hidden: int):
    model = tiny_model(hidden_size=hidden, num_attention_heads=2, num_labels=2)
    settings = {"microbatch_size": 64, "max_steps": 12, "learning_rate": 0.1}
    trainer = trainer_of(tmp_path, model, **settings)
    trainer.train()
    assert trainer.trajectory.next_step == 12
    whole = differences(trainer, list(range(60)))
    for left_out in range(1, 20, 3):
        assert differences(trainer, list(range(left_out, 60))).items() <= whole.items()
