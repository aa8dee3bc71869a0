"""Attack: results, recipe and curve of a run that is not private, shipped under a private run's card."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from attacked_runs import SECRET
from tiny_runs import build

from hf_dpzero.reporting.hub import build_hub_folder

LEFT = {
    "all_results.json": json.dumps({"eval_accuracy": 0.99, "test_accuracy": 0.98}),
    "test_results.json": json.dumps({"test_accuracy": 0.98}),
    "recipe.yaml": "method: adamw\n",
    "training_curve.png": "a curve",
}


def test_what_another_run_left_is_moved_aside(tmp_path: Path, caplog: Any) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name, text in LEFT.items():
        (out / name).write_text(text)
    (out / "earlier-1").mkdir()
    settings = {**SECRET, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    logging.getLogger("hf_dpzero").propagate = True
    trainer = build(out, **settings)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    (said,) = [r.getMessage() for r in caplog.records if "set aside" in r.getMessage()]
    assert "what another run left" in said and "earlier-2" in said
    trainer.save_metrics("eval", trainer.evaluate())  # adds to all_results.json
    trainer.save_model()
    shipped = build_hub_folder(out, tmp_path / "hub")
    names = {path.name for path in shipped.iterdir()}
    assert "recipe.yaml" not in names and "training_curve.png" not in names
    assert json.loads((shipped / "all_results.json").read_text()).keys() == {"eval_loss", "epoch"}
    assert "accuracy" not in (shipped / "README.md").read_text()
    assert {path.name: path.read_text() for path in (out / "earlier-2").iterdir()} == LEFT
    again = build(out, **settings)  # its own are kept when it goes on
    again.train(resume_from_checkpoint=str(out / "checkpoint-1"))
    assert (out / "all_results.json").is_file() and not (out / "earlier-3").exists()


def test_a_refused_run_moves_nothing(tmp_path: Path) -> None:
    for name, text in LEFT.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="nosuch"):
        build(tmp_path, trainable="nosuch", **SECRET).train()
    assert {path.name for path in tmp_path.iterdir()} == LEFT.keys()
