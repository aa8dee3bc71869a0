"""The private step under any Trainer: a script's own subclass, or Seq2SeqTrainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny_runs import build, config, same, tiny_data, tiny_model, weights
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Trainer,
    default_data_collator,
)

from hf_dpzero import (
    DPZeroConfig,
    DPZeroMixin,
    DPZeroSeq2SeqConfig,
    DPZeroSeq2SeqTrainer,
)


class ScoringTrainer(Trainer):
    """Like a script's QuestionAnsweringTrainer: more arguments, and an evaluation of its own."""

    def __init__(self, *args: Any, eval_examples: Any = None, score: Any = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.eval_examples, self.score = eval_examples, score

    def evaluate(self, eval_dataset: Any = None, eval_examples: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        rows = self.get_eval_dataloader(eval_dataset)
        output = self.evaluation_loop(rows, description="Evaluation", metric_key_prefix="eval")
        examples = self.eval_examples if eval_examples is None else eval_examples
        return {"eval_score": self.score(examples, output.predictions)}


class PrivateScoringTrainer(DPZeroMixin, ScoringTrainer):
    pass


@dataclass
class ModelArguments:
    model_name_or_path: str = field(default="tiny")


@dataclass
class DataTrainingArguments:
    max_seq_length: int = field(default=8)


@pytest.mark.parametrize("kind", [DPZeroConfig, DPZeroSeq2SeqConfig])
def test_a_scripts_parser_takes_the_privacy_settings(tmp_path, kind):
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, kind))
    words = ["--output_dir", str(tmp_path), "--target_epsilon", "2", "--num_directions", "3"]
    if kind is DPZeroSeq2SeqConfig:
        words += ["--predict_with_generate", "--generation_max_length", "5"]
    model, data, args = parser.parse_args_into_dataclasses([*words, "--max_seq_length", "4"])
    assert (model.model_name_or_path, data.max_seq_length) == ("tiny", 4)
    assert (args.target_epsilon, args.num_directions) == (2.0, 3)
    assert kind is DPZeroConfig or (args.predict_with_generate and args.generation_max_length == 5)


def test_the_mixin_trains_as_the_trainer_does_and_leaves_evaluation_to_the_script(tmp_path):
    trainer = PrivateScoringTrainer(
        model=tiny_model(),
        args=config(tmp_path / "mixed"),
        train_dataset=tiny_data(),
        eval_dataset=tiny_data(40, seed=2),
        eval_examples=["a", "b"],
        score=lambda examples, logits: (len(examples), logits.shape),
        data_collator=default_data_collator,
    )
    trainer.train()
    assert trainer.evaluate() == {"eval_score": (2, (40, 2))}
    with pytest.raises(ValueError, match="private"):
        trainer.evaluate(trainer.train_dataset)
    plain = build(tmp_path / "plain")
    plain.train()
    assert same(weights(trainer.model), weights(plain.model))
    assert trainer.privacy_report().epsilon == plain.privacy_report().epsilon


def bart() -> BartForConditionalGeneration:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BartForConditionalGeneration(
            BartConfig(
                vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1,
                encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
                decoder_ffn_dim=16, max_position_embeddings=32, pad_token_id=1, bos_token_id=0,
                eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
            )
        )  # fmt: skip


def pairs(rows: int, seed: int) -> Dataset:
    numbers = torch.randint(
        5, 40, (rows, 9), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return Dataset.from_list(
        [{"input_ids": r[: 4 + r[0] % 5], "labels": r[: 2 + r[1] % 3]} for r in numbers]
    ).map(lambda row: {"attention_mask": [1] * len(row["input_ids"])})


class Pad:
    """What DataCollatorForSeq2Seq asks of a tokenizer."""

    padding_side, pad_token_id, model_input_names = "right", 1, ["input_ids", "attention_mask"]
    deprecation_warnings: dict[str, bool] = {}

    def pad(self, rows: list[Any], **_: Any) -> dict[str, torch.Tensor]:
        widest = max(len(row["input_ids"]) for row in rows)
        fill = {"input_ids": 1, "attention_mask": 0}
        of = lambda row, n: row[n] + [fill[n]] * (widest - len(row[n]))  # noqa: E731
        return {n: torch.tensor([of(row, n) for row in rows]) for n in fill}


@pytest.mark.parametrize("method", ["dpzero", "dp-sgd"])
def test_evaluation_generates_after_private_steps(tmp_path, method):
    seen: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction)
        return {"length": float((prediction.predictions != 1).sum(1).mean())}

    model = bart()
    if method == "dp-sgd":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("fc" in name)
    settings = {"num_directions": 2} if method == "dpzero" else {}
    args = config(tmp_path, method=method, max_steps=2, **settings).to_dict()
    chosen = {
        n: args[n] for n in ("target_delta", "noise_multiplier", "clip", "max_steps", "method")
    }
    trainer = DPZeroSeq2SeqTrainer(
        model=model,
        args=DPZeroSeq2SeqConfig(
            output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True,
            save_strategy="no", expected_batch_size=12, microbatch_size=4, predict_with_generate=True,
            generation_max_length=6, **chosen, **settings,
        ),
        train_dataset=pairs(60, 1),
        eval_dataset=pairs(20, 2),
        data_collator=DataCollatorForSeq2Seq(Pad(), model=model),  # type: ignore[arg-type]
        compute_metrics=metrics,
    )  # fmt: skip
    trainer.train()
    measured = trainer.evaluate()
    assert seen[0].predictions.shape[0] == 20 and seen[0].predictions.ndim == 2
    assert 0 < measured["eval_length"] <= 6
    report = trainer.privacy_report()
    assert report.private and report.steps == 2
    with pytest.raises(ValueError, match="private"):
        trainer.predict(trainer.train_dataset)
