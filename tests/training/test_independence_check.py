"""The trial that finds losses of more than their own example."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dpzero.objectives.prompted import LabelWords
from hf_dpzero.training import independence_check
from hf_dpzero.training.independence_check import (
    check_independence,
    check_widths,
    long_and_short,
    rope_types,
    widened,
)

LENGTHS = [8] * 40 + [3, 30]


def collate(rows: list[int]) -> dict[str, Tensor]:
    lengths = [LENGTHS[row] for row in rows]
    width = max(lengths)
    ids = [torch.arange(row, row + n) % 50 + 2 for row, n in zip(rows, lengths)]
    padded = [nn.functional.pad(row, (0, width - len(row))) for row in ids]
    masks = [torch.arange(width) < n for n in lengths]
    return {"input_ids": torch.stack(padded), "attention_mask": torch.stack(masks).long()}


def own(batch: dict[str, Tensor], seed: int = 0) -> Tensor:
    """A loss of a row's own tokens."""
    return (batch["input_ids"] * batch["attention_mask"]).sum(1).float()


def test_an_honest_loss_passes():
    check_independence(collate, len(LENGTHS), own)


def test_the_trial_takes_long_and_short_rows():
    assert set(long_and_short(collate, len(LENGTHS))) >= {40, 41}
    assert long_and_short(collate, 1) == [0]


class Stateful:
    """Changes for good when it has seen a short row alone, as block-sparse attention does."""

    def __init__(self) -> None:
        self.short = False

    def __call__(self, batch: dict[str, Tensor], seed: int = 0) -> Tensor:
        self.short |= batch["input_ids"].shape[1] < 5
        return own(batch) + float(self.short)


def widest(batch: dict[str, Tensor], seed: int = 0) -> Tensor:
    """Depends on the width of the batch; rows that are all of one length do not show it."""
    return own(batch) + batch["input_ids"].shape[1]


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        (lambda batch, seed=0: own(batch) - own(batch).mean(), "of one"),
        (lambda batch, seed=0: own(batch) + batch["input_ids"].shape[1], "of one"),
        (Stateful(), "seen|of one"),
    ],
)
def test_a_coupled_loss_is_refused(losses: Any, words: str):
    with pytest.raises(ValueError, match=words):
        check_independence(collate, len(LENGTHS), losses)


def test_rows_of_one_length_are_tried_wider():
    def same_length(rows: list[int]) -> dict[str, Tensor]:
        return collate([row % 40 for row in rows])

    check_independence(same_length, 40, own)
    with pytest.raises(ValueError, match="masked padding"):
        check_independence(same_length, 40, widest)
    check_independence(same_length, 40, widest, widths=False)  # rows that run one by one


def test_a_loss_that_reads_the_last_token_of_left_padded_rows_passes():
    def left(rows: list[int]) -> dict[str, Tensor]:
        return {name: value.flip(1) for name, value in collate(rows).items()}

    check_independence(left, len(LENGTHS), lambda batch, seed=0: batch["input_ids"][:, -1].float())


def test_widened_labels_are_ignored_and_candidates_stay_theirs():
    ids = torch.tensor([[[1, 2], [3, 4]]])
    batch = {"input_ids": ids, "attention_mask": ids > 0, "labels": torch.tensor([1])}
    found = widened(batch, "right", 2)
    assert found is not None
    assert found["input_ids"].tolist() == [[[1, 2, 2, 2], [3, 4, 4, 4]]]
    assert found["attention_mask"].tolist() == [[[True, True, False, False]] * 2]
    assert found["labels"].tolist() == [1]
    assert widened({"x": ids}, "left", 1) is None


def language_models() -> dict[str, nn.Module]:
    import transformers as t

    sizes: dict[str, Any] = {
        "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "max_position_embeddings": 64, "initializer_range": 0.3,
    }  # fmt: skip
    conv = t.ConvBertConfig(**sizes, embedding_size=32, conv_kernel_size=9, head_ratio=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {
            "convbert": t.ConvBertForMaskedLM(conv).eval(),
            "bert": t.BertForMaskedLM(t.BertConfig(**sizes)).eval(),
        }


@pytest.mark.parametrize("same_length", [False, True])
def test_convolutions_over_padding_are_found_and_attention_passes(same_length: bool):
    objective = LabelWords((5, 6))

    def rows_of(rows: list[int]) -> dict[str, Tensor]:
        batch = collate([row % 40 for row in rows] if same_length else rows)
        last = batch["attention_mask"].sum(1) - 1
        return {**batch, "positions": last, "labels": torch.zeros_like(last)}

    models = language_models()

    @torch.no_grad()
    def of(name: str, batch: dict[str, Tensor]) -> Tensor:
        return objective(models[name], batch)

    check_independence(rows_of, len(LENGTHS), lambda batch, seed=0: of("bert", batch))
    with pytest.raises(ValueError, match="depends on the other examples"):
        check_independence(rows_of, len(LENGTHS), lambda batch, seed=0: of("convbert", batch))


def model_with(**settings: Any) -> nn.Module:
    model: Any = nn.Linear(1, 1)
    model.config = type("Config", (), settings)()
    return model


@pytest.mark.parametrize(
    ("settings", "microbatch", "words"),
    [
        ({"attention_type": "block_sparse"}, 1, "original_full"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 1, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, 2, "microbatch_size=1"),
        ({"rope_parameters": {"full": {"rope_type": "longrope"}}}, 2, "microbatch_size=1"),
    ],
)
def test_attention_that_changes_with_the_width_is_refused(settings, microbatch, words):
    with pytest.raises(ValueError, match=words):
        check_widths(model_with(**settings), microbatch)


def test_other_positions_pass():
    check_widths(model_with(rope_parameters={"rope_type": "longrope"}), 1)
    check_widths(model_with(rope_scaling={"rope_type": "yarn"}), 8)
    check_widths(model_with(attention_type="original_full"), 8)
    check_widths(nn.Linear(1, 1), 8)
    assert rope_types(None) == set()


@pytest.mark.parametrize("count", [1, 3, 64, 65, 127, 128, 1000])
def test_at_most_64_rows_are_looked_at_evenly_spread(count: int):
    seen: list[int] = []

    def collate(rows: list[int]) -> dict[str, torch.Tensor]:
        seen.extend(rows)
        return {"attention_mask": torch.ones(1, 1 + rows[0] % 5)}

    independence_check.long_and_short(collate, count)
    assert len(seen) == len(set(seen)) == min(count, 64) and seen[0] == 0
    gaps = [after - before for before, after in zip(seen, [*seen[1:], count], strict=True)]
    assert max(gaps) - min(gaps) <= 1 and sum(gaps) == count
