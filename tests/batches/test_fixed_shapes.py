"""Microbatches of fixed shapes: what is in them, and what falls back to one example a pass."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tiny_runs import build, tiny_data
from tiny_texts import passes_of
from torch import Tensor, nn
from transformers import OPTConfig, OPTForSequenceClassification

from hf_dpzero.batches.placement import Placement
from hf_dpzero.batches.shapes import PassShapes, widened
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.objectives.heads import sequence_classification_objective
from hf_dpzero.objectives.losses import evaluation_mode
from hf_dpzero.training.preparation import prepare


def collate(lengths: list[int]) -> Any:
    def one(i: int) -> dict[str, Tensor]:
        ids = torch.arange(1, lengths[i] + 1) + 10 * i
        return {
            "input_ids": ids[None],
            "attention_mask": torch.ones(1, lengths[i], dtype=torch.int64),
            "labels": torch.tensor([i]),
        }

    return lambda indices: [one(i) for i in indices]


LENGTHS = [3, 9, 8, 20, 10, 2, 33, 15]


def test_rows_take_the_next_place_of_their_shape():
    shapes = PassShapes(collate(LENGTHS), passes_of(3), context_length=40)
    made = shapes.microbatches(range(8))
    found = [(tuple(m["input_ids"].shape), m["labels"].tolist(), m.examples) for m in made]
    assert found == [
        ((3, 8), [0, 5, 0], 2),
        ((3, 16), [1, 2, 4], 3),
        ((3, 16), [7, 0, 0], 1),
        ((3, 24), [3, 0, 0], 1),
        ((3, 40), [6, 0, 0], 1),
    ]
    for m in made:
        assert int(m["attention_mask"][m.examples :].sum()) == 3 - m.examples  # blanks
        examples = zip(m["input_ids"], m["attention_mask"], m["labels"].tolist())
        for ids, mask, i in list(examples)[: m.examples]:
            alone = collate(LENGTHS)([i])[0]["input_ids"][0]
            assert torch.equal(ids[mask.bool()], alone)
            assert int(mask.sum()) == len(alone)


def test_rows_of_a_pass_follow_from_its_place_whatever_is_drawn():
    placement = Placement(5.0, (1, 4), {8: 1.0}, cost=5.0)
    sizes = placement.passes(8)
    assert len(set(sizes)) == 2
    shapes = PassShapes(collate([3] * 12), placement)
    for count in range(1, 12):
        made = shapes.microbatches(range(count))
        assert [len(m["labels"]) for m in made] == list(sizes[: len(made)])
        starts = [sum(sizes[:number]) for number in range(len(made))]
        for part, start, rows in zip(made, starts, sizes):
            assert list(part.places) == list(range(start, min(start + rows, count)))


def test_second_texts_of_pairs_are_masked_where_they_are_widened():
    """Of as many tokens as the first: both are widened."""
    ids, mask = torch.tensor([[5, 6]]), torch.tensor([[1, 1]])
    row = {
        "input_ids": ids,
        "attention_mask": mask,
        "input_ids_pair": ids,
        "attention_mask_pair": mask,
    }
    wide = widened(row, "right", 2)
    assert wide["attention_mask_pair"].tolist() == wide["attention_mask"].tolist() == [[1, 1, 0, 0]]


def test_rows_without_padding_stand_among_themselves():
    """A mask that is all ones takes another kernel: it may not be whole by chance."""
    shapes = PassShapes(collate([40, 33, 40, 39]), passes_of(2), context_length=40)
    made = shapes.microbatches(range(4))
    found = [(m.places, bool(m["attention_mask"].all())) for m in made]
    assert found == [([0, 2], True), ([1, 3], False)]
    (one,) = shapes.microbatches([0])
    assert one["attention_mask"].all()  # its blank attends to all columns too


@pytest.mark.parametrize("side", ["left", "right"])
def test_labels_of_tokens_are_masked_and_decoders_have_their_own_width(side):
    ids = torch.ones(1, 5, dtype=torch.int64)
    row = {
        "input_ids": ids,
        "attention_mask": ids,
        "labels": torch.full((1, 9), 7),
        "decoder_input_ids": torch.full((1, 9), 3),
    }
    (m,) = PassShapes(lambda _: [row], passes_of(2), padding_side=side).microbatches([0])
    assert m["attention_mask"][0].tolist() == ([1] * 5 + [0] * 3)[:: 1 if side == "right" else -1]
    assert m["labels"].tolist() == [[7] * 9 + [-100] * 7, [-100] * 16]
    assert m["decoder_input_ids"].shape == (2, 16)


def test_what_is_no_row_of_its_own_is_refused():
    shapes = PassShapes(
        lambda _: [{"ids": torch.ones(1, 4), "scale": torch.tensor(1.0)}], passes_of(2)
    )
    with pytest.raises(ValueError, match="'scale' of one row a \\[\\].*microbatch_size=1"):
        shapes.microbatches([0])


def test_fillers_do_not_count(tmp_path):
    """x has a row for each sampled example, whatever the slots."""
    trainer = build(tmp_path, max_steps=1, microbatch_size=5, expected_batch_size=40)
    trainer.train()
    assert not trainer.run.shapes.one_by_one
    chosen = list(range(0, 114, 3))
    parts = trainer.run.shapes.microbatches(chosen)
    assert sum(m.examples for m in parts) == 38
    assert {len(m["labels"]) for m in parts} <= {1, 4, 5}
    rows, evaluate = trainer.run.rows, trainer.step.differences.evaluate
    with evaluation_mode(trainer.model):
        losses = torch.cat([evaluate(m) for m in parts])
        alone = [evaluate(rows.collate_rows([i])) for i in chosen]
    torch.testing.assert_close(losses.sort().values, torch.cat(alone).sort().values)


class Coupled(nn.Module):
    """Adds a share of the batch's mean loss to every loss."""

    single_pass = True

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
        losses = sequence_classification_objective(model, inputs)
        return losses + self.share * losses.mean()


