"""Attacks on what the trial before training cannot see: rare shapes, later weights, stacked copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_runs import build, tiny_model
from tiny_texts import differences, pad, texts
from torch import Tensor, nn

from hf_dpzero.objectives.heads import sequence_classification_objective
from hf_dpzero.training import shape_trials
from hf_dpzero.training.batches import places_of
from hf_dpzero.training.precision import couples_values
from hf_dpzero.training.shape_trials import ShapeTrials


class RoundsSlots(nn.Module):
    """Rounds rows in odd slots otherwise, where `where` says so."""

    single_pass = True

    def __init__(self, where: Any) -> None:
        super().__init__()
        self.where = where

    def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
        losses = sequence_classification_objective(model, inputs)
        if not self.where(model, inputs):
            return losses
        return torch.where(torch.arange(len(losses)) % 2 == 1, losses * (1 + 2.0**-8), losses)


def wide(model: nn.Module, inputs: Any) -> bool:
    return inputs["input_ids"].shape[1] == 16


def rare(rows: int) -> list[dict[str, Any]]:
    """Rows of up to eight tokens, and a few of sixteen where no sample of 64 looks."""
    short = [row for row in texts(6 * rows, 4) if len(row["input_ids"]) <= 8][:rows]
    long = [row for row in texts(800, 5) if len(row["input_ids"]) > 8]
    step = rows // 64
    for place in range(1, rows, 4 * step):
        short[place] = long[place]
    return short


def trainer_of(folder: Any, data: Any, objective: Any, public: Any = None, **settings: Any) -> Any:
    settings = {"expected_batch_size": 40, "microbatch_size": 4, "max_steps": 2, **settings}
    given = {"eval_dataset": public, "compute_per_example_loss": objective}
    model = settings.pop("model", None) or tiny_model().bfloat16()
    trainer = build(folder, model, data=data, trainer_settings=given, **settings)
    trainer.data_collator = pad
    return trainer


def test_a_shape_that_no_sampled_row_has_is_tried_when_it_comes(tmp_path):
    """Nothing of a step is released in which a shape fails; then rows go one by one, as before."""
    data = rare(256)
    public = [row for row in texts(200, 9) if len(row["input_ids"]) <= 8][:60]
    trainer = trainer_of(tmp_path, data, RoundsSlots(wide), public)
    with pytest.raises(
        ValueError, match="other bits.*was not released.*microbatch_size=1 and resume"
    ):
        trainer.train()
    assert trainer.shapes.slots == 4 and trainer.trajectory.next_step == 0
    trainer = trainer_of(tmp_path, data, RoundsSlots(wide), public, microbatch_size=1)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.trajectory.next_step == 2


def test_the_hole_that_this_closes(tmp_path, monkeypatch):
    """Without it, removing an example moves others' differences in such a run."""
    monkeypatch.setattr(ShapeTrials, "check", lambda *given: None)
    data = rare(256)
    public = [row for row in texts(200, 9) if len(row["input_ids"]) <= 8][:60]
    trainer = trainer_of(tmp_path, data, RoundsSlots(wide), public)
    trainer.train()
    long = [i for i, row in enumerate(data) if len(row["input_ids"]) > 8]
    whole = differences(trainer, long)
    assert not differences(trainer, long[1:]).items() <= whole.items()


@pytest.mark.slow
def test_coupling_that_comes_with_later_weights_stops_the_run(tmp_path, monkeypatch):
    """The weights are looked at again when ten times as many steps are taken."""
    monkeypatch.setattr(shape_trials, "AGAIN", 2)
    start = tiny_model().bfloat16().classifier.weight.detach().clone()

    def moved(model: Any, inputs: Any) -> bool:
        return bool((model.classifier.weight - start).abs().max() > 0.05)

    trainer = trainer_of(
        tmp_path, texts(120), RoundsSlots(moved), texts(40, 9), max_steps=12, learning_rate=0.1
    )
    with pytest.raises(ValueError, match="at weights that the trial before training did not see"):
        trainer.train()
    assert 0 < trainer.trajectory.next_step < 12


def test_how_many_passes_the_trials_take(tmp_path):
    """Six microbatches at both signs for each shape, and again at tenfold steps."""
    counted: list[int] = []

    def count(model: Any, inputs: Any) -> bool:
        counted.append(inputs["input_ids"].shape[1])
        return False

    trainer = trainer_of(tmp_path, texts(60), RoundsSlots(count), texts(40, 9), max_steps=1)
    trainer.train()
    trials, step = trainer.method.trials, trainer.step.differences
    parts = trainer.shapes.microbatches(range(24))
    groups = {trainer.shapes.group_of({n: v[:1] for n, v in part.items()}) for part in parts}
    again = ShapeTrials(trainer.shapes, step, 1)
    for at, passes in ((0, 12 * len(groups)), (8, 0), (9, 12 * len(groups)), (98, 0), (99, 12)):
        counted.clear()
        again.check(at, parts if at < 99 else parts[:1])
        assert len(counted) == passes
    assert len(trials._tried) <= len(groups) + 1


