"""Attack: rows that are left out by what they hold, or counted as what they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_language_models import opt_tokenizer, save_causal_lm
from tiny_runs import config, tiny_data, tiny_model
from transformers import AutoModelForCausalLM, Trainer, default_data_collator

from hf_dpzero import DPZeroMixin, DPZeroTrainer


class Dropping(Trainer):
    """Leaves out the rows that it does not like."""

    def __init__(
        self, model: Any, args: Any, data_collator: Any, train_dataset: Any, **settings: Any
    ):
        kept = train_dataset.filter(lambda row: row["input_ids"][0] > 6)
        super().__init__(model, args, data_collator, kept, **settings)


class PassingOn(Dropping):
    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)


@pytest.mark.parametrize("kind", [Dropping, PassingOn])
@pytest.mark.parametrize("by_name", [False, True])
def test_rows_that_a_trainer_leaves_out(tmp_path: Path, kind: Any, by_name: bool) -> None:
    """Passed by place, they were not counted: n told how many private rows were left out."""
    private: Any = type("Private", (DPZeroMixin, kind), {})
    given = {"data_collator": default_data_collator, "train_dataset": tiny_data()}
    places, names = ([], given) if by_name else (given.values(), {})
    with pytest.raises(ValueError, match="another number of rows"):
        private(tiny_model(), config(tmp_path), *places, **names)


def trainer_of(tmp_path: Path, rows: list[dict[str, str]], args: Any = None) -> DPZeroTrainer:
    return DPZeroTrainer(
        model=AutoModelForCausalLM.from_pretrained(save_causal_lm(tmp_path / "model")),
        args=args or config(tmp_path / "out", max_steps=2, max_length=100),
        train_dataset=rows,
        processing_class=opt_tokenizer(),
    )


BLOCKS = [{"text": f"{'the film was bad ' * 40}{i}"} for i in range(60)]
PROMPT = {"prompt": "red:", "completion": " great"}


def test_one_prompt_among_blocks_of_text(tmp_path: Path) -> None:
    """A first row with a prompt vouched for all others: nobody asked whether they are blocks."""
    with pytest.raises(ValueError, match="row 1 of train_dataset has not the columns") as refusal:
        trainer_of(tmp_path, [PROMPT, *BLOCKS])
    assert "film" not in str(refusal.value)


def test_blocks_of_text_under_the_settings_of_an_earlier_trainer(tmp_path: Path) -> None:
    """What the first trainer found its rows to be was written into the settings, for the second too."""
    args = trainer_of(tmp_path, [PROMPT] * 60).args
    with pytest.raises(ValueError, match="rows_are"):
        trainer_of(tmp_path, BLOCKS, args).train()