def checked(tmp_path, objective: Any, **settings: Any) -> Any:
    trainer = build(
        tmp_path, expected_batch_size=40, trainer_settings={"compute_per_example_loss": objective},
        **settings,
    )  # fmt: skip
    prepare(trainer.run)
    return trainer


def test_coupling_as_small_as_rounding_falls_back_to_one_example_a_pass(tmp_path, caplog):
    logging.getLogger("transformers").propagate = True
    assert not checked(tmp_path, sequence_classification_objective).run.shapes.one_by_one
    assert "one example" not in caplog.text and "by itself" not in caplog.text
    trainer = checked(tmp_path, Coupled(1e-4))
    assert trainer.run.shapes.one_by_one
    assert "every example is evaluated by itself" in caplog.text
    batch = trainer.run.shapes.microbatches([0, 1])
    assert [len(m["labels"]) for m in batch] == [1, 1]


@pytest.mark.parametrize("method", ["dpzero", "dp-sgd"])
def test_coupling_beyond_rounding_is_refused_for_random_models_too(tmp_path, method):
    """Dropout in the loss hid it: two evaluations of one batch differ, with or without coupling."""

    def dropped(model: nn.Module, inputs: Any) -> Tensor:
        losses = sequence_classification_objective(model, inputs)
        return nn.functional.dropout(losses, 0.2) + losses.mean()

    with pytest.raises(ValueError, match="depends on the other examples"):
        checked(tmp_path, dropped, method=method)


