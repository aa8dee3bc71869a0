"""The trainer with objectives of prompted language models: what it may share, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_language_models import save_masked_lm
from toy_tasks import review_rows, write_rows

from hf_dpzero.objectives.bounded import ZeroOne
from hf_dpzero.recipes.build import build_trainer
from hf_dpzero.recipes.recipe import load_recipe
from hf_dpzero.training.dpzero_trainer import DPZeroTrainer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"masked_lm": save_masked_lm(tmp_path_factory.mktemp("models"))}


def trainer_of(folder: Path, models: dict[str, Path], **settings: Any) -> DPZeroTrainer:
    """Few trainable parameters behind a frozen model, eight directions: what `stacked` is for."""
    few = {"trainable": "lm_head.layer_norm", "num_directions": 8, "max_steps": 1}
    rows = {f"{name}_file": folder / f"{name}.jsonl" for name in ("train", "validation")}
    for seed, path in enumerate(rows.values()):
        write_rows(path, review_rows(12, seed))
    values = {
        **{name: str(path) for name, path in rows.items()},
        "model_name_or_path": str(models["masked_lm"]),
        "task": "sst2",
        "prompt": "masked_lm",
        "max_seq_length": 90,
        "target_epsilon": 4.0,
        "target_delta": 1e-2,
        "expected_batch_size": 3,
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "output_dir": str(folder / "out"),
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    return build_trainer(load_recipe(folder / "recipe.yaml", {**few, **settings}))


def test_examples_that_are_evaluated_alone_share_no_pass(tmp_path, models):
    """A 0/1 loss may be flipped by rounding, which in shared passes depends on the microbatch."""
    smooth = trainer_of(tmp_path, models, output_dir=str(tmp_path / "smooth"))
    smooth.train()
    assert smooth.step.differences.strategy == "stacked"
    assert smooth.step.differences.prefix is not None
    assert smooth.run.shapes.max_length == 90  # no row is widened beyond max_seq_length
    jumping = trainer_of(tmp_path, models, objective="accuracy", output_dir=str(tmp_path / "01"))
    assert isinstance(jumping.per_example_loss, ZeroOne)
    jumping.train()
    assert jumping.step.differences.strategy == "whole_model"
    assert jumping.step.differences.prefix is None


def test_shared_passes_are_refused_by_name(tmp_path, models):
    trainer = trainer_of(
        tmp_path, models, objective="accuracy", performance={"perturbation_strategy": "stacked"}
    )
    with pytest.raises(ValueError, match="stacked"):
        trainer.train()


@pytest.mark.parametrize("method", ["dp-sgd", "adamw"])
def test_a_loss_without_a_gradient_is_refused_by_first_order_methods(method, tmp_path, models):
    settings = {"method": method, "num_directions": 1}
    if method == "adamw":
        settings["target_epsilon"] = None
    trainer = trainer_of(tmp_path, models, **settings)
    trainer.per_example_loss = ZeroOne(trainer.per_example_loss)
    with pytest.raises(ValueError, match="gradient"):
        trainer.train()
