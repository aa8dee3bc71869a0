"""Per-example losses: right values, no coupling through batch or padding, clear refusals."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from hf_dpzero.objectives import heads
from hf_dpzero.objectives import losses as objectives

VOCABULARY = 40
PAD = 1
LENGTHS = (3, 9, 6, 1)
SMALL = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2}


HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
ENCODER = {**HEADS, "hidden_size": 16, "intermediate_size": 24}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
OPT = {**HEADS, "hidden_size": 16, "ffn_dim": 24, "word_embed_proj_dim": 16}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
BART = {
    f"{part}_{what}": number
    for part in ("encoder", "decoder")
    for what, number in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 24))
} | {"d_model": 16, "max_position_embeddings": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-classification": ("BertForSequenceClassification", {**ENCODER, "num_labels": 3}),
    "roberta-classification": ("RobertaForSequenceClassification", {**ENCODER, "num_labels": 3}),
    "gpt2-classification": ("GPT2ForSequenceClassification", GPT2),
    "bert-masked": ("BertForMaskedLM", ENCODER),
    "roberta-masked": ("RobertaForMaskedLM", ENCODER),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "opt": ("OPTForCausalLM", OPT),
    "llama": ("LlamaForCausalLM", {**ENCODER, "num_key_value_heads": 2}),
    "t5": ("T5ForConditionalGeneration", {**T5, "decoder_start_token_id": PAD}),
    "bart": ("BartForConditionalGeneration", {**BART, "decoder_start_token_id": 2}),
    "bert2bert": ("EncoderDecoderModel", {}),
}
OBJECTIVES = {
    "classification": heads.sequence_classification_objective,
    "masked": heads.masked_lm_objective,
    "gpt2": heads.causal_lm_objective,
    "opt": heads.causal_lm_objective,
    "llama": heads.causal_lm_objective,
}


def build(name: str) -> nn.Module:
    """A tiny model with weights from an explicit generator, large enough for losses to differ."""
    kind, settings = getattr(transformers, MODELS[name][0]), {**SMALL, **MODELS[name][1]}
    if name == "bert2bert":
        parts = [transformers.BertConfig(**SMALL, **ENCODER) for _ in range(2)]
        config = kind.config_class.from_encoder_decoder_configs(*parts)
        config.decoder_start_token_id, config.pad_token_id = 0, PAD
        model = kind(config=config).eval()
    else:
        model = kind(kind.config_class(**settings)).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3, generator=generator)
    return model


def examples(name: str) -> list[dict[str, Tensor]]:
    """Unpadded examples, `[1, T]` each: one per length, one of a single token."""
    generator = torch.Generator().manual_seed(11)

    def tokens(length: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (1, length), generator=generator)

    rows = []
    for index, length in enumerate(LENGTHS):
        row = {"input_ids": tokens(length)}
        row["attention_mask"] = torch.ones_like(row["input_ids"])
        if "classification" in name:
            row["labels"] = torch.tensor([index % 2])
        elif name in ("t5", "bart", "bert2bert"):
            row["labels"] = tokens(1 + length // 2)
        else:
            row["labels"] = row["input_ids"].clone()
            row["labels"][:, : length // 2] = -100
        rows.append(row)
    return rows


def pad(rows: list[dict[str, Tensor]], side: str, sequence_labels: bool) -> dict[str, Tensor]:
    """One batch; encoder-decoder labels are padded on the right, the rest on `side`."""
    fill = {"input_ids": PAD, "attention_mask": 0, "labels": -100}
    batch = {}
    for key, value in fill.items():
        values = [row[key] for row in rows]
        if values[0].dim() == 1:
            batch[key] = torch.cat(values)
            continue
        width = max(tensor.shape[1] for tensor in values)
        left = side == "left" and not (key == "labels" and sequence_labels)
        gaps = [width - tensor.shape[1] for tensor in values]
        padding = [(gap, 0) if left else (0, gap) for gap in gaps]
        batch[key] = torch.cat(
            [F.pad(v, p, value=value) for v, p in zip(values, padding, strict=True)]
        )
    return batch


@pytest.mark.parametrize("name", sorted(MODELS))
@torch.no_grad()
def test_an_examples_loss_is_transformers_own_alone_and_in_a_batch(name: str) -> None:
    """Hugging Face's mean loss of a batch of one is the example's loss."""
    model, rows = build(name), examples(name)
    objective = heads.select_objective(model)
    alone = torch.cat([objective(model, row) for row in rows])
    assert alone.max() - alone.min() > 1e-2, "the examples must be told apart"
    torch.testing.assert_close(alone[1], model(**rows[1]).loss, atol=1e-4, rtol=1e-4)
    for side in ("left", "right"):
        batch = pad(rows, side, sequence_labels=name in ("t5", "bart", "bert2bert"))
        together = objective(model, batch)
        assert together.dtype == torch.float32
        torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_select_objective(name: str) -> None:
    expected = next((f for key, f in OBJECTIVES.items() if key in name and "-" in name), None)
    expected = expected or OBJECTIVES.get(name, heads.seq2seq_objective)
    assert heads.select_objective(build(name)) is expected


def test_select_objective_looks_through_wrappers_and_subclasses() -> None:
    class Mine(transformers.BertForSequenceClassification):
        pass

    model = Mine(transformers.BertConfig(**SMALL, **ENCODER))
    lora = peft.get_peft_model(
        build("bert-classification"), peft.LoraConfig(task_type="SEQ_CLS", r=2)
    )
    for wrapped in (model, lora, nn.DataParallel(model), torch.compile(model)):
        chosen = heads.select_objective(wrapped)
        assert chosen is heads.sequence_classification_objective


def test_select_objective_refuses_an_unknown_head() -> None:
    with pytest.raises(ValueError, match=r"BertModel.*compute_per_example_loss"):
        config = transformers.BertConfig(**SMALL, **ENCODER)
        heads.select_objective(transformers.BertModel(config))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gpt2", peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"])),
        ("opt", peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
        ("llama", peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
        ("t5", peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=2)),
        (
            "roberta-classification",
            peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3),
        ),
    ],
)
@torch.no_grad()
def test_peft_models_do_not_couple_examples(name: str, config: Any) -> None:
    model = peft.get_peft_model(build(name), config).eval()
    objective, rows = heads.select_objective(model), examples(name)
    alone = torch.cat([objective(model, row) for row in rows])
    for side in ("left", "right"):
        together = objective(model, pad(rows, side, sequence_labels=name == "t5"))
        torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_tied_weights_and_gradients_reach_every_trainable_parameter() -> None:
    model = build("opt")
    assert model.lm_head.weight is model.get_input_embeddings().weight
    with torch.enable_grad():
        heads.select_objective(model)(model, examples("opt")[1]).sum().backward()
    assert model.lm_head.weight.grad is not None


@torch.no_grad()
def test_only_needed_logits_are_computed() -> None:
    """Labels on the last two tokens: the head answers for four positions, not for all nine."""
    model, row = build("gpt2"), examples("gpt2")[1]
    row["labels"][:, :-2] = -100
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda _m, _i, output: seen.append(output.shape[1]))
    loss = heads.causal_lm_objective(model, row)
    assert seen == [4]  # three, rounded up to a power of two
    torch.testing.assert_close(loss, model(**row).loss.reshape(1), atol=1e-4, rtol=1e-4)


def test_classification_values() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    expected = torch.tensor([2.0 + torch.log1p(torch.tensor(-2.0).exp()), torch.tensor(2.0).log()])
    torch.testing.assert_close(
        objectives.classification_losses(logits, torch.tensor([1, 0])), expected
    )
    targets = torch.tensor([[1.0, 2.0], [0.0, 2.0]])
    torch.testing.assert_close(
        objectives.classification_losses(logits, targets, "regression"), torch.tensor([2.5, 2.0])
    )
    multi_label = objectives.classification_losses(logits, torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    log2 = torch.tensor(2.0).log()
    sigmoid = torch.log1p(torch.tensor(-2.0).exp())
    torch.testing.assert_close(multi_label, torch.stack([(sigmoid + log2) / 2, log2]))


def test_classification_refuses_an_unknown_problem_type() -> None:
    with pytest.raises(ValueError, match="problem_type='ranking'"):
        objectives.classification_losses(torch.zeros(1, 2), torch.tensor([0]), "ranking")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_summed_in_float32(dtype: torch.dtype) -> None:
    """Half precision cannot tell 600 + 1e-2 from 600; the float32 loss of the same logits can."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 200, 30, generator=generator).to(dtype)
    labels = torch.randint(0, 30, (2, 200), generator=generator)
    expected = torch.stack(
        [F.cross_entropy(a.float(), b) for a, b in zip(logits, labels, strict=True)]
    )
    actual = objectives.token_losses(logits, labels)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)
    by_class = objectives.classification_losses(logits[:, 0], labels[:, 0])
    torch.testing.assert_close(
        by_class, F.cross_entropy(logits[:, 0].float(), labels[:, 0], reduction="none")
    )


