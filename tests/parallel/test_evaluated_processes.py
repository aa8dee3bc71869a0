"""The loss of an evaluation does not follow from the number of processes."""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate import Accelerator
from tiny_runs import build, tiny_data


def losses(trainer: Any, batches: list[Any]) -> list[float]:
    """`prediction_step`'s loss of each batch."""
    return [float(trainer.prediction_step(trainer.model, batch, True)[0]) for batch in batches]


def test_a_batchs_loss_is_its_mean_whatever_the_number_of_processes(tmp_path, monkeypatch):
    """A model that takes `**kwargs` and does not divide by the labels of all processes (BERT)."""
    trainer = build(tmp_path)
    trainer.model.eval()
    assert trainer.model_accepts_loss_kwargs and trainer.args.average_tokens_across_devices
    batches = list(trainer.get_eval_dataloader())  # five of eight rows
    alone = losses(trainer, batches)
    rows = {name: torch.tensor(values) for name, values in tiny_data(40, seed=2)[:].items()}
    with torch.no_grad():
        expected = float(trainer.model(**rows).loss)
    assert math.isclose(sum(alone) / 5, expected, rel_tol=1e-5)
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    assert losses(trainer, batches) == alone
    assert trainer.args.average_tokens_across_devices