def masked(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Masks a random half of the tokens."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    chosen = torch.rand(ids.shape) < 0.5
    return {
        "input_ids": ids.masked_fill(chosen, 4),
        "attention_mask": torch.ones_like(ids),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def test_random_collators_do_not_hide_a_loss_of_the_batch(tmp_path):
    def negatives(model: nn.Module, inputs: Any) -> Tensor:
        tokens = model.get_input_embeddings()(inputs["input_ids"]).flatten(1)
        similar = 100 * tokens @ tokens.T
        return nn.functional.cross_entropy(similar, torch.arange(len(tokens)), reduction="none")

    trainer = build(
        tmp_path, expected_batch_size=40, trainer_settings={"compute_per_example_loss": negatives}
    )
    trainer.data_collator = masked
    with pytest.raises(ValueError, match="depends on the other examples"):
        prepare(trainer.run)


class Experts(nn.Module):
    """Two experts of a fixed capacity: tokens beyond it are dropped, in the order of the batch."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.capacity = capacity

    def forward(self, input_ids: Tensor, labels: Any = None) -> Tensor:
        tokens = self.embed(input_ids).flatten(0, 1)
        choice = input_ids.flatten() % 2
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            taken = (choice == e).nonzero().flatten()[: self.capacity]
            out[taken] = expert(tokens[taken])
        return self.head(out.view(*input_ids.shape, -1).mean(1))


def test_experts_of_a_fixed_capacity_are_refused(tmp_path):
    """Four rows of eight tokens always fit; the run's own microbatches of twelve do not."""

    def objective(model: nn.Module, inputs: Any) -> Tensor:
        return nn.functional.cross_entropy(
            model(inputs["input_ids"]), inputs["labels"], reduction="none"
        )

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Experts(capacity=40)
    trainer = build(
        tmp_path, model, expected_batch_size=144, microbatch_size=32, data=tiny_data(200),
        trainer_settings={"compute_per_example_loss": objective},
    )  # fmt: skip
    with pytest.raises(ValueError, match="depends on the other examples"):
        prepare(trainer.run)


@pytest.mark.parametrize("setting", ["precision", "allow"])
def test_tf32_set_globally_runs_in_fixed_shapes_and_is_refused_for_gradients(tmp_path, setting):
    try:
        if setting == "precision":
            torch.set_float32_matmul_precision("high")
        else:
            torch.backends.cuda.matmul.allow_tf32 = True
        trainer = build(tmp_path, expected_batch_size=40)
        prepare(trainer.run)
        assert not trainer.run.shapes.one_by_one
        with pytest.raises(ValueError, match="TF32.*microbatch_size=8"):
            prepare(build(tmp_path, method="dp-sgd").run)
        prepare(build(tmp_path, method="dp-sgd", microbatch_size=1).run)
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("method", ["dpzero", "dp-sgd"])
def test_a_classifier_that_pools_at_the_last_token_is_no_coupled_loss(tmp_path, method):
    """OPT's looks for the last token that does not pad: what widens a row must be padding."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = OPTForSequenceClassification(
            OPTConfig(
                vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16,
                max_position_embeddings=32, word_embed_proj_dim=16, pad_token_id=1, init_std=0.5,
            )
        )  # fmt: skip
    short = tiny_data().map(lambda row: {n: row[n][:5] for n in ("input_ids", "attention_mask")})
    prepare(build(tmp_path, model, data=short, method=method, expected_batch_size=40).run)


def test_stacked_copies_that_round_by_place_go_back_to_whole_model(tmp_path, monkeypatch):
    """Directions that share a pass have kernels of their own, which public rows are tried in."""

    class RoundsStacked(FiniteDifferences):
        def __call__(self, microbatches: Any, directions: Any, *more: Any) -> Tensor:
            x = super().__call__(microbatches, directions, *more)
            places = torch.arange(len(x))[:, None]
            return x + 0.01 * places * (self.stack is not None)

    monkeypatch.setattr("hf_dpzero.training.zeroth_order_method.FiniteDifferences", RoundsStacked)
    settings = {"num_directions": 5, "expected_batch_size": 40, "max_steps": 1}
    trainer = build(tmp_path / "auto", **settings)
    trainer.train()
    assert trainer.step.differences.strategy == "whole_model"
    with pytest.raises(ValueError, match="stacked' moves what an example adds by its place"):
        build(
            tmp_path / "named",
            performance={"perturbation_strategy": "stacked"},
            **settings,
        ).train()
    assert not (tmp_path / "named" / "trajectory.ledger").exists()
