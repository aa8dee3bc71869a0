"""Attack: claim a guarantee for an example, with rows that hold parts of many examples."""

from __future__ import annotations

from itertools import chain

import datasets
import pytest
import torch
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


def group_texts(examples, block_size=BLOCK):
    """As in transformers' run_clm.py."""
    concatenated = {k: list(chain(*examples[k])) for k in examples}
    total_length = len(concatenated[next(iter(examples.keys()))])
    total_length = (total_length // block_size) * block_size
    result = {
        k: [t[i : i + block_size] for i in range(0, total_length, block_size)]
        for k, t in concatenated.items()
    }
    result["labels"] = result["input_ids"].copy()
    return result


def padded(rows):
    width = max(len(row["input_ids"]) for row in rows)
    batch = {
        "input_ids": torch.tensor(
            [r["input_ids"] + [0] * (width - len(r["input_ids"])) for r in rows]
        )
    }
    batch["attention_mask"] = torch.tensor(
        [r["attention_mask"] + [0] * (width - len(r["attention_mask"])) for r in rows]
    )
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return {**batch, "labels": labels}


def trainer_of(folder, model, data, collator=default_data_collator, **settings):
    return DPZeroTrainer(
        model=model,
        args=config(folder, max_steps=1, microbatch_size=1, expected_batch_size=2, **settings),
        train_dataset=data,
        data_collator=collator,
    )


def test_run_clms_blocks_are_not_taken_for_examples(tmp_path, tiny_gpt2):
    blocks = lines().map(group_texts, batched=True)
    assert 0 < len(blocks) < 400
    with pytest.raises(ValueError, match="look packed.*have one length.*rows_are='examples'"):
        trainer_of(tmp_path / "unsaid", tiny_gpt2(**CONTEXT), blocks).train()
    assert not (tmp_path / "unsaid" / "trajectory.ledger").exists()

    trainer = trainer_of(tmp_path / "blocks", tiny_gpt2(**CONTEXT), blocks, rows_are="blocks")
    trainer.train()
    report = trainer.privacy_report()
    assert report.privacy_unit == "block of text"
    assert trainer.trajectory.header["privacy_unit"] == "block of text"
    assert any("not for an example, a document or a person" in text for text in report.caveats)
    assert "one training block of text" in str(report)
    assert PrivacyReport.from_dict(report.to_dict()) == report


def test_blocks_are_not_shipped_as_examples(tmp_path, tiny_gpt2):
    blocks = lines().map(group_texts, batched=True)
    secret = {"testing.sampler_key": None, "testing.insecure_noise_seed": None}
    trainer = trainer_of(tmp_path, tiny_gpt2(**CONTEXT), blocks, rows_are="blocks", **secret)
    trainer.train()
    trainer.save_model()
    folder = build_hub_folder(tmp_path, tmp_path / "hub")
    assert "one training block of text" in (folder / "README.md").read_text()
    path = tmp_path / "privacy_report.json"
    path.write_text(path.read_text().replace('"block of text"', '"example"'))
    with pytest.raises(ValueError, match="privacy_unit: example / block of text"):
        build_hub_folder(tmp_path, tmp_path / "hub")


def test_rows_that_fill_the_context_are_asked_about(tmp_path, tiny_gpt2):
    """Packing that leaves ends of different lengths: 153 to 160 of 160 tokens."""
    full = lines(40, 153, 161)
    with pytest.raises(ValueError, match="look packed.*fill the 160 tokens"):
        trainer_of(tmp_path, tiny_gpt2(**CONTEXT), full, padded).train()


def test_positions_that_start_again_are_asked_about(tmp_path, tiny_gpt2):
    data = lines(40, 10, 11)
    data = data.map(
        lambda row: {"position_ids": [0, 1, 2, 3, 0, 1, 2, 3, 4, 5], "labels": row["input_ids"]}
    )
    with pytest.raises(ValueError, match="look packed.*start again"):
        trainer_of(tmp_path, tiny_gpt2(**CONTEXT), data).train()


@pytest.mark.parametrize("family", ["tiny_gpt2", "tiny_opt", "tiny_masked_lm"])
def test_every_language_model_is_asked(tmp_path, family, request):
    size = CONTEXT if family == "tiny_gpt2" else {"max_position_embeddings": 160}
    blocks = lines().map(group_texts, batched=True)
    with pytest.raises(ValueError, match="look packed"):
        trainer_of(tmp_path, request.getfixturevalue(family)(**size), blocks).train()


def test_examples_a_row_are_not_asked_about(tmp_path, tiny_gpt2, tiny_bert):
    trainer_of(tmp_path / "lines", tiny_gpt2(**CONTEXT), lines(), padded).train()

    def to_length(row):
        """Padding to a fixed length, as `padding="max_length"` makes it."""
        missing = 100 - len(row["input_ids"])
        ids, mask = row["input_ids"] + [0] * missing, row["attention_mask"] + [0] * missing
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": [-100 if m == 0 else i for i, m in zip(ids, mask, strict=True)],
        }

    data = lines().map(to_length)
    trainer_of(tmp_path / "padded", tiny_gpt2(**CONTEXT), data).train()
    labelled = lines(60, 40, 41).map(lambda row, i: {"labels": i % 2}, with_indices=True)
    trainer_of(tmp_path / "classified", tiny_bert(), labelled).train()


def test_examples_of_one_length_are_the_users_word(tmp_path, tiny_gpt2):
    data = lines(40, 100, 101).map(lambda row: {"labels": row["input_ids"]})
    with pytest.raises(ValueError, match="look packed"):
        trainer_of(tmp_path / "unsaid", tiny_gpt2(**CONTEXT), data).train()
    trainer = trainer_of(tmp_path / "said", tiny_gpt2(**CONTEXT), data, rows_are="examples")
    trainer.train()
    assert trainer.privacy_report().privacy_unit == "example"


def test_unknown_rows_are_refused(tmp_path):
    with pytest.raises(ValueError, match="rows_are='block' is not one of examples, blocks"):
        config(tmp_path, rows_are="block")
