"""The smoke test: what it lets run in passes of several rows, what runs one by one, what is refused."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch
from tiny_runs import build, same, tiny_data, tiny_model, weights
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration, default_data_collator

from hf_dpzero.batches.placement import PassBytes, rows_that_fit, tokens_that_fit
from hf_dpzero.checks import passes
from hf_dpzero.checks.smoke_test import ROOM
from hf_dpzero.objectives.heads import sequence_classification_objective
from hf_dpzero.training.preparation import prepare

ALL = (1, 4, 8)


def checked(
    tmp_path: Any, objective: Any = sequence_classification_objective, **settings: Any
) -> Any:
    given = {"compute_per_example_loss": objective, **settings.pop("trainer_settings", {})}
    trainer = build(tmp_path, expected_batch_size=40, trainer_settings=given, **settings)
    prepare(trainer.run)
    return trainer.run


def moved(change: Any) -> Any:
    def objective(model: nn.Module, inputs: Any) -> Tensor:
        return change(sequence_classification_objective(model, inputs), inputs)

    return objective


@pytest.mark.parametrize("method", ["dpzero", "dp-sgd", "dpgd-0th"])
def test_rows_that_do_not_couple_run_together(tmp_path, method: str):
    settings = {"clip": 1e3} if method == "dpgd-0th" else {}  # of x u, whose norm is that of u too
    assert checked(tmp_path, method=method, **settings).shapes.placement.sizes == ALL


def by_labels(losses: Tensor, inputs: Any) -> Tensor:
    """Weights of classes over their mean in the batch: with equal labels no loss shows it."""
    own = torch.tensor([1.0, 2.0])[inputs["labels"]]
    return losses * own / own.mean()


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (lambda losses, _: losses + losses.mean(), {}),
        (lambda losses, _: losses + losses.mean(), {"method": "dp-sgd"}),
        (by_labels, {}),
        *[  # the longest row of a batch
            (lambda losses, inputs: losses * inputs["attention_mask"].sum(1).max(), size)
            for size in ({"microbatch_size": 4}, {"microbatch_size": 8}, {"microbatch_size": 64})
        ],
    ],
)
def test_losses_that_depend_on_other_examples_are_refused(tmp_path, change, settings):
    with pytest.raises(ValueError, match="depends on the other examples of its batch"):
        checked(tmp_path, moved(change), **settings)


PUBLIC = tiny_data(40, seed=9)
KNOWN = {tuple(row) for data in (tiny_data(), PUBLIC) for row in data["input_ids"]}


def known(inputs: Any) -> Tensor:
    """Whether a row is one of the data and not an invented one, bool [B]."""
    return torch.tensor([tuple(ids[:8].tolist()) in KNOWN for ids in inputs["input_ids"]])


def refusing(losses: Tensor, inputs: Any) -> Tensor:
    if not known(inputs).all():
        raise ValueError("an unknown row")
    return losses


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda losses, _: losses + 2e-5 * losses.mean(), "other bits beside other examples"),
        (refusing, "does not take rows invented in the form of row 0 (ValueError)"),
        (
            lambda losses, inputs: torch.where(known(inputs), losses, torch.nan),
            "the loss of an invented row is NaN or infinite",
        ),
    ],
)
def test_what_cannot_be_seen_to_be_apart_runs_one_by_one(tmp_path, caplog, change, words):
    """Coupling as small as rounding, and losses that invented rows do not show."""
    logging.getLogger("transformers").propagate = True
    run = checked(tmp_path, moved(change), trainer_settings={"eval_dataset": PUBLIC})
    assert run.shapes.one_by_one and words in caplog.text and "by itself" in caplog.text
    assert [len(m["labels"]) for m in run.shapes.microbatches([0, 1])] == [1, 1]


class CouplesInside(nn.Linear):
    """Its rows' last bits follow from the batch, though the loss does not show it."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + 2.0**-20 * y.mean()


def test_what_only_a_layer_shows_runs_one_by_one(tmp_path):
    model = tiny_model()
    model.classifier.__class__ = CouplesInside
    assert checked(
        tmp_path, moved(lambda losses, _: losses.round(decimals=3)), model=model
    ).shapes.one_by_one


def by_place(size: float) -> Any:
    """Adds a number to the loss in the last slot of passes of eight."""

    def change(losses: Tensor, _: Any) -> Tensor:
        last = torch.arange(len(losses)) == 7
        return torch.where(last, losses.double() + size, losses.double()).float()

    return moved(change)


