"""Rows keep their batch in fixed batches: a resumed run must hold the same rows in the same order."""

from __future__ import annotations

import json

import pytest
import torch
from attacked_runs import SAVED, Calls, killed
from datasets import Dataset
from tiny_runs import build, tiny_data
from torch.utils.data import Dataset as Rows
from torch.utils.data import random_split

from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.run_folder.keys import FILE, FOLDER

RUN = {
    "method": "dp-sgd",
    "sampling": "fixed_batches",
    "learning_rate": 0.1,
    "max_steps": 12,
    **SAVED,
}


def stopped(folder, data, **settings) -> None:
    killed(folder, data=data, **{**RUN, **settings})


def resumed(folder, data, **settings):
    trainer = build(folder, data=data, **{**RUN, **settings})
    trainer.train(resume_from_checkpoint=True)
    return trainer


@pytest.mark.parametrize("correlation", ["none", "toeplitz"])
@pytest.mark.parametrize("moved", ["all", "two"])
def test_rows_in_another_order_are_refused(tmp_path, correlation, moved):
    """Row 0 of the second start would be in the batch of another row, within one epoch of ten steps."""
    data, noise = tiny_data(), {"correlated_noise": {"kind": correlation}}
    stopped(tmp_path, data, **noise)
    order = list(range(len(data)))
    order[17], order[83] = order[83], order[17]
    with pytest.raises(LedgerError, match="same rows in the same order"):
        resumed(tmp_path, data.shuffle(seed=8) if moved == "all" else data.select(order), **noise)


def test_the_same_rows_from_elsewhere_go_on(tmp_path):
    """Equal contents, whatever the object, its fingerprint or its cache."""
    data = tiny_data()
    stopped(tmp_path, data)
    assert resumed(tmp_path, Dataset.from_list(data.to_list())).trajectory.next_step == 12


class _Cropped(Rows):
    """Rows that are drawn anew at every access; their labels stay."""

    def __init__(self, data) -> None:
        self.data = list(data)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> dict:
        row, ids = self.data[i], torch.tensor(self.data[i]["input_ids"])
        return {**row, "input_ids": ids[torch.randperm(len(ids))].tolist()}


@pytest.mark.parametrize("resumed_on", ["same", "shuffled"])
def test_rows_that_are_drawn_anew_cannot_be_resumed(tmp_path, caplog, resumed_on):
    """Said at the start, and refused where it would matter: a row could take part twice in an epoch."""
    data = tiny_data()
    stopped(tmp_path, _Cropped(data))
    assert "could not be resumed" in caplog.text
    then = data if resumed_on == "same" else data.shuffle(seed=8)
    with pytest.raises(LedgerError, match=r"(?s)drawn anew.*row's number.*sampling='poisson'"):
        resumed(tmp_path, _Cropped(then))


@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end"])
def test_rows_that_are_shuffled_in_place_while_a_run_trains_end_it(tmp_path, event):
    data = list(tiny_data())

    shuffle = Calls(event, lambda *_, **__: data.insert(0, data.pop()))
    trainer = build(tmp_path, data=data, **RUN, trainer_settings={"callbacks": [shuffle]})
    with pytest.raises(LedgerError, match="same rows in the same order"):
        trainer.train()
    with pytest.raises(ValueError, match="not saved"):
        trainer.save_model()


@pytest.mark.parametrize("split", [False, True])
def test_a_transform_that_draws_is_compared_by_what_is_stored(tmp_path, split):
    """Also beneath `Subset`s, of which the same seed makes the same one."""

    def crop(batch):
        ids = [torch.tensor(row)[torch.randperm(len(row))].tolist() for row in batch["input_ids"]]
        return {**batch, "input_ids": ids}

    def rows(data, seed=1):
        data = data.with_transform(crop)
        if not split:
            return data
        generator = torch.Generator().manual_seed(seed)
        most, _ = random_split(data, [160, 40], generator)
        return random_split(most, [120, 40], generator)[0]

    data = tiny_data(200 if split else 120)
    stopped(tmp_path, rows(data))
    others = [rows(data.shuffle(seed=8)), *([rows(data, seed=2)] if split else [])]
    for other in others:
        with pytest.raises(LedgerError, match="same rows in the same order"):
            resumed(tmp_path, other)
    assert resumed(tmp_path, rows(data)).trajectory.next_step == 12


@pytest.mark.parametrize("kept", ["", None])
def test_a_file_of_keys_without_a_digest_is_refused(tmp_path, kept):
    """As it was written for rows that are drawn anew, and before there were digests."""
    stopped(tmp_path, tiny_data())
    file = tmp_path / FOLDER / FILE
    stored = {**json.loads(file.read_text()), "rows": kept}
    file.write_text(json.dumps({k: v for k, v in stored.items() if v is not None}))
    with pytest.raises(LedgerError, match="drawn anew"):
        resumed(tmp_path, tiny_data())


def test_the_digest_of_the_rows_needs_the_secret_key(tmp_path):
    """Two runs on the same rows keep different digests: nobody can try guessed rows without the key."""
    digests = []
    for name in "ab":
        stopped(tmp_path / name, tiny_data())
        stored = json.loads((tmp_path / name / FOLDER / FILE).read_text())
        digests.append(stored["rows"])
    assert len(set(digests)) == 2
