"""Rows keep their batch in fixed batches: a resumed run must hold the same rows in the same order."""

from __future__ import annotations

import contextlib
import json
from collections import Counter

import pytest
import torch
from datasets import Dataset
from tiny_runs import build, tiny_data
from torch.utils.data import Dataset as Rows
from torch.utils.data import Subset, random_split
from transformers import TrainerCallback

from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.reporting.verification import report_of
from hf_dpzero.run_folder.keys import FILE, FOLDER, digest_of_rows, steady_parts

RUN = {
    "method": "dp-sgd",
    "sampling": "fixed_batches",
    "learning_rate": 0.1,
    "max_steps": 12,
    "save_strategy": "steps",
    "save_steps": 2,
    "testing.sampler_key": None,
    "testing.insecure_noise_seed": None,
}


class _KilledAt(TrainerCallback):
    def __init__(self, step: int = 5) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step >= self.step:
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
    killed(tmp_path, data, correlated_noise={"kind": correlation})
    moved = data.shuffle(seed=8)
    with pytest.raises(LedgerError, match="same rows in the same order"):
        resumed(tmp_path, moved, correlated_noise={"kind": correlation})


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
    """Rows that are drawn anew at every access; their labels stay, and a column `id` if asked for."""

    def __init__(self, data, *, ids: bool = False, label: int | None = None) -> None:
        self.data, self.ids, self.label = list(data), ids, label

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> dict:
        row, ids = self.data[i], torch.tensor(self.data[i]["input_ids"])
        row = {**row, "input_ids": ids[torch.randperm(len(ids))].tolist()}
        row |= {"id": sum(row["input_ids"])} if self.ids else {}
        return row if self.label is None else {**row, "labels": self.label}


def shuffled(data: Dataset, seed: int = 8) -> list[dict]:
    return list(data.shuffle(seed=seed))


def participations(folder, first, then, *, killed_at=5, **settings) -> Counter:
    """How often each row takes part in one epoch of a run that is killed and resumed on other rows.

    A row is known by its tokens in ascending order, which stay what they are when it is drawn anew.
    """
    seen: Counter = Counter()

    def counting(data, **kwargs):
        trainer = build(folder, data=data, **{**RUN, **settings}, **kwargs)
        step = trainer.training_step

        def counted(model, inputs, *rest):
            done = step(model, inputs, *rest)
            for part, examples in zip(inputs["microbatches"], inputs["examples"], strict=True):
                rows = part["input_ids"][:examples].sort(dim=1).values.tolist()
                seen.update(map(tuple, rows))
            return done

        trainer.training_step = counted
        return trainer

    callbacks = {"callbacks": [_KilledAt(killed_at)]}
    with pytest.raises(KeyboardInterrupt):
        counting(first, trainer_settings=callbacks).train()
    with contextlib.suppress(LedgerError):
        counting(then).train(resume_from_checkpoint=True)
    return seen


ONE_EPOCH = {"max_steps": 10}


@pytest.mark.parametrize("resumed_on", ["same", "shuffled"])
def test_no_row_takes_part_twice_in_an_epoch_though_rows_are_drawn_anew(tmp_path, resumed_on):
    """dp-sgd is accounted for one release of a row an epoch, which this run is made of."""
    data = tiny_data()
    then = data if resumed_on == "same" else shuffled(data)
    counts = participations(tmp_path, _Cropped(data), _Cropped(then), **ONE_EPOCH)
    assert max(counts.values()) == 1
    assert len(counts) == (120 if resumed_on == "same" else 60)


def test_no_row_takes_part_twice_under_noise_that_cancels_over_steps(tmp_path):
    """dp-adamw, banded noise, 60 rows of one class in five batches: 48 of them came twice."""
    data = tiny_data(60)
    settings = {
        "method": "dp-adamw",
        "correlated_noise.kind": "banded",
        "correlated_noise.bands": 2,
    }
    first, then = (_Cropped(rows, label=1) for rows in (data, shuffled(data)))
    counts = participations(tmp_path, first, then, killed_at=4, **settings, max_steps=5)
    assert max(counts.values()) == 1 and len(counts) == 48


