"""Attacks with rounding by place that no loss shows at first: layers of small outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_runs import build, tiny_model
from tiny_texts import differences, pad, texts
from torch import Tensor, nn

from hf_dpzero.checks import smoke_test
from hf_dpzero.training.preparation import prepare


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


def test_rounding_by_place_is_measured_in_the_layer_though_no_loss_shows_it(tmp_path):
    """Units in the last place of 1e-3 vanish in log 2; the layer itself is tried on random inputs."""
    settings = {"microbatch_size": 64, "smoothing": 1e-2, "trainable": "classifier"}
    for clip in (50.0, 1e-3):
        model = with_small_logits()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("classifier"))
        trainer = trainer_of(tmp_path / str(clip), model, clip=clip, **settings)
        with pytest.MonkeyPatch.context() as patch:  # the layer alone
            patch.setattr(smoke_test, "_bounds", lambda placed: (torch.zeros(1, 1),) * 2)
            prepare(trainer.run)
        found = set(trainer.run.shapes.placement.sizes)
        # 4 rows are no whole block; where one row rounds as 16 do depends on the processor
        assert found == {1, 4, 16, 64} if clip == 50.0 else found in ({1, 16, 64}, {16, 64})


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        *[(with_small_logits, {"microbatch_size": rows}) for rows in (4, 15, 64)],
        # as narrow as round by slots on some machines
        *[
            (lambda h=h: tiny_model(hidden_size=h), {"microbatch_size": 64, "max_steps": 12})
            for h in (32, 64, 128)
        ],
    ],
)
def test_a_place_moves_a_row_by_less_than_a_256th_of_the_radius(tmp_path, model, settings):
    """At any weights of the run: rows beside others, in other places, after logits have grown."""
    small = model is with_small_logits
    trainer = trainer_of(tmp_path, model(), **settings, learning_rate=1e-2 if small else 0.1)
    trainer.train()
    assert trainer.trajectory.next_step == trainer.args.max_steps
    if small:  # logits as later in training
        with torch.no_grad():
            trainer.model.classifier.weight.mul_(1e5)
        trainer.space.snap_()
    whole = differences(trainer, list(range(60)))
    for left_out in (1, 2, 7, 16):
        for row, x in differences(trainer, list(range(left_out, 60))).items():
            assert abs(x - whole[row]) <= 2.0**-8 * trainer.plan.smallest_clip
