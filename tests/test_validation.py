"""Refusals that need the model or the data: each message says what, the value, what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_dpzero import validation


class Rows:
    """A map-style data set of given columns."""

    def __init__(self, count: int, *columns: str) -> None:
        self.count, self.columns = count, columns

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, int]:
        return dict.fromkeys(self.columns, index)


# ---------------------------------------------------------------- data


def test_num_examples_counts():
    assert validation.num_examples(Rows(7, "labels")) == 7
    assert validation.num_examples([1, 2, 3]) == 3


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (None, "train_dataset is None"),
        (Rows(0), "train_dataset is empty"),
        (iter([1, 2]), "without length or random access.*map-style"),
        ({1, 2}, "a set without length or random access"),
    ],
)
def test_data_without_a_size_is_refused(dataset: Any, message: str):
    with pytest.raises(ValueError, match=message):
        validation.num_examples(dataset)


@pytest.mark.parametrize("column", validation.LABEL_COLUMNS)
def test_any_label_column_will_do(column: str):
    validation.check_labels(Rows(3, "input_ids", column))


def test_labels_are_looked_for_in_column_names_first():
    with_names = SimpleNamespace(column_names=["text", "label"])
    validation.check_labels(with_names)
    with pytest.raises(ValueError, match=r"\['idx', 'text'\] but no labels: name the label column"):
        validation.check_labels(SimpleNamespace(column_names=["text", "idx"]))
    with pytest.raises(
        ValueError, match=r"\['input_ids'\] but no labels.*compute_per_example_loss"
    ):
        validation.check_labels(Rows(3, "input_ids"))


def test_rows_that_are_not_mappings_are_left_to_the_collator():
    validation.check_labels([(torch.zeros(2), 1)])


# ---------------------------------------------------------------- what trains


def test_trainable_selects_by_search_and_freezes_the_rest():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    validation.select_trainable(model, r"^1\.|bias")
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        "0.bias",
        "1.weight",
        "1.bias",
    ]
    validation.select_trainable(model, None)
    assert not model[0].weight.requires_grad


def test_a_pattern_that_matches_nothing_changes_nothing():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"trainable='lora' matches no parameter; .*'bias'"):
        validation.select_trainable(model, "lora")
    assert all(p.requires_grad for p in model.parameters())


# ---------------------------------------------------------------- the model


@pytest.mark.parametrize("layer", [nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm])
def test_batch_statistics_are_refused(layer: type[nn.Module]):
    model = nn.Sequential(nn.Linear(2, 2), layer(2, track_running_stats=False))
    with pytest.raises(
        ValueError, match=r"1 normalises with the statistics of its batch.*LayerNorm"
    ):
        validation.check_model(model, 1e-3)
    validation.check_model(nn.Sequential(layer(2)), 1e-3)  # running statistics couple nobody


def test_batch_norm_without_statistics_does_couple_examples():
    """Why it is refused: in eval mode another row changes the first row's output."""
    layer = nn.BatchNorm1d(2, track_running_stats=False).eval()
    rows = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    changed = torch.tensor([[1.0, 2.0], [9.0, 9.0]])
    assert not torch.equal(layer(rows)[0], layer(changed)[0])


class Stubborn(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Stubborn:
        return super().train(True)


def test_batch_norm_that_stays_in_training_mode_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), Stubborn(2)).eval()
    with pytest.raises(ValueError, match=r"1 stays in training mode after model.eval\(\)"):
        validation.check_evaluation_mode(model)
    validation.check_evaluation_mode(nn.Sequential(nn.BatchNorm1d(2)).eval())


def test_vanishing_fraction_is_what_the_dtype_says():
    """bfloat16 has 8 bits: near 1 the neighbours are 2^-7 apart, so +1e-3 vanishes and +0.01 not."""
    ones, small = torch.ones(10).bfloat16(), torch.full((10,), 0.01).bfloat16()
    assert validation.vanishing_fraction(ones, 1e-3) == 1.0
    assert validation.vanishing_fraction(ones, 1e-2) == 0.0
    assert validation.vanishing_fraction(small, 1e-3) == 0.0
    assert validation.vanishing_fraction(torch.ones(10), 1e-3) == 0.0
    assert validation.vanishing_fraction(torch.empty(0), 1e-3) == 0.0
    half = torch.cat([ones, small])
    assert validation.vanishing_fraction(half, 1e-3) == 0.5


def test_smoothing_that_vanishes_is_refused_only_where_it_trains():
    model = nn.Linear(4, 4).bfloat16()
    model.weight.data.fill_(1.0)
    model.bias.data.fill_(0.01)
    with pytest.raises(
        ValueError, match=r"smoothing=0.001 vanishes in rounding for 100% of weight"
    ):
        validation.check_model(model, 1e-3)
    validation.check_model(model, 0.1)
    model.weight.requires_grad_(False)
    validation.check_model(model, 1e-3)
    validation.check_model(model.float().requires_grad_(True), 1e-3)


# ---------------------------------------------------------------- ways of running


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fsdp": ["full_shard"]}, "FSDP and DeepSpeed"),
        ({"deepspeed": "ds.json"}, "FSDP and DeepSpeed"),
        ({"n_gpu": 2}, "2 GPUs in one process.*accelerate launch"),
    ],
)
def test_strategies_that_the_step_does_not_cover_are_refused(settings: dict, message: str):
    plain = {"fsdp": [], "deepspeed": None, "n_gpu": 1}
    with pytest.raises(ValueError, match=message):
        validation.check_single_strategy(SimpleNamespace(**{**plain, **settings}))
    validation.check_single_strategy(SimpleNamespace(**plain))
    validation.check_single_strategy(SimpleNamespace(**{**plain, "n_gpu": 0}))