def caveat_of(trainer) -> list[str]:
    return [text for text in trainer.privacy_report().caveats if "drawn anew" in text]


def test_what_agrees_of_rows_that_are_drawn_anew_is_compared(tmp_path):
    """And the report says what that was, also when it is derived again from the trajectory."""
    data = tiny_data()
    killed(tmp_path, _Cropped(data))
    trainer = resumed(tmp_path, _Cropped(data))
    assert trainer.trajectory.next_step == 12
    assert len(caveat_of(trainer)) == 1 and "labels" in caveat_of(trainer)[0]
    assert "input_ids" not in caveat_of(trainer)[0]
    trainer.save_model()
    assert report_of(tmp_path).caveats == trainer.privacy_report().caveats


def test_rows_that_stay_as_they_are_need_no_caveat(tmp_path):
    killed(tmp_path, tiny_data())
    trainer = resumed(tmp_path, tiny_data())
    assert not caveat_of(trainer) and "row_parts" not in trainer.trajectory.header


def test_a_column_of_numbers_is_no_id(tmp_path):
    """idx = i says where a row stands: 27 of 120 rows came twice, in another order beneath it."""

    class Numbered(_Cropped):
        def __getitem__(self, i: int) -> dict:
            return {**super().__getitem__(i), "idx": i}

    data = tiny_data()
    settings = {"remove_unused_columns": True}
    killed(tmp_path, Numbered(data, label=1), **settings)
    with pytest.raises(LedgerError, match="drawn anew"):
        resumed(tmp_path, Numbered(shuffled(data), label=1), **settings)


def test_the_numbers_that_a_subset_selects_are_not_rows(tmp_path):
    """25 rows came twice: a seeded split of rows of one class whose order beneath it was another."""
    data = tiny_data(200)

    def split(rows):
        return random_split(_Cropped(rows, label=1), [120, 80], torch.Generator().manual_seed(1))[0]

    killed(tmp_path, split(data))
    with pytest.raises(LedgerError, match="drawn anew"):
        resumed(tmp_path, split(shuffled(data)))


@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end"])
def test_rows_that_are_shuffled_in_place_while_a_run_trains_end_it(tmp_path, event):
    data = list(tiny_data())

    class Shuffles(TrainerCallback):
        pass

    def shuffle(self, args, state, control, **kwargs):
        data.insert(0, data.pop())

    setattr(Shuffles, event, shuffle)
    trainer = build(tmp_path, data=data, **RUN, trainer_settings={"callbacks": [Shuffles()]})
    with pytest.raises(LedgerError, match="same rows in the same order"):
        trainer.train()
    with pytest.raises(ValueError, match="not saved"):
        trainer.save_model()


def test_an_id_column_knows_rows_again_that_are_drawn_anew(tmp_path):
    data = tiny_data()
    settings = {"remove_unused_columns": True}
    killed(tmp_path, _Cropped(data, ids=True, label=1), **settings)
    with pytest.raises(LedgerError, match="same rows in the same order"):
        resumed(tmp_path, _Cropped(shuffled(data), ids=True, label=1), **settings)
    trainer = resumed(tmp_path, _Cropped(data, ids=True, label=1), **settings)
    assert "id, labels" in caveat_of(trainer)[0]


def test_a_split_of_rows_that_are_drawn_anew_is_known_by_its_numbers(tmp_path):
    """Of a `Subset`, also one of another: with the same seed it goes on, without it is refused."""
    data = _Cropped(tiny_data(200))

    def split(seed):
        generator = torch.Generator().manual_seed(seed)
        most, _ = random_split(data, [160, 40], generator)
        return random_split(most, [120, 40], generator)[0]

    killed(tmp_path, split(1))
    with pytest.raises(LedgerError, match="same rows in the same order"):
        resumed(tmp_path, split(2))
    assert "Subset.indices" in caveat_of(resumed(tmp_path, split(1)))[0]