@pytest.mark.parametrize(("share", "sizes"), [(0.9, ALL), (1.1, (1, 4))])
@pytest.mark.parametrize("directions", [1, 4])
def test_a_size_is_used_up_to_the_bound_on_what_places_move(tmp_path, share, sizes, directions):
    """sqrt(K) move / lambda against 2^-12 of the smallest clip, 5."""
    clip, smoothing = 5.0, 1e-2
    bound = ROOM * clip * smoothing / directions**0.5
    settings = {"clip": clip, "smoothing": smoothing, "num_directions": directions}
    run = checked(tmp_path, by_place(share * bound), **settings)
    assert run.shapes.placement.sizes == sizes


def test_a_schedule_counts_with_its_smallest_clip_and_smoothing(tmp_path):
    clip, smoothing = 5.0, 1e-2
    bound = ROOM * clip * smoothing
    settings = {"clip": clip, "smoothing": smoothing, "max_steps": 4}
    settings["schedules.smoothing"] = "linear(0.5)"
    run = checked(tmp_path, by_place(0.9 * bound), **settings)
    assert run.shapes.placement.sizes == (1, 4)


def test_a_loss_that_counts_may_not_move_at_all(tmp_path):
    class Counts(nn.Module):
        single_pass = True

        def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
            return (sequence_classification_objective(model, inputs) > 0.69).float()

        def comparison_loss(self, model: nn.Module, inputs: Any) -> Tensor:
            return by_place(1e-6)(model, inputs)

    assert 8 not in checked(tmp_path, Counts(), clip=1e6).shapes.placement.sizes


def test_a_model_that_remembers_is_refused(tmp_path):
    seen = []

    def change(losses: Tensor, _: Any) -> Tensor:
        seen.extend([None] * (len(losses) == 1))
        return losses + 1e-5 * len(seen) * (len(losses) == 1)

    try:
        with pytest.raises(ValueError, match="before and after other examples were seen"):
            checked(tmp_path, moved(change))
    finally:
        torch.use_deterministic_algorithms(False)


def test_zeros_are_filled_and_put_back(tmp_path):
    """A head of zeros hides whatever comes before it; a coupling there is found all the same."""
    model = tiny_model()
    nn.init.zeros_(model.classifier.weight)
    before = weights(model)
    model.bert.pooler.dense.__class__ = CouplesInside
    assert checked(tmp_path, model=model).shapes.one_by_one
    assert same(weights(model), before) and not model.classifier.weight.any()


class MovesByPlace(nn.LayerNorm):
    """What it returns in the last place of eight rows is larger by a thousandth."""

    def forward(self, x: Tensor) -> Tensor:
        last = torch.arange(len(x))[:, None, None] == 7
        return super().forward(x) * torch.where(last, 1.001, 1.0)


@pytest.mark.parametrize("zero", [True, False])
def test_a_head_of_zeros_does_not_hide_what_places_move(tmp_path, zero: bool):
    """At zero logits no loss moves; at the first step's they do."""
    model = tiny_model()
    if zero:
        nn.init.zeros_(model.classifier.weight)
    model.bert.encoder.layer[-1].output.LayerNorm.__class__ = MovesByPlace
    assert 8 not in checked(tmp_path, model=model, clip=0.5).shapes.placement.sizes


@pytest.mark.parametrize("microbatch_size", [8, 16])
def test_tables_of_positions_are_no_rows(tmp_path, microbatch_size: int):
    """T5 looks its bias up by [queries, keys], in a pass of as many rows as columns too."""
    config = T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, num_labels=2,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, dropout_rate=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    rows = [
        {"input_ids": [5 + i, 6, 7, 1], "attention_mask": [1] * 4, "labels": [8, 9, 1]}
        for i in range(9)
    ]
    trainer = build(
        tmp_path, T5ForConditionalGeneration(config), data=rows, microbatch_size=microbatch_size,
        expected_batch_size=9, sampling="full_batch", max_length=microbatch_size,
    )  # fmt: skip
    prepare(trainer.run)
    assert trainer.run.shapes.placement.largest == microbatch_size


@pytest.mark.parametrize(("place", "kept"), [(None, True), (7, False)])
def test_gradients_of_wide_rows_are_tried(tmp_path, place: Any, kept: bool):
    """A wide row's loss is 20 times as steep in the last of eight places."""

    def change(losses: Tensor, inputs: Any) -> Tensor:
        wide = inputs["attention_mask"].all(dim=1) & (torch.arange(len(losses)) == place)
        return torch.where(wide, losses.detach() + 20 * (losses - losses.detach()), losses)

    run = checked(tmp_path, moved(change), method="dp-sgd")
    assert (8 in run.shapes.placement.sizes) == kept


