"""The private step under any Trainer: a script's own subclass, or Seq2SeqTrainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_language_models import save_causal_lm
from tiny_runs import build, config, same, tiny_data, tiny_model, weights
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Trainer,
    default_data_collator,
)

from hf_dpzero import DPZeroConfig, DPZeroMixin, DPZeroSeq2SeqConfig, DPZeroSeq2SeqTrainer


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
    trainer = DPZeroSeq2SeqTrainer(
        model=model,
        args=seq2seq_config(
            tmp_path, method=method, clip=5.0, predict_with_generate=True, generation_max_length=6
        ),
        train_dataset=pairs(60, 1),
        eval_dataset=pairs(20, 2),
        data_collator=DataCollatorForSeq2Seq(Pad(), model=model),  # type: ignore[arg-type]
        compute_metrics=metrics,
    )  # fmt: skip
    trainer.train()
    measured = trainer.evaluate()
    assert [len(prediction.predictions) for prediction in seen] == [16, 20]  # tried on two batches
    assert seen[1].predictions.ndim == 2
    assert 0 < measured["eval_length"] <= 6
    report = trainer.privacy_report()
    assert report.private and report.steps == 2
    with pytest.raises(ValueError, match="private"):
        trainer.predict(trainer.train_dataset)


# ---------------------------------------------------------------- names, adapters and texts


class PassingTrainer(Trainer):
    """A script's trainer that passes everything on and adds an argument of its own."""

    def __init__(self, model: Any = None, args: Any = None, *rest: Any, tag: str = "", **more: Any):
        super().__init__(model, args, *rest, **more)
        self.tag = tag


class PrivatePassingTrainer(DPZeroMixin, PassingTrainer):
    pass


def prompts(rows: int, seed: int = 0) -> list[dict[str, str]]:
    return [{"prompt": f"red {seed} {i}:", "completion": " great"} for i in range(rows)]


@pytest.fixture(scope="module")
def named(tmp_path_factory) -> str:
    """A folder of a causal language model with its tokenizer."""
    return str(save_causal_lm(tmp_path_factory.mktemp("named")))


def lora() -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def seq2seq_config(tmp_path: Any, **settings: Any) -> DPZeroSeq2SeqConfig:
    return DPZeroSeq2SeqConfig(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, target_epsilon=8,
        save_strategy="no", expected_batch_size=8, microbatch_size=4, max_steps=2, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [PrivatePassingTrainer, DPZeroSeq2SeqTrainer])
def test_names_adapters_and_texts_work_under_the_mixin(tmp_path, named, kind):
    sequences = kind is DPZeroSeq2SeqTrainer
    trainer = kind(
        model=named,
        args=seq2seq_config(tmp_path) if sequences else config(tmp_path, max_steps=2),
        train_dataset=Dataset.from_list(prompts(40)),
        eval_dataset=prompts(8, seed=1),
        peft_config=lora(),
        **({} if sequences else {"tag": "mine"}),
    )
    assert trainer.processing_class is not None
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert len(trainer.train_dataset) == 40 and trainer.run.examples_known
    trainer.train()
    assert trainer.privacy_report().steps == 2
    assert torch.isfinite(torch.tensor(trainer.evaluate(prompts(8, seed=2))["eval_loss"]))
    with pytest.raises(ValueError, match="private"):
        trainer.evaluate(prompts(8))


def test_arguments_without_a_name_are_those_of_the_trainer_beneath(tmp_path, named):
    settings = config(tmp_path, max_steps=2)
    trainer = PrivatePassingTrainer(named, settings, None, prompts(20), prompts(8, seed=1))
    assert set(trainer.train_dataset[0]) == {"input_ids", "labels"}
    with pytest.raises(TypeError, match="PrivatePassingTrainer takes"):
        PrivatePassingTrainer(named, settings, None, prompts(20), train_dataset=prompts(20))


def test_texts_for_an_encoder_decoder_are_refused_at_construction(tmp_path):
    with pytest.raises(ValueError, match="BartForConditionalGeneration does not take.*Tokenise"):
        DPZeroSeq2SeqTrainer(model=bart(), args=seq2seq_config(tmp_path), train_dataset=prompts(20))


class TokenisingTrainer(Trainer):
    """One that names `peft_config`, so that it loads and tokenises by itself."""

    def __init__(self, model: Any, args: Any, train_dataset: Any = None, peft_config: Any = None):
        self.got = model, peft_config
        super().__init__(tiny_model(), args, train_dataset=[*tiny_data()])


class PrivateTokenisingTrainer(DPZeroMixin, TokenisingTrainer):
    pass


class Untouched(DPZeroMixin, PassingTrainer):
    prepares_inputs = False


def test_trainers_that_prepare_by_themselves_get_what_was_given(tmp_path):
    rows, settings = [{"text": "a"}] * len(tiny_data()), config(tmp_path)
    trainer = PrivateTokenisingTrainer("name", settings, train_dataset=rows, peft_config="mine")
    assert trainer.got == ("name", "mine")
    left = Untouched(model=tiny_model(), args=settings, train_dataset=rows)
    assert left.train_dataset is rows


def test_a_trainer_without_the_mixin_refuses_to_train_with_the_configuration(tmp_path):
    args = config(tmp_path)
    plain = Trainer(model=tiny_model(), args=args, train_dataset=tiny_data())
    before = weights(plain.model)
    with pytest.raises(ValueError, match="DPZeroConfig was given to a Trainer .* without privacy"):
        plain.train()
    assert same(before, weights(plain.model))
    assert args.get_warmup_steps(10) == 0  # a script may ask