def test_a_transform_that_draws_is_compared_by_what_is_stored(tmp_path):
    def crop(batch):
        ids = [torch.tensor(row)[torch.randperm(len(row))].tolist() for row in batch["input_ids"]]
        return {**batch, "input_ids": ids}

    data = tiny_data()
    killed(tmp_path, data.with_transform(crop))
    with pytest.raises(LedgerError, match="same rows in the same order"):
        resumed(tmp_path, data.shuffle(seed=8).with_transform(crop))
    assert not caveat_of(resumed(tmp_path, data.with_transform(crop)))


@pytest.mark.parametrize("label", [0, 1])
def test_rows_of_which_nothing_tells_the_order_cannot_be_resumed(tmp_path, caplog, label):
    """Said at the start, and refused where it would matter, with what to do."""
    data = _Cropped(tiny_data(), label=label)
    killed(tmp_path, data)
    assert "could not be resumed" in caplog.text
    with pytest.raises(LedgerError, match=r"(?s)drawn anew.*id column.*sampling='poisson'"):
        resumed(tmp_path, data)


@pytest.mark.parametrize("kept", ["", None])
def test_a_file_of_keys_without_a_digest_is_refused(tmp_path, kept):
    """As it was written for rows that are drawn anew, and before there were digests."""
    killed(tmp_path, tiny_data())
    file = tmp_path / FOLDER / FILE
    stored = {**json.loads(file.read_text()), "rows": kept}
    file.write_text(json.dumps({k: v for k, v in stored.items() if v is not None}))
    with pytest.raises(LedgerError, match="drawn anew"):
        resumed(tmp_path, tiny_data())


class _Crops:
    """Rows in a list, made of tensors: (crop, label)."""

    def __init__(self, labels: list[int], draws: bool) -> None:
        self.labels, self.draws = labels, draws

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        crop = torch.rand(4) if self.draws else torch.arange(4.0) + i
        return crop.bfloat16(), torch.tensor([i, self.labels[i]])[1]  # a view of what differs


def test_places_of_a_tuple_are_parts_of_a_row():
    labels = [i % 3 for i in range(60)]
    fixed, drawn = _Crops(labels, draws=False), _Crops(labels, draws=True)
    assert steady_parts(fixed) is None and steady_parts(drawn) == ["1"]
    assert digest_of_rows(fixed, b"k") and not digest_of_rows(drawn, b"k")
    known = digest_of_rows(drawn, b"k", parts=["1"])
    assert known == digest_of_rows(_Crops(labels, draws=True), b"k", parts=["1"])
    assert known != digest_of_rows(_Crops(labels[1:] + labels[:1], draws=True), b"k", parts=["1"])


def test_parts_that_hardly_tell_an_order_tell_nothing():
    """One other label among 200: a shuffle would leave it where it is once in 200 times."""
    rare = _Crops([1] + [0] * 199, draws=True)
    assert digest_of_rows(rare, b"k", parts=["1"]) == ""
    assert digest_of_rows(_Crops(list(range(8)), draws=True), b"k", parts=["1"])  # ids, however few


def test_numbers_in_a_row_say_nothing_of_the_order_beneath():
    rows = _Crops([0] * 200, draws=True)
    assert steady_parts(Subset(rows, range(10, 90))) == ["1"]
    assert steady_parts(Subset(rows, [5, 3, 9, 1])) == ["1", "Subset.indices"]


def test_the_digest_of_the_rows_needs_the_secret_key(tmp_path):
    """Two runs on the same rows keep different digests: nobody can try guessed rows without the key."""
    digests = []
    for name in "ab":
        killed(tmp_path / name, tiny_data())
        stored = json.loads((tmp_path / name / FOLDER / FILE).read_text())
        digests.append(stored["rows"])
    assert len(set(digests)) == 2
