"""Attack: claim a guarantee for an example, with rows that hold parts of many examples."""

from __future__ import annotations

from itertools import chain

import datasets
import pytest
import torch
from attacked_runs import SECRET
from tiny_runs import config
from transformers import default_data_collator

from hf_dpzero import DPZeroTrainer
from hf_dpzero.reporting.hub import build_hub_folder
from hf_dpzero.reporting.privacy_report import PrivacyReport

BLOCK = 80
CONTEXT = {"n_positions": 160}


def lines(count: int = 400, shortest: int = 3, longest: int = 40) -> datasets.Dataset:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(shortest, longest, (count,), generator=generator).tolist()
    ids = [torch.randint(4, 64, (n,), generator=generator).tolist() for n in lengths]
    return datasets.Dataset.from_dict(
        {"input_ids": ids, "attention_mask": [[1] * n for n in lengths]}
    )


def blocks() -> datasets.Dataset:
    """As transformers' run_clm.py groups texts."""

    def group_texts(examples):
        joined = {name: list(chain(*column)) for name, column in examples.items()}
        whole = range(0, len(joined["input_ids"]) // BLOCK * BLOCK, BLOCK)
        made = {name: [t[i : i + BLOCK] for i in whole] for name, t in joined.items()}
        return {**made, "labels": made["input_ids"]}

    made = lines().map(group_texts, batched=True)
    assert 0 < len(made) < 400
    return made


def padded(rows, width: int | None = None):
    width = width or max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "attention_mask": 0}
    batch = {
        n: torch.tensor([r[n] + [v] * (width - len(r[n])) for r in rows]) for n, v in fill.items()
    }
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return {**batch, "labels": labels}


def trainer_of(folder, model, data, collator=default_data_collator, **settings):
    return DPZeroTrainer(
        model=model,
        args=config(folder, max_steps=1, microbatch_size=1, expected_batch_size=2, **settings),
        train_dataset=data,
        data_collator=collator,
    )


def test_run_clms_blocks_are_not_taken_nor_shipped_for_examples(tmp_path, tiny_gpt2):
    data = blocks()
    with pytest.raises(ValueError, match="look packed.*have one length.*rows_are='examples'"):
        trainer_of(tmp_path / "unsaid", tiny_gpt2(**CONTEXT), data).train()
    assert not (tmp_path / "unsaid" / "trajectory.ledger").exists()
    run = tmp_path / "blocks"
    trainer = trainer_of(run, tiny_gpt2(**CONTEXT), data, rows_are="blocks", **SECRET)
    trainer.train()
    report = trainer.privacy_report()
    assert report.privacy_unit == trainer.trajectory.header["privacy_unit"] == "block of text"
    assert any("not for an example, a document or a person" in text for text in report.caveats)
    assert "one training block of text" in str(report)
    assert PrivacyReport.from_dict(report.to_dict()) == report
    trainer.save_model()
    folder = build_hub_folder(run, tmp_path / "hub")
    assert "one training block of text" in (folder / "README.md").read_text()
    path = run / "privacy_report.json"
    path.write_text(path.read_text().replace('"block of text"', '"example"'))
    with pytest.raises(ValueError, match="privacy_unit: example / block of text"):
        build_hub_folder(run, tmp_path / "hub")


def starting_again() -> datasets.Dataset:
    positions = {"position_ids": [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]}
    return lines(40, 10, 11).map(lambda row: {**positions, "labels": row["input_ids"]})


@pytest.mark.parametrize(
    ("family", "make", "collator", "words"),
    [
        # packing that leaves ends of different lengths: 153 to 160 of 160 tokens
        ("tiny_gpt2", lambda: lines(40, 153, 161), padded, "fill the 160 tokens"),
        ("tiny_gpt2", starting_again, default_data_collator, "start again"),
        ("tiny_opt", blocks, default_data_collator, "have one length"),
        ("tiny_masked_lm", blocks, default_data_collator, "have one length"),
    ],
)
def test_rows_that_look_packed_are_asked_about(tmp_path, family, make, collator, words, request):
    size = CONTEXT if family == "tiny_gpt2" else {"max_position_embeddings": 160}
    with pytest.raises(ValueError, match=f"look packed.*{words}"):
        trainer_of(tmp_path, request.getfixturevalue(family)(**size), make(), collator).train()


def to_length(row):
    """Padding to a fixed length, as `padding="max_length"` makes it."""
    return {name: value[0].tolist() for name, value in padded([row], 100).items()}


def test_examples_a_row_are_not_asked_about(tmp_path, tiny_gpt2, tiny_bert):
    labelled = lines(60, 40, 41).map(lambda row, i: {"labels": i % 2}, with_indices=True)
    trainer_of(tmp_path / "classified", tiny_bert(), labelled).train()
    for name, data, collator in (
        ("lines", lines(), padded),
        ("padded", lines().map(to_length), default_data_collator),
    ):
        trainer_of(tmp_path / name, tiny_gpt2(**CONTEXT), data, collator).train()


def test_rows_of_one_length_are_the_users_word(tmp_path, tiny_gpt2):
    data = lines(40, 100, 101).map(lambda row: {"labels": row["input_ids"]})
    trainer = trainer_of(tmp_path, tiny_gpt2(**CONTEXT), data, rows_are="examples")
    trainer.train()
    assert trainer.privacy_report().privacy_unit == "example"
    with pytest.raises(ValueError, match="rows_are='block' is not one of examples, blocks"):
        config(tmp_path, rows_are="block")