def test_rows_that_first_meet_in_a_shape_that_one_was_tried_in(tmp_path):
    """Where processes go in lockstep no row is invented to stand beside a lone one."""

    def several(model: Any, inputs: Any) -> bool:
        return int((inputs["attention_mask"].sum(dim=1) > 2).sum()) > 1

    data = [row for row in texts(200, 5) if len(row["input_ids"]) > 8]
    trainer = trainer_of(tmp_path, data, RoundsSlots(lambda *_: False), texts(40, 9), max_steps=1)
    trainer.train()
    shapes, differences = trainer.shapes, trainer.step.differences
    part = next(part for part in shapes.microbatches(range(20)) if part.examples > 1)
    differences.objective = RoundsSlots(several)
    trials = ShapeTrials(shapes, differences, 1, lockstep=list)
    trials.check(0, shapes.microbatches(part.places[:1]))
    with pytest.raises(ValueError, match="other bits"):
        trials.check(1, [part])


class RoundsCopies(nn.Module):
    """Rounds odd slots otherwise where copies are stacked, and nowhere else."""

    single_pass = True

    def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
        losses = sequence_classification_objective(model, inputs)
        if not torch._C._functorch.is_batchedtensor(losses):
            return losses
        return torch.where(torch.arange(len(losses)) % 2 == 1, losses * (1 + 2.0**-20), losses)


@pytest.mark.parametrize("strategy", ["auto", pytest.param("stacked", marks=pytest.mark.slow)])
def test_stacked_copies_are_tried_beside_neighbours(tmp_path, strategy: str):
    settings = {
        "trainable": "classifier", "num_directions": 8, "perturbation_strategy": strategy,
        "learning_rate": 1e-3,
    }  # fmt: skip
    fair = trainer_of(
        tmp_path / "fair",
        texts(60),
        sequence_classification_objective,
        texts(40, 9),
        model=tiny_model(),
        **settings,
    )
    fair.train()
    assert fair.step.differences.strategy == "stacked" and fair.shapes.slots == 4
    trainer = trainer_of(
        tmp_path / "odd", texts(60), RoundsCopies(), texts(40, 9), model=tiny_model(), **settings
    )
    if strategy == "stacked":
        with pytest.raises(ValueError, match="slot in a microbatch.*use 'whole_model'"):
            trainer.train()
        return
    trainer.train()
    assert trainer.step.differences.strategy == "whole_model"
    found = differences_k(trainer, list(range(24)))
    assert differences_k(trainer, list(range(1, 24))).items() <= found.items()


def differences_k(trainer: Any, chosen: list[int]) -> dict[int, tuple[float, ...]]:
    from hf_dpzero.perturbation.directions import Direction

    parts = trainer.shapes.microbatches(chosen)
    x = trainer.step.differences(parts, [Direction(7, 0, k) for k in range(8)])
    trainer.step.differences.space.settle_()
    rows = [tuple(row) for row in x.tolist()]
    return dict(zip((chosen[i] for i in places_of(parts)), rows, strict=True))


# ---- values of other rows


def overflowing() -> tuple[nn.Module, Tensor]:
    """BART's encoder layer in float16, a row close to the largest number, and one beyond it."""
    from transformers import BartConfig
    from transformers.models.bart.modeling_bart import BartEncoderLayer

    config = BartConfig(d_model=16, encoder_attention_heads=2, encoder_ffn_dim=16)
    config._attn_implementation = "eager"
    layer = BartEncoderLayer(config).half().eval()
    for name, parameter in layer.named_parameters():
        parameter.data.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    ordinary = torch.linspace(-1, 1, 16)
    peak = torch.eye(16)[0]  # its largest entry is farther from the mean than any other row's
    with torch.no_grad():
        largest = float(layer(ordinary.view(1, 1, 16).half(), None).max())
    layer.final_layer_norm.weight.data.fill_(65_000 / largest)
    return layer, torch.stack([ordinary, peak]).view(2, 1, 16).half()


def test_clamps_by_other_rows_are_known_by_their_text():
    layer, rows = overflowing()
    with torch.no_grad():
        alone, beside = layer(rows[:1], None)[0], layer(rows, None)[0]
    assert alone.isfinite().all() and not torch.equal(alone, beside)
    assert "overflows" in couples_values(layer)
    assert not couples_values(layer.float()) and not couples_values(layer.bfloat16())
    assert not couples_values(tiny_model().half())


@pytest.mark.parametrize("kind", ["T5", "MT5", "UMT5", "LongT5"])
def test_models_that_clamp_in_float16_run_one_by_one(kind: str):
    import transformers

    small = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model = getattr(transformers, f"{kind}EncoderModel")(
        getattr(transformers, f"{kind}Config")(**small)
    )
    assert not couples_values(model)
    assert "clamps all rows" in couples_values(model.half())


# ---- refusals that nothing swallows


def test_private_rows_given_as_evaluation_rows_after_the_start_are_refused(tmp_path):
    """They would choose how all rows are evaluated."""
    trainer = build(tmp_path, max_steps=1, eval_strategy="no")
    trainer.eval_dataset = trainer.train_dataset
    with pytest.raises(ValueError, match="train_dataset"):
        trainer.train()
    assert trainer.trajectory is None
