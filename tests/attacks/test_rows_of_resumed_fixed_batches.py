"""Rows keep their batch in fixed batches: a resumed run must hold the same rows in the same order."""

from __future__ import annotations

import json

import pytest
import torch
from datasets import Dataset
from tiny_runs import build, tiny_data
from torch.utils.data import Dataset as Rows
from transformers import TrainerCallback

from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.training.noise_keys import FILE, FOLDER

RUN = {
    "method": "dp-sgd",
    "sampling": "fixed_batches",
    "learning_rate": 0.1,
    "max_steps": 12,
    "save_strategy": "steps",
    "save_steps": 2,
    "sampler_key": None,
    "insecure_noise_seed": None,
}


class _KilledAt(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step >= 5:
            raise KeyboardInterrupt


def killed(folder, data, **settings) -> None:
    with pytest.raises(KeyboardInterrupt):
        build(
            folder, data=data, trainer_settings={"callbacks": [_KilledAt()]}, **{**RUN, **settings}
        ).train()


def resumed(folder, data, **settings):
    trainer = build(folder, data=data, **{**RUN, **settings})
    trainer.train(resume_from_checkpoint=True)
    return trainer


@pytest.mark.parametrize("correlation", ["none", "toeplitz"])
def test_rows_in_another_order_are_refused(tmp_path, correlation):
    """Row 0 of the second start would be in the batch of another row, within one epoch of ten steps."""
    data = tiny_data()
    killed(tmp_path, data, noise_correlation=correlation)
    moved = data.shuffle(seed=8)
    with pytest.raises(LedgerError, match="same rows in the same order"):
        resumed(tmp_path, moved, noise_correlation=correlation)


def test_two_rows_that_change_places_are_refused(tmp_path):
    data = tiny_data()
    killed(tmp_path, data)
    order = list(range(len(data)))
    order[17], order[83] = order[83], order[17]
    with pytest.raises(LedgerError, match="same rows in the same order"):
        resumed(tmp_path, data.select(order))


def test_the_same_rows_from_elsewhere_go_on(tmp_path):
    """Equal contents, whatever the object, its fingerprint or its cache."""
    data = tiny_data()
    killed(tmp_path, data)
    assert resumed(tmp_path, Dataset.from_list(data.to_list())).trajectory.next_step == 12


class _Cropped(Rows):
    """Rows that are drawn anew at every access."""

    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> dict:
        ids = torch.tensor(self.data[i]["input_ids"])
        return {**self.data[i], "input_ids": ids[torch.randperm(len(ids))].tolist()}


def test_rows_that_are_drawn_at_every_access_are_not_compared(tmp_path):
    data = _Cropped(tiny_data())
    killed(tmp_path, data)
    assert resumed(tmp_path, data).trajectory.next_step == 12


def test_the_digest_of_the_rows_needs_the_secret_key(tmp_path):
    """Two runs on the same rows keep different digests: nobody can try guessed rows without the key."""
    digests = []
    for name in "ab":
        killed(tmp_path / name, tiny_data())
        stored = json.loads((tmp_path / name / FOLDER / FILE).read_text())
        digests.append(stored["rows"])
    assert len(set(digests)) == 2
