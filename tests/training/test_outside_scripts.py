"""Scripts of `outside_scripts` train in their three-line form, or say why not."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from outside_scripts import PAGE, SCRIPTS, made, page
from tiny_runs import weights


def test_the_page_has_the_list():
    """`python tests/outside_scripts.py` writes it."""
    assert len({script.name for script in SCRIPTS}) == len(SCRIPTS) >= 30
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_three_lines_are_enough(tmp_path, script):
    if script.refused or script.fourth:
        words = script.refused or f"set {next(iter(script.fourth))}="
        with pytest.raises(ValueError, match=re.escape(words)):
            made(script, tmp_path, {}).train()
    if script.refused:
        return
    trainer = made(script, tmp_path, script.fourth)
    before = weights(trainer.model)
    trainer.train()
    report = trainer.privacy_report()
    assert report.private and report.steps == 2 and report.epsilon <= 8
    moved = [n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])]
    trained = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert trained.issuperset(moved)
    logged = [log for log in trainer.state.log_history if "eval_loss" in log]
    assert bool(logged) == ("eval_strategy" in script.arguments)
    assert all(np.isfinite(log["eval_loss"]) for log in logged)
    if script.arguments.get(
        "load_best_model_at_end"
    ):  # maybe the first, at a rate of 0 in a warm-up
        assert trainer.state.best_model_checkpoint
    else:
        assert moved