class Series(nn.Module):
    """The mean of a series of any length, without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.layer(x.unsqueeze(-1)).mean(dim=1)


def series_of(tmp_path: Any, lengths: list[int], public: list[int] | None = None) -> Any:
    generator = torch.Generator().manual_seed(0)

    def rows(of: list[int]) -> list[Any]:
        return [{"x": torch.randn(n, generator=generator), "labels": torch.tensor(0)} for n in of]

    def losses(model: nn.Module, inputs: Any) -> Tensor:
        return nn.functional.cross_entropy(model(inputs["x"]), inputs["labels"], reduction="none")

    given = {"compute_per_example_loss": losses, "eval_dataset": public and rows(public)}
    return build(
        tmp_path, Series(), data=rows(lengths), trainer_settings=given, remove_unused_columns=False,
        expected_batch_size=len(lengths), sampling="full_batch", max_steps=1,
    )  # fmt: skip


def test_sizes_that_no_mask_tells_are_public_or_those_of_all_rows(tmp_path):
    sizes = []
    for first in (3, 200):
        trainer = series_of(tmp_path / str(first), [first, 8, 8, 9], public=[7, 7])
        prepare(trainer.run)
        sizes.append(trainer.run.shapes.placement.sizes)
        assert trainer.run.shapes.row_sizes is None
    assert sizes[0] == sizes[1]
    series_of(tmp_path / "alike", [8, 8, 8, 8]).train()
    with pytest.raises(ValueError, match="other sizes than row 0"):
        series_of(tmp_path / "apart", [8, 8, 9, 8]).train()
    series_of(tmp_path / "public", [8, 8, 9, 8], public=[7]).train()


@pytest.mark.parametrize("microbatch_size", [1, 4])
def test_rows_that_run_by_themselves_may_have_any_size(tmp_path, monkeypatch, microbatch_size: int):
    """Whether asked for, or because of what the model couples: nothing stands beside a row."""
    if microbatch_size > 1:
        monkeypatch.setattr(passes, "couples_values", lambda *_: "it couples rows")
    trainer = series_of(tmp_path, [8, 8, 9, 8])
    trainer.args.microbatch_size = microbatch_size
    trainer.train()
    assert trainer.run.shapes.one_by_one and trainer.trajectory.next_step == 1


@pytest.mark.parametrize("held", ["attribute", "closure", "seed"])
def test_collators_with_a_generator_of_their_own_are_refused(tmp_path, held: str):
    """One row more would change what all later rows become."""
    generator = torch.Generator().manual_seed(0)

    class Masks:
        def __init__(self) -> None:
            self.seed = 42 if held == "seed" else None
            self.generator = generator if held == "attribute" else None

        def __call__(self, rows: list[Any]) -> Any:
            return default_data_collator(rows)

    def closed(rows: list[Any]) -> Any:
        torch.rand(1, generator=generator)
        return default_data_collator(rows)

    trainer = build(tmp_path)
    trainer.data_collator = closed if held == "closure" else Masks()
    with pytest.raises(ValueError, match="draws from a generator of its own"):
        trainer.train()


def test_no_private_row_but_row_0_is_evaluated(tmp_path):
    data, seen = tiny_data(200), Counter[tuple[int, ...]]()
    private = {tuple(row): i for i, row in enumerate(data["input_ids"])}

    def change(losses: Tensor, inputs: Any) -> Tensor:
        rows = (tuple(ids[:8].tolist()) for ids in inputs["input_ids"])
        seen.update(row for row in rows if row in private)
        return losses

    checked(tmp_path, moved(change), data=data, trainer_settings={"eval_dataset": PUBLIC})
    assert {private[row] for row in seen} == {0}


def test_the_default_cap_follows_from_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(passes.placing, "free_bytes", lambda _: 10**12)
    assert checked(tmp_path, microbatch_size=None).shapes.placement.sizes == (1, 4, 16, 64)
    monkeypatch.setattr(passes.placing, "free_bytes", lambda _: 0)
    short = checked(tmp_path, microbatch_size=None).shapes.placement
    assert {n for width in short.shares for n in short.passes(width)} == {1}
    given = checked(tmp_path, microbatch_size=8).shapes.placement  # a wish is granted
    assert max(n for width in given.shares for n in given.passes(width)) == 8


def test_bytes_of_a_pass():
    found = PassBytes(largest=1000, total=9000)  # of ten tokens
    assert tokens_that_fit(found, 10, 2_000_000, 0, backward=False) == 1_000_000 // 400
    assert tokens_that_fit(found, 10, 2_000_000, 0, backward=True) == 1_000_000 // 1800
    assert tokens_that_fit(found, 10, 2_000_000, 10**6, backward=False) == 0
    free = 2 * 2 * 32 * 4 * 10**9  # half of it holds two copies of 32 gradients
    assert rows_that_fit(free, 10**9, dense=True) == 32
    assert rows_that_fit(free, 10**9, dense=False) == 64
    assert rows_that_fit(1, 10**9, dense=True) == 1