def test_an_example_without_label_tokens_has_loss_zero() -> None:
    labels = torch.full((2, 5), -100)
    labels[1, 0] = 3  # the first token has no predictor in a causal model
    model = build("gpt2")
    batch = {"input_ids": torch.randint(4, 9, (2, 5)), "labels": labels}
    assert heads.causal_lm_objective(model, batch).tolist() == [0.0, 0.0]
    row = {**examples("gpt2")[1]}
    row["labels"] = torch.full_like(row["labels"], -100)
    assert heads.causal_lm_objective(model, row).tolist() == [0.0]


def test_an_empty_batch_gives_no_losses() -> None:
    assert objectives.token_losses(torch.zeros(0, 4, 5), torch.zeros(0, 4).long()).shape == (0,)
    assert objectives.classification_losses(torch.zeros(0, 2), torch.zeros(0).long()).shape == (0,)


def test_one_bad_example_stays_alone() -> None:
    logits = torch.zeros(3, 4, 5)
    logits[1] = float("nan")
    losses = objectives.token_losses(logits, torch.zeros(3, 4).long())
    assert losses.isnan().tolist() == [False, True, False]


def test_memory_of_float32_logits_is_one_example(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    original = F.cross_entropy

    def spy(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert logits.dtype == torch.float32
        rows.append(logits.shape[0])
        return original(logits, *args, **kwargs)

    monkeypatch.setattr(F, "cross_entropy", spy)
    labels = torch.full((4, 8), -100)
    labels[:, 2:4] = 1
    objectives.token_losses(torch.zeros(4, 8, 6, dtype=torch.bfloat16), labels)
    assert rows == [2, 2, 2, 2]


def test_right_padded_leaves_aligned_or_explicit_inputs_alone() -> None:
    right = {"input_ids": torch.tensor([[5, 1]]), "attention_mask": torch.tensor([[1, 0]])}
    assert objectives.right_padded(right) is right
    explicit = {
        "attention_mask": torch.tensor([[0, 1]]),
        "position_ids": torch.tensor([[0, 0]]),
        "input_ids": torch.tensor([[1, 5]]),
    }
    assert objectives.right_padded(explicit) is explicit


def test_missing_labels_are_refused() -> None:
    row = {key: value for key, value in examples("gpt2")[0].items() if key != "labels"}
    with pytest.raises(ValueError, match="no 'labels'"):
        heads.causal_lm_objective(build("gpt2"), row)


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (torch.tensor(0.5), r"shape \[\] where \[4\]"),
        (torch.zeros(4, 3), r"shape \[4, 3\]"),
        (torch.zeros(3), r"shape \[3\] where \[4\]"),
        (torch.zeros(4, dtype=torch.long), r"dtype torch.int64"),
        (0.5, r"is a float"),
    ],
)
def test_check_per_example_refuses(losses: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        objectives.check_per_example(losses, batch_size=4)


def test_check_per_example_returns_float32() -> None:
    losses = objectives.check_per_example(torch.ones(4, dtype=torch.bfloat16), batch_size=4)
    assert losses.dtype == torch.float32
    assert losses.tolist() == [1.0] * 4
